"""The folder of a teacher cache, opened for reading; records are looked up by the content of a segment.

    meta.json           properties common to all shards, and a checksum over all of them (mkd.teacher.cache.meta)
    NAME.safetensors    a shard: `keys` [m, 16] and `lengths` [m] of its segments, `records` [n, R] of all their tokens,
                        segment after segment (mkd.teacher.cache.shard, mkd.teacher.cache.record_format); its header has
                        the properties too, so that a shard of another cache is refused
    NAME.json           size in bytes and SHA-256 of the shard, and a checksum of what precedes its records (header,
                        lengths and keys); a shard without this file is not part of the cache yet

A key is a hash of the token ids of a segment only, so any layout, batch size, seed and packing finds the same records.

Every byte is covered when it is used: properties, header, lengths and keys by checksums that are compared when the
cache is opened, each record by its own when it is read. The SHA-256 of a shard is compared by `verify` only. Older
versions of mkd wrote no checksum of the properties and keys, and no properties into shards; such caches are read with a
warning.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mkd.errors import MkdCacheError
from mkd.teacher.cache.meta import META, CacheMeta
from mkd.teacher.cache.record_format import TokenTargets, damaged, key_words
from mkd.teacher.cache.shard import KEY_BYTES, CacheShard
from mkd.utils.logging import logger
from mkd.utils.mapped_files import SizeGuard


@dataclass(frozen=True)
class Segment:
    """Location of a segment's records."""

    shard: int
    start: int
    length: int
    """Tokens."""


