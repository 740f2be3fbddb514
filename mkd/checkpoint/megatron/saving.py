"""mkd's additions to Megatron's checkpoint saving: the tracker names a checkpoint only when it is complete on disk.

Order of a save, synchronous or not (`mkd.compat.checkpoints` calls these methods):

0. `collecting`: the run's state is put among the arguments that Megatron collects;
1. `before`: check that no other job saves in the folder and that the disk has room, and move an old folder of the same
   iteration aside; an earlier asynchronous save has ended before;
2. `writer`: the process that writes the shards also hashes them;
3. `written`: all shards exist; write `integrity.json` and make everything durable (fsync);
4. `replacing`: the tracker file is replaced atomically;
5. `published`: the tracker names the checkpoint; exports may start, and then older checkpoints are removed.
"""

import errno
import os
import shutil
import threading
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist

from mkd.checkpoint.megatron.claim import FolderClaim
from mkd.checkpoint.megatron.integrity import hash_files, take_hashes, write_manifest
from mkd.checkpoint.ranks import gather_objects
from mkd.config.run_state import RunState
from mkd.utils.atomic_files import free_bytes, rename, replacing, sync_file, sync_folder
from mkd.utils.logging import logger
from mkd.utils.parent_process import exit_with
from mkd.utils.stop_signals import ignore_stop_signals

OWNER = "saving_job.txt"
"""File in --save with the job that claimed the folder last (`mkd.checkpoint.megatron.claim`)."""


class Saving:
    """Called around each save on all ranks; see the order at the top of this file."""

    def __init__(
        self,
        root: Path,
        *,
        hashes: bool,
        state: RunState | None = None,
        on_published: Sequence[Callable[[Path], None]] = (),
    ) -> None:
        """Args:
        root: the folder in --save.
        hashes: True to write `integrity.json`.
        state: state of the run, which each checkpoint holds.
        on_published: called in order, on all ranks, with the folder of each checkpoint in `root` once the tracker
            names it.
        """
        self._root, self._hashes, self._state, self._on_published = root, hashes, state, on_published
        self._written: Path | None = None
        self._claim = FolderClaim(root / OWNER, f"--save {root}")

    def claim(self) -> None:
        """Record in the folder that this job saves there from now on. Called on all ranks."""
        if dist.get_rank() == 0:
            self._claim.take()

    def collecting(self, args: Namespace) -> None:
        """Put the run's state among the arguments that are saved."""
        if self._state is not None:
            self._state.write_to(args)

    def before(self, folder: Path, nbytes: int = 0) -> None:
        """Empty the folder of the iteration, so that no old file can be taken for a part of the new checkpoint.

        An existing folder may be the last complete checkpoint, because a finished job that is restarted saves its last
        iteration again. It is renamed, and kept until the new one is complete.

        Args:
            folder: the folder of the iteration.
            nbytes: bytes of the tensors that this rank saves.

        Raises:
            MkdCheckpointError: on all ranks, when another job has claimed the folder in --save.
            OSError: on all ranks, when the disk has no room for the checkpoint.
        """
        self._claim.check("This job exits without saving")
        _require_room(folder, sum(gather_objects(nbytes)))
        if dist.get_rank() == 0 and folder.is_dir() and any(folder.iterdir()):
            logger.info(f"{folder} exists from an earlier attempt and is rewritten")
            if _replaced(folder).exists():  # no save of this iteration has completed since
                shutil.rmtree(folder)
            else:
                rename(folder, _replaced(folder))
            folder.mkdir()
            sync_folder(folder.parent)
        dist.barrier()

    def writer(self, write: Callable[..., None]) -> Callable[..., None]:
        """Megatron's function that writes this rank's shards, in this process or in another, extended with hashing."""
        into = _hash_file(dist.get_rank()) if self._hashes else None
        return partial(_write, write, os.getpid(), into)

    def written(self, folder: Path) -> None:
        """Make the checkpoint durable: the files of all ranks exist, and the tracker does not name them yet."""
        hashes = gather_objects(take_hashes(folder, _hash_file(dist.get_rank())))
        if dist.get_rank() == 0:
            sync_file(folder / "metadata.json")
            if self._hashes:
                write_manifest(folder, {name: text for part in hashes for name, text in part.items()})
            sync_folder(folder)
            sync_folder(folder.parent)
            shutil.rmtree(_replaced(folder), ignore_errors=True)
        dist.barrier()
        self._written = folder

    def published(self) -> None:
        """Start the exports and the removal of older checkpoints: the tracker names the checkpoint."""
        folder, self._written = self._written, None
        if folder is not None and folder.parent.resolve() == self._root.resolve():
            for call in self._on_published:
                call(folder)

    def replacing(self, tracker: Path) -> AbstractContextManager[TextIO]:
        """The tracker file, opened for writing; it replaces the old one when the `with` block ends."""
        return replacing(tracker)


def _require_room(folder: Path, nbytes: int) -> None:
    """Raise OSError on all ranks if the disk has no room for `nbytes` of tensors and 1% for the index."""
    needed = nbytes + nbytes // 100
    free = [free_bytes(folder) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(free)
    if free[0] is not None and free[0] < needed:
        raise OSError(errno.ENOSPC, f"it needs {needed / 2**30:.3f} GiB")


def _replaced(folder: Path) -> Path:
    return folder.with_name(f"replaced_{folder.name}")


def _hash_file(rank: int) -> str:
    return f".__{rank}.hashes"


def _write(write: Callable[..., None], trainer: int, into: str | None, rank: int, buckets: Any, *rest: Any) -> None:
    """Write shards and hash them, in the trainer's process or in a separate writer process."""
    if os.getpid() != trainer:
        exit_with(trainer)  # a writer that outlives it could write into the folder of the restarted trainer
        if threading.current_thread() is threading.main_thread():
            ignore_stop_signals()
    write(rank, buckets, *rest)
    if into is not None and buckets:
        files = [Path(bucket[0]) for bucket in buckets]
        try:
            hash_files(files[0].parent, [file.name for file in files], into)
        except OSError as error:
            if os.getpid() == trainer:
                raise
            raise SystemExit(f"mkd: the hashes of the shards cannot be written ({error})") from None  # no traceback
