"""Hugging Face folders beside the checkpoints, while the job runs (--kd-save-hf-interval)."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from mkd.checkpoint.hf.export import HFExport
from mkd.checkpoint.megatron_folder import MegatronFolder
from mkd.errors import MkdCheckpointError, MkdError
from mkd.utils.atomic_files import sync_file, sync_folder

FOLDER = "hf"
"""In --save; an iteration has the same name there as its checkpoint."""


class Snapshots:
    """Writes `<save>/hf/iter_XXXXXXX` from checkpoints, all ranks together.

    A folder is filled under a name that begins with a dot and renamed when all of it is on disk; one that is no longer
    kept is renamed before it is removed. Whatever has its plain name is whole.
    """

    def __init__(self, save: Path, interval: int, keep: int | None) -> None:
        """Args:
        save: the folder in --save.
        interval: iterations between snapshots.
        keep: how many stay, the newest; None for all.
        """
        self._folder, self._interval, self._keep = save / FOLDER, interval, keep

    def clean(self) -> None:
        """Remove what a killed job has left. Call it when the job starts, on all ranks."""
        if dist.get_rank() == 0 and self._folder.is_dir():
            for path in self._folder.glob(".iter_*"):
                print(f"mkd: {path} is left from a job that ended while it wrote or removed it: removed", flush=True)
                shutil.rmtree(path)
        dist.barrier()

    def take(self, checkpoint: Path) -> None:
        """Export a checkpoint, if it is time; it is complete, and stays until this returns. Collective over all ranks.

        Raises:
            MkdCheckpointError: on all ranks, when the export fails on one.
        """
        iteration = _iteration(checkpoint)
        if iteration is None or iteration % self._interval:
            return
        final, staged = self._folder / checkpoint.name, self._folder / f".{checkpoint.name}.partial"
        _on_first(lambda: _make_empty(staged))
        _on_all(lambda: _write_part(checkpoint, staged))
        _on_first(lambda: self._publish(staged, final))

    def _publish(self, staged: Path, final: Path) -> None:
        sync_folder(staged)
        if final.exists():  # of a job that was killed after this point and began again before it
            _remove(final)
        os.replace(staged, final)
        sync_folder(self._folder)
        print(f"mkd: wrote {final}", flush=True)
        if self._keep is not None:
            # Those of later iterations are from before the job went back to an earlier one.
            numbers = {path: _iteration(path) for path in self._folder.glob("iter_*")}
            kept = {path: n for path, n in numbers.items() if n is not None and n <= _iteration(final)}
            for old in sorted(kept, key=kept.get)[: -self._keep]:
                _remove(old)


def _iteration(folder: Path) -> int | None:
    digits = folder.name.removeprefix("iter_")
    return int(digits) if digits.isascii() and digits.isdigit() else None


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _write_part(checkpoint: Path, out: Path) -> None:
    HFExport(MegatronFolder(checkpoint, "--save")).write(out, dist.get_rank(), dist.get_world_size())
    for path in out.iterdir():
        sync_file(path)


def _remove(folder: Path) -> None:
    """Take the name away first: what is half removed must not be taken for whole."""
    aside = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(folder, aside)
    shutil.rmtree(aside)


def _on_first(action: Callable[[], None]) -> None:
    """Rank 0 acts; all ranks learn of its failure."""
    _on_all(action if dist.get_rank() == 0 else lambda: None)


def _on_all(action: Callable[[], None]) -> None:
    """Each rank acts; all ranks raise when one fails, and none waits for another that is gone."""
    problem = None
    try:
        action()
    except (MkdError, OSError) as error:
        problem = str(error)
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for rank, text in enumerate(problems):
        if text is not None:
            raise MkdCheckpointError(f"--kd-save-hf-interval: rank {rank} cannot write the folder: {text}")
