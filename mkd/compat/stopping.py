"""A signal ends a job between two steps: all ranks agree, the job saves, and its exit status is 0.

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
from types import FrameType, ModuleType
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from mkd.utils.logging import logger

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What schedulers send before they kill."""


class StopSignals:
    """Notes the signals that ask a process to stop, instead of dying of them.

    megatron-core 0.19 has a handler of its own for one signal, and reads each rank's answer from the GPU by itself.
    """

    def __init__(self, *more: signal.Signals) -> None:
        """Args:
        more: signals that are noted besides SIGTERM and SIGUSR1.
        """
        self._signals = dict.fromkeys((*SIGNALS, *more))
        self._before: dict[signal.Signals, Any] = {}
        self._agreed = False
        self.received: str | None = None
        """Name of the last signal that this process received."""

    def __enter__(self) -> "StopSignals":
        self._before = {number: signal.signal(number, self._note) for number in self._signals}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name

    def anywhere(self) -> bool:
        """Whether any rank was asked to stop. Collective over all ranks, if there are any; after the first True it is
        True for good."""
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

    def signals_received(self) -> list[bool]:
        """As megatron's training loop asks after each step. Collective over all ranks."""
        return [self.anywhere()]


class WorkerSignals:
    """In a worker of a DataLoader: signals to stop are the trainer's business, which still needs its data.

    PyTorch's worker dies of a SIGTERM that is not from its parent, and the training with it. megatron-core 0.19's
    handler lets it survive every SIGTERM, also the one with which its parent ends it at last.
    """

    def __init__(self, *more: signal.Signals) -> None:
        self._signals = {*SIGNALS, *more}

    def __enter__(self) -> "WorkerSignals":
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)  # also in threads that begin later
        threading.Thread(target=self._wait, args=(os.getppid(),), daemon=True).start()
        return self

    def _wait(self, parent: int) -> None:
        while True:
            info = signal.sigwaitinfo(self._signals)
            if info.si_pid == parent and info.si_signo == signal.SIGTERM:
                os._exit(0)


class EvaluationAborted(Exception):
    """Raised on all ranks at once, between two steps of an evaluation."""


class EvaluationState(Protocol):
    """The part of the run's state that an aborted evaluation changes."""

    unfinished_evaluation: bool


def install_stopping(stop: StopSignals, state: EvaluationState) -> None:
    """Let megatron's training end, after SIGTERM, SIGUSR1 or --exit-signal, with the step that is under way.

    megatron-core 0.19 looks for signals after training steps only: an evaluation runs to its end, and it has counted
    the samples of one that its own time limit ended. Here an evaluation ends with its next step, and counts for
    nothing: `unfinished_evaluation` in the run's state has the resumed job begin with it. It must be called after
    `mkd.compat.install_training_hooks`.
    """
    from megatron.training import training
    from megatron.training.datasets import data_samplers

    megatron_args = training.get_args()
    megatron_args.exit_signal_handler = True
    training.get_signal_handler = lambda: stop
    data_samplers.DistributedSignalHandler = WorkerSignals

    get_schedule, train, evaluate = training.get_forward_backward_func, training.train, training.evaluate
    trains = False

    def get_schedule_that_stops(*args: Any, **kwargs: Any) -> Callable:
        run = get_schedule(*args, **kwargs)

        def run_or_stop(*, forward_only: bool = False, **options: Any) -> list[dict]:
            nonlocal trains
            if forward_only and stop.anywhere():
                raise EvaluationAborted
            trains = trains or not forward_only
            return run(forward_only=forward_only, **options)

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
        if result[2]:  # it ended early, by a signal or by megatron's time limit, and nothing was put back
            if not trains:
                _end_without_saving(training)
            megatron_args.consumed_valid_samples = counted
            training.get_rerun_state_machine().set_mode(mode)
            training.get_timers()("evaluate").stop()
            for chunk in model:
                chunk.train()
        return result

    training.get_forward_backward_func = get_schedule_that_stops
    training.train, training.evaluate = train_or_stop, evaluate_or_stop


def _end_without_saving(training: ModuleType) -> NoReturn:
    """No step was made since the start: what there is to continue from is there already."""
    logger.info("no step was made, nothing is saved")
    training.maybe_finalize_async_save(blocking=True, terminate=True)
    sys.exit(0)
