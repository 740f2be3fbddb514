"""Planning of rows for samples with k views: one plan for the student and all teachers with other tokenizers.

As `mkd.data.packing.row_plan`, with one length per view instead of one. A row of the student and the row of a teacher
hold the same pieces of text in the same order, each view padded on its own. So a piece has to fit the rows of every
view, and a long sample is cut only where a text chunk (aligned piece of text) begins in all views.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mkd.data.packing.row_plan import WINDOW, RowPlan, pack_windows
from mkd.data.sources.aligned import AlignedSample, TeacherText


@dataclass(frozen=True)
class AlignedPieces:
    """Parts of samples, each of which fits a row in every view. View 0 is the student's."""

    sample: np.ndarray
    """[n] int64: number of the sample."""
    start: np.ndarray
    """[n, views] int64: first token of the piece in its sample; no position of the piece predicts it."""
    positions: np.ndarray
    """[n, views] int64 >= 1: tokens that the piece reads; the label of the last one is the token after it."""
    split: int = 0
    """Samples in more than one piece."""
    dropped: int = 0
    """Samples without a piece because they are longer than a row."""
    short: int = 0
    """Samples without a piece because they have fewer than two tokens in a view."""
    unfit: int = 0
    """Runs of tokens left out because they are longer than a row and no chunk begins in them."""

    def __len__(self) -> int:
        return len(self.sample)

    def of(self, piece: int, sample: AlignedSample) -> AlignedSample:
        """Tokens of a piece, with the label of its last position."""
        first, *rest = (
            slice(start, start + count + 1)
            for start, count in zip(self.start[piece].tolist(), self.positions[piece].tolist(), strict=True)
        )
        views = tuple(
            TeacherText(view.ids[part], view.targets[part], view.chunk[part], view.student_chunk[first])
            for view, part in zip(sample.views, rest, strict=True)
        )
        return AlignedSample(sample.ids[first], sample.targets[first], views)


def cut_aligned(
    lengths: np.ndarray, row_lengths: Sequence[int], read: Callable[[int], AlignedSample], *, drop_long: bool
) -> AlignedPieces:
    """Cut samples into pieces.

    In each view every token but a sample's first is predicted once, unless a run is left out.

    Args:
        lengths: [n, views] integers, tokens of each sample.
        row_lengths: positions of a row in each view.
        read: returns a sample by its number; called for long ones only.
        drop_long: leave out samples that do not fit, instead of cutting them.
    """
    positions = np.asarray(lengths, dtype=np.int64) - 1
    is_short = (positions < 1).any(axis=1)
    is_long = (positions > np.asarray(row_lengths)).any(axis=1) & ~is_short
    whole = np.flatnonzero(~is_short & ~is_long)
    sample = [whole]
    start, size = [np.zeros((len(whole), positions.shape[1]), dtype=np.int64)], [positions[whole]]
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
    return AlignedPieces(
        sample=sample[order],
        start=start[order],
        positions=size[order],
        split=split,
        dropped=int(is_long.sum()) if drop_long else dropped,
        short=int(is_short.sum()),
        unfit=unfit,
    )


def _borders(sample: AlignedSample) -> np.ndarray:
    """[k, views] increasing: the last token before each chunk that begins in all views, between the first token of the
    text and the last one."""
    firsts = [
        dict(zip(_first_tokens(view.student_chunk), _first_tokens(view.chunk), strict=True)) for view in sample.views
    ]
    common = sorted(set.intersection(*map(set, firsts)))
    borders = np.array([[token, *(first[token] for first in firsts)] for token in common], dtype=np.int64)
    borders = borders.reshape(-1, 1 + len(firsts)) - 1
    borders = borders[(borders > 0).all(axis=1)]
    last = np.array(sample.lengths) - 1
    borders = borders[(borders < last).all(axis=1)]
    return np.concatenate([np.zeros_like(last)[None], borders, last[None]])


def _first_tokens(chunk: np.ndarray) -> list[int]:
    """First token of each chunk, by chunk number; the tokens of a chunk are consecutive."""
    numbers, first = np.unique(chunk, return_index=True)
    return first[numbers >= 0].tolist()


def _cut_one(borders: np.ndarray, row_lengths: Sequence[int]) -> tuple[np.ndarray, int]:
    """Pieces of one sample, each as long as fits.

    Args:
        borders: [k, views], see `_borders`.
        row_lengths: positions of a row in each view.

    Returns:
        [pieces, 2, views]: first token and end of each piece's positions; and the number of runs that fit no row.
    """
    pieces, begin, unfit = [], 0, 0
    while begin < len(borders) - 1:
        fits = (borders - borders[begin] <= np.asarray(row_lengths)).all(axis=1)
        end = int(np.flatnonzero(fits)[-1])
        if end == begin:
            unfit, end = unfit + 1, begin + 1
        else:
            pieces.append(borders[[begin, end]])
        begin = end
    return np.array(pieces, dtype=np.int64).reshape(-1, 2, borders.shape[1]), unfit


def pack_aligned(positions: np.ndarray, row_lengths: Sequence[int], multiple: int, seed: int) -> RowPlan:
    """Like `mkd.data.packing.row_plan.pack`, for pieces that need room in every view.

    Args:
        positions: [n, views] integers, 1 to the view's row length, of each piece.
        row_lengths: positions of a row in each view, multiples of `multiple`.
        multiple: each piece takes its positions rounded up to it.
        seed: seed of the order.
    """
    units = -(-np.asarray(positions, dtype=np.int64) // multiple)
    capacity = np.asarray(row_lengths, dtype=np.int64) // multiple
    piece, row_start = pack_windows(units, lambda u: best_fit_all_views(u, capacity), seed, WINDOW)
    return RowPlan(row_lengths[0], piece, row_start, int(np.sum(positions[:, 0])))


def best_fit_all_views(sizes: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """Vector bin packing: largest item first, each into the bin where it leaves the least room in its fullest view.

    Args:
        sizes: [n, views] integers, 1 to `capacity`.
        capacity: [views] size of a bin.

    Returns:
        [n] int64 bin of each item; bins are counted from 0. A function of the arguments alone.
    """
    bin_of = np.empty(len(sizes), dtype=np.int64)
    # Room of every bin. Exact integers, so that shares of different views compare alike on all machines.
    scale = np.prod(capacity) // capacity
    room = np.empty((len(sizes), len(capacity)), dtype=np.int64)
    open_bins = np.empty(0, dtype=np.int64)  # bins with room for the smallest item, by number
    bins, least = 0, sizes.min(axis=0) if len(sizes) else capacity
    for item in np.argsort(-(sizes * scale).max(axis=1), kind="stable").tolist():
        left = room[open_bins] - sizes[item]
        fitting = np.flatnonzero((left >= 0).all(axis=1))
        if len(fitting):
            chosen = open_bins[fitting[np.argmin((left[fitting] * scale).min(axis=1))]]
        else:
            chosen, bins = bins, bins + 1
            room[chosen] = capacity
            open_bins = np.append(open_bins, chosen)
        bin_of[item] = chosen
        room[chosen] -= sizes[item]
        if (room[chosen] < least).any():
            open_bins = open_bins[open_bins != chosen]
    return bin_of
