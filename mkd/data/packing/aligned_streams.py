"""Endless streams of training rows in k views: `SampleRows` for samples with teachers' tokens beside the student's."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mkd.data.packing.aligned_layout import AlignedRowLayout
from mkd.data.packing.aligned_plan import cut_aligned, pack_aligned
from mkd.data.packing.row_plan import EpochOrder, one_per_row
from mkd.data.packing.streams import RowOptions, with_counts
from mkd.data.sources.aligned import AlignedStore
from mkd.errors import MkdDataError


class AlignedRows:
    """Rows made of aligned samples, packed or one per row: a `mkd.data.packing.streams.RowStream`."""

    def __init__(self, store: AlignedStore, options: RowOptions[AlignedRowLayout], name: str) -> None:
        """Plan all rows.

        Args:
            store: the samples.
            options: how they become rows.
            name: name of the data in --data-path, for messages.

        Raises:
            MkdDataError: no sample can be used.
        """
        self._store, self._layout = store, options.layout
        layout, lengths = options.layout.student, options.layout.row_lengths
        pieces = cut_aligned(store.lengths, options.layout.piece_lengths, store.read, drop_long=options.drop_long)
        kept = np.ones(len(pieces), dtype=bool)
        if not layout.kd_everywhere:
            # Pieces of a long sample may have no target; whole samples have one.
            parts = np.bincount(pieces.sample, minlength=len(store.lengths))[pieces.sample] > 1
            for i in np.flatnonzero(parts):
                kept[i] = pieces.of(i, store.read(int(pieces.sample[i]))).targets[1:].any()
        self._pieces, self._kept = pieces, np.flatnonzero(kept)
        self._without_target = int((~kept).sum())
        if not len(self._kept):
            raise MkdDataError(self._why_empty(name))
        positions = pieces.positions[self._kept]
        if layout.is_packed:
            self.plan = pack_aligned(positions, lengths, layout.multiple, options.seed)
        else:
            self.plan = one_per_row(positions[:, 0], lengths[0])
        self.per_epoch = len(self.plan)
        self._order = EpochOrder(self.per_epoch, options.seed)
        self._filled = positions.sum(axis=0) / (self.per_epoch * np.array(lengths))

    def _why_empty(self, name: str) -> str:
        """Message with the number of samples that are too long or too short, view by view."""
        lengths, rows = self._store.lengths, self._layout.piece_lengths
        flags = ["--seq-length", *["--kd-teacher-seq-length"] * (len(rows) - 1)]
        views = ["the student's", *["a teacher's"] * (len(rows) - 1)]
        too_long = ", ".join(
            f"{count} are longer than {flag} {row} in {view} tokens"
            for count, flag, row, view in zip((lengths - 1 > rows).sum(axis=0), flags, rows, views, strict=True)
        )
        return (
            f"--data-path {name}: none of its {len(lengths)} samples can be used: {too_long}, {self._pieces.short} "
            f"have fewer than two tokens in one of these, {self._without_target} parts of long samples have no target"
        )

    def row(self, index: int) -> dict[str, Any]:
        """Tensors of one row: see `AlignedRowLayout.row`."""
        pieces = self._kept[self.plan.row(self._order.row_at(index))]
        texts = [self._pieces.of(i, self._store.read(int(self._pieces.sample[i]))) for i in pieces]
        return to_tensors(self._layout.row(texts))

    def __str__(self) -> str:
        counts = {
            f"split because they are longer than {self._layout.limit}": self._pieces.split,
            f"dropped because they are longer than {self._layout.limit}": self._pieces.dropped,
            "left out because they have fewer than two tokens for one model": self._pieces.short,
            "runs of tokens left out because no chunk begins in a whole row of them": self._pieces.unfit,
            "parts of long samples left out because nothing in them is a target": self._without_target,
        }
        own, *teachers = (f"{share:.1%}" for share in self._filled)
        text = f"{len(self._store.lengths)} samples in {self.per_epoch} rows, {own} of them tokens"
        text += f" (of the teacher's rows: {', '.join(teachers)})"
        return with_counts(text, counts)


def to_tensors(row: dict[str, Any]) -> dict[str, Tensor | tuple]:
    """A row of numpy arrays as tensors, teachers' rows included."""
    return {
        name: tuple(map(to_tensors, value)) if isinstance(value, tuple) else torch.as_tensor(value)
        for name, value in row.items()
    }
