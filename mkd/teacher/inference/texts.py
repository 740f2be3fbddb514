"""Texts of a microbatch, and their records in memory and in a cache folder."""

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mkd.data.batch import KDBatch
from mkd.errors import MkdCacheError
from mkd.teacher.cache.meta import CacheMeta
from mkd.teacher.cache.store import Segment, TeacherStore
from mkd.teacher.cache.writer import StoreWriter

_FLUSH_S, _LOOK_S = 60.0, 30.0
"""Seconds after which a shard is closed, and after which shards of other ranks are looked for."""


@dataclass(frozen=True)
class Text:
    """A segment of a microbatch with tokens in the KD mask."""

    key: bytes
    """Its content hash."""
    positions: slice
    """Positions of its tokens in the flattened microbatch."""
    ids: tuple[int, ...]
    """Its tokens, and the label of the last one: the server returns what is predicted before each token."""


@dataclass(frozen=True)
class BatchOfTexts:
    """The texts of a whole microbatch. See `mkd.teacher.run_ahead.BatchRequest`."""

    texts: tuple[Text, ...]
    key: bytes
    answer_bytes: int

    @classmethod
    def of(cls, batch: KDBatch, record_bytes: int) -> "BatchOfTexts":
        """The texts of a microbatch on the host, with records of `record_bytes` bytes per token."""
        tokens, labels, mask = batch.tokens.flatten(), batch.labels.flatten(), batch.kd_mask.flatten()
        texts = tuple(
            Text(key, part, (*tokens[part].tolist(), int(labels[part.stop - 1])))
            for key, part in batch.segments()
            if mask[part].any()
        )
        digest = hashlib.blake2b(repr((batch.bounds, batch.segment_hashes)).encode(), digest_size=16)
        digest.update(mask.numpy().tobytes())
        return cls(texts, digest.digest(), record_bytes * sum(len(text.ids) - 1 for text in texts))


class TextStore:
    """Records by text: those that this rank has received, and those in the folder of --kd-teacher-cache."""

    def __init__(self, folder: Path | None, meta: CacheMeta, flag: str) -> None:
        """Open or create the folder.

        Args:
            folder: None keeps nothing beyond a step.
            meta: properties of the records.
            flag: the flag of the folder, for messages.

        Raises:
            MkdCacheError: the folder holds something else, or is full.
        """
        self._folder, self._flag = folder, flag
        self._store, self._writer = None, None
        self._added: dict[bytes, np.ndarray] = {}
        """Records that are not in `_store` yet."""
        self._flushed = self._looked = time.monotonic()
        if folder is not None:
            with named_errors(flag, folder):
                self._writer = StoreWriter(folder, meta, flag)
                self._store = TeacherStore(folder, flag)

    def find(self, texts: Sequence[Text]) -> Mapping[bytes, np.ndarray]:
        """[n] records of each of the texts that is there.

        Raises:
            MkdCacheError: a record is damaged, or a text has another length.
        """
        found = {text.key: self._added[text.key] for text in texts if text.key in self._added}
        if self._store is None:
            return found
        left = [text for text in texts if text.key not in found]
        if any(segment is None for segment in self._store.find([text.key for text in left])):
            self._look_for_others()
        for text, segment in zip(left, self._store.find([text.key for text in left]), strict=True):
            if segment is not None:
                found[text.key] = self._read(text, segment)
        return found

    def _read(self, text: Text, segment: Segment) -> np.ndarray:
        if segment.length != len(text.ids) - 1:
            raise MkdCacheError(
                f"{self._flag} {self._folder}: segment {text.key.hex()} has {len(text.ids) - 1} tokens in the data and "
                f"{segment.length} in the cache: remove the folder"
            )
        return self._store.read_records([text.key], [segment], [np.arange(segment.length)])

    def _look_for_others(self) -> None:
        """Open the shards again, where other ranks may have added some."""
        if time.monotonic() - self._looked > _LOOK_S:
            self._open_again()

    def _open_again(self) -> None:
        self._store, self._looked = TeacherStore(self._folder, self._flag), time.monotonic()

    def add(self, key: bytes, records: np.ndarray) -> None:
        """Keep the records of a text in the folder; nothing without one."""
        if self._writer is not None and key not in self._writer.known:
            self._added[key] = records
            with named_errors(self._flag, self._folder):
                self._writer.add_records(key, records)

    def flush(self, *, now: bool = False) -> None:
        """Write a shard, if the last one is old or `now`.

        Raises:
            MkdCacheError: the disk is full, or the folder is gone.
        """
        if not self._added or not (now or time.monotonic() - self._flushed > _FLUSH_S):
            return
        with named_errors(self._flag, self._folder):
            self._writer.flush()
            self._open_again()
        self._added, self._flushed = {}, time.monotonic()


@contextmanager
def named_errors(flag: str, folder: Path) -> Iterator[None]:
    """OSErrors inside become an MkdCacheError that names flag and folder."""
    try:
        yield
    except OSError as error:
        raise MkdCacheError(
            f"{flag} {folder} cannot be written ({error.strerror or error}): free space there, or leave it out"
        ) from None
