"""mkd/compat/stopping.py, and why megatron-core 0.19 needs it: a test fails when upstream no longer does."""

import inspect
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.training import training
from megatron.training.datasets import data_samplers
from megatron.training.dist_signal_handler import DistributedSignalHandler
from torch.utils.data import DataLoader

from mkd.compat.stopping import LAUNCHER, StopSignals, WorkerSignals, install_stopping
from tests.support.upstream import source_of


def test_signals_are_recorded_and_handlers_restored() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    with StopSignals(signal.SIGUSR2) as stop:
        assert not stop.anywhere()
        signal.raise_signal(signal.SIGUSR2)
        assert stop.received == "SIGUSR2"
        assert stop.anywhere()
        assert stop.signals_received() == [True]
    assert signal.getsignal(signal.SIGUSR2) is before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signals_of_schedulers(number: signal.Signals) -> None:
    with StopSignals() as stop:
        signal.raise_signal(number)
        assert stop.anywhere()


def interrupted(*numbers: signal.Signals, launched: bool = False) -> tuple[int, str]:
    """(exit status, stderr) of a process that receives signals one after the other while it listens for them."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        os.dup2(writer, 2)
        os.environ.pop("RANK", None)
        os.environ.pop(LAUNCHER, None)
        if launched:
            os.environ[LAUNCHER] = "a run"
        with StopSignals(then="the job saves and ends") as stop:
            for number in numbers:
                signal.raise_signal(number)
        os._exit(10 + stop.anywhere())
    os.close(writer)
    with open(reader) as stream:
        text = stream.read()
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), text


def test_ctrl_c_announces_the_save_and_a_second_one_ends_the_process() -> None:
    status, text = interrupted(signal.SIGINT)
    assert status == 11
    assert text == "mkd: Ctrl-C: the job saves and ends after this step; a second Ctrl-C ends it at once\n"
    status, text = interrupted(signal.SIGINT, signal.SIGINT)
    assert status == -signal.SIGINT
    assert text.splitlines()[1] == "mkd: Ctrl-C again: ended at once; what was saved before stays"


@pytest.mark.parametrize(("launched", "status"), [(False, 11), (True, -signal.SIGINT)])
def test_torchrun_forwards_a_second_ctrl_c_as_sigterm(launched: bool, status: int) -> None:
    """Without torchrun, SIGTERM after Ctrl-C is a scheduler's, and the job still saves."""
    seen, text = interrupted(signal.SIGINT, signal.SIGTERM, launched=launched)
    assert seen == status
    assert ("(torchrun allows 30 s)" in text) == launched
    assert interrupted(signal.SIGTERM, signal.SIGTERM, launched=launched)[0] == 11


