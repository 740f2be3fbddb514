"""The checkpoint whose evaluation is the best of a run (--kd-keep-best)."""

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mkd.checkpoint.megatron.folder import iteration_name, iteration_of
from mkd.config.values import BestMetric
from mkd.errors import MkdCheckpointError
from mkd.utils.atomic_files import replacing
from mkd.utils.json_files import read_json
from mkd.utils.logging import logger

FILE = "best_checkpoint.json"
"""File in --save: `iteration`, `metric` and `value`."""
_MOST_ITERATIONS = 10**12
"""A larger number is damage, and no name of a folder."""


class BestCheckpoint:
    """Compares the evaluations of the checkpoints in a --save folder, on rank 0; a file holds the best one."""

    def __init__(self, root: Path, metric: BestMetric) -> None:
        """Read the best checkpoint so far.

        Args:
            root: the folder in --save.
            metric: accuracy, of which more is better, or ce, of which less is better.

        Raises:
            MkdCheckpointError: the file is damaged.
        """
        self._root, self.metric = root, metric
        self._evaluated: dict[int, float] = {}
        self._unmeasured: Path | None = None  # the last checkpoint, if it was published before its evaluation
        self._best = _read(root / FILE, metric)

    @property
    def iteration(self) -> int | None:
        """Iteration of the best checkpoint; None without one."""
        return None if self._best is None else self._best[0]

    def evaluated(self, iteration: int, value: float | None) -> None:
        """Take the value of an evaluation. Collective over all ranks.

        Args:
            iteration: the last iteration before it.
            value: on the last rank; ignored on the others. None or NaN: it was not measured.
        """
        found = torch.tensor(math.nan if value is None else value, dtype=torch.float64, device="cuda")
        dist.broadcast(found, src=dist.get_world_size() - 1)
        self._evaluated.pop(iteration, None)
        if not math.isnan(found.item()):
            self._evaluated[iteration] = found.item()
        if self._unmeasured is not None and iteration_of(self._unmeasured.name) == iteration:
            self.published(self._unmeasured)

    def published(self, folder: Path) -> None:
        """The tracker names a checkpoint: record it if it is the best one. Called on all ranks; rank 0 records.

        An asynchronous save may be published after later evaluations, and the last one of a run before its evaluation.
        """
        if (iteration := iteration_of(folder.name)) is None:
            return
        value = self._evaluated.get(iteration)
        self._unmeasured = folder if value is None else None
        self._evaluated = {later: found for later, found in self._evaluated.items() if later > iteration}
        if dist.get_rank() != 0 or value is None:
            return
        # A job that went back has rewritten the checkpoint: its old value is of other weights.
        if self._best is not None and iteration != self._best[0] and not self._is_better(value, self._best[1]):
            return
        self._best = iteration, value
        with replacing(self._root / FILE) as out:
            json.dump({"iteration": iteration, "metric": self.metric, "value": value}, out)
        logger.info(f"the best checkpoint so far is {folder.name}: {self.metric} {value:.4f} (--kd-keep-best)")

    def _is_better(self, value: float, other: float) -> bool:
        return value > other if self.metric == "accuracy" else value < other


def _read(file: Path, metric: BestMetric) -> tuple[int, float] | None:
    """Iteration and value of the best checkpoint, if the file has one by this metric and its folder exists."""
    if not file.is_file():
        return None
    try:
        record: Any = read_json(file)
        iteration, value, known = record["iteration"], float(record["value"]), record["metric"]
        if type(iteration) is not int or not 0 <= iteration < _MOST_ITERATIONS or not math.isfinite(value):
            raise ValueError("no iteration or value")
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise MkdCheckpointError(f"{file} is damaged ({error}): remove it to compare from now on") from None
    is_there = known == metric and (file.parent / iteration_name(iteration)).is_dir()
    return (iteration, value) if is_there else None
