"""Planning of rows: cut samples into pieces, pack pieces into rows. Pure functions of lengths and seed.

A sample of n tokens takes n - 1 positions of a row: position i reads token i and predicts token i + 1. Labels are
therefore shifted inside the sample before it is cut, and its last token is only a target.

The plan depends on the lengths of the samples and on the seed, never on the parallel layout, so every layout trains on
the same rows in the same order. Rows are composed once; every epoch reads all of them, in an order of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

WINDOW = 1 << 14
"""Samples that are packed together. The last rows of a window are not full: with 16384 samples that is negligible, and
larger windows only take longer."""


@dataclass(frozen=True)
class Pieces:
    """Parts of samples, each of which fits a row."""

    sample: np.ndarray
    """[n] int64: number of the sample."""
    start: np.ndarray
    """[n] int64: first token of the piece in its sample."""
    positions: np.ndarray
    """[n] int64 >= 1: tokens that the piece reads; the label of the last one is the token after it."""
    split: int = 0
    """Samples in more than one piece."""
    dropped: int = 0
    """Samples without a piece because they are longer than a row."""
    short: int = 0
    """Samples without a piece because they have fewer than two tokens."""

    def __len__(self) -> int:
        return len(self.sample)

    def select(self, kept: np.ndarray) -> "Pieces":
        """Pieces where `kept` ([n] bool) is true; the counts of samples stay."""
        return Pieces(self.sample[kept], self.start[kept], self.positions[kept], self.split, self.dropped, self.short)


@dataclass(frozen=True)
class RowPlan:
    """Assignment of pieces to rows."""

    row_length: int
    piece: np.ndarray
    """[n] int64: every piece once, row by row."""
    row_start: np.ndarray
    """[rows + 1] int64: row r has piece[row_start[r] : row_start[r + 1]]."""
    positions: int
    """Positions with a token, in all rows together."""

    def __len__(self) -> int:
        return len(self.row_start) - 1

    @property
    def efficiency(self) -> float:
        """Share of all positions that hold a token, 0 to 1."""
        return self.positions / (len(self) * self.row_length)

    def row(self, index: int) -> np.ndarray:
        """[k] int64 pieces of a row."""
        return self.piece[self.row_start[index] : self.row_start[index + 1]]


def cut(lengths: np.ndarray, row_length: int, *, drop_long: bool) -> Pieces:
    """Cut samples of `lengths` ([n] integers) tokens into pieces.

    A sample with more than `row_length` positions is dropped, or cut into pieces that fill a row each and a rest.
    Every token but a sample's first is a label in exactly one piece. A later piece does not see those before it.
    """
    positions = np.maximum(np.asarray(lengths, dtype=np.int64) - 1, 0)
    count = -(-positions // row_length)
    is_long = positions > row_length
    if drop_long:
        count[is_long] = 0
    sample = np.repeat(np.arange(len(positions)), count)
    start = (np.arange(len(sample)) - np.repeat(np.cumsum(count) - count, count)) * row_length
    return Pieces(
        sample=sample,
        start=start,
        positions=np.minimum(positions[sample] - start, row_length),
        split=0 if drop_long else int(is_long.sum()),
        dropped=int(is_long.sum()) if drop_long else 0,
        short=int((positions == 0).sum()),
    )


def best_fit_decreasing(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Bin packing: largest item first, each into the bin where it leaves the least room (Johnson et al. 1974).

    Args:
        sizes: [n] integers, 1 to `capacity`.
        capacity: size of a bin.

    Returns:
        [n] int64 bin of each item; bins are counted from 0. A function of the arguments alone.
    """
    bin_of = np.empty(len(sizes), dtype=np.int64)
    bins_with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r is set if bins_with_room[r] is not empty
    bins = 0
    largest_first = np.argsort(-sizes, kind="stable")
    for item, size in zip(largest_first.tolist(), sizes[largest_first].tolist(), strict=True):
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            chosen = bins_with_room[room].pop()
            if not bins_with_room[room]:
                rooms ^= 1 << room
        else:
            room, chosen, bins = capacity, bins, bins + 1
        bin_of[item] = chosen
        if room > size:
            bins_with_room[room - size].append(chosen)
            rooms |= 1 << (room - size)
    return bin_of


def pack(positions: np.ndarray, row_length: int, multiple: int, seed: int, window: int = WINDOW) -> RowPlan:
    """Rows of several pieces: best fit decreasing over windows of a random order.

    Args:
        positions: [n] integers, 1 to `row_length`, of each piece.
        row_length: positions of a row, a multiple of `multiple`.
        multiple: each piece takes its positions rounded up to it.
        seed: seed of the order.
        window: pieces that are packed together.
    """
    units = -(-np.asarray(positions, dtype=np.int64) // multiple)
    piece, row_start = pack_windows(units, lambda u: best_fit_decreasing(u, row_length // multiple), seed, window)
    return RowPlan(row_length, piece, row_start, int(np.sum(positions)))


def pack_windows(
    units: np.ndarray, bins_of: Callable[[np.ndarray], np.ndarray], seed: int, window: int
) -> tuple[np.ndarray, np.ndarray]:
    """(`RowPlan.piece`, `RowPlan.row_start`) of pieces in a random order, packed one window at a time.

    Args:
        units: [n] or [n, views] sizes of the pieces.
        bins_of: sizes of a window -> bin of each piece, from 0.
        seed: seed of the order.
        window: pieces that are packed together.
    """
    order = shuffled(len(units), seed, -1)
    row_of = np.empty(len(units), dtype=np.int64)
    rows = 0
    for begin in range(0, len(order), window):
        row_of[begin : begin + window] = rows + bins_of(units[order[begin : begin + window]])
        rows = int(row_of[begin : begin + window].max()) + 1
    row_start = np.concatenate(([0], np.cumsum(np.bincount(row_of, minlength=rows))))
    return order[np.argsort(row_of, kind="stable")], row_start


def one_per_row(positions: np.ndarray, row_length: int) -> RowPlan:
    """One row for each piece ([n] integers, its positions); the rest of the row is padding."""
    count = len(positions)
    return RowPlan(row_length, np.arange(count), np.arange(count + 1), int(np.sum(positions)))


def shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
    """[count] int64: 0 to count - 1 in the random order of an epoch, counted from 0.

    RandomState, because numpy promises that its numbers stay the same in all versions.
    """
    return np.random.RandomState([seed, epoch + 1]).permutation(count)


class EpochOrder:
    """Order of the rows of a plan in an endless stream: a new permutation per epoch, from seed and epoch alone."""

    def __init__(self, rows: int, seed: int) -> None:
        """Args: rows of the plan, and the seed."""
        self._rows, self._seed = rows, seed
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def row_at(self, index: int) -> int:
        """Row of the plan at position `index` of the stream."""
        epoch, offset = divmod(index, self._rows)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, shuffled(self._rows, self._seed, epoch)
        return int(self._order[offset])
