"""Patches of Megatron's saving and loading of checkpoints."""

import multiprocessing
import os
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from io import StringIO
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any, Protocol, TextIO

from mkd.compat.unpickling import allowed_classes_only
from mkd.errors import MkdCheckpointError
from mkd.utils.parent_process import exit_with
from mkd.utils.stop_signals import blocked, ignore_stop_signals


class CheckpointHooks(Protocol):
    """mkd's part in saving and loading checkpoints. `writer` and `replacing` are not called on all ranks."""

    def collecting(self, args: Namespace) -> None:
        """Called before megatron collects what it saves, with its arguments, which it saves too."""
        ...

    def before(self, folder: Path, nbytes: int) -> None:
        """Called before anything is written into the folder of an iteration, with the bytes that this rank saves."""
        ...

    def writer(self, write: Callable[..., None]) -> Callable[..., None]:
        """Wrap the function (rank, buckets, ...) that writes a rank's shards; it may run in another process."""
        ...

    def written(self, folder: Path) -> None:
        """Called when all files are written, before the tracker points to them."""
        ...

    def published(self) -> None:
        """Called when the tracker points to the checkpoint that was written last."""
        ...

    def replacing(self, tracker: Path) -> AbstractContextManager[TextIO]:
        """Open the tracker for writing. Called on rank 0 only."""
        ...


