"""Endless streams of training rows, and blends of them.

Row i is a function of i, the files and the flags. The number of rows consumed, which Megatron's checkpoints hold, is
therefore the whole state of the data, and a resumed run reads the rows that an uninterrupted one reads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from megatron.core.datasets import helpers
from megatron.core.datasets.utils import Split
from torch import Tensor
from torch.utils.data import Dataset

from mkd.data.packing.row_layout import RowLayout
from mkd.data.packing.row_plan import EpochOrder, cut, one_per_row, pack
from mkd.data.sources.stores import SampleStore
from mkd.errors import MkdDataError

PERIOD = 1 << 16
"""Rows after which the schedule of a blend repeats: weights are exact to 1 in PERIOD."""


class RowStream(Protocol):
    """Rows 0, 1, ... without end."""

    per_epoch: int
    """Rows that hold every sample once."""

    def row(self, index: int) -> dict[str, Any]:
        """Tensors of one row: see `RowLayout.row`."""
        ...


@dataclass(frozen=True)
class RowOptions[Layout]:
    """Options of turning samples into rows; Layout is RowLayout, or AlignedRowLayout for samples with k views."""

    layout: Layout
    drop_long: bool
    """Leave out samples that are longer than a row, instead of cutting them."""
    seed: int


class SampleRows:
    """Rows made of the samples of a store, packed or one sample per row."""

    def __init__(self, store: SampleStore, options: RowOptions[RowLayout], name: str) -> None:
        """Plan all rows.

        Args:
            store: the samples.
            options: how they become rows.
            name: name of the data in --data-path, for messages.

        Raises:
            MkdDataError: no sample can be used.
        """
        layout = options.layout
        pieces = cut(store.lengths, layout.piece_length, drop_long=options.drop_long)
        kept = np.ones(len(pieces), dtype=bool)
        if not (layout.kd_everywhere or store.all_targets):
            # Pieces of a long sample may have no target; whole samples have one.
            parts = np.bincount(pieces.sample, minlength=len(store.lengths))[pieces.sample] > 1
            for i in np.flatnonzero(parts):
                kept[i] = store.read(pieces.sample[i], pieces.start[i], pieces.positions[i] + 1)[1][1:].any()
        self._pieces = pieces.select(kept)
        if not len(self._pieces):
            raise MkdDataError(
                f"--data-path {name}: none of its {len(store.lengths)} samples can be used: {pieces.dropped} are "
                f"longer than {layout.limit if layout.is_limited else f'--seq-length {layout.row_length}'}, "
                f"{pieces.short} have fewer than two tokens"
            )
        if layout.is_packed:
            self.plan = pack(self._pieces.positions, layout.row_length, layout.multiple, options.seed)
        else:
            self.plan = one_per_row(self._pieces.positions, layout.row_length)
        self.per_epoch = len(self.plan)
        self._order = EpochOrder(self.per_epoch, options.seed)
        self._store, self._layout = store, layout
        self._without_target = int((~kept).sum())

    def row(self, index: int) -> dict[str, Tensor]:
        """See `RowStream`."""
        texts = [self._store.read(*self._bounds_of(piece)) for piece in self.plan.row(self._order.row_at(index))]
        return {name: torch.as_tensor(value) for name, value in self._layout.row(texts).items()}

    def _bounds_of(self, piece: int) -> tuple[int, int, int]:
        """(sample, start, count), the arguments of `SampleStore.read`."""
        pieces = self._pieces
        return int(pieces.sample[piece]), int(pieces.start[piece]), int(pieces.positions[piece]) + 1

    def __str__(self) -> str:
        what = self._layout.limit
        counts = {
            f"split because they are longer than {what}": self._pieces.split,
            f"dropped because they are longer than {what}": self._pieces.dropped,
            "left out because they have fewer than two tokens": self._pieces.short,
            "parts of long samples left out because nothing in them is a target": self._without_target,
        }
        text = f"{len(self._store.lengths)} samples in {self.per_epoch} rows, {self.plan.efficiency:.1%} of them tokens"
        if self._pieces.split or self._pieces.dropped:
            text += f"; the longest sample has {int(np.max(self._store.lengths)):,} tokens"
        return with_counts(text, counts)


def with_counts(text: str, counts: Mapping[str, int]) -> str:
    """The text, followed by all counts (description -> number) that are not 0."""
    return text + "".join(f"; {count} {what}" for what, count in counts.items() if count)


class ClassicRows:
    """Megatron's rows of concatenated documents, with the tensor names of `RowLayout.row`."""

    def __init__(self, samples: Any, per_epoch: int) -> None:
        """Wrap a GPTDataset."""
        self._samples, self.per_epoch = samples, per_epoch

    def row(self, index: int) -> dict[str, Tensor]:
        """See `RowStream`."""
        sample = self._samples[index]
        mask = sample["loss_mask"].float()
        return {
            **{name: sample[name] for name in ("tokens", "labels", "position_ids")},
            "ce_mask": mask,
            "kd_mask": mask,
            "length": torch.tensor(len(mask)),
        }

    def __str__(self) -> str:
        return f"concatenated documents, about {self.per_epoch} rows"


