"""Signals end a run between two steps: all ranks agree, the run saves, and its exit status is 0.

Ctrl-C is one of them; a second one ends the process at once.

with StopSignals() as stop:
    for step in steps:
        if stop.anywhere():  # collective
            break
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, ModuleType
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from mkd.errors import MkdTeacherTimeout
from mkd.utils.logging import current_rank, logger
from mkd.utils.stop_signals import SIGNALS

LAUNCHER = "TORCHELASTIC_RUN_ID"
"""Environment variable of a process that torchrun started."""
LAUNCHER_GRACE_S = 30
"""Seconds after which torchrun kills processes to which it has forwarded a signal."""


class StopSignals:
    """Records the signals that request a stop, so that they do not end the process at once.

    megatron-core 0.19 has a handler for a single signal, and copies the flag of each rank from the GPU separately.
    """

    def __init__(self, *more: signal.Signals, then: str = "the job ends") -> None:
        """Args:
        more: signals to record besides those in SIGNALS.
        then: what follows after the current step, for the message after Ctrl-C.
        """
        self._signals = dict.fromkeys((*SIGNALS, *more))
        self._then, self._process = then, os.getpid()
        self._before: dict[signal.Signals, Any] = {}
        self._agreed = self._interrupted = False
        self.received: str | None = None
        """Name of the last signal that this process received."""
        self.status = 0
        """Exit status of the job if it stops; see `request`."""

    def listen(self) -> "StopSignals":
        """Record signals from now on."""
        self._before = {number: signal.signal(number, self._record) for number in self._signals}
        return self

    def __enter__(self) -> "StopSignals":
        return self.listen()

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a fork, such as the writer of an asynchronous save, ends with its parent
            return
        # At a second Ctrl-C torchrun sends SIGTERM to its processes.
        if self._interrupted and (number == signal.SIGINT or (number == signal.SIGTERM and LAUNCHER in os.environ)):
            _end_by(signal.SIGINT)
        self.received = signal.Signals(number).name
        if number == signal.SIGINT:
            self._interrupted = True
            if current_rank() == 0:
                _write(f"mkd: Ctrl-C: {self._then} after this step{_limit()}; a second Ctrl-C ends it at once\n")

    def anywhere(self) -> bool:
        """True if any rank has received a signal, and in all later calls. Collective over all ranks, if there are
        several."""
        if self._agreed:
            return True
        self._agreed = self.received is not None
        if dist.is_initialized():
            flag = torch.tensor([self._agreed], dtype=torch.int32, device="cuda")
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            self._agreed = bool(flag.item())
        if self._agreed:
            logger.info(f"{self.received or 'a signal to another rank'}: stopping after this step")
        return self._agreed

    def request(self, reason: str, status: int) -> None:
        """Stop as at a signal, with another exit status than 0. Called on all ranks."""
        self._agreed, self.status = True, status
        logger.warning(f"{reason}; stopping")

    def signals_received(self) -> list[bool]:
        """Called by megatron's training loop after each step. Collective over all ranks."""
        return [self.anywhere()]


def _end_by(number: signal.Signals) -> NoReturn:
    """End this process as the signal does by default, so that its parent sees the signal."""
    if current_rank() == 0:
        _write("mkd: Ctrl-C again: ended at once; what was saved before stays\n")
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # the signal is blocked


def _limit() -> str:
    return f" (torchrun allows {LAUNCHER_GRACE_S} s)" if LAUNCHER in os.environ else ""


def _write(text: str) -> None:
    """Write to stderr in a signal handler, where the interrupted code may be writing to a stream."""
    with suppress(OSError):
        os.write(2, text.encode())


class WorkerSignals:
    """Signal handling in a worker of a DataLoader: the worker ignores stop signals, since the trainer still needs data.

    PyTorch's worker exits on a SIGTERM that is not from its parent, and the training fails. With megatron-core 0.19's
    handler it survives every SIGTERM, including the one from its parent that should end it.
    """

    def __init__(self, *more: signal.Signals) -> None:
        self._signals = {*SIGNALS, *more}

    def __enter__(self) -> "WorkerSignals":
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)  # also in threads that start later
        threading.Thread(target=self._wait, args=(os.getppid(),), daemon=True).start()
        return self

    def _wait(self, parent: int) -> None:
        while True:
            info = signal.sigwaitinfo(self._signals)
            if info.si_pid == parent and info.si_signo == signal.SIGTERM:
                os._exit(0)


