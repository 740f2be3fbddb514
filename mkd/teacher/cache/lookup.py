"""Which of a microbatch's tokens need a teacher's answer, and where a cache has it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mkd.data.batch import KDBatch
from mkd.distributed.context_parallel import dual_chunk_positions
from mkd.errors import MkdCacheError
from mkd.teacher.cache.store import Segment, TeacherStore


@dataclass(frozen=True)
class Missing:
    """A segment with tokens to learn from the teacher that a cache does not have."""

    key: bytes
    microbatch: int
    """Its number in the step."""
    index: int
    """The segment's number in the microbatch."""
    places: slice
    """Of its text among the microbatch's tokens, row after row."""

    def text(self, row_length: int) -> str:
        """For a message; rows are `row_length` tokens long."""
        row, start = divmod(self.places.start, row_length)
        return (
            f"segment {self.key.hex()} ({self.places.stop - self.places.start} tokens at place {start} of row {row}, "
            f"segment {self.index} of microbatch {self.microbatch})"
        )


@dataclass(frozen=True)
class Request:
    """Records that one rank reads of a microbatch: `TeacherStore.read` takes keys, segments and places."""

    keys: list[bytes]
    segments: list[Segment]
    places: list[np.ndarray]
    rows: np.ndarray
    """[n] where each record goes among the rank's tokens, row after row."""
    shape: tuple[int, int]
    """(b, s/cp)"""


@dataclass(frozen=True)
class Lookup:
    """What a cache has of a whole microbatch."""

    batch: KDBatch
    """On the host; its KD mask is 0 where the cache has nothing."""
    missing: list[Missing]
    _keys: list[bytes]
    _segments: list[Segment]
    _starts: list[int]

    @classmethod
    def of(cls, batch: KDBatch, store: TeacherStore) -> "Lookup":
        """Look for all segments with tokens of the KD mask; others are not needed.

        Raises:
            MkdCacheError: a segment is as long in the cache as it cannot be.
        """
        mask = batch.kd_mask.reshape(-1)
        needed = [(i, *text) for i, text in enumerate(batch.segments()) if mask[text[1]].any()]
        found = store.find([key for _, key, _ in needed])
        missing, keys, segments, starts = [], [], [], []
        for (index, key, places), segment in zip(needed, found, strict=True):
            length = places.stop - places.start
            if segment is None:
                missing.append(Missing(key, batch.number, index, places))
            elif segment.length != length:
                raise MkdCacheError(
                    f"{store.flag} {store.folder}: segment {key.hex()} has {length} tokens in the data and "
                    f"{segment.length} in the cache: write it anew"
                )
            else:
                keys.append(key)
                segments.append(segment)
                starts.append(places.start)
        return cls(_without(batch, missing), missing, keys, segments, starts)

    def request(self, cp_rank: int, cp_size: int) -> Request:
        """What one context-parallel rank reads: the tokens of its part whose KD mask is not 0."""
        rows, length = self.batch.tokens.shape
        places = dual_chunk_positions(self.batch.bounds, cp_rank, cp_size).numpy()
        places = (np.arange(rows)[:, None] * length + places).reshape(-1)
        wanted = np.flatnonzero(self.batch.kd_mask.reshape(-1).numpy()[places])
        segment = np.searchsorted(self._starts, places[wanted], side="right") - 1
        order = np.argsort(segment, kind="stable")
        wanted, segment = wanted[order], segment[order]
        used, begins = np.unique(segment, return_index=True)
        inside = places[wanted] - np.array(self._starts, dtype=np.int64)[segment]
        return Request(
            keys=_at(self._keys, used),
            segments=_at(self._segments, used),
            places=np.split(inside, begins[1:]) if len(used) else [],
            rows=wanted,
            shape=(rows, len(places) // rows),
        )


def _at[Item](items: Sequence[Item], numbers: np.ndarray) -> list[Item]:
    return [items[number] for number in numbers]


def _without(batch: KDBatch, missing: Sequence[Missing]) -> KDBatch:
    """The batch with a KD mask of 0 on the missing segments."""
    if not missing:
        return batch
    mask = batch.kd_mask.clone()  # it may be the CE mask's tensor
    for segment in missing:
        mask.view(-1)[segment.places] = 0.0
    return replace(batch, kd_mask=mask)
