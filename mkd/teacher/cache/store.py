"""The folder of a teacher cache, opened for reading; records are looked up by the content of a segment.

    meta.json           properties common to all shards, and a checksum over all of them
    NAME.safetensors    a shard: `keys` [m, 16] and `lengths` [m] of its segments, `records` [n, R] of all their tokens,
                        segment after segment (mkd.teacher.cache.record_format)
    NAME.json           size in bytes and SHA-256 of the shard, and a checksum of what precedes its records (header,
                        lengths and keys); a shard without this file is not part of the cache yet

A key is a hash of the token ids of a segment only, so any layout, batch size, seed and packing finds the same records.

Every byte is covered when it is used: properties, header, lengths and keys by checksums that are compared when the
cache is opened, each record by its own when it is read. The SHA-256 of a shard is compared by `verify` only. Older
versions of mkd wrote no checksum of the properties and keys; such caches are read with a warning.
"""

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mkd.errors import MkdCacheError
from mkd.teacher.cache.record_format import MAX_COUNT, RecordFormat, TokenTargets, damaged, key_words
from mkd.utils.json_files import parse_json, read_json
from mkd.utils.logging import logger
from mkd.utils.mapped_files import SizeGuard
from mkd.utils.near_paths import near_path_hint

FORMAT = "mkd-teacher-cache"
VERSION = 1
KEY_BYTES = 16
META = "meta.json"
_CHECKSUM = "checksum"
"""Key of the checksum in meta.json."""
_INDEX_BYTES, _INDEX_CHECKSUM = "index_bytes", "index_blake2b"
"""Keys of a shard's .json file: how many bytes precede the records, and their checksum."""
_TEMPERATURES = 64
"""Most temperatures of a cache."""
_HOTTEST = 1e6
"""Largest temperature; flags allow less."""
_HEADER_BYTES = 1 << 20
"""Longest safetensors header of a shard, which describes three tensors."""


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
    is_checked: bool = field(default=True, compare=False, kw_only=True)
    """False if an older version of mkd wrote the file, without a checksum."""

    @cached_property
    def records(self) -> RecordFormat:
        """Encoder and decoder of the records."""
        return RecordFormat(self.true_vocab, self.top_k, self.values, self.temperatures, self.samples)

    def to_json(self) -> str:
        """Contents of meta.json."""
        values = {"format": FORMAT, "version": VERSION, **self._properties(), "record": self._record_layout()}
        return json.dumps({**values, _CHECKSUM: _checksum(values)}, indent=2) + "\n"

    def _properties(self) -> dict[str, Any]:
        """Name -> value of all fields of the file."""
        return {name: value for name, value in asdict(self).items() if name != "is_checked"}

    def _record_layout(self) -> dict[str, Any]:
        fields = {name: [int(n) for n in kind.shape] for name, (kind, *_) in self.records.dtype.fields.items()}
        return {"bytes": self.records.dtype.itemsize, "fields": fields}

    @classmethod
    def read(cls, folder: Path, flag: str) -> "CacheMeta":
        """Read meta.json of a folder.

        Raises:
            MkdCacheError: the folder is not a teacher cache, or one of another version.
        """
        file = folder / META
        if not file.is_file():
            what = "is not a teacher cache: it has no meta.json" if folder.is_dir() else "does not exist"
            near = "" if folder.exists() else near_path_hint(folder, Path.is_dir)
            raise MkdCacheError(f"{flag} {folder} {what} (mkd cache write creates one){near}")
        try:
            values: dict[str, Any] = read_json(file)
            if values["format"] != FORMAT:
                raise MkdCacheError(
                    f"{flag} {folder} is not a teacher cache: meta.json has the format {values['format']!r}"
                )
            if values["version"] != VERSION:
                raise MkdCacheError(
                    f"{flag} {folder} has format version {values['version']}, this version of mkd reads {VERSION}: "
                    "use the version of mkd that wrote it, or write it again"
                )
            stored = values.pop(_CHECKSUM, None)
            if stored not in (None, _checksum(values)):
                raise ValueError("its checksum does not match: a value was changed")
            names = [name for name in cls.__dataclass_fields__ if name != "is_checked"]
            _require_types({name: values[name] for name in names})
            properties = {name: values[name] for name in names} | {"temperatures": tuple(values["temperatures"])}
            meta = cls(**properties, is_checked=stored is not None)
            if values["record"] != meta._record_layout():
                raise ValueError("the layout of its records is not that of its other values")
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, OSError) as error:
            raise MkdCacheError(f"{flag} {folder} is not a teacher cache: meta.json is damaged ({error})") from error
        return meta

    def differences(self, other: "CacheMeta") -> list[str]:
        """One text per field that differs: `name: mine, theirs`."""
        mine, theirs = self._properties(), other._properties()
        return [f"{name}: {mine[name]}, {theirs[name]}" for name in mine if mine[name] != theirs[name]]


def _checksum(values: Mapping[str, Any]) -> str:
    """128-bit hex hash of everything in meta.json but the checksum itself."""
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()