class EvaluationAborted(Exception):
    """Raised on all ranks, between two steps of an evaluation."""


class WaitAborted(Exception):
    """Raised on all ranks, before any of them computes a step: a signal has ended their wait for its inputs."""


class EvaluationState(Protocol):
    """The part of the run's state that an aborted evaluation changes."""

    unfinished_evaluation: bool


def install_stopping(stop: StopSignals, state: EvaluationState) -> None:
    """End megatron's training after the current step on SIGTERM, SIGUSR1, Ctrl-C or --exit-signal.

    megatron-core 0.19 checks for signals after training steps only, so an evaluation runs to its end; and the samples
    of an evaluation that its own time limit ended stay counted. Here an evaluation ends after its current step and is
    not counted: with `unfinished_evaluation` in the run's state the resumed job starts with it.
    """
    from megatron.training import training
    from megatron.training.datasets import data_samplers

    megatron_args = training.get_args()
    megatron_args.exit_signal_handler = True
    training.get_signal_handler = lambda: stop
    data_samplers.DistributedSignalHandler = WorkerSignals

    get_schedule, train, evaluate = training.get_forward_backward_func, training.train, training.evaluate
    trains = False

    def get_stoppable_schedule(*args: Any, **kwargs: Any) -> Callable:
        run = get_schedule(*args, **kwargs)

        def run_or_stop(*, forward_only: bool = False, **options: Any) -> list[dict]:
            nonlocal trains
            if forward_only and stop.anywhere():
                raise EvaluationAborted
            try:
                reports = run(forward_only=forward_only, **options)
            except (MkdTeacherTimeout, WaitAborted) as error:
                if isinstance(error, MkdTeacherTimeout):
                    stop.request(str(error), error.status)
                else:
                    stop.anywhere()
                if forward_only:
                    raise EvaluationAborted from error
                raise
            trains = trains or not forward_only
            return reports

        return run_or_stop

    def train_or_stop(*args: Any, **kwargs: Any) -> Any:
        if stop.anywhere():
            _end_without_saving(training)
        return train(*args, **kwargs)

    def evaluate_or_stop(forward_step: Any, iterator: Any, model: list[Any], *args: Any, **kwargs: Any) -> tuple:
        counted, mode = megatron_args.consumed_valid_samples, training.get_rerun_state_machine().get_mode()
        try:
            result = evaluate(forward_step, iterator, model, *args, **kwargs)
        except EvaluationAborted:
            result = None, None, True
        state.unfinished_evaluation = result[2]
        if result[2]:  # ended early, by a signal or megatron's time limit, without restoring the training state
            if not trains:
                _end_without_saving(training)
            megatron_args.consumed_valid_samples = counted
            training.get_rerun_state_machine().set_mode(mode)
            training.get_timers()("evaluate").stop()
            for chunk in model:
                chunk.train()
        return result

    training.get_forward_backward_func = get_stoppable_schedule
    training.train, training.evaluate = train_or_stop, evaluate_or_stop
    training.train_step = _stoppable_step(training, stop)


def _stoppable_step(training: ModuleType, stop: StopSignals) -> Callable:
    """megatron's training step; if the wait for its inputs ends without them, on all ranks and before any of them
    computes, the training loop saves the state before the step, and ends."""
    from megatron.core.rerun_state_machine import RerunDataIterator, RerunState

    train_step, steps = training.train_step, 0

    def step_or_stop(forward_step: Any, data_iterator: Any, *args: Any, iteration: int, **options: Any) -> tuple:
        nonlocal steps
        try:
            result = train_step(forward_step, data_iterator, *args, iteration=iteration, **options)
        except (MkdTeacherTimeout, WaitAborted):
            training.get_rerun_state_machine().state = RerunState.NOT_RUNNING_YET
            for one in data_iterator if isinstance(data_iterator, list) else [data_iterator]:
                if isinstance(one, RerunDataIterator):
                    one.advance()
            own = training.get_args()
            is_saved = steps == 0 or bool(own.save_interval and iteration % own.save_interval == 0)
            return {}, True, own.save is not None and not is_saved, True, stop.status, None, None, 0
        steps += 1
        return result

    return step_or_stop


def _end_without_saving(training: ModuleType) -> NoReturn:
    """Exit before the first step: the last checkpoint is still the latest state."""
    logger.info("no step was taken, nothing is saved")
    training.maybe_finalize_async_save(blocking=True, terminate=True)
    sys.exit(0)
