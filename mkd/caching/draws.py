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


def counted(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Different ids of each row, and how often each is there.

    Args:
        ids: [n, K] integers, ascending in each row, and at least K ids in the vocabulary.

    Returns:
        [n, K] int32 ids, distinct in each row, and [n, K] int32 counts; ids that are only there to fill the row have a
        count of 0.
    """
    slots = ids.shape[1]
    is_first = np.ones(ids.shape, dtype=bool)
    is_first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    row, place = np.nonzero(is_first)
    starts = row * slots + place
    counts = np.zeros(ids.shape, dtype=np.int32)
    counts[row, place] = np.diff(np.append(starts, ids.size))
    # Of the ids 0 .. K - 1 those that were not drawn: at least as many as there are repetitions.
    fillers = np.broadcast_to(np.arange(slots), ids.shape)
    drawn = np.zeros(ids.shape, dtype=bool)
    small = ids < slots
    drawn[np.nonzero(small)[0], ids[small]] = True
    candidates = np.sort(np.where(drawn, slots, fillers), axis=1)
    number = np.cumsum(~is_first, axis=1) - 1  # of each repetition in its row
    filled = np.where(is_first, ids, np.take_along_axis(candidates, np.maximum(number, 0), axis=1))
    return filled.astype(np.int32), counts