class BlendSchedule:
    """Stream of each row of a blend: greedily the one that lags most behind its weight."""

    def __init__(self, weights: Sequence[float]) -> None:
        """Raise MkdDataError for a weight that is 0 or below 1/PERIOD of the sum."""
        total = sum(weights)
        self._stream, self._index = np.zeros(PERIOD, dtype=np.int16), np.zeros(PERIOD, dtype=np.int64)
        normed = [weight / total for weight in weights] if total > 0 else []
        if not all(share * PERIOD >= 1 for share in normed) or not normed:
            raise MkdDataError(
                f"weights {' '.join(f'{w:g}' for w in weights)} in --data-path: each must be positive and at least "
                f"1/{PERIOD} of their sum"
            )
        helpers.build_blending_indices(self._stream, self._index, normed, len(normed), PERIOD, False)
        self._counts = np.bincount(self._stream, minlength=len(normed))

    def locate(self, index: int) -> tuple[int, int]:
        """(stream, index in that stream) of a row of the blend."""
        period, offset = divmod(index, PERIOD)
        stream = int(self._stream[offset])
        return stream, period * int(self._counts[stream]) + int(self._index[offset])

    def needed(self, rows: int) -> list[int]:
        """Number of rows of each stream among the first `rows` of the blend."""
        periods, rest = divmod(rows, PERIOD)
        return (periods * self._counts + np.bincount(self._stream[:rest], minlength=len(self._counts))).tolist()


class BlendOfRows(Dataset):
    """A set of `size` rows from one or more streams, for megatron's data loader."""

    def __init__(self, streams: Sequence[RowStream], schedule: BlendSchedule, size: int, split: Split) -> None:
        """Args: streams, the blend schedule, the number of rows, and the split, from which megatron takes the batch
        size."""
        self._streams, self._schedule, self._size = streams, schedule, size
        self.split = split

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._size:
            raise IndexError(f"row {index} of {self._size}")
        stream, offset = self._schedule.locate(int(index))
        return self._streams[stream].row(offset)

    def one_epoch(self) -> "BlendOfRows | None":
        """The same blend with as many rows as hold every sample at least once; None where later epochs have other rows,
        as Megatron's concatenation has.
        """
        if any(isinstance(stream, ClassicRows) for stream in self._streams):
            return None
        per_epoch = [stream.per_epoch for stream in self._streams]
        size = sum(per_epoch)
        while any(n < least for n, least in zip(self._schedule.needed(size), per_epoch, strict=True)):
            size += -(-size // 64)
        return BlendOfRows(self._streams, self._schedule, size, self.split)
