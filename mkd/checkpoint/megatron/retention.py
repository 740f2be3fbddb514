"""Removes old checkpoints from a --save folder (--kd-keep-last)."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from mkd.checkpoint.megatron.best import BestCheckpoint
from mkd.checkpoint.megatron.folder import iteration_name, iteration_of
from mkd.utils.atomic_files import remove_folder
from mkd.utils.logging import logger


@dataclass(frozen=True)
class Retention:
    """Keeps the newest checkpoints of a folder.

    A folder counts if it has a name of an iteration and `metadata.json`, which a save writes after all shards and
    before the tracker is replaced. Other folders are neither counted nor removed: releases, incomplete ones, links,
    Hugging Face folders, and iterations later than the one that was saved, which belong to a job that went back or to
    a save that is not finished.
    """

    root: Path
    """The folder in --save."""
    keep: int
    """Number of checkpoints that stay, with the newest one; at least 1."""
    multiples_of: int | None = None
    """Multiples of this iteration stay too and are not counted: --save-retain-interval."""
    best: BestCheckpoint | None = None
    """The best checkpoint stays too and is not counted."""

    def clean(self) -> None:
        """Remove the rest of folders whose removal was interrupted. Called on all ranks when a job starts."""
        if dist.get_rank() == 0 and self.root.is_dir():
            for path in self.root.glob(".iter_*.old"):
                shutil.rmtree(path, ignore_errors=True)

    def remove_old(self, newest: Path) -> None:
        """Remove what is not kept. Called on all ranks once the tracker names `newest`; rank 0 removes.

        A folder is renamed before it is removed: one whose removal is interrupted is not taken for a checkpoint.
        """
        if dist.get_rank() != 0:
            return
        for path in self.surplus(newest):
            try:
                remove_folder(path)
                logger.info(f"removed {path} (--kd-keep-last {self.keep})")
            except OSError as error:
                logger.warning(f"{path} cannot be removed ({error}): remove it by hand")

    def surplus(self, newest: Path) -> list[Path]:
        """Checkpoints that are not kept, the oldest first."""
        last = iteration_of(newest.name)
        if last is None or newest.parent.resolve() != self.root.resolve():
            return []
        counted = {path: iteration for path in self.root.glob("iter_*") if (iteration := _counted(path)) is not None}
        older = [path for path in sorted(counted, key=counted.get, reverse=True) if counted[path] < last]
        if self.multiples_of is not None:
            older = [path for path in older if counted[path] % self.multiples_of]
        if self.best is not None:
            older = [path for path in older if counted[path] != self.best.iteration]
        return older[self.keep - 1 :][::-1]


def _counted(path: Path) -> int | None:
    """Iteration of a folder that counts as a checkpoint; None for any other."""
    iteration = iteration_of(path.name)
    is_plain = iteration is not None and path.name == iteration_name(iteration) and not path.is_symlink()
    return iteration if is_plain and (path / "metadata.json").is_file() else None
