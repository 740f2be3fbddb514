"""Finds the records of a microbatch in a cache."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mkd.data.batch import KDBatch
from mkd.distributed.context_parallel import dual_chunk_positions
from mkd.errors import MkdCacheError
from mkd.teacher.cache.store import Segment, TeacherStore


@dataclass(frozen=True)
class MissingSegment:
    """A segment with tokens in the KD mask that the cache does not have."""

    key: bytes
    microbatch: int
    """Index in the step."""
    index: int
    """Index of the segment in the microbatch."""
    positions: slice
    """Positions of its tokens in the flattened microbatch."""

    def describe(self, row_length: int) -> str:
        """Text for a message, with rows of `row_length` tokens."""
        row, start = divmod(self.positions.start, row_length)
        return (
            f"segment {self.key.hex()} ({self.positions.stop - self.positions.start} tokens at position {start} of row "
            f"{row}, segment {self.index} of microbatch {self.microbatch})"
        )


@dataclass(frozen=True)
class ReadRequest:
    """Records of a microbatch that one rank reads; keys, segments and positions go to `TeacherStore.read`."""

    keys: list[bytes]
    segments: list[Segment]
    positions: list[np.ndarray]
    tokens: np.ndarray
    """[n] index of each record's token in the rank's flattened tokens."""
    shape: tuple[int, int]
    """(b, s/cp)"""


@dataclass(frozen=True)
class Lookup:
    """The segments of a whole microbatch, found in a cache."""

    batch: KDBatch
    """The microbatch, on the host, with a KD mask of 0 on segments that the cache does not have."""
    missing: list[MissingSegment]
    _keys: list[bytes]
    _segments: list[Segment]
    _starts: list[int]

    @classmethod
    def of(cls, batch: KDBatch, store: TeacherStore) -> "Lookup":
        """Look up all segments that have tokens in the KD mask.

        Raises:
            MkdCacheError: a segment has another length in the cache than in the data.
        """
        mask = batch.kd_mask.reshape(-1)
        needed = [(i, *text) for i, text in enumerate(batch.segments()) if mask[text[1]].any()]
        found = store.find([key for _, key, _ in needed])
        missing, keys, segments, starts = [], [], [], []
        for (index, key, positions), segment in zip(needed, found, strict=True):
            length = positions.stop - positions.start
            if segment is None:
                missing.append(MissingSegment(key, batch.number, index, positions))
            elif segment.length != length:
                raise MkdCacheError(
                    f"{store.flag} {store.folder}: segment {key.hex()} has {length} tokens in the data and "
                    f"{segment.length} in the cache: write it again"
                )
            else:
                keys.append(key)
                segments.append(segment)
                starts.append(positions.start)
        return cls(_without(batch, missing), missing, keys, segments, starts)

    def request(self, cp_rank: int, cp_size: int) -> ReadRequest:
        """Records that one context-parallel rank reads: those of its own tokens in the KD mask."""
        rows, length = self.batch.tokens.shape
        positions = dual_chunk_positions(self.batch.bounds, cp_rank, cp_size).numpy()
        positions = (np.arange(rows)[:, None] * length + positions).reshape(-1)
        tokens = np.flatnonzero(self.batch.kd_mask.reshape(-1).numpy()[positions])
        segment = np.searchsorted(self._starts, positions[tokens], side="right") - 1
        order = np.argsort(segment, kind="stable")
        tokens, segment = tokens[order], segment[order]
        used, begins = np.unique(segment, return_index=True)
        in_segment = positions[tokens] - np.array(self._starts, dtype=np.int64)[segment]
        return ReadRequest(
            keys=[self._keys[i] for i in used],
            segments=[self._segments[i] for i in used],
            positions=np.split(in_segment, begins[1:]) if len(used) else [],
            tokens=tokens,
            shape=(rows, len(positions) // rows),
        )


def _without(batch: KDBatch, missing: Sequence[MissingSegment]) -> KDBatch:
    """The batch with a KD mask of 0 on the missing segments."""
    if not missing:
        return batch
    mask = batch.kd_mask.clone()  # the CE mask may be the same tensor
    for segment in missing:
        mask.view(-1)[segment.positions] = 0.0
    return replace(batch, kd_mask=mask)
