"""Aligned samples into rows: one plan for all sides. Pure functions.

A row of the student and the row of a teacher with another tokenizer hold the same pieces of text in the same order,
each side padded on its own. So a piece has to fit the rows of every side, and a long sample is cut only where a chunk
begins on all sides.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mkd.data.batch import OTHERS
from mkd.data.packing.layout import WINDOW, RowLayout, RowPlan, shuffled
from mkd.data.sources.aligned import OtherTokens, PairedSample


@dataclass(frozen=True)
class PairedPieces:
    """Parts of samples, each of which fits a row on every side. The student's side is the first."""

    sample: np.ndarray
    """[n] int64: whose part it is."""
    start: np.ndarray
    """[n, sides] int64: its first token, which no token of the piece predicts."""
    places: np.ndarray
    """[n, sides] int64 >= 1: its tokens; the label of the last one is the token after it."""
    split: int = 0
    """Samples in more than one piece."""
    dropped: int = 0
    """Samples without a piece because they are longer than a row."""
    short: int = 0
    """Samples without a piece because they have less than two tokens on a side."""
    unfit: int = 0
    """Runs of tokens left out because they are longer than a row and no chunk begins in them."""

    def __len__(self) -> int:
        return len(self.sample)

    def of(self, piece: int, sample: PairedSample) -> PairedSample:
        """The tokens of a piece, with the label of its last place."""
        first, *rest = (
            slice(start, start + places + 1)
            for start, places in zip(self.start[piece].tolist(), self.places[piece].tolist(), strict=True)
        )
        others = tuple(
            OtherTokens(other.ids[part], other.targets[part], other.chunk[part], other.student_chunk[first])
            for other, part in zip(sample.others, rest, strict=True)
        )
        return PairedSample(sample.ids[first], sample.targets[first], others)


def cut_pairs(
    lengths: np.ndarray, row_lengths: Sequence[int], read: Callable[[int], PairedSample], *, drop_long: bool
) -> PairedPieces:
    """Pieces of samples.

    Every token but a sample's first is predicted once, on each side, if no run is left out.

    Args:
        lengths: [n, sides] integers, tokens of each sample.
        row_lengths: places of a row on each side.
        read: a sample by its number; asked for long ones only.
        drop_long: leave samples out that do not fit, instead of cutting them.
    """
    places = np.asarray(lengths, dtype=np.int64) - 1
    is_short = (places < 1).any(axis=1)
    is_long = (places > np.asarray(row_lengths)).any(axis=1) & ~is_short
    whole = np.flatnonzero(~is_short & ~is_long)
    sample = [whole]
    start, size = [np.zeros((len(whole), places.shape[1]), dtype=np.int64)], [places[whole]]
    split = dropped = unfit = 0
    for number in np.flatnonzero(is_long) if not drop_long else ():
        ends, left_out = _cut_one(_borders(read(int(number))), row_lengths)
        unfit += left_out
        split += len(ends) > 1
        dropped += len(ends) == 0
        sample.append(np.full(len(ends), number))
        start.append(ends[:, 0])
        size.append(ends[:, 1] - ends[:, 0])
    sample, start, size = (np.concatenate(parts) for parts in (sample, start, size))
    order = np.argsort(sample, kind="stable")
    return PairedPieces(
        sample=sample[order],
        start=start[order],
        places=size[order],
        split=split,
        dropped=int(is_long.sum()) if drop_long else dropped,
        short=int(is_short.sum()),
        unfit=unfit,
    )


def _borders(sample: PairedSample) -> np.ndarray:
    """[k, sides] increasing: the last token before each place where a chunk begins on all sides, the first token of the
    text, and the last one."""
    firsts = [
        dict(zip(_first_tokens(other.student_chunk), _first_tokens(other.chunk), strict=True))
        for other in sample.others
    ]
    common = sorted(set.intersection(*map(set, firsts)))
    borders = np.array([[at, *(first[at] for first in firsts)] for at in common], dtype=np.int64)
    borders = borders.reshape(-1, 1 + len(firsts)) - 1
    borders = borders[(borders > 0).all(axis=1)]
    last = np.array(sample.lengths) - 1
    borders = borders[(borders < last).all(axis=1)]
    return np.concatenate([np.zeros_like(last)[None], borders, last[None]])