def _require_types(values: Mapping[str, Any]) -> None:
    """Raise ValueError that names a property whose value cannot be one."""

    def is_count(value: Any, least: int, most: float) -> bool:
        return type(value) is int and least <= value <= most

    temperatures = values["temperatures"]
    valid = {
        "teacher": isinstance(values["teacher"], str),
        "tokenizer": isinstance(values["tokenizer"], str | None),
        "true_vocab": is_count(values["true_vocab"], 1, math.inf),
        "top_k": is_count(values["top_k"], 1, math.inf),
        "values": values["values"] in ("log12", "fp32", "counts"),
        "temperatures": isinstance(temperatures, list)
        and 1 <= len(temperatures) <= _TEMPERATURES
        and all(type(value) in (int, float) and 0 < value <= _HOTTEST for value in temperatures),
        "samples": is_count(values["samples"], 0, MAX_COUNT)
        and (values["samples"] > 0) == (values["values"] == "counts"),
        "teacher_dtype": isinstance(values["teacher_dtype"], str),
        "positions": values["positions"] in ("segment", "document"),
        "labels_only": isinstance(values["labels_only"], bool),
        "has_tail": isinstance(values["has_tail"], bool),
    }
    for name, is_valid in valid.items():
        if not is_valid:
            raise ValueError(f"{name} is {str(values[name])[:60]!r}")


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
            self.manifest = read_json(path.with_suffix(".json"))
            size, digest = self.manifest["bytes"], self.manifest["sha256"]
            if type(size) is not int or not isinstance(digest, str):
                raise TypeError(f"{size!r} bytes, SHA-256 {digest!r}")
        except (ValueError, LookupError, TypeError, OSError) as error:
            raise MkdCacheError(f"{path.with_suffix('.json')} of the teacher cache is damaged ({error!r})") from error
        if path.stat().st_size != size:
            raise MkdCacheError(
                f"shard {path} of the teacher cache is truncated: {path.stat().st_size} bytes instead of {size}"
            )
        try:
            with path.open("rb") as file:
                length = struct.unpack("<Q", file.read(8))[0]
                if length > _HEADER_BYTES:
                    raise ValueError(f"a header of {length} bytes")
                self._header = parse_json(file.read(length))
                base = file.tell()
            # np.memmap keeps its file open, and a large cache has more shards than a process may have open files.
            whole = torch.from_file(str(path), size=size, dtype=torch.uint8).numpy()
            self._data = whole[base:]
            self.keys, self.lengths = self._tensor("keys", np.uint8), self._tensor("lengths", np.int32).reshape(-1)
            self.records = self._tensor("records", np.uint8)
            """[n, R] uint8, memory-mapped."""
            self._check_sizes()
            self._check_index(whole, base)
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            struct.error,
            OSError,
            ArithmeticError,
            MemoryError,
        ) as error:
            raise MkdCacheError(f"shard {path} of the teacher cache is damaged ({error!r})") from error

    def _check_sizes(self) -> None:
        if self.keys.shape != (len(self.lengths), KEY_BYTES):
            raise ValueError(f"keys of shape {self.keys.shape} for {len(self.lengths)} segments")
        count, record = self.records.shape
        if record != self._dtype.itemsize or count != self.lengths.sum(dtype=np.int64) or (self.lengths < 0).any():
            raise ValueError(f"{count} records of {record} bytes for {self.lengths.sum()} tokens")

    @property
    def is_checked(self) -> bool:
        """False if an older version of mkd wrote the shard, without a checksum of its keys."""
        return _INDEX_CHECKSUM in self.manifest

    def _check_index(self, whole: np.ndarray, base: int) -> None:
        if not self.is_checked:
            return
        size, begin = self.manifest[_INDEX_BYTES], base + self._header["records"]["data_offsets"][0]
        if size != begin or size + self.records.nbytes != len(whole):
            raise ValueError(f"its records begin at byte {begin}, not {size}")
        if _index_checksum(whole[:size]) != self.manifest[_INDEX_CHECKSUM]:
            raise ValueError("the checksum of its keys does not match")

    def _tensor(self, name: str, dtype: np.dtype | type) -> np.ndarray:
        entry = self._header[name]
        begin, end = entry["data_offsets"]
        if not 0 <= begin <= end <= len(self._data):
            raise ValueError(f"{name} is at the bytes {begin} to {end} of {len(self._data)}")
        return self._data[begin:end].view(dtype).reshape(entry["shape"])

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


def warn_of_older_version(folder: Path, flag: str, meta: CacheMeta, shards: Sequence[CacheShard]) -> None:
    """Log a warning if a cache, or a shard of it, has no checksum of its properties or keys."""
    if not meta.is_checked or not all(shard.is_checked for shard in shards):
        logger.warning(
            f"{flag} {folder} was written by an older version of mkd: its properties and keys are covered by no "
            "checksum; mkd cache merge NEW OLD writes a cache that has them"
        )


def manifest_of(path: Path) -> dict[str, Any]:
    """Content of the .json file of a complete shard.

    Raises:
        MkdCacheError: it is damaged.
    """
    with path.open("rb") as file:
        try:
            length = struct.unpack("<Q", file.read(8))[0]
            if length > _HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            begin = parse_json(file.read(length))["records"]["data_offsets"][0]
            index = 8 + length + begin
            if type(begin) is not int or not 0 <= begin <= path.stat().st_size - 8 - length:
                raise ValueError(f"its records begin at byte {begin}")
        except (ValueError, LookupError, TypeError, struct.error) as error:
            raise MkdCacheError(f"shard {path} of the teacher cache is damaged ({error!r}): remove it") from error
        file.seek(0)
        checksum = _index_checksum(file.read(index))
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest, _INDEX_BYTES: index, _INDEX_CHECKSUM: checksum}


def _index_checksum(index: bytes | np.ndarray) -> str:
    """128-bit hex hash of header, lengths and keys of a shard."""
    return hashlib.blake2b(index, digest_size=16).hexdigest()


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
