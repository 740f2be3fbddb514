"""Folders with the student's weights, from which inference servers load them."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from mkd.checkpoint.megatron.claim import FolderClaim
from mkd.checkpoint.ranks import run_on_all_ranks
from mkd.errors import MkdCheckpointError
from mkd.utils.atomic_files import partial_path, remove_folder, rename, sync_file, sync_folder

_NAME = "step_"
_MARK = ".mkd_rollout"
"""Empty file in each folder: folders of other programs, which may have such names too, are never removed."""
OWNER = "writing_job.txt"
"""File with the job that claimed the folder last (`mkd.checkpoint.megatron.claim`)."""
FLAG = "--kd-rollout-weights"


class WeightFolders:
    """`<folder>/step_XXXXXXX`, one per refresh: the number of steps that the student had taken.

    All ranks fill a folder together under a name that begins with a dot; the first rank makes it durable and renames
    it. A folder with a plain name and the mark is therefore complete.
    """

    def __init__(self, folder: Path) -> None:
        """Nothing is written yet."""
        self.path = folder
        self._claim = FolderClaim(folder / OWNER, f"{FLAG} {folder}")

    def claim(self) -> None:
        """Claim the folder for this job on the first call; check on later ones that no other job has claimed it since:
        it would remove the weights that servers load for this one. Collective over all ranks.

        Raises:
            MkdCheckpointError: on all ranks, if another job has, or the folder cannot be written.
        """
        on_first_rank(self.path, lambda: None if self._claim.is_taken else self._claim.take())
        self._claim.check("This job ends")

    def add(self, iteration: int, write: Callable[[Path], None]) -> Path:
        """A new folder. Collective over all ranks.

        Args:
            iteration: steps that the student has taken.
            write: fills a folder that exists, called on all ranks.

        Raises:
            MkdCheckpointError: on all ranks, when one cannot write it.
        """
        final = self.path.absolute() / f"{_NAME}{iteration:07d}"
        staged = partial_path(final)
        on_first_rank(self.path, lambda: _make_empty(staged))
        _on_all_ranks(self.path, lambda: write(staged))
        on_first_rank(self.path, lambda: _publish(staged, final))
        return final

    def remove_others(self, kept: Path) -> None:
        """Remove all folders but one, and what ended jobs have left. Collective over all ranks.

        Raises:
            MkdCheckpointError: on all ranks, if they cannot be removed.
        """
        on_first_rank(self.path, lambda: self._remove_others(kept))

    def _remove_others(self, kept: Path) -> None:
        names = re.compile(rf"{_NAME}\d{{7,}}")
        for path in list(self.path.iterdir()):
            if path.is_symlink() or not path.is_dir():
                continue
            if names.fullmatch(path.name) and path.name != kept.name and (path / _MARK).is_file():
                remove_folder(path)
            elif names.search(path.name) and path.name.startswith(f".{_NAME}"):
                shutil.rmtree(path)


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / _MARK).touch()


def _publish(staged: Path, final: Path) -> None:
    for path in staged.iterdir():
        sync_file(path)
    sync_folder(staged)
    if final.exists():
        if not (final / _MARK).is_file():
            raise FileExistsError(f"{final} exists and was not written by {FLAG}: give a folder of this run alone")
        remove_folder(final)  # an ended job has written the weights of this step, too
    rename(staged, final)


def on_first_rank(folder: Path, action: Callable[[], None]) -> None:
    """Run an action that writes into a folder on the first rank; all ranks raise when it fails. Collective over all
    ranks."""
    _on_all_ranks(folder, action if dist.get_rank() == 0 else lambda: None)


def _on_all_ranks(folder: Path, action: Callable[[], None]) -> None:
    """Run the action on every rank; all ranks raise when it fails on one."""
    for rank, problem in enumerate(run_on_all_ranks(action)):
        if problem is not None:
            raise MkdCheckpointError(
                f"{FLAG} {folder}: rank {rank} cannot write there, or remove what is old: {problem}"
            )