def _first_tokens(chunk: np.ndarray) -> list[int]:
    """Of each chunk, in the order of their numbers; a chunk's tokens follow each other."""
    numbers, first = np.unique(chunk, return_index=True)
    return first[numbers >= 0].tolist()


def _cut_one(borders: np.ndarray, row_lengths: Sequence[int]) -> tuple[np.ndarray, int]:
    """Pieces of one sample, each as long as fits.

    Args:
        borders: [k, sides] as of `_borders`.
        row_lengths: places of a row on each side.

    Returns:
        [pieces, 2, sides]: first token and end of each piece's places; and how many runs fit no row.
    """
    pieces, at, unfit = [], 0, 0
    while at < len(borders) - 1:
        fits = (borders - borders[at] <= np.asarray(row_lengths)).all(axis=1)
        end = int(np.flatnonzero(fits)[-1])
        if end == at:
            unfit, end = unfit + 1, at + 1
        else:
            pieces.append(borders[[at, end]])
        at = end
    return np.array(pieces, dtype=np.int64).reshape(-1, 2, borders.shape[1]), unfit


def pack_pairs(
    places: np.ndarray, row_lengths: Sequence[int], multiple: int, seed: int, window: int = WINDOW
) -> RowPlan:
    """As `mkd.data.packing.layout.pack`, of pieces that need room on every side.

    Args:
        places: [n, sides] integers, 1 to the side's row length, of each piece.
        row_lengths: places of a row on each side, multiples of `multiple`.
        multiple: each piece takes its places rounded up to it.
        seed: of the order.
        window: pieces that are packed together.
    """
    units = -(-np.asarray(places, dtype=np.int64) // multiple)
    capacity = np.asarray(row_lengths, dtype=np.int64) // multiple
    order = shuffled(len(units), seed, -1)
    row_of = np.empty(len(units), dtype=np.int64)
    rows = 0
    for begin in range(0, len(order), window):
        row_of[begin : begin + window] = rows + best_fit_on_all_sides(units[order[begin : begin + window]], capacity)
        rows = int(row_of[begin : begin + window].max()) + 1
    row_start = np.concatenate(([0], np.cumsum(np.bincount(row_of, minlength=rows))))
    return RowPlan(row_lengths[0], order[np.argsort(row_of, kind="stable")], row_start, int(np.sum(places[:, 0])))


def best_fit_on_all_sides(sizes: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """Vector bin packing: largest item first, each into the bin where it leaves the least room on its fullest side.

    Args:
        sizes: [n, sides] integers, 1 to `capacity`.
        capacity: [sides] of a bin.

    Returns:
        [n] int64: the bin of each item; bins are counted from 0. A function of the arguments alone.
    """
    bin_of = np.empty(len(sizes), dtype=np.int64)
    # Room of every bin. Exact integers, so that shares of different sides compare alike on all machines.
    scale = np.prod(capacity) // capacity
    room = np.empty((len(sizes), len(capacity)), dtype=np.int64)
    open_bins = np.empty(0, dtype=np.int64)  # those with room for anything, in the order of their numbers
    bins, least = 0, sizes.min(axis=0) if len(sizes) else capacity
    for item in np.argsort(-(sizes * scale).max(axis=1), kind="stable").tolist():
        left = room[open_bins] - sizes[item]
        fitting = np.flatnonzero((left >= 0).all(axis=1))
        if len(fitting):
            place = open_bins[fitting[np.argmin((left[fitting] * scale).min(axis=1))]]
        else:
            place, bins = bins, bins + 1
            room[place] = capacity
            open_bins = np.append(open_bins, place)
        bin_of[item] = place
        room[place] -= sizes[item]
        if (room[place] < least).any():
            open_bins = open_bins[open_bins != place]
    return bin_of


@dataclass(frozen=True)
class PairedLayout:
    """How rows look on all sides."""

    student: RowLayout
    others: tuple[RowLayout, ...]
    """Of each teacher with another tokenizer."""

    @property
    def row_lengths(self) -> list[int]:
        """Places of a row, on each side."""
        return [self.student.row_length, *(other.row_length for other in self.others)]

    def row(self, pieces: Sequence[PairedSample]) -> dict[str, object]:
        """The student's row as `RowLayout.row` has it, and under OTHERS a tuple with one for each teacher.

        A teacher's row has also: chunk [t] and student_chunk [s] int64, for each place of its own row and of the
        student's the chunk of its label, counted from 0 along the row, -1 for none; chunks (int64), their number.
        """
        row: dict[str, object] = self.student.row([(piece.ids, piece.targets) for piece in pieces])
        others = []
        for number, layout in enumerate(self.others):
            texts = [piece.others[number] for piece in pieces]
            other = layout.row([(text.ids, text.targets) for text in texts])
            chunks = [
                counted_chunks(piece.targets, text, layout.kd_everywhere)
                for piece, text in zip(pieces, texts, strict=True)
            ]
            other["student_chunk"] = _in_row(self.student, [chunk for chunk, _ in chunks])
            other["chunk"] = _in_row(layout, [chunk for _, chunk in chunks])
            other["chunks"] = np.int64(other["chunk"].max(initial=-1) + 1)
            others.append(other)
        return {**row, OTHERS: tuple(others)}


def counted_chunks(targets: np.ndarray, other: OtherTokens, everywhere: bool) -> tuple[np.ndarray, np.ndarray]:
    """The chunks of a piece on which the divergence is taken, for each place of both sides that of its label.

    Those whose tokens are all predicted inside the piece, on both sides; and, unless `everywhere`, are all targets.

    Args:
        targets: [places + 1] bool, the student's.
        other: the teacher's tokens and the chunks of both sides.
        everywhere: whether prompts count too.

    Returns:
        [places] int64 of the student and of the teacher, counted from 0; -1 for none.
    """
    sides = ((other.student_chunk, targets), (other.chunk, other.targets))
    low = min(int(chunk[chunk >= 0].min(initial=np.iinfo(np.int32).max)) for chunk, _ in sides)
    sides = tuple((np.where(chunk >= 0, chunk - low, -1).astype(np.int64), targets) for chunk, targets in sides)
    count = 1 + max(int(chunk.max(initial=-1)) for chunk, _ in sides)
    kept = np.ones(count + 1, dtype=bool)
    kept[-1] = False  # where index -1 finds it
    for chunk, wanted in sides:
        labels = chunk[1:]
        kept[:-1] &= np.bincount(labels[labels >= 0], minlength=count) > 0
        kept[chunk[0]] = False  # its first token is nobody's label
        if not everywhere:
            kept[labels[~wanted[1:]]] = False
    number = np.where(kept, np.cumsum(kept) - 1, -1)
    return number[sides[0][0][1:]], number[sides[1][0][1:]]


def _in_row(layout: RowLayout, chunks: Sequence[np.ndarray]) -> np.ndarray:
    """[row length] int64: the chunks of pieces at their places in a row, numbered on from piece to piece."""
    row = np.full(layout.row_length, -1, dtype=np.int64)
    before = 0
    for start, chunk in zip(layout.starts([len(chunk) for chunk in chunks]), chunks, strict=False):
        row[start : start + len(chunk)] = np.where(chunk >= 0, chunk + before, -1)
        before += int(chunk.max(initial=-1)) + 1
    return row
