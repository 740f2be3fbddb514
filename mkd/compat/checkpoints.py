"""Patches of megatron's saving and loading (tests/unit/compat/test_checkpoint_hooks.py)."""

import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from io import StringIO
from pathlib import Path
from typing import Any, Protocol, TextIO

from mkd.errors import MkdCheckpointError


class CheckpointHooks(Protocol):
    """What mkd adds to megatron's saving and loading of checkpoints. All but `writer` are called on all ranks."""

    def collecting(self, args: Namespace) -> None:
        """Called before megatron collects what it saves, with its arguments, which it saves too."""
        ...

    def before(self, folder: Path) -> None:
        """Called before anything is written into the folder of an iteration."""
        ...

    def writer(self, write: Callable[..., None]) -> Callable[..., None]:
        """Wrap what writes a rank's shards: a function of (rank, buckets, ...) that may run in another process."""
        ...

    def written(self, folder: Path) -> None:
        """Called when all files are written, before the tracker names them."""
        ...

    def published(self) -> None:
        """Called when the tracker names what was written last."""
        ...

    def replacing(self, tracker: Path) -> AbstractContextManager[TextIO]:
        """Open the tracker for writing. Called on rank 0 only."""
        ...


def install_checkpoint_hooks(hooks: CheckpointHooks) -> None:
    """Let a checkpoint count only when it is whole, and end with an error when one cannot be loaded.

    megatron-core 0.19 writes the tracker in place, writes into folders that an earlier attempt has left, hashes on rank
    0 alone, and ends some failed loads with exit status 0. With --save-retain-interval it removes what the tracker has
    named, also where that is a later iteration, and stops where it is a release.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
    from megatron.training import checkpointing, training

    save, request_of = dist_checkpointing.save, TorchDistSaveShardedStrategy.async_save
    save_checkpoint, schedule = checkpointing.save_checkpoint, checkpointing.schedule_async_save
    files = _WholeTracker(checkpointing.maybe_msc, hooks.replacing)
    saved = 0

    def save_with_hooks(state: Any, folder: str, *args: Any, **kwargs: Any) -> Any:
        hooks.before(Path(folder))
        request = save(state, folder, *args, **kwargs)
        if request is None:
            hooks.written(Path(folder))
        else:
            request.add_finalize_fn(lambda: hooks.written(Path(folder)))
        return request

    def request_with_own_writer(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = request_of(self, *args, **kwargs)
        return request if request.async_fn is None else request._replace(async_fn=hooks.writer(request.async_fn))

    def schedule_and_tell(request: Any) -> None:
        request.add_finalize_fn(hooks.published)
        request.finalize_fns[:] = [
            _told_when_not_saved(saved)(files.saving(saved)(finalize)) for finalize in request.finalize_fns
        ]
        schedule(request)

    def save_checkpoint_and_tell(iteration: int, *args: Any, **kwargs: Any) -> None:
        nonlocal saved
        saved = iteration
        hooks.collecting(training.get_args())
        with _told_when_not_saved(iteration), files.saving(iteration):
            save_checkpoint(iteration, *args, **kwargs)
        if not training.get_args().async_save:
            hooks.published()

    dist_checkpointing.save = save_with_hooks
    TorchDistSaveShardedStrategy.async_save = request_with_own_writer
    checkpointing.schedule_async_save = schedule_and_tell
    checkpointing.save_checkpoint = training.save_checkpoint = save_checkpoint_and_tell
    checkpointing.maybe_msc = files
    training.load_checkpoint = _load_or_refuse(training.load_checkpoint)


class _WholeTracker:
    """megatron's file functions, but the tracker is replaced in one step, and what is read from it while an iteration
    is saved is the number of an earlier one, or 0."""

    def __init__(self, files: Any, replacing: Callable[[Path], AbstractContextManager[TextIO]]) -> None:
        self._files, self._replacing = files, replacing
        self._saving: int | None = None

    @contextmanager
    def saving(self, iteration: int) -> Iterator[None]:
        """Inside, this iteration is saved."""
        self._saving = iteration
        try:
            yield
        finally:
            self._saving = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def open(self, path: str, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        is_tracker = "://" not in str(path) and Path(path).name == "latest_checkpointed_iteration.txt"
        if is_tracker and mode == "w":
            return self._replacing(Path(path))
        if is_tracker and mode == "r" and self._saving is not None:
            text = Path(path).read_text(errors="replace").strip()
            is_earlier = text.isascii() and text.isdigit() and int(text) < self._saving
            return StringIO(text if is_earlier else "0")
        return self._files.open(path, mode, *args, **kwargs)


def _load_or_refuse(load: Callable) -> Callable:
    """Loading that fails with an `MkdCheckpointError`."""
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint.api import CheckpointException

    known = (
        CheckpointingException,
        CheckpointException,
        AssertionError,
        LookupError,
        RuntimeError,
        OSError,
        ValueError,
    )

    def load_or_refuse(*args: Any, **kwargs: Any) -> Any:
        try:
            return load(*args, **kwargs)
        except SystemExit as error:
            raise MkdCheckpointError(
                "megatron refuses the checkpoint in --load or --pretrained-checkpoint (its reason is above)"
            ) from error
        except known as error:
            _raise_if_memory_ran_out(error)
            raise MkdCheckpointError(
                f"the checkpoint in --load or --pretrained-checkpoint cannot be loaded: {_in_one_line(error)}"
            ) from error

    return load_or_refuse


def _in_one_line(error: BaseException) -> str:
    cause = _cause(error)
    return f"{type(cause).__name__}: {' '.join(str(cause).split())[:500]}"


def _cause(error: BaseException) -> BaseException:
    failures = getattr(error, "failures", None)  # torch's, of each rank
    return next(iter(failures.values()))[0] if failures else error


def _raise_if_memory_ran_out(error: BaseException) -> None:
    """No folder is to blame for that."""
    import torch

    if isinstance(cause := _cause(error), torch.OutOfMemoryError | MemoryError):
        raise cause


@contextmanager
def _told_when_not_saved(iteration: int) -> Iterator[None]:
    """A save that fails, because the disk is full for example, is an `MkdCheckpointError`."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except (CheckpointException, RuntimeError, OSError) as error:
        from megatron.training import get_args

        _raise_if_memory_ran_out(error)
        folder = Path(get_args().save)
        tracker = folder / "latest_checkpointed_iteration.txt"
        named = tracker.read_text().strip() if tracker.is_file() else ""
        name = named if named == "release" else f"iter_{named:0>7}"
        before = f"{name} is still whole" if named else "there is none before it"
        existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        free = shutil.disk_usage(existing).free / 2**30  # megatron loses the system's reason
        raise MkdCheckpointError(
            f"--save: {folder / f'iter_{iteration:07d}'} was not saved, {free:.3f} GiB are free there "
            f"({_in_one_line(error)}); {before}. Make room or mend the folder; the same command goes on from there"
        ) from error


