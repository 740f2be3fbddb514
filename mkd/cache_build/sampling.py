"""Numbers that decide which ids are drawn from a teacher, and the drawn ids as they are stored."""

import numpy as np
import torch
from torch import Tensor

_BITS_OF_DOUBLE = 53


def uniforms(key: bytes, length: int, draws: int) -> Tensor:
    """[length, draws] float64 in [0, 1), ascending in each row: number i is drawn from the i-th of `draws` equal parts.

    A function of the arguments alone, so that the same text has the same draws in every layout, order and run. Each id
    is then drawn `draws` * p times on average, as by independent draws, with less variance.

    Args:
        key: of a segment, 16 bytes.
        length: its tokens.
        draws: of each token.
    """
    bits = np.random.Philox(key=np.frombuffer(key, "<u8")).random_raw(length * draws)  # numpy promises these
    parts = (bits >> np.uint64(64 - _BITS_OF_DOUBLE)).reshape(length, draws) * 2.0**-_BITS_OF_DOUBLE
    numbers = (np.arange(draws) + parts) / draws
    return torch.from_numpy(np.minimum(numbers, np.nextafter(1.0, 0.0)))


def counted(ids: np.ndarray, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Different ids of each row, and how often each is there.

    Args:
        ids: [n, draws] integers, ascending in each row.
        slots: ids of a row, at least as many as can be different: the smaller of draws and vocabulary.

    Returns:
        [n, slots] int32 ids, distinct in each row and below the vocabulary, and [n, slots] int32 counts; ids that are
        only there to fill the row have a count of 0.
    """
    rows, draws = ids.shape
    is_first = np.ones(ids.shape, dtype=bool)
    is_first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    row, place = np.nonzero(is_first)
    number = np.cumsum(is_first, axis=1) - 1  # of each id among the different ones of its row
    slot = number[row, place]
    counts = np.zeros((rows, slots), dtype=np.int32)
    counts[row, slot] = np.diff(np.append(row * draws + place, ids.size))
    # Behind them those of the ids 0 .. slots - 1 that were not drawn: at least as many as there are slots left.
    drawn = np.zeros((rows, slots), dtype=bool)
    small = ids < slots
    drawn[np.nonzero(small)[0], ids[small]] = True
    others = np.sort(np.where(drawn, slots, np.arange(slots)), axis=1)
    place_of_other = np.arange(slots) - (number[:, -1:] + 1)
    filled = np.take_along_axis(others, np.maximum(place_of_other, 0), axis=1)
    filled[row, slot] = ids[row, place]
    return filled.astype(np.int32), counts