def end_result_queues_with_their_rank(start_method: str = "spawn") -> None:
    """Let the process that holds the results of a save end when its rank ends: neither later nor before.

    megatron-core 0.19 starts it at a rank's first save and ends it when Python ends: after a kill half a GB of host
    memory stays in use. A stop signal to all processes of a rank ends it, and the save that is being written fails with
    EOFError. A second call changes nothing.

    Args:
        start_method: see `multiprocessing.get_context`; Megatron's is the default.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async.get_write_results_queue.__module__ == __name__:
        return

    @filesystem_async._disable_gc()
    def results_queue(mp_mode: str = start_method) -> Any:
        if filesystem_async._results_queue is None:
            manager = SyncManager(ctx=multiprocessing.get_context(mp_mode))
            with blocked():  # it imports for seconds before it can ignore them
                manager.start(_hold_results, (os.getpid(),))
            filesystem_async._results_queue = manager.Queue()
        return filesystem_async._results_queue

    filesystem_async.get_write_results_queue = results_queue


def _hold_results(rank: int) -> None:
    """First call in the process that holds the results of the rank with process id `rank`."""
    exit_with(rank)
    ignore_stop_signals()


def install_checkpoint_hooks(hooks: CheckpointHooks) -> None:
    """Make a checkpoint valid only when it is complete, and raise an error when one cannot be loaded.

    megatron-core 0.19 writes the tracker in place, writes into folders of an earlier attempt, hashes on rank 0 only,
    and exits with status 0 after some failed loads. With --save-retain-interval it removes the checkpoint in the
    tracker even if its iteration is later, and fails if it is a release. It starts an asynchronous save while earlier
    ones are being written, so that a full disk can make all of them fail.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
    from megatron.training import checkpointing, training

    save, create_request = dist_checkpointing.save, TorchDistSaveShardedStrategy.async_save
    save_checkpoint, schedule = checkpointing.save_checkpoint, checkpointing.schedule_async_save
    files = _AtomicTracker(checkpointing.maybe_msc, hooks.replacing)
    saved = 0

    def save_with_hooks(state: Any, folder: str, *args: Any, **kwargs: Any) -> Any:
        hooks.before(Path(folder), _bytes_to_save(state))
        request = save(state, folder, *args, **kwargs)
        if request is None:
            hooks.written(Path(folder))
        else:
            request.add_finalize_fn(lambda: hooks.written(Path(folder)))
        return request

    def request_with_hooks(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = create_request(self, *args, **kwargs)
        return request if request.async_fn is None else request._replace(async_fn=hooks.writer(request.async_fn))

    def schedule_with_hooks(request: Any) -> None:
        request.add_finalize_fn(hooks.published)
        request.finalize_fns[:] = [
            _save_errors(saved)(files.saving(saved)(finalize)) for finalize in request.finalize_fns
        ]
        schedule(request)

    def save_checkpoint_with_hooks(iteration: int, *args: Any, **kwargs: Any) -> None:
        nonlocal saved
        if training.get_args().async_save:
            training.maybe_finalize_async_save(blocking=True)  # the save before
        saved = iteration
        hooks.collecting(training.get_args())
        with _save_errors(iteration), files.saving(iteration):
            save_checkpoint(iteration, *args, **kwargs)
        if not training.get_args().async_save:
            hooks.published()

    dist_checkpointing.save = save_with_hooks
    TorchDistSaveShardedStrategy.async_save = request_with_hooks
    checkpointing.schedule_async_save = schedule_with_hooks
    checkpointing.save_checkpoint = training.save_checkpoint = save_checkpoint_with_hooks
    checkpointing.maybe_msc = files
    training.load_checkpoint = with_load_errors(training.load_checkpoint)


def _bytes_to_save(state: Any) -> int:
    """Bytes of the tensors that this rank saves, without copies that other ranks save."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica

    total, left = 0, [state]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list | tuple):
            left += value
        elif isinstance(value, ShardedTensor | ShardedTensorFactory) and is_main_replica(value.replica_id):
            total += getattr(value.data, "nbytes", 0)
    return total


class _AtomicTracker:
    """megatron's file functions, with an atomic tracker: it is replaced in one step, and while an iteration is saved,
    it reads as the number of an earlier iteration, or 0."""

    def __init__(self, files: Any, replacing: Callable[[Path], AbstractContextManager[TextIO]]) -> None:
        self._files, self._replacing = files, replacing
        self._saving: int | None = None

    @contextmanager
    def saving(self, iteration: int) -> Iterator[None]:
        """This iteration is being saved inside the `with` block."""
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


def with_load_errors(load: Callable) -> Callable:
    """Wrap a load so that it fails with an `MkdCheckpointError`."""
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

    def load_with_errors(*args: Any, **kwargs: Any) -> Any:
        try:
            with allowed_classes_only():
                return load(*args, **kwargs)
        except SystemExit as error:
            raise MkdCheckpointError(
                "megatron refuses the checkpoint in --load or --pretrained-checkpoint (its reason is printed above)"
            ) from error
        except known as error:
            _raise_out_of_memory(error)
            raise MkdCheckpointError(
                f"the checkpoint in --load or --pretrained-checkpoint cannot be loaded: {_in_one_line(error)}"
            ) from error

    return load_with_errors


def _in_one_line(error: BaseException) -> str:
    cause = _cause(error)
    return f"{type(cause).__name__}: {' '.join(str(cause).split())[:500]}"


def _cause(error: BaseException) -> BaseException:
    failures = getattr(error, "failures", None)  # of torch, per rank
    return next(iter(failures.values()))[0] if failures else error


def _raise_out_of_memory(error: BaseException) -> None:
    """The checkpoint folder is not the cause of an out-of-memory error."""
    import torch

    if isinstance(cause := _cause(error), torch.OutOfMemoryError | MemoryError):
        raise cause


@contextmanager
def _save_errors(iteration: int) -> Iterator[None]:
    """Turn the failure of a save, such as a full disk, into an `MkdCheckpointError`."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except (CheckpointException, RuntimeError, OSError) as error:
        from megatron.training import get_args

        _raise_out_of_memory(error)
        folder = Path(get_args().save)
        tracker = folder / "latest_checkpointed_iteration.txt"
        named = tracker.read_text().strip() if tracker.is_file() else ""
        name = named if named == "release" else f"iter_{named:0>7}"
        before = f"{name} is still complete" if named else "there is no earlier one"
        existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        free = shutil.disk_usage(existing).free / 2**30  # megatron drops the system's reason
        raise MkdCheckpointError(
            f"--save: {folder / f'iter_{iteration:07d}'} was not saved, {free:.3f} GiB are free there "
            f"({_in_one_line(error)}); {before}. Free space or repair the folder; the same command resumes"
        ) from error


@contextmanager
def tracker_override(iteration: int | None) -> Iterator[None]:
    """Inside the `with` block megatron reads this iteration from every tracker file; None for a release.

    megatron-core 0.19 exits with status 0 on a tracker that it cannot parse, before mkd has repaired it.
    """
    from megatron.training import checkpointing

    read = checkpointing.read_metadata
    checkpointing.read_metadata = lambda file: (iteration or 0, iteration is None)
    try:
        yield
    finally:
        checkpointing.read_metadata = read
