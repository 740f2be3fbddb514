"""Epochs of a run over its data, per file and split."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.utils import Split

from mkd.data.sources.stores import DocumentStore, is_chat_file

NAMES = {Split.train: "training", Split.valid: "validation", Split.test: "test"}
MANY = 100
"""More epochs than this are reported as a likely mistake."""
_LESS = {
    "training": "fewer iterations (--train-iters)",
    "validation": "a larger share in --split, or a smaller --eval-iters",
    "test": "a larger share in --split, or a smaller --eval-iters",
}


@dataclass(frozen=True)
class Reading:
    """Rows that one of the three sets reads from one file."""

    split: str
    """training, validation or test."""
    name: str
    """Name of the data."""
    rows: int
    """Rows that the whole run reads; for validation, rows of one evaluation."""
    per_epoch: int
    """Rows of one epoch over the set's part of the file."""

    @property
    def epochs(self) -> float:
        return self.rows / self.per_epoch

    def __str__(self) -> str:
        return f"{self.rows} rows wanted, {self.epochs:.2f} epochs"

    @property
    def warning(self) -> str | None:
        """Warning if there are more than MANY epochs; else None."""
        if self.epochs <= MANY:
            return None
        return (
            f"{self.split} reads its part of {self.name}, {self.per_epoch} rows, {self.epochs:.0f} times: give more "
            f"data, or {_LESS[self.split]}"
        )


def blend_of(config: GPTDatasetConfig, split: Split) -> tuple[Any, tuple[float, float] | None]:
    """((files, weights), share of each file) of a set; (None, None) for an empty set."""
    if config.blend_per_split is not None:
        return config.blend_per_split[split.value], (0.0, 1.0)
    return config.blend, config.split_matrix[split.value]


def readings_of_documents(config: GPTDatasetConfig, sizes: Sequence[int | None]) -> list[Reading]:
    """Estimate the epochs over documents, from the lengths in their index alone.

    Args:
        config: Megatron's: files, weights, shares and row length.
        sizes: rows that the run reads of the training, validation and test set.

    Returns:
        One entry per set and file; none for a blend with a chat file, whose lengths are unknown until it is tokenized.
    """
    found = []
    for split, size in zip(Split, sizes, strict=True):
        blend, share = (None, None) if config.mock else blend_of(config, split)
        if not size or blend is None or share is None or any(map(is_chat_file, blend[0])):
            continue
        names, weights = blend
        tokens = [int(DocumentStore(name, share).lengths.sum(dtype="int64")) for name in names]
        rows = [max(1, count // config.sequence_length) for count in tokens]
        parts = rows if weights is None else weights
        for name, part, per_epoch in zip(names, parts, rows, strict=True):
            found.append(Reading(NAMES[split], name, max(1, round(size * part / sum(parts))), per_epoch))
    return found
