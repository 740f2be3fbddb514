"""Bit packing for records: fixed-width integers and Elias-Fano coded sets of token ids, little-endian."""

import sys

import numpy as np

from mkd.errors import MkdCacheError

assert sys.byteorder == "little", "records are memory-mapped and used in place"


def packed_bytes(count: int, width: int) -> int:
    """Bytes of `count` packed integers of `width` bits."""
    return -(-count * width // 8)


def pack(values: np.ndarray, width: int) -> np.ndarray:
    """[n, K] integers in [0, 2^width) -> [n, packed_bytes(K, width)] uint8; the first value has the lowest bits."""
    groups = -(-values.shape[1] // 8)
    packed = np.zeros((len(values), groups, max(width, 1)), dtype=np.uint8)
    for i in range(8):
        column = values[:, i::8].astype(np.uint32)
        offset, shift = divmod(i * width, 8)
        for byte in range(-(-(shift + width) // 8)):
            part = (column << np.uint32(shift)) >> np.uint32(8 * byte)
            packed[:, : column.shape[1], offset + byte] |= part.astype(np.uint8)
    return packed.reshape(len(values), -1)[:, : packed_bytes(values.shape[1], width)]


def unpack(packed: np.ndarray, count: int, width: int) -> np.ndarray:
    """The inverse of `pack`: [n, packed_bytes(count, width)] uint8 -> [n, count] int32.

    Eight values fill `width` bytes, so the i-th of each eight starts at the same bit of its bytes; it is read with one
    32-bit word, which limits the width to 25 bits.
    """
    if width == 0:
        return np.zeros((len(packed), count), dtype=np.int32)
    groups = -(-count // 8)
    stride = groups * width + 4
    padded = np.empty((len(packed), stride), dtype=np.uint8)
    padded[:, : packed.shape[1]] = packed
    padded[:, packed.shape[1] :] = 0
    values = np.empty((len(packed), groups, 8), dtype=np.uint32)
    for i in range(8):
        offset, shift = divmod(i * width, 8)
        words = np.ndarray((len(packed), groups), "<u4", padded.data, offset, (stride, width))
        np.bitwise_and(words >> np.uint32(shift), np.uint32((1 << width) - 1), out=values[:, :, i])
    return values.reshape(len(packed), -1)[:, :count].view(np.int32)


class IdSets:
    """Sets of K distinct ids below `vocab`, each in about K (2 + log2(V / K)) bits (Elias 1974, Fano 1971).

    With the ids in ascending order x_0 < x_1 < ..., the low field packs the lowest `width` bits of each. The rest,
    h_k = x_k >> width, does not decrease, so h_k + k ascends strictly: the high field is a bitmap with exactly these K
    bits set. The k-th set bit at position p gives h_k = p - k.
    """

    def __init__(self, vocab: int, count: int) -> None:
        """Choose the width of the low field that needs the fewest bytes.

        Args:
            vocab: ids are below it; at most 2^20.
            count: ids in a set.
        """
        self.count = count

        def nbytes(width: int) -> int:
            return packed_bytes(count, width) + packed_bytes(count + ((vocab - 1) >> width), 1)

        self._width = min(range(21), key=nbytes)
        self._high_bits = count + ((vocab - 1) >> self._width)
        self.low_bytes = packed_bytes(count, self._width)
        self.high_bytes = packed_bytes(self._high_bits, 1)

    def encode(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[n, K] ascending ids in [0, vocab) -> low and high field, [n, low_bytes] and [n, high_bytes] uint8."""
        low = pack(ids & ((1 << self._width) - 1), self._width)
        bits = np.zeros((len(ids), self._high_bits), dtype=np.uint8)
        np.put_along_axis(bits, (ids >> self._width) + np.arange(self.count), 1, axis=1)
        return low, np.packbits(bits, axis=1, bitorder="little")

    def decode(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """The inverse of `encode`: [n, K] int32, ascending.

        Raises:
            MkdCacheError: a high field does not have K bits set.
        """
        set_bits = np.flatnonzero(np.unpackbits(high, axis=1, bitorder="little").view(np.bool_))
        if set_bits.size != len(high) * self.count:
            raise MkdCacheError("a set of token ids in the teacher cache is damaged: its number of ids is wrong")
        ids = set_bits.astype(np.int32).reshape(len(high), self.count)
        ids -= np.arange(len(high), dtype=np.int32)[:, None] * (8 * self.high_bytes)
        ids -= np.arange(self.count, dtype=np.int32)
        return ids << self._width | unpack(low, self.count, self._width)
