"""mkd/compat/checkpoints.py: the order of the hooks, and that megatron-core 0.19 still needs them."""

import ast
import inspect
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO

import psutil
import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.training import checkpointing, training
from torch.distributed.checkpoint.api import CheckpointException

from mkd.checkpoint.megatron.folder import TRACKER
from mkd.compat.checkpoints import (
    _bytes_to_save,
    install_checkpoint_hooks,
    tracker_override,
    with_load_errors,
)
from mkd.errors import MkdCheckpointError
from mkd.utils.atomic_files import replacing

HELD = """
import sys
from megatron.core.dist_checkpointing.strategies import filesystem_async
from mkd.compat.checkpoints import end_result_queues_with_their_rank
end_result_queues_with_their_rank()
results = filesystem_async.get_write_results_queue(sys.argv[1])
print(results._manager._process.pid, flush=True)
input()
results.put({0: "written"})
print(results.get(), flush=True)
input()
"""


def start_rank_with_holder(method: str = "fork") -> tuple[subprocess.Popen, psutil.Process]:
    pipe = subprocess.PIPE
    rank = subprocess.Popen([sys.executable, "-c", HELD, method], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    return rank, psutil.Process(int(rank.stdout.readline()))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT])
def test_a_stop_signal_to_all_processes_of_a_rank_leaves_the_results_of_its_save(number: int) -> None:
    rank, holder = start_rank_with_holder()
    holder.send_signal(number)
    answer, errors = rank.communicate("\n\n", timeout=60)
    assert answer == "{0: 'written'}\n", errors
    assert rank.returncode == 0, errors
    assert not holder.is_running()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_stop_signals_are_blocked_until_the_process_that_holds_results_ignores_them(method: str) -> None:
    """With "spawn" it imports for seconds first. The mask that it starts with is the one that it keeps."""
    rank, holder = start_rank_with_holder(method)
    status = Path(f"/proc/{holder.pid}/status").read_text()
    rank.communicate("\n\n", timeout=60)
    mask = int(re.search(r"SigBlk:\s*(\w+)", status)[1], 16)
    signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
    assert [number for number in signals if not mask >> (number - 1) & 1] == []


def test_the_process_that_holds_results_ends_with_a_killed_rank() -> None:
    rank, holder = start_rank_with_holder()
    assert holder.is_running()
    rank.kill()
    rank.wait()
    gone, alive = psutil.wait_procs([holder], timeout=10)
    for process in alive:
        process.kill()
    assert gone == [holder]


def names_called_in(module: object) -> set[str]:
    nodes = [node.func for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Call)]
    return {ast.unparse(node) for node in nodes}


def test_upstream_calls_the_replaced_functions_by_these_names() -> None:
    called = names_called_in(checkpointing)
    assert {"dist_checkpointing.save", "schedule_async_save", "maybe_msc.open", "read_metadata"} <= called
    assert {"save_checkpoint", "load_checkpoint"} <= names_called_in(training)
    assert "self.async_save" in names_called_in(inspect.getmodule(TorchDistSaveShardedStrategy))


def test_upstream_writes_the_tracker_in_place() -> None:
    assert "with maybe_msc.open(tracker_filename, 'w') as f:" in inspect.getsource(checkpointing.save_checkpoint)


def test_upstream_leaves_the_files_of_an_earlier_attempt() -> None:
    source = inspect.getsource(serialization.save)
    assert "Overwriting old incomplete" in source
    assert "rmtree" not in source
    assert "unlink" not in source