@contextmanager
def tracker_override(iteration: int | None) -> Iterator[None]:
    """Inside, megatron takes this iteration for what every tracker file names; None for a release.

    megatron-core 0.19 exits with status 0 on a tracker that it cannot read, before mkd has mended it.
    """
    from megatron.training import checkpointing

    read = checkpointing.read_metadata
    checkpointing.read_metadata = lambda file: (iteration or 0, iteration is None)
    try:
        yield
    finally:
        checkpointing.read_metadata = read


def resume_distributed_optimizer() -> None:
    """Let the distributed optimizer continue from a checkpoint in fp32, and where Adam is PyTorch's, as on CPU.

    megatron-core 0.19 writes into fp32 weights while autograd watches. And with PyTorch's Adam it asserts on its way
    to a checkpoint that the steps of all parameters are equal, but before a load there are none; it gives all
    parameters one tensor of the number of steps, to which each of them then adds; and it takes this number from the
    tensors of a parameter, where the fully reshardable form has none and the other one the 0 of before the load.
    """
    import torch
    from megatron.core.optimizer import distrib_optimizer

    optimizer = distrib_optimizer.DistributedOptimizer
    if optimizer._set_main_param_and_optimizer_states.__module__ == __name__:
        return
    set_states = torch.no_grad()(optimizer._set_main_param_and_optimizer_states)
    if distrib_optimizer.HAVE_APEX_OR_TE:

        def set_states_unwatched(self: Any, model_param: Any, tensors: dict) -> None:
            set_states(self, model_param, tensors)

        optimizer._set_main_param_and_optimizer_states = set_states_unwatched
        return
    state_dict, load_state_dict = optimizer.state_dict, optimizer.load_state_dict

    def state_dict_before_a_load(self: Any) -> dict:
        if self.optimizer.state:
            return state_dict(self)
        self.optimizer.state["a placeholder"] = {"step": torch.zeros(())}
        try:
            return state_dict(self)
        finally:
            self.optimizer.state.clear()

    def load_steps_of_their_own(self: Any, state: dict) -> None:
        load_state_dict(self, state)
        for values in self.optimizer.state.values():
            if "step" in values:
                values["step"] = values["step"].clone()

    def set_states_but_no_step(self: Any, model_param: Any, tensors: dict) -> None:
        set_states(self, model_param, {**tensors, "step": None})  # what is no tensor is left as it is

    optimizer.state_dict, optimizer.load_state_dict = state_dict_before_a_load, load_steps_of_their_own
    optimizer._set_main_param_and_optimizer_states = set_states_but_no_step


