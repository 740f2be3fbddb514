"""Samples of any length into rows of one length: which go where, and how a row looks. Pure functions.

A sample of n tokens has n - 1 places in a row: token i with label i + 1. So labels are shifted inside the sample before
it is cut, and its last token is a target only.

Rows depend on the samples' lengths and the seed, never on the parallel layout, so that every layout trains on the same
rows in the same order. They are composed once; every epoch reads all of them, each in an order of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

WINDOW = 1 << 14
"""Samples that are packed together. Enough that what is left over at its end is nothing; a larger one only takes
longer."""


@dataclass(frozen=True)
class Pieces:
    """Parts of samples, each of which fits a row."""

    sample: np.ndarray
    """[n] int64: whose part it is."""
    start: np.ndarray
    """[n] int64: its first token."""
    places: np.ndarray
    """[n] int64 >= 1: its tokens; the label of the last one is the token after it."""
    split: int = 0
    """Samples in more than one piece."""
    dropped: int = 0
    """Samples without a piece because they are longer than a row."""
    short: int = 0
    """Samples without a piece because they have less than two tokens."""

    def __len__(self) -> int:
        return len(self.sample)

    def select(self, kept: np.ndarray) -> "Pieces":
        """Those where `kept` ([n] bool) is true; the counts stay."""
        return Pieces(self.sample[kept], self.start[kept], self.places[kept], self.split, self.dropped, self.short)


@dataclass(frozen=True)
class RowPlan:
    """Which pieces are in which row."""

    row_length: int
    piece: np.ndarray
    """[n] int64: every piece once, row by row."""
    row_start: np.ndarray
    """[rows + 1] int64: row r has piece[row_start[r] : row_start[r + 1]]."""
    places: int
    """Places with a token, in all rows together."""

    def __len__(self) -> int:
        return len(self.row_start) - 1

    @property
    def efficiency(self) -> float:
        """Share of all places that hold a token, 0 to 1."""
        return self.places / (len(self) * self.row_length)

    def row(self, index: int) -> np.ndarray:
        """[k] int64, the pieces of a row."""
        return self.piece[self.row_start[index] : self.row_start[index + 1]]


def cut(lengths: np.ndarray, row_length: int, *, drop_long: bool) -> Pieces:
    """Pieces of samples that have `lengths` ([n] integers) tokens.

    A sample with more than `row_length` places is cut into pieces that fill a row each, and a rest, or dropped. Every
    token but a sample's first is a label in exactly one piece. A later piece does not see those before it.
    """
    places = np.maximum(np.asarray(lengths, dtype=np.int64) - 1, 0)
    count = -(-places // row_length)
    is_long = places > row_length
    if drop_long:
        count[is_long] = 0
    sample = np.repeat(np.arange(len(places)), count)
    start = (np.arange(len(sample)) - np.repeat(np.cumsum(count) - count, count)) * row_length
    return Pieces(
        sample=sample,
        start=start,
        places=np.minimum(places[sample] - start, row_length),
        split=0 if drop_long else int(is_long.sum()),
        dropped=int(is_long.sum()) if drop_long else 0,
        short=int((places == 0).sum()),
    )


def best_fit_decreasing(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Bin packing: largest item first, each into the bin where it leaves the least room (Johnson et al. 1974).

    Args:
        sizes: [n] integers, 1 to `capacity`.
        capacity: of a bin.

    Returns:
        [n] int64: the bin of each item; bins are counted from 0. A function of `sizes` alone.
    """
    bin_of = np.empty(len(sizes), dtype=np.int64)
    bins_with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r: bins_with_room[r] is not empty
    bins = 0
    largest_first = np.argsort(-sizes, kind="stable")
    for item, size in zip(largest_first.tolist(), sizes[largest_first].tolist(), strict=True):
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            place = bins_with_room[room].pop()
            if not bins_with_room[room]:
                rooms ^= 1 << room
        else:
            room, place, bins = capacity, bins, bins + 1
        bin_of[item] = place
        if room > size:
            bins_with_room[room - size].append(place)
            rooms |= 1 << (room - size)
    return bin_of


