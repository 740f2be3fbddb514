"""The folder of a teacher cache, opened for reading; records are looked up by the content of a segment.

    meta.json           properties common to all shards
    NAME.safetensors    a shard: `keys` [m, 16] and `lengths` [m] of its segments, `records` [n, R] of all their tokens,
                        segment after segment (mkd.teacher.cache.record_format)
    NAME.json           size in bytes and SHA-256 of the shard; a shard without this file is not part of the cache yet

A key is a hash of the token ids of a segment only, so any layout, batch size, seed and packing finds the same records.
"""

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mkd.errors import MkdCacheError
from mkd.teacher.cache.record_format import RecordFormat, TokenTargets, damaged, key_words

FORMAT = "mkd-teacher-cache"
VERSION = 1
KEY_BYTES = 16
META = "meta.json"


@dataclass(frozen=True)
class CacheMeta:
    """Properties common to all records of a cache."""

    teacher: str
    """Fingerprint of the teacher's architecture and weights."""
    tokenizer: str | None
    """Hash of the tokenizer; None if not known."""
    true_vocab: int
    """Vocabulary size without padding."""
    top_k: int
    """Ids in a record."""
    values: str
    """See `mkd.teacher.cache.record_format.Values`."""
    temperatures: tuple[float, ...] = (1.0,)
    """Temperatures whose tail is stored."""
    samples: int = 0
    """Samples per token, at the last of `temperatures`; `TokenTargets.logits` are then the logs of their relative
    frequencies. 0 for top-k."""
    teacher_dtype: str = ""
    """Dtype of the teacher's layers."""
    positions: str = "segment"
    """Position ids restart at each "segment", or at each "document" in it."""
    labels_only: bool = False
    """True if only supervised tokens have targets and the records of the others are filler; imported caches only."""
    has_tail: bool = True
    """False if the mass of the tail is not known; imported caches only."""

    @cached_property
    def records(self) -> RecordFormat:
        """Encoder and decoder of the records."""
        return RecordFormat(self.true_vocab, self.top_k, self.values, self.temperatures, self.samples)

    def to_json(self) -> str:
        """Contents of meta.json."""
        fields = {name: [int(n) for n in kind.shape] for name, (kind, *_) in self.records.dtype.fields.items()}
        layout = {"bytes": self.records.dtype.itemsize, "fields": fields}
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self), "record": layout}, indent=2) + "\n"

    @classmethod
    def read(cls, folder: Path, flag: str) -> "CacheMeta":
        """Read meta.json of a folder.

        Raises:
            MkdCacheError: the folder is no teacher cache, or one of another version.
        """
        file = folder / META
        if not file.is_file():
            what = "is not a teacher cache: it has no meta.json" if folder.is_dir() else "does not exist"
            raise MkdCacheError(f"{flag} {folder} {what} (mkd cache write creates one)")
        try:
            values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            if values["format"] != FORMAT:
                raise MkdCacheError(
                    f"{flag} {folder} is not a teacher cache: meta.json has the format {values['format']!r}"
                )
            if values["version"] != VERSION:
                raise MkdCacheError(
                    f"{flag} {folder} has format version {values['version']}, this version of mkd reads {VERSION}: "
                    "use the version of mkd that wrote it, or write it again"
                )
            names = cls.__dataclass_fields__
            meta = cls(**{name: values[name] for name in names} | {"temperatures": tuple(values["temperatures"])})
        except (ValueError, LookupError, TypeError, OSError) as error:
            raise MkdCacheError(f"{flag} {folder} is not a teacher cache: meta.json is damaged ({error!r})") from error
        return meta

    def differences(self, other: "CacheMeta") -> list[str]:
        """One text per field that differs: `name: mine, theirs`."""
        mine, theirs = asdict(self), asdict(other)
        return [f"{name}: {mine[name]}, {theirs[name]}" for name in mine if mine[name] != theirs[name]]


@dataclass(frozen=True)
class Segment:
    """Location of a segment's records."""

    shard: int
    start: int
    length: int
    """Tokens."""


class CacheShard:
    """One file of a cache, memory-mapped."""

    def __init__(self, path: Path, meta: CacheMeta) -> None:
        """Map a file and check its size and header.

        Raises:
            MkdCacheError: it is missing, truncated or damaged.
        """
        self.path = path
        self._dtype = meta.records.dtype
        if not path.is_file():
            raise MkdCacheError(f"shard {path} is missing from the teacher cache, but {path.stem}.json is there")
        try:
            self.manifest = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
            size = self.manifest["bytes"]
        except (ValueError, LookupError, OSError) as error:
            raise MkdCacheError(f"{path.with_suffix('.json')} of the teacher cache is damaged ({error!r})") from error
        if path.stat().st_size != size:
            raise MkdCacheError(
                f"shard {path} of the teacher cache is truncated: {path.stat().st_size} bytes instead of {size}"
            )
        try:
            with path.open("rb") as file:
                self._header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
                base = file.tell()
            # np.memmap keeps its file open, and a large cache has more shards than a process may have open files.
            self._data = torch.from_file(str(path), size=size, dtype=torch.uint8).numpy()[base:]
            self.keys, self.lengths = self._tensor("keys", np.uint8), self._tensor("lengths", np.int32).reshape(-1)
            self.records = self._tensor("records", np.uint8)
            """[n, R] uint8, memory-mapped."""
            self._check_sizes()
        except (ValueError, LookupError, TypeError, struct.error, OSError, ArithmeticError, MemoryError) as error:
            raise MkdCacheError(f"shard {path} of the teacher cache is damaged ({error!r})") from error

    def _check_sizes(self) -> None:
        if self.keys.shape != (len(self.lengths), KEY_BYTES):
            raise ValueError(f"keys of shape {self.keys.shape} for {len(self.lengths)} segments")
        count, record = self.records.shape
        if record != self._dtype.itemsize or count != self.lengths.sum(dtype=np.int64) or (self.lengths < 0).any():
            raise ValueError(f"{count} records of {record} bytes for {self.lengths.sum()} tokens")

    def _tensor(self, name: str, dtype: np.dtype | type) -> np.ndarray:
        entry = self._header[name]
        return self._data[slice(*entry["data_offsets"])].view(dtype).reshape(entry["shape"])

    def segments(self) -> Iterator[tuple[bytes, np.ndarray]]:
        """Key and [length] decodable records of each segment."""
        starts = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        for key, start, length in zip(self.keys, starts, self.lengths, strict=True):
            yield key.tobytes(), np.array(self.records[start : start + length]).view(self._dtype).reshape(-1)

    def check(self) -> None:
        """Read the whole file and compare its SHA-256.

        Raises:
            MkdCacheError: it differs.
        """
        with self.path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != self.manifest["sha256"]:
                raise MkdCacheError(f"shard {self.path} of the teacher cache is damaged: its SHA-256 differs")


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
            MkdCacheError: the folder is no cache, of another version, or a shard is missing or truncated.
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
            keys: keys of the segments.
            segments: their locations, from `find`.
            positions: per segment, [k] integers below its length: the tokens to read.
            temperature: see `RecordFormat.decode`.

        Raises:
            MkdCacheError: a record is damaged, or not finite.
        """
        counts = [len(part) for part in positions]
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
        try:
            return self.meta.records.decode(records, temperature)
        except MkdCacheError as error:
            raise self._locate(error, keys, segments, np.split(records, np.cumsum(counts)[:-1])) from None

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