def let_finished_jobs_evaluate() -> None:
    """Give a job that has made all its steps a loader without samples: it draws none, and evaluates.

    megatron-core 0.19 asserts that samples are left. Its own training sets have more than a job takes; those of whole
    samples have as many (`mkd.data.packing.row_sets`).
    """
    from megatron.training import training
    from torch.utils.data import DataLoader

    build = training.build_pretraining_data_loader

    def build_or_none_left(dataset: Any, consumed: int) -> Any:
        args = training.get_args()
        is_finished = dataset is not None and args.iteration >= args.train_iters
        # Validation and test sets have samples left always.
        return DataLoader([]) if is_finished and consumed >= len(dataset) else build(dataset, consumed)

    training.build_pretraining_data_loader = build_or_none_left


def take_rates_of_this_job() -> None:
    """Let a checkpoint's optimizer be read by a job with another --lr or --min-lr, and go on with this job's.

    megatron-core 0.19 has --override-opt-param-scheduler for that, but looks for a group of parameters in the
    checkpoint by its highest and lowest rate too, and would go on with those that it finds.
    """
    from megatron.core.optimizer import distrib_optimizer, optimizer

    whole, distributed = optimizer.MegatronOptimizer, distrib_optimizer.DistributedOptimizer
    reorder, load = whole._filter_and_reorder_param_groups, distributed.load_state_dict

    def reorder_with_own_rates(current: list[dict], stored: list[dict]) -> list[dict]:
        return reorder(current, _with_rates_of(current, stored))

    def load_with_own_rates(self: Any, state: dict) -> None:
        if "optimizer" in state:
            inner = state["optimizer"]
            groups = _with_rates_of(self.optimizer.param_groups, inner["param_groups"])
            state = {**state, "optimizer": {**inner, "param_groups": groups}}
        load(self, state)

    whole._filter_and_reorder_param_groups = staticmethod(reorder_with_own_rates)
    distributed.load_state_dict = load_with_own_rates


def _with_rates_of(current: list[dict], stored: list[dict]) -> list[dict]:
    """The stored groups, each with the rates of the current group of its kind; those of a kind that has several rates,
    here or there, stay as they are."""
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    rates = ("max_lr", "min_lr")
    kinds = ("default_config", *(key for key in param_group_identifier_keys if key not in rates))

    def rates_by_kind(groups: list[dict]) -> dict[tuple, set[tuple]]:
        found: dict[tuple, set[tuple]] = {}
        for group in groups:
            kind = tuple(map(group.get, kinds))
            found.setdefault(kind, set()).add(tuple(map(group.get, rates)))
        return found

    here, there = rates_by_kind(current), rates_by_kind(stored)
    renamed = []
    for group in stored:
        kind = tuple(map(group.get, kinds))
        if len(here.get(kind, ())) == len(there[kind]) == 1:
            group = {**group, **dict(zip(rates, *here[kind], strict=True))}
        renamed.append(group)
    return renamed