def test_forks_leave_ctrl_c_to_their_parent() -> None:
    """Such as the writer of an asynchronous save, which has the same handler and gets the terminal's signals too."""
    with StopSignals() as stop:
        process = os.fork()
        if process == 0:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            os._exit(0 if stop.received is None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
        assert not stop.anywhere()


def test_upstream_handles_one_signal() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with DistributedSignalHandler(signal.SIGTERM):
        assert signal.getsignal(signal.SIGUSR1) is before


def test_upstream_evaluates_to_the_end_and_counts_the_samples_of_an_aborted_evaluation() -> None:
    text = source_of("evaluate")
    assert "signal" not in text
    early = text[text.index("Exiting during evaluation") :]
    assert "consumed_valid_samples" not in early
    assert early.index("return None, None, True") < early.index(".train()") < early.index("timers('evaluate').stop()")


def test_upstream_lets_workers_survive_every_signal() -> None:
    assert "DistributedSignalHandler(args.exit_signal).__enter__()" in inspect.getsource(data_samplers)


@pytest.fixture
def loaders() -> Iterator[Callable[[Any], tuple[Iterator, Any]]]:
    """Creates (iterator, worker) of a DataLoader with one worker."""
    made = []

    def make(handler: Any) -> tuple[Iterator, Any]:
        enter = None if handler is None else lambda _: handler(signal.SIGTERM).__enter__()
        loader = DataLoader(range(100), num_workers=1, worker_init_fn=enter, multiprocessing_context="fork")
        batches = iter(loader)
        next(batches)
        made.append(batches)
        return batches, batches._workers[0]

    yield make
    for batches in made:
        batches._shutdown_workers()


def send(process: Any, *names: str) -> None:
    """From a process that is not its parent."""
    for name in names:
        subprocess.run(["kill", f"-{name}", str(process.pid)], check=True)
    time.sleep(0.2)


def test_torch_workers_exit_on_a_signal_to_all_processes(loaders: Callable) -> None:
    batches, worker = loaders(None)
    with pytest.raises(RuntimeError, match="killed by signal: Terminated"):
        send(worker, "TERM")  # torch checks its workers in a handler of SIGCHLD
        worker.join(timeout=60.0)
        list(batches)


def test_workers_run_until_their_parent_ends_them(loaders: Callable) -> None:
    batches, worker = loaders(WorkerSignals)
    send(worker, "TERM", "USR1", "TERM")
    os.kill(worker.pid, signal.SIGUSR1)
    assert len(list(batches)) == 99
    batches, worker = loaders(WorkerSignals)
    worker.terminate()
    worker.join(timeout=10.0)
    assert worker.exitcode == 0


def test_upstream_workers_do_not_end_when_their_parent_ends_them(loaders: Callable) -> None:
    _, worker = loaders(DistributedSignalHandler)
    worker.terminate()
    worker.join(timeout=0.5)
    assert worker.is_alive()


class Training:
    """Stand-ins in megatron.training.training, with an evaluation of 3 steps; a time limit ends it after 1."""

    def __init__(self, patch: pytest.MonkeyPatch, limited: bool) -> None:
        self.args = SimpleNamespace(consumed_valid_samples=5)
        self.state = SimpleNamespace(unfinished_evaluation=False)
        self.chunk = torch.nn.Linear(1, 1)
        self.limited, self.timer_runs, self.mode = limited, False, "training"
        timer = SimpleNamespace(stop=lambda: setattr(self, "timer_runs", False))
        machine = SimpleNamespace(get_mode=lambda: self.mode, set_mode=lambda mode: setattr(self, "mode", mode))
        stubs = {
            "get_args": lambda: self.args,
            "get_timers": lambda: lambda name: timer,
            "get_rerun_state_machine": lambda: machine,
            "get_forward_backward_func": lambda: lambda *, forward_only=False: [],
            "get_signal_handler": None,
            "train": lambda: "trained",
            "evaluate": self.evaluate,
        }
        for name, stub in stubs.items():
            patch.setattr(training, name, stub)
        patch.setattr(data_samplers, "DistributedSignalHandler", DistributedSignalHandler)

    def evaluate(self, step: Any, iterator: Any, model: list[torch.nn.Module]) -> tuple:
        self.timer_runs, self.mode = True, "evaluating"
        self.chunk.eval()
        for _ in range(3):
            training.get_forward_backward_func()(forward_only=True)
            self.args.consumed_valid_samples += 1
            if self.limited:
                return None, None, True
        self.chunk.train()
        self.timer_runs, self.mode = False, "training"
        return {"loss": 1.0}, None, False


@pytest.mark.parametrize("limited", [False, True])
def test_aborted_evaluation_is_not_counted(monkeypatch: pytest.MonkeyPatch, limited: bool) -> None:
    """By a signal, or by megatron's time limit."""
    loop, stop = Training(monkeypatch, limited), StopSignals()
    install_stopping(stop, loop.state)
    training.get_forward_backward_func()()  # a training step
    if not limited:
        assert training.evaluate(None, None, [loop.chunk])[0] == {"loss": 1.0}
        assert (loop.args.consumed_valid_samples, loop.state.unfinished_evaluation) == (8, False)
        stop.received = "SIGTERM"
    before = loop.args.consumed_valid_samples
    assert training.evaluate(None, None, [loop.chunk]) == (None, None, True)
    assert (loop.args.consumed_valid_samples, loop.state.unfinished_evaluation) == (before, True)
    assert loop.chunk.training
    assert (loop.timer_runs, loop.mode) == (False, "training")
    assert training.get_signal_handler().signals_received() == [not limited]


@pytest.mark.parametrize("limited", [False, True])
def test_no_training_after_an_aborted_first_evaluation(monkeypatch: pytest.MonkeyPatch, limited: bool) -> None:
    loop, stop = Training(monkeypatch, limited), StopSignals()
    loop.args.async_save = False
    monkeypatch.setattr(training, "maybe_finalize_async_save", lambda **options: None)
    install_stopping(stop, loop.state)
    assert training.train() == "trained"
    stop.received = None if limited else "SIGTERM"
    with pytest.raises(SystemExit) as ended:
        training.evaluate(None, None, [loop.chunk])
    assert ended.value.code == 0
    if not limited:
        with pytest.raises(SystemExit):
            training.train()
