"""Exports checkpoints as Hugging Face folders during training (--kd-save-hf-interval).

All ranks write one folder together: it is filled under a name that begins with a dot, made durable, and then renamed by
rank 0. A folder with a plain name is therefore complete, also after a job was killed at any moment.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from mkd.checkpoint.hf.export import HFExport
from mkd.checkpoint.megatron.folder import MegatronFolder, iteration_of
from mkd.checkpoint.ranks import run_on_all_ranks
from mkd.errors import MkdCheckpointError
from mkd.utils.atomic_files import remove_folder, rename, sync_file, sync_folder
from mkd.utils.logging import logger

FOLDER = "hf"
"""Subfolder of --save; a snapshot has the same name there as its checkpoint."""


class Snapshots:
    """Writes `<save>/hf/iter_XXXXXXX` from checkpoints and removes the oldest ones. Collective over all ranks."""

    def __init__(
        self,
        save: Path,
        interval: int,
        keep: int | None,
        write: Callable[[MegatronFolder, Path], None] | None = None,
    ) -> None:
        """Args:
        save: the folder in --save.
        interval: iterations between snapshots.
        keep: number of snapshots that are kept, the newest ones; None keeps all.
        write: writes a checkpoint's files into a folder, called on all ranks; None: those of `HFExport`.
        """
        self._folder, self._interval, self._keep = save / FOLDER, interval, keep
        self._write = _write_model if write is None else write

    def clean(self) -> None:
        """Remove the leftovers of a killed job. Call it when the job starts, on all ranks."""
        if dist.get_rank() == 0 and self._folder.is_dir():
            for path in self._folder.glob(".iter_*"):
                logger.info(f"{path} is left from a job that ended while it wrote or removed it: removed")
                shutil.rmtree(path)
        dist.barrier()

    def take(self, checkpoint: Path) -> None:
        """Export a checkpoint if its iteration is a multiple of the interval. Collective over all ranks.

        Args:
            checkpoint: folder of one iteration, complete; it must stay until this call returns.

        Raises:
            MkdCheckpointError: on all ranks, when the export fails on one.
        """
        iteration = iteration_of(checkpoint.name)
        if iteration is None or iteration % self._interval:
            return
        final, staged = self._folder / checkpoint.name, self._folder / f".{checkpoint.name}.partial"
        _on_first_rank(final, lambda: _make_empty(staged))
        _on_all_ranks(final, lambda: self._write_part(checkpoint, staged))
        _on_first_rank(final, lambda: self._publish(staged, final))

    def _write_part(self, checkpoint: Path, out: Path) -> None:
        self._write(MegatronFolder(checkpoint, "--save"), out)
        for path in out.iterdir():
            sync_file(path)

    def _publish(self, staged: Path, final: Path) -> None:
        sync_folder(staged)
        if final.exists():  # the job was killed after this line and resumed from an earlier iteration
            remove_folder(final)
        rename(staged, final)
        logger.info(f"wrote {final}")
        if self._keep is not None:
            # Snapshots of later iterations were written before the job went back to an earlier one; they stay.
            numbers = {path: iteration_of(path.name) for path in self._folder.glob("iter_*")}
            kept = {path: n for path, n in numbers.items() if n is not None and n <= iteration_of(final.name)}
            for old in sorted(kept, key=kept.get)[: -self._keep]:
                remove_folder(old)


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _write_model(checkpoint: MegatronFolder, out: Path) -> None:
    HFExport(checkpoint).write(out, dist.get_rank(), dist.get_world_size())


def _on_first_rank(folder: Path, action: Callable[[], None]) -> None:
    _on_all_ranks(folder, action if dist.get_rank() == 0 else lambda: None)


def _on_all_ranks(folder: Path, action: Callable[[], None]) -> None:
    """Run the action on every rank; all ranks raise when it fails on one."""
    for rank, problem in enumerate(run_on_all_ranks(action)):
        if problem is not None:
            raise MkdCheckpointError(f"--kd-save-hf-interval: rank {rank} cannot write {folder}: {problem}")
