"""mkd's part in megatron's saving and loading: when it is called, and that upstream still needs it."""

import ast
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.training import checkpointing, training
from torch.distributed.checkpoint.api import CheckpointException

from mkd.checkpoint.megatron_folder import TRACKER
from mkd.compat.checkpoints import (
    _load_or_refuse,
    install_checkpoint_hooks,
    resume_distributed_optimizer,
    tracker_override,
)
from mkd.errors import MkdCheckpointError
from mkd.utils.atomic_files import replacing
from tests.unit.compat.test_compat import fresh


def names_called_in(module: object) -> set[str]:
    nodes = [node.func for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Call)]
    return {ast.unparse(node) for node in nodes}


def test_upstream_calls_what_the_hooks_replace_by_these_names() -> None:
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


def test_upstream_ends_with_status_0_on_a_tracker_that_it_cannot_read(tmp_path: Path) -> None:
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

    def before(self, folder: Path) -> None:
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
    """(the calls that happen, megatron's arguments) with stand-ins for what writes, and the hooks in place."""
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
    before = {None: "there is none before it", "1": "iter_0000001 is still whole", "release": "release is still whole"}
    assert f"{Path(args.save) / 'iter_0000002'} was not saved" in str(caught.value)
    assert f"(OSError: no room); {before[named]}" in str(caught.value)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("gone"), MemoryError("gone")])
def test_memory_that_ran_out_is_no_fault_of_a_folder(saving: tuple[list, SimpleNamespace], error: Exception) -> None:
    for failure in (error, CheckpointException("write", {1: (error, None)})):
        saving[1].fails = failure

        def load(failure: BaseException = failure) -> None:
            raise failure

        for fail in (lambda: training.save_checkpoint(2), _load_or_refuse(load)):
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
def test_a_load_that_fails_is_an_error_of_mkd(error: BaseException, words: str) -> None:
    def load() -> None:
        raise error

    with pytest.raises(MkdCheckpointError, match=words) as caught:
        _load_or_refuse(load)()
    assert "\n" not in str(caught.value)
    assert _load_or_refuse(lambda: (7, 0))() == (7, 0)


class InnerOptimizer:
    """What a distributed optimizer has of PyTorch's."""

    def __init__(self) -> None:
        self.state: dict = {}


@pytest.fixture
def distributed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], DistributedOptimizer]:
    """Makes distributed optimizers without a model, with stand-ins for upstream's two functions."""

    def state_dict(self: DistributedOptimizer) -> list:
        return [state["step"].item() for state in self.optimizer.state.values()]

    def load_state_dict(self: DistributedOptimizer, state: dict) -> None:
        step = torch.tensor(3.0)
        self.optimizer.state = {name: {"step": step} for name in "ab"}

    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", False)
    monkeypatch.setattr(DistributedOptimizer, "state_dict", state_dict)
    monkeypatch.setattr(DistributedOptimizer, "load_state_dict", load_state_dict)
    whole = DistributedOptimizer._set_main_param_and_optimizer_states
    monkeypatch.setattr(DistributedOptimizer, "_set_main_param_and_optimizer_states", whole)
    resume_distributed_optimizer()

    def make() -> DistributedOptimizer:
        made = object.__new__(DistributedOptimizer)
        made.optimizer = InnerOptimizer()
        return made

    return make


def test_distributed_optimizer_without_a_step_has_a_state(distributed: Callable[[], DistributedOptimizer]) -> None:
    made = distributed()
    assert made.state_dict() == [0.0]
    assert made.optimizer.state == {}
    made.optimizer.state = {"a": {"step": torch.tensor(5.0)}}
    assert made.state_dict() == [5.0]


def test_distributed_optimizer_counts_the_steps_of_each_parameter(
    distributed: Callable[[], DistributedOptimizer],
) -> None:
    made = distributed()
    made.load_state_dict({})
    made.optimizer.state["a"]["step"] += 1
    assert made.state_dict() == [4.0, 3.0]


def test_fp32_weights_and_steps_in_the_form_that_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream writes into a view of a weight that autograd watches, and has 0 steps there."""
    for name in ("state_dict", "load_state_dict", "_set_main_param_and_optimizer_states"):
        monkeypatch.setattr(DistributedOptimizer, name, getattr(fresh(distrib_optimizer).DistributedOptimizer, name))
    weight = torch.nn.Parameter(torch.zeros(4))
    view, step = weight.view(-1), torch.tensor(3.0)
    stand_in = SimpleNamespace(
        model_param_group_index_map={weight: (0, 0)},
        optimizer=SimpleNamespace(param_groups=[{"params": [view]}], state={view: {"step": step}}),
        config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False),
    )
    load = (stand_in, weight, {"param": torch.ones(4), "step": torch.tensor(0.0)})
    with pytest.raises(RuntimeError, match="a view of a leaf Variable"):
        DistributedOptimizer._set_main_param_and_optimizer_states(*load)
    resume_distributed_optimizer()
    DistributedOptimizer._set_main_param_and_optimizer_states(*load)
    assert weight.tolist() == [1.0] * 4
    assert step == 3.0


def test_upstream_asserts_on_an_optimizer_without_a_step_and_shares_the_number() -> None:
    source = inspect.getsource(distrib_optimizer)
    assert 'steps = list(set([s["step"].item() for s in inner_state_dict["state"].values()]))' in source
    assert 's["step"] = step\n' in source
    assert "if not isinstance(tensors[key], torch.Tensor):" in source


def test_upstream_wants_samples_left_also_where_no_step_is():
    from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

    with pytest.raises(AssertionError, match="no samples left to consume"):
        MegatronPretrainingSampler(8, 8, micro_batch_size=2, data_parallel_rank=0, data_parallel_size=1)
