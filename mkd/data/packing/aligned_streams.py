"""Endless streams of training rows with a teacher's rows beside them, in its own tokens."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mkd.data.packing.aligned_layout import PairedLayout, cut_pairs, pack_pairs
from mkd.data.packing.layout import Epochs, one_per_row, with_counts
from mkd.data.sources.aligned import PairedStore
from mkd.errors import MkdDataError


@dataclass(frozen=True)
class PairedOptions:
    """How samples become rows."""

    layout: PairedLayout
    drop_long: bool
    """Whether samples longer than a row are left out, and not cut."""
    seed: int


class PairedRows:
    """Rows made of aligned samples, one a row or packed: see `mkd.data.packing.streams.RowStream`."""

    def __init__(self, store: PairedStore, options: PairedOptions, name: str) -> None:
        """Plan all rows.

        Args:
            store: where the samples are.
            options: how they become rows.
            name: of the data, for messages.

        Raises:
            MkdDataError: nothing is left to train on.
        """
        self._store, self._layout = store, options.layout
        layout, lengths = options.layout.student, options.layout.row_lengths
        pieces = cut_pairs(store.lengths, lengths, store.read, drop_long=options.drop_long)
        kept = np.ones(len(pieces), dtype=bool)
        if not layout.kd_everywhere:
            # Parts of a long sample may have nothing to learn; whole samples have.
            parts = np.bincount(pieces.sample, minlength=len(store.lengths))[pieces.sample] > 1
            for i in np.flatnonzero(parts):
                kept[i] = pieces.of(i, store.read(int(pieces.sample[i]))).targets[1:].any()
        self._pieces, self._piece = pieces, np.flatnonzero(kept)
        self._idle = int((~kept).sum())
        if not len(self._piece):
            raise MkdDataError(self._why_nothing(name))
        places = pieces.places[self._piece]
        if layout.is_packed:
            self.plan = pack_pairs(places, lengths, layout.multiple, options.seed)
        else:
            self.plan = one_per_row(places[:, 0], lengths[0])
        self.per_epoch = len(self.plan)
        self._epochs = Epochs(self.per_epoch, options.seed)
        self._filled = places.sum(axis=0) / (self.per_epoch * np.array(lengths))

    def _why_nothing(self, name: str) -> str:
        """What is wrong with all samples, and which side's rows are too short for how many of them."""
        lengths, rows = self._store.lengths, self._layout.row_lengths
        flags = ["--seq-length", *["--kd-teacher-seq-length"] * (len(rows) - 1)]
        whose = ["the student's", *["a teacher's"] * (len(rows) - 1)]
        too_long = ", ".join(
            f"{count} are longer than {flag} {row} in {side} tokens"
            for count, flag, row, side in zip((lengths - 1 > rows).sum(axis=0), flags, rows, whose, strict=True)
        )
        return (
            f"--data-path {name}: none of its {len(lengths)} samples can be used: {too_long}, {self._pieces.short} "
            f"have less than two tokens on one side, and {self._idle} parts of long samples have nothing to learn"
        )

    def row(self, index: int) -> dict[str, Any]:
        """Tensors of one row: see `PairedLayout.row`."""
        pieces = self._piece[self.plan.row(self._epochs.row_at(index))]
        texts = [self._pieces.of(i, self._store.read(int(self._pieces.sample[i]))) for i in pieces]
        return _tensors(self._layout.row(texts))

    def __str__(self) -> str:
        counts = {
            "split because they are longer than a row": self._pieces.split,
            "dropped because they are longer than a row": self._pieces.dropped,
            "left out because they have less than two tokens on one side": self._pieces.short,
            "runs of tokens left out because no chunk begins in a whole row of them": self._pieces.unfit,
            "parts of long samples left out because nothing in them is a target": self._idle,
        }
        filled = ", ".join(f"{share:.1%}" for share in self._filled)
        text = f"{len(self._store.lengths)} samples in {self.per_epoch} rows, {filled} of them tokens"
        return with_counts(text, counts)


def _tensors(row: dict[str, Any]) -> dict[str, Tensor | tuple]:
    return {
        name: tuple(map(_tensors, value)) if isinstance(value, tuple) else torch.as_tensor(value)
        for name, value in row.items()
    }
