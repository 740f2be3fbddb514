"""Endless streams of training rows. Row i is a function of i alone: the rows consumed so far are all the state."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from megatron.core.datasets import helpers
from megatron.core.datasets.utils import Split
from torch import Tensor
from torch.utils.data import Dataset

from mkd.data.packing.layout import Epochs, RowLayout, cut, one_per_row, pack, with_counts
from mkd.data.sources.stores import SampleStore
from mkd.errors import MkdDataError

PERIOD = 1 << 16
"""Rows after which the choices of a blend begin anew: weights are kept to 1 in PERIOD."""


class RowStream(Protocol):
    """Rows 0, 1, ... without end."""

    per_epoch: int
    """Rows that hold every sample once."""

    def row(self, index: int) -> dict[str, Tensor]:
        """Tensors of one row: see `RowLayout.row`."""
        ...


@dataclass(frozen=True)
class RowOptions:
    """How samples become rows."""

    layout: RowLayout
    drop_long: bool
    """Whether samples longer than a row are left out, and not cut."""
    seed: int


class SampleRows:
    """Rows made of the samples of a store, one a row or packed."""

    def __init__(self, store: SampleStore, options: RowOptions, name: str) -> None:
        """Plan all rows.

        Args:
            store: where the samples are.
            options: how they become rows.
            name: of the data, for messages.

        Raises:
            MkdDataError: nothing is left to train on.
        """
        layout = options.layout
        pieces = cut(store.lengths, layout.row_length, drop_long=options.drop_long)
        kept = np.ones(len(pieces), dtype=bool)
        if not (layout.kd_everywhere or store.all_targets):
            # Parts of a long sample may have nothing to learn; whole samples have.
            parts = np.bincount(pieces.sample, minlength=len(store.lengths))[pieces.sample] > 1
            for i in np.flatnonzero(parts):
                kept[i] = store.read(pieces.sample[i], pieces.start[i], pieces.places[i] + 1)[1][1:].any()
        self._pieces = pieces.select(kept)
        if not len(self._pieces):
            raise MkdDataError(
                f"--data-path {name}: none of its {len(store.lengths)} samples can be used: {pieces.dropped} are "
                f"longer than --seq-length {layout.row_length}, {pieces.short} have less than two tokens"
            )
        if layout.is_packed:
            self.plan = pack(self._pieces.places, layout.row_length, layout.multiple, options.seed)
        else:
            self.plan = one_per_row(self._pieces.places, layout.row_length)
        self.per_epoch = len(self.plan)
        self._epochs = Epochs(self.per_epoch, options.seed)
        self._store, self._layout = store, layout
        self._idle = int((~kept).sum())

    def row(self, index: int) -> dict[str, Tensor]:
        """See `RowStream`."""
        texts = [self._store.read(*self._bounds_of(piece)) for piece in self.plan.row(self._epochs.row_at(index))]
        return {name: torch.as_tensor(value) for name, value in self._layout.row(texts).items()}

    def _bounds_of(self, piece: int) -> tuple[int, int, int]:
        pieces = self._pieces
        return int(pieces.sample[piece]), int(pieces.start[piece]), int(pieces.places[piece]) + 1

    def __str__(self) -> str:
        counts = {
            "split because they are longer than a row": self._pieces.split,
            "dropped because they are longer than a row": self._pieces.dropped,
            "left out because they have less than two tokens": self._pieces.short,
            "parts of long samples left out because nothing in them is a target": self._idle,
        }
        text = f"{len(self._store.lengths)} samples in {self.per_epoch} rows, {self.plan.efficiency:.1%} of them tokens"
        return with_counts(text, counts)


class ClassicRows:
    """Megatron's rows of concatenated documents, with the names of ours."""

    def __init__(self, samples: Any, per_epoch: int) -> None:
        """Take a GPTDataset."""
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


class Shares:
    """Which stream each row of a blend comes from: greedily the one that lags most behind its weight."""

    def __init__(self, weights: Sequence[float]) -> None:
        """Raise MkdDataError for a weight that is 0 or too small to be kept."""
        total = sum(weights)
        self._stream, self._place = np.zeros(PERIOD, dtype=np.int16), np.zeros(PERIOD, dtype=np.int64)
        normed = [weight / total for weight in weights] if total > 0 else []
        if not all(share * PERIOD >= 1 for share in normed) or not normed:
            raise MkdDataError(
                f"weights {' '.join(f'{w:g}' for w in weights)} in --data-path: each must be positive and at least "
                f"1/{PERIOD} of their sum"
            )
        helpers.build_blending_indices(self._stream, self._place, normed, len(normed), PERIOD, False)
        self._counts = np.bincount(self._stream, minlength=len(normed))

    def locate(self, index: int) -> tuple[int, int]:
        """Stream of a row, and its place among the rows of that stream."""
        period, offset = divmod(index, PERIOD)
        stream = int(self._stream[offset])
        return stream, period * int(self._counts[stream]) + int(self._place[offset])

    def needed(self, rows: int) -> list[int]:
        """Of the first `rows` of the blend, how many come from each stream."""
        periods, rest = divmod(rows, PERIOD)
        return (periods * self._counts + np.bincount(self._stream[:rest], minlength=len(self._counts))).tolist()


class BlendOfRows(Dataset):
    """A set of `size` rows from one or more streams, for megatron's data loader."""

    def __init__(self, streams: Sequence[RowStream], shares: Shares, size: int, split: Split) -> None:
        """Take streams, who is whose turn, and which set it is (`split` tells megatron the batch size)."""
        self._streams, self._shares, self._size = streams, shares, size
        self.split = split

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self._size:
            raise IndexError(f"row {index} of {self._size}")
        stream, place = self._shares.locate(int(index))
        return self._streams[stream].row(place)

    def one_epoch(self) -> "BlendOfRows | None":
        """As many rows as it takes for every sample to be in one; None where later epochs have other rows, as
        Megatron's concatenation has.
        """
        if any(isinstance(stream, ClassicRows) for stream in self._streams):
            return None
        wanted = [stream.per_epoch for stream in self._streams]
        size = sum(wanted)
        while any(n < least for n, least in zip(self._shares.needed(size), wanted, strict=True)):
            size += -(-size // 64)
        return BlendOfRows(self._streams, self._shares, size, self.split)