def pack(places: np.ndarray, row_length: int, multiple: int, seed: int, window: int = WINDOW) -> RowPlan:
    """Rows of several pieces: best fit decreasing over windows of a random order.

    Args:
        places: [n] integers, 1 to `row_length`, of each piece.
        row_length: places of a row, a multiple of `multiple`.
        multiple: each piece takes its places rounded up to it.
        seed: of the order.
        window: pieces that are packed together.
    """
    units = -(-np.asarray(places, dtype=np.int64) // multiple)
    order = shuffled(len(units), seed, -1)
    row_of = np.empty(len(units), dtype=np.int64)
    rows = 0
    for begin in range(0, len(order), window):
        row_of[begin : begin + window] = rows + best_fit_decreasing(
            units[order[begin : begin + window]], row_length // multiple
        )
        rows = int(row_of[begin : begin + window].max()) + 1
    row_start = np.concatenate(([0], np.cumsum(np.bincount(row_of, minlength=rows))))
    return RowPlan(row_length, order[np.argsort(row_of, kind="stable")], row_start, int(np.sum(places)))


def one_per_row(places: np.ndarray, row_length: int) -> RowPlan:
    """A row for each piece ([n] integers, its places); the rest of the row is padding."""
    return RowPlan(row_length, np.arange(len(places)), np.arange(len(places) + 1), int(np.sum(places)))


def shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
    """[count] int64: 0 to count - 1 in the random order of an epoch, counted from 0.

    RandomState, because numpy promises that its numbers stay the same in all versions.
    """
    return np.random.RandomState([seed, epoch + 1]).permutation(count)


class Epochs:
    """The rows of a plan, in another order in each epoch, which depends on seed and epoch alone."""

    def __init__(self, rows: int, seed: int) -> None:
        """For a plan of so many rows."""
        self._rows, self._seed = rows, seed
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def row_at(self, index: int) -> int:
        """Number in the plan of the row that comes at place `index` of an endless stream."""
        epoch, place = divmod(index, self._rows)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, shuffled(self._rows, self._seed, epoch)
        return int(self._order[place])


def with_counts(text: str, counts: Mapping[str, int]) -> str:
    """The text, and what there is any of behind it: what it is -> how many."""
    return text + "".join(f"; {count} {what}" for what, count in counts.items() if count)


@dataclass(frozen=True)
class RowLayout:
    """How a row looks."""

    row_length: int
    multiple: int
    """Places of each piece in a packed row are padded to it: it keeps all layouts on the same rows."""
    is_packed: bool
    """Whether segment bounds go along. Else a row has one piece."""
    kd_everywhere: bool
    """Whether the divergence is taken on every token of a text, and not on the supervised ones alone."""

    def starts(self, places: Sequence[int]) -> list[int]:
        """Where pieces with so many places begin in a row, and where the next one would."""
        units = -(-np.asarray(places, dtype=np.int64) // self.multiple)
        return [0, *(self.multiple * np.cumsum(units)).tolist()]

    def row(self, texts: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, np.ndarray]:
        """Lay pieces one after the other.

        Each is padded behind its text. What is then left of the row is a segment of its own, of padding alone. Padding
        has id 0 and is masked by its place, never by an id: a text may end with the tokenizer's padding token.

        Args:
            texts: of each piece the ids ([places + 1] integers) and which of them are supervised targets
                ([places + 1] bool).

        Returns:
            tokens, labels [s] int64, ce_mask, kd_mask [s] fp32, position_ids [s] int64; and when packed
            cu_seqlens_padded, cu_seqlens [s / multiple + 1] int32 (where segments begin in the row; sums of their
            lengths without padding; the last bound is repeated to the full length, so that rows collate) and
            max_seqlen (int64, places of the longest segment); otherwise length (int64, places of the text).
        """
        size = self.row_length
        row = {
            "tokens": np.zeros(size, dtype=np.int64),
            "labels": np.zeros(size, dtype=np.int64),
            "ce_mask": np.zeros(size, dtype=np.float32),
            "kd_mask": np.zeros(size, dtype=np.float32),
            "position_ids": np.arange(size, dtype=np.int64),
        }
        counts = [len(ids) - 1 for ids, _ in texts]
        padded, real = [*self.starts(counts)], [0, *np.cumsum(counts).tolist()]
        for (ids, supervised), start, places in zip(texts, padded, counts, strict=False):
            text = slice(start, start + places)
            row["tokens"][text], row["labels"][text] = ids[:-1], ids[1:]
            row["ce_mask"][text] = supervised[1:]
            row["kd_mask"][text] = 1.0 if self.kd_everywhere else supervised[1:]
        if not self.is_packed:
            row["length"] = np.int64(real[-1])
            return row
        if padded[-1] < size:
            padded.append(size)
            real.append(real[-1])
        row["position_ids"] -= np.repeat(padded[:-1], np.diff(padded))
        bounds = size // self.multiple + 1
        row["cu_seqlens_padded"] = np.array(padded + [size] * (bounds - len(padded)), dtype=np.int32)
        row["cu_seqlens"] = np.array(real + [real[-1]] * (bounds - len(real)), dtype=np.int32)
        row["max_seqlen"] = np.int64(np.max(np.diff(row["cu_seqlens_padded"])))
        return row