class TeacherStore:
    """A teacher cache, opened for reading; also the `TeacherSource` of a cached teacher.

    Only keys and locations are in memory, 32 bytes per segment.
    """

    def __init__(self, folder: Path, flag: str) -> None:
        """Read meta.json and every shard's keys.

        Args:
            folder: the cache.
            flag: the flag that names it, for messages.

        Raises:
            MkdCacheError: the folder is not a cache, of another version, or a shard is missing or truncated.
        """
        self.folder, self.flag = folder, flag
        self.architecture: dict[str, Any] = {}
        """See `TeacherSource`: empty, because there is no model."""
        self.meta = CacheMeta.read(folder, flag)
        self.shards = [
            CacheShard(path.with_suffix(".safetensors"), self.meta)
            for path in sorted(folder.glob("*.json"))
            if path.name != META and not path.name.startswith(".")
        ]
        warn_of_older_version(folder, flag, self.meta, self.shards)
        self._guards = [SizeGuard([shard.path]) for shard in self.shards]
        keys = [shard.keys for shard in self.shards]
        lengths = [shard.lengths for shard in self.shards]
        starts = [np.cumsum(part, dtype=np.int64) - part for part in lengths]
        joined = np.concatenate(keys) if keys else np.zeros((0, KEY_BYTES), np.uint8)
        keys_flat = np.ascontiguousarray(joined).view(f"S{KEY_BYTES}").reshape(-1)
        order = np.argsort(keys_flat, kind="stable")
        self._keys = keys_flat[order]
        self._shard = np.repeat(np.arange(len(keys), dtype=np.int32), [len(part) for part in keys])[order]
        self._start = np.concatenate([*starts, np.zeros(0, np.int64)])[order]
        self._length = np.concatenate([*lengths, np.zeros(0, np.int32)])[order]

    def __len__(self) -> int:
        """Number of segments, including duplicates."""
        return len(self._keys)

    @property
    def tokens(self) -> int:
        """Number of records, including those of duplicates."""
        return int(self._length.sum(dtype=np.int64))

    @property
    def origin(self) -> str:
        """See `TeacherSource`."""
        return f"{self.flag} {self.folder}"

    @property
    def path(self) -> Path:
        """See `TeacherSource`."""
        return self.folder

    @property
    def vocab_size(self) -> int:
        """See `TeacherSource`."""
        return self.meta.true_vocab

    @property
    def tokenizer_hash(self) -> str | None:
        """See `TeacherSource`."""
        return self.meta.tokenizer

    def fingerprint(self) -> str:
        """See `TeacherSource`: of the teacher that computed the targets."""
        return self.meta.teacher

    def keys(self) -> set[bytes]:
        """Keys of all segments."""
        return {bytes(key).ljust(KEY_BYTES, b"\0") for key in self._keys}

    def digest(self) -> int:
        """63-bit hash of all keys and lengths."""
        parts = hashlib.blake2b(self._keys.tobytes(), digest_size=8)
        parts.update(self._length.tobytes())
        return int.from_bytes(parts.digest(), "little") >> 1

    def find(self, keys: Sequence[bytes]) -> list[Segment | None]:
        """Location of the segment of each key; None if it is not in the cache."""
        if not len(self._keys) or not keys:
            return [None] * len(keys)
        sought = np.array(keys, dtype=f"S{KEY_BYTES}")
        indices = np.minimum(np.searchsorted(self._keys, sought), len(self._keys) - 1)
        return [
            Segment(int(self._shard[i]), int(self._start[i]), int(self._length[i])) if is_found else None
            for i, is_found in zip(indices, self._keys[indices] == sought, strict=True)
        ]

    def read(
        self,
        keys: Sequence[bytes],
        segments: Sequence[Segment],
        positions: Sequence[np.ndarray],
        temperature: float = 1.0,
    ) -> TokenTargets:
        """Targets of some tokens of some segments, segment after segment.

        Args:
            keys, segments, positions: see `read_records`.
            temperature: see `RecordFormat.decode`.

        Raises:
            MkdCacheError: a record is damaged, or not finite.
        """
        records = self.read_records(keys, segments, positions)
        try:
            return self.meta.records.decode(records, temperature)
        except MkdCacheError as error:
            ends = np.cumsum([len(part) for part in positions])[:-1]
            raise self._locate(error, keys, segments, np.split(records, ends)) from None

    def read_records(
        self, keys: Sequence[bytes], segments: Sequence[Segment], positions: Sequence[np.ndarray]
    ) -> np.ndarray:
        """[n] records of some tokens of some segments, segment after segment, not decoded.

        Args:
            keys: keys of the segments.
            segments: their locations, from `find`.
            positions: per segment, [k] integers below its length: the tokens to read.

        Raises:
            MkdCacheError: a checksum does not match.
        """
        counts = [len(part) for part in positions]
        for number in {segment.shard for segment in segments}:
            if (problem := self._guards[number].problem()) is not None:
                raise MkdCacheError(f"{self.flag} {self.folder}: {problem}; write it again")
        records = np.empty((sum(counts), self.meta.records.dtype.itemsize), dtype=np.uint8)
        end = 0
        for segment, part in zip(segments, positions, strict=True):
            begin, end = end, end + len(part)
            np.take(self.shards[segment.shard].records, segment.start + part, 0, records[begin:end], mode="clip")
        records = records.view(self.meta.records.dtype).reshape(-1)
        joined = np.concatenate([*positions, np.zeros(0, np.int64)])
        bad = damaged(records, np.repeat(key_words(keys), counts), joined)
        if bad.any():
            first = int(np.repeat(np.arange(len(keys)), counts)[bad.argmax()])
            raise MkdCacheError(
                f"{self.flag} {self.folder}: a record of segment {keys[first].hex()} in shard "
                f"{self.shards[segments[first].shard].path.name} is damaged (its checksum does not match): remove that "
                "shard with its .json file and write what is missing again (mkd cache verify)"
            )
        return records

    def _locate(
        self, error: MkdCacheError, keys: Sequence[bytes], segments: Sequence[Segment], parts: Sequence[np.ndarray]
    ) -> MkdCacheError:
        """A decoding error, with the first segment and shard that it occurs in."""
        for key, segment, records in zip(keys, segments, parts, strict=True):
            try:
                self.meta.records.decode(records)
            except MkdCacheError:
                shard = self.shards[segment.shard].path.name
                return MkdCacheError(f"{self.flag} {self.folder}: segment {key.hex()} in shard {shard}: {error}")
        return error


def warn_of_older_version(folder: Path, flag: str, meta: CacheMeta, shards: Sequence[CacheShard]) -> None:
    """Log a warning if a cache, or a shard of it, has no checksum of its properties or keys, or if a shard lacks the
    properties of its cache."""
    if not meta.is_checked or not all(shard.is_checked for shard in shards):
        logger.warning(
            f"{flag} {folder} was written by an older version of mkd: its properties and keys are covered by no "
            "checksum, or shards of another cache are not found; mkd cache merge NEW OLD writes one without these gaps"
        )
