"""mkd's part in Megatron's saving of a checkpoint: what makes it count only when it is whole."""

import ctypes
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import Any, TextIO
from uuid import uuid4

import torch.distributed as dist

from mkd.checkpoint.integrity import hash_files, take_hashes, write_manifest
from mkd.errors import MkdCheckpointError
from mkd.utils.atomic_files import replacing, sync_file, sync_folder

OWNER = "saving_job.txt"
"""In --save: the job that began to save there last. One that was taken for dead, or forgotten, may still be at work."""


class Saving:
    """Called around each save, synchronous or not, on all ranks (`mkd.compat.checkpoints`)."""

    def __init__(self, root: Path, *, hashes: bool, then: Callable[[Path], None] | None = None) -> None:
        """Args:
        root: the folder in --save.
        hashes: whether to write `integrity.json`.
        then: called on all ranks with the folder of each checkpoint in `root`, when the tracker names it.
        """
        self._root, self._hashes, self._then = root, hashes, then
        self._written: Path | None = None
        self._name: str | None = None

    def claim(self) -> None:
        """Say in the folder that this job saves there from now on. Called on all ranks."""
        if dist.get_rank() == 0:
            began = f"{datetime.now().astimezone():%F %T %z}"
            self._name = f"process {os.getpid()} on {gethostname()}, begun {began} ({uuid4().hex[:8]})"
            self._root.mkdir(parents=True, exist_ok=True)
            with replacing(self._root / OWNER) as file:
                file.write(self._name)

    def _check_claim(self) -> None:
        owner = [None]
        if self._name is not None and (self._root / OWNER).is_file():
            owner = [(self._root / OWNER).read_text()]
            owner = [None] if owner == [self._name] else owner
        dist.broadcast_object_list(owner)
        if owner[0] is not None:
            raise MkdCheckpointError(
                f"--save {self._root}: another job saves there since: {owner[0]}. This one ends and saves nothing "
                "more; give each job a folder of its own"
            )

    def before(self, folder: Path) -> None:
        """Clear a folder that is there already, so that nothing old can pass for a part of the new.

        It may be the last whole checkpoint, which a job that has nothing left to do saves once more: it stays under
        another name until the new one is whole.

        Raises:
            MkdCheckpointError: on all ranks, when another job has claimed the folder in --save.
        """
        self._check_claim()
        if dist.get_rank() == 0 and folder.is_dir() and any(folder.iterdir()):
            print(f"mkd: {folder} is there from an earlier attempt, and is written anew", flush=True)
            if _replaced(folder).exists():  # and since then no save of this iteration has ended
                shutil.rmtree(folder)
            else:
                folder.rename(_replaced(folder))
            folder.mkdir()
            sync_folder(folder.parent)
        dist.barrier()

    def writer(self, write: Callable[..., None]) -> Callable[..., None]:
        """What writes this rank's shards, in this process or in another, with hashing after it."""
        into = _hashes_of(dist.get_rank()) if self._hashes else None
        return partial(_write, write, os.getpid(), into)

    def written(self, folder: Path) -> None:
        """All ranks' files are there, the tracker does not name them yet: put everything on disk."""
        hashes = [None] * dist.get_world_size()
        dist.all_gather_object(hashes, take_hashes(folder, _hashes_of(dist.get_rank())))
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
        """The tracker names the checkpoint."""
        folder, self._written = self._written, None
        if self._then is not None and folder is not None and folder.parent.resolve() == self._root.resolve():
            self._then(folder)

    def replacing(self, tracker: Path) -> AbstractContextManager[TextIO]:
        """The tracker file, opened for writing."""
        return replacing(tracker)


def _replaced(folder: Path) -> Path:
    return folder.with_name(f"replaced_{folder.name}")


def _hashes_of(rank: int) -> str:
    return f".__{rank}.hashes"


def _write(write: Callable[..., None], trainer: int, into: str | None, rank: int, buckets: Any, *rest: Any) -> None:
    """Runs where the shards are written: possibly a process of its own, beside the training."""
    if os.getpid() != trainer:
        _end_with(trainer)
    write(rank, buckets, *rest)
    if into is not None and buckets:
        files = [Path(bucket[0]) for bucket in buckets]
        hash_files(files[0].parent, [file.name for file in files], into)


def _end_with(trainer: int) -> None:
    """A writer that outlives its trainer could write into the folder that the restarted trainer writes, too."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    try:
        os.kill(trainer, 0)
    except ProcessLookupError:  # it died before the line above
        os._exit(1)
