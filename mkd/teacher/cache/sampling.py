"""Stratified sampling of target tokens: random numbers that depend on the text only, and counting of sampled ids."""

import numpy as np
import torch
from torch import Tensor

_BITS_OF_DOUBLE = 53


def stratified_uniforms(key: bytes, length: int, samples: int) -> Tensor:
    """[length, samples] float64 in [0, 1), ascending per token: number i lies in the i-th of `samples` equal intervals.

    A function of the arguments only, so a text has the same samples in every layout, order and run. Each id is sampled
    `samples` * p times on average, as with independent samples, but with less variance.

    Args:
        key: key of a segment, 16 bytes.
        length: tokens of the segment.
        samples: samples per token.
    """
    # NumPy guarantees that these bits stay the same across versions.
    bits = np.random.Philox(key=np.frombuffer(key, "<u8")).random_raw(length * samples)
    offsets = (bits >> np.uint64(64 - _BITS_OF_DOUBLE)).reshape(length, samples) * 2.0**-_BITS_OF_DOUBLE
    numbers = (np.arange(samples) + offsets) / samples
    return torch.from_numpy(np.minimum(numbers, np.nextafter(1.0, 0.0)))


def count_ids(ids: np.ndarray, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Distinct ids of each token, and how often each was sampled.

    Args:
        ids: [n, samples] integers, ascending per token.
        slots: ids per token in the result: the smaller of `samples` and the vocabulary size.

    Returns:
        [n, slots] int32 ids, distinct per token and below the vocabulary size, and [n, slots] int32 counts. Slots that
        are left over have a count of 0 and the smallest ids that were not sampled.
    """
    tokens, samples = ids.shape
    is_first = np.ones(ids.shape, dtype=bool)
    is_first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    token, position = np.nonzero(is_first)
    index = np.cumsum(is_first, axis=1) - 1  # of each id among the distinct ones of its token
    slot = index[token, position]
    counts = np.zeros((tokens, slots), dtype=np.int32)
    counts[token, slot] = np.diff(np.append(token * samples + position, ids.size))
    # At least as many of the ids 0 .. slots - 1 were not sampled as there are slots left.
    was_sampled = np.zeros((tokens, slots), dtype=bool)
    small = ids < slots
    was_sampled[np.nonzero(small)[0], ids[small]] = True
    unsampled = np.sort(np.where(was_sampled, slots, np.arange(slots)), axis=1)
    unsampled_index = np.arange(slots) - (index[:, -1:] + 1)
    filled = np.take_along_axis(unsampled, np.maximum(unsampled_index, 0), axis=1)
    filled[token, slot] = ids[token, position]
    return filled.astype(np.int32), counts