def test_upstream_exits_with_status_0_on_a_tracker_that_it_cannot_read(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("")
    with pytest.raises(SystemExit) as caught:
        checkpointing.read_metadata(str(tmp_path / TRACKER))
    assert not caught.value.code
    with tracker_override(4):
        assert checkpointing.read_metadata(str(tmp_path / TRACKER)) == (4, False)
    with tracker_override(None):
        assert checkpointing.read_metadata(str(tmp_path / TRACKER)) == (0, True)
    with pytest.raises(SystemExit):
        checkpointing.read_metadata(str(tmp_path / TRACKER))


class Recorder:
    """Hooks that record their calls."""

    def __init__(self, calls: list) -> None:
        self._calls = calls

    def collecting(self, args: SimpleNamespace) -> None:
        self._calls.append(("collecting", args))

    def before(self, folder: Path, nbytes: int) -> None:
        self._calls.append(("before", folder))

    def writer(self, write: Callable[..., None]) -> Callable[..., None]:
        return lambda *args: (self._calls.append("writer"), write(*args))

    def written(self, folder: Path) -> None:
        self._calls.append(("written", folder))

    def published(self) -> None:
        self._calls.append("published")

    def replacing(self, tracker: Path) -> AbstractContextManager[TextIO]:
        self._calls.append(("tracker", tracker))
        return replacing(tracker)


@pytest.fixture
def saving(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[list, SimpleNamespace]:
    """(recorded calls, megatron's arguments), with stand-ins for the functions that write, and the hooks installed."""
    calls: list = []
    waiting: list[AsyncRequest] = []
    args = SimpleNamespace(async_save=False, save=str(tmp_path), fails=None, waiting=waiting)
    folder = tmp_path / "iter_0000002"
    strategy = TorchDistSaveShardedStrategy()

    def request(self: object, *given: object) -> AsyncRequest:
        return AsyncRequest(lambda rank, buckets: calls.append("shards"), (0, []), [index])

    def index() -> None:
        calls.append("index")
        if args.fails is not None:
            raise args.fails

    def save(state: object, path: str, *given: object) -> AsyncRequest | None:
        made = strategy.async_save(state, path)
        if args.async_save:
            return made
        made.async_fn(*made.async_fn_args)
        made.finalize_fns[0]()
        return None

    def save_checkpoint(*given: object) -> None:
        made = dist_checkpointing.save({}, str(folder))

        def track() -> None:
            if (tmp_path / TRACKER).is_file():
                with checkpointing.maybe_msc.open(str(tmp_path / TRACKER), "r") as file:
                    calls.append(int(file.read().strip()))
            with checkpointing.maybe_msc.open(str(tmp_path / TRACKER), "w") as file:
                file.write("2")

        if made is None:
            track()
        else:
            made.add_finalize_fn(track)
            checkpointing.schedule_async_save(made)

    def schedule(made: AsyncRequest) -> None:
        calls.append("scheduled")
        waiting.append(made)
        if args.fails is not None:
            return
        made.async_fn(*made.async_fn_args)
        for finalize in made.finalize_fns:
            finalize()

    monkeypatch.setattr(TorchDistSaveShardedStrategy, "async_save", request)
    monkeypatch.setattr(dist_checkpointing, "save", save)
    monkeypatch.setattr(checkpointing, "save_checkpoint", save_checkpoint)
    monkeypatch.setattr(checkpointing, "schedule_async_save", schedule)
    monkeypatch.setattr(checkpointing, "maybe_msc", checkpointing.maybe_msc)
    monkeypatch.setattr(training, "save_checkpoint", None)
    monkeypatch.setattr(training, "load_checkpoint", None)
    monkeypatch.setattr(training, "get_args", lambda: args)
    monkeypatch.setattr(training, "maybe_finalize_async_save", lambda blocking: None)
    monkeypatch.setattr("megatron.training.get_args", lambda: args)
    install_checkpoint_hooks(Recorder(calls))
    return calls, args


def test_order_of_a_save(saving: tuple[list, SimpleNamespace], tmp_path: Path) -> None:
    calls, args = saving
    folder = tmp_path / "iter_0000002"
    whole = ["writer", "shards", "index", ("written", folder), ("tracker", tmp_path / TRACKER), "published"]
    training.save_checkpoint(2)
    assert calls == [("collecting", args), ("before", folder), *whole]
    assert (tmp_path / TRACKER).read_text() == "2"
    calls.clear()
    args.async_save = True
    training.save_checkpoint(2)
    whole.insert(-2, 0)  # the tracker is read
    assert calls == [("collecting", args), ("before", folder), "scheduled", *whole]


@pytest.mark.parametrize("named", [None, "1", "release"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_fails(
    saving: tuple[list, SimpleNamespace], tmp_path: Path, named: str | None, asynchronous: bool
) -> None:
    """Synchronous or not: an asynchronous one when it is finished, in whichever step."""
    _, args = saving
    args.async_save, args.fails = asynchronous, CheckpointException("write", {0: (OSError("no\nroom"), None)})
    if named is None:
        args.save = str(tmp_path / "went away")
    else:
        (tmp_path / TRACKER).write_text(named)
    with pytest.raises(MkdCheckpointError) as caught:
        training.save_checkpoint(2)
        args.waiting[0].finalize_fns[0]()
    before = {
        None: "there is no earlier one",
        "1": "iter_0000001 is still complete",
        "release": "release is still complete",
    }
    assert f"{Path(args.save) / 'iter_0000002'} was not saved" in str(caught.value)
    assert f"(OSError: no room); {before[named]}" in str(caught.value)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("gone"), MemoryError("gone")])
def test_out_of_memory_errors_do_not_blame_a_folder(saving: tuple[list, SimpleNamespace], error: Exception) -> None:
    for failure in (error, CheckpointException("write", {1: (error, None)})):
        saving[1].fails = failure

        def load(failure: BaseException = failure) -> None:
            raise failure

        for fail in (lambda: training.save_checkpoint(2), with_load_errors(load)):
            with pytest.raises(type(error), match="gone"):
                fail()


@pytest.mark.parametrize(("named", "earlier"), [("1", 1), ("2", 0), ("8", 0), ("release", 0), ("", 0)])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_only_an_earlier_iteration_is_removed_after_a_save(
    saving: tuple[list, SimpleNamespace], tmp_path: Path, named: str, earlier: int, asynchronous: bool
) -> None:
    """--save-retain-interval: a job that went back keeps what it went back from."""
    calls, args = saving
    args.async_save = asynchronous
    (tmp_path / TRACKER).write_text(named)
    training.save_checkpoint(2)
    assert [call for call in calls if isinstance(call, int)] == [earlier]
    assert (tmp_path / TRACKER).read_text() == "2"
    assert "prev_iteration = int(f.read().strip())" in inspect.getsource(checkpointing)


def test_other_files_are_opened_as_before(saving: tuple[list, SimpleNamespace], tmp_path: Path) -> None:
    with checkpointing.maybe_msc.open(str(tmp_path / "other"), "w") as file:
        file.write("x")
    (tmp_path / TRACKER).write_text("7")
    with checkpointing.maybe_msc.open(str(tmp_path / TRACKER), "r") as file:
        assert file.read() == "7"
    assert checkpointing.maybe_msc.os.path.isfile(str(tmp_path / "other"))
    assert saving[0] == []


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (SystemExit(), "megatron refuses the checkpoint in --load"),
        (AssertionError("num_layers value"), "cannot be loaded: AssertionError: num_layers value"),
        (RuntimeError("two\nlines"), "cannot be loaded: RuntimeError: two lines"),
        (CheckpointException("read", {3: (EOFError("short"), None)}), "cannot be loaded: EOFError: short"),
    ],
)
def test_failed_loads_are_errors_of_mkd(error: BaseException, words: str) -> None:
    def load() -> None:
        raise error

    with pytest.raises(MkdCheckpointError, match=words) as caught:
        with_load_errors(load)()
    assert "\n" not in str(caught.value)
    assert with_load_errors(lambda: (7, 0))() == (7, 0)


def test_one_asynchronous_save_at_a_time(saving: tuple[list, SimpleNamespace], monkeypatch: pytest.MonkeyPatch) -> None:
    """The save before ends first: on a full disk, one of two is complete."""
    calls, args = saving
    monkeypatch.setattr(training, "maybe_finalize_async_save", lambda blocking: calls.append(("finalize", blocking)))
    args.async_save = True
    training.save_checkpoint(2)
    assert calls[0] == ("finalize", True)
    args.async_save = False
    calls.clear()
    training.save_checkpoint(3)
    assert ("finalize", True) not in calls


def test_upstream_starts_a_save_while_another_one_runs() -> None:
    assert "Starting a checkpoint save before previous has finished" in inspect.getsource(checkpointing)


def test_bytes_to_save() -> None:
    tensor = torch.zeros(3, 4, dtype=torch.bfloat16)
    shard = ShardedTensor.from_rank_offsets("a", tensor)
    copy = ShardedTensor.from_rank_offsets("b", tensor, replica_id=1)
    state = {"model": {"a": shard, "b": copy}, "optimizer": [{"x": (shard,)}, 3], "args": SimpleNamespace(a=shard)}
    assert _bytes_to_save(state) == 2 * 24
