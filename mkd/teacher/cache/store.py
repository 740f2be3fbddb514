"""A folder of teacher records, found by the content of a segment.

    meta.json                     what all shards have in common
    NAME.safetensors              a shard: `keys` [m, 16] and `lengths` [m] of its segments, `records` [n, R] of all
                                  their tokens one after the other (mkd.teacher.cache.record_format)
    NAME.json                     the shard's length in bytes and its SHA-256; a shard without it does not count yet

Keys depend on the token ids of a segment alone, so the folder is the same to every layout, batch size, seed and
packing.
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
from mkd.teacher.cache.record_format import RecordFormat, TokenRows, damaged, key_words

FORMAT = "mkd-teacher-cache"
VERSION = 1
KEY_BYTES = 16
META = "meta.json"


@dataclass(frozen=True)
class CacheMeta:
    """What is true of every record of a folder."""

    teacher: str
    """Fingerprint of the teacher's architecture and weights."""
    tokenizer: str | None
    """Hash of the tokenizer; None when it was not known."""
    true_vocab: int
    """Tokens that exist."""
    top_k: int
    """Ids in a record."""
    values: str
    """See `mkd.teacher.cache.record_format.Values`."""
    temperatures: tuple[float, ...] = (1.0,)
    """Those whose tail is stored."""
    samples: int = 0
    """Ids drawn for each token at the last of `temperatures`, whose shares `TokenRows.logits` are the ln of; 0 for a
    top-k."""
    teacher_dtype: str = ""
    """Precision in which the teacher ran."""
    positions: str = "segment"
    """Where position ids begin anew: with each segment, or with each document in it."""
    labels_only: bool = False
    """Whether only supervised tokens have answers; the records of the others say nothing. Of imported answers."""
    has_tail: bool = True
    """Whether the mass of the tail is known. Of imported answers it may not be."""

    @cached_property
    def records(self) -> RecordFormat:
        """How a record is laid out."""
        return RecordFormat(self.true_vocab, self.top_k, self.values, self.temperatures, self.samples)

    def to_json(self) -> str:
        """The text of meta.json."""
        fields = {name: [int(n) for n in kind.shape] for name, (kind, *_) in self.records.dtype.fields.items()}
        layout = {"bytes": self.records.dtype.itemsize, "fields": fields}
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self), "record": layout}, indent=2) + "\n"

    @classmethod
    def read(cls, folder: Path, flag: str) -> "CacheMeta":
        """Of a folder.

        Raises:
            MkdCacheError: it is no teacher cache, or one of another version.
        """
        file = folder / META
        if not file.is_file():
            what = "is not a teacher cache: it has no meta.json" if folder.is_dir() else "does not exist"
            raise MkdCacheError(f"{flag} {folder} {what} (tools/cache_teacher.py write makes one)")
        try:
            values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            if values["format"] != FORMAT:
                raise MkdCacheError(f"{flag} {folder} is not a teacher cache: meta.json is of {values['format']!r}")
            if values["version"] != VERSION:
                raise MkdCacheError(
                    f"{flag} {folder} has format version {values['version']}, this version of mkd reads {VERSION}: "
                    "use the version of mkd that wrote it, or write it anew"
                )
            names = cls.__dataclass_fields__
            meta = cls(**{name: values[name] for name in names} | {"temperatures": tuple(values["temperatures"])})
        except (ValueError, LookupError, TypeError, OSError) as error:
            raise MkdCacheError(f"{flag} {folder} is not a teacher cache: meta.json is damaged ({error!r})") from error
        return meta

    def differences(self, other: "CacheMeta") -> list[str]:
        """What is not the same, a text each: `name: mine, theirs`."""
        mine, theirs = asdict(self), asdict(other)
        return [f"{name}: {mine[name]}, {theirs[name]}" for name in mine if mine[name] != theirs[name]]


@dataclass(frozen=True)
class Segment:
    """Where a segment's records are."""

    shard: int
    start: int
    length: int
    """Tokens."""


class Shard:
    """One file of a cache, read in place."""

    def __init__(self, path: Path, meta: CacheMeta) -> None:
        """Open a file and check its length and header.

        Raises:
            MkdCacheError: it is missing or torn.
        """
        self.path = path
        self._dtype = meta.records.dtype
        if not path.is_file():
            raise MkdCacheError(f"shard {path} is missing from the teacher cache, but {path.stem}.json is there")
        try:
            self.facts = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
            size = self.facts["bytes"]
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
            # Not np.memmap, which keeps a file open for as long: a large cache has more shards than a process may have.
            self._data = torch.from_file(str(path), size=size, dtype=torch.uint8).numpy()[base:]
            self.keys, self.lengths = self._tensor("keys", np.uint8), self._tensor("lengths", np.int32).reshape(-1)
            self.records = self._tensor("records", np.uint8)
            """[n, R] uint8, mapped."""
            self._check_sizes()
        except (ValueError, LookupError, TypeError, struct.error, OSError, ArithmeticError, MemoryError) as error:
            raise MkdCacheError(f"shard {path} of the teacher cache is damaged ({error!r})") from error

    def _check_sizes(self) -> None:
        if self.keys.shape != (len(self.lengths), KEY_BYTES):
            raise ValueError(f"keys of shape {self.keys.shape} for {len(self.lengths)} segments")
        rows, record = self.records.shape
        if record != self._dtype.itemsize or rows != self.lengths.sum(dtype=np.int64) or (self.lengths < 0).any():
            raise ValueError(f"{rows} records of {record} bytes for {self.lengths.sum()} tokens")

    def _tensor(self, name: str, dtype: np.dtype | type) -> np.ndarray:
        entry = self._header[name]
        return self._data[slice(*entry["data_offsets"])].view(dtype).reshape(entry["shape"])

    def segments(self) -> Iterator[tuple[bytes, np.ndarray]]:
        """Key and records ([length] of the format's dtype) of each segment."""
        starts = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        for key, start, length in zip(self.keys, starts, self.lengths, strict=True):
            yield key.tobytes(), np.array(self.records[start : start + length]).view(self._dtype).reshape(-1)

    def check(self) -> None:
        """Read the whole file.

        Raises:
            MkdCacheError: it is not what was written.
        """
        with self.path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != self.facts["sha256"]:
                raise MkdCacheError(f"shard {self.path} of the teacher cache is damaged: its SHA-256 is another one")


class TeacherStore:
    """A teacher cache, opened for reading. Only keys and lengths are in memory, 28 bytes a segment."""

    def __init__(self, folder: Path, flag: str) -> None:
        """Read meta.json and every shard's keys.

        Args:
            folder: of the cache.
            flag: that named it, for messages.

        Raises:
            MkdCacheError: the folder is no cache, of another version, or a shard is missing or torn.
        """
        self.folder, self.flag = folder, flag
        self.meta = CacheMeta.read(folder, flag)
        self.shards = [
            Shard(path.with_suffix(".safetensors"), self.meta)
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
        """Segments, doubles too."""
        return len(self._keys)

    @property
    def tokens(self) -> int:
        """Records, doubles too."""
        return int(self._length.sum(dtype=np.int64))

    def keys(self) -> set[bytes]:
        """Of all segments."""
        return {bytes(key).ljust(KEY_BYTES, b"\0") for key in self._keys}

    def digest(self) -> int:
        """63 bits that differ, but for chance, between folders that have other segments."""
        parts = hashlib.blake2b(self._keys.tobytes(), digest_size=8)
        parts.update(self._length.tobytes())
        return int.from_bytes(parts.digest(), "little") >> 1

    def find(self, keys: Sequence[bytes]) -> list[Segment | None]:
        """Where the segments of these keys are; None for those that are not there."""
        if not len(self._keys) or not keys:
            return [None] * len(keys)
        wanted = np.array(keys, dtype=f"S{KEY_BYTES}")
        places = np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)
        return [
            Segment(int(self._shard[i]), int(self._start[i]), int(self._length[i])) if is_there else None
            for i, is_there in zip(places, self._keys[places] == wanted, strict=True)
        ]

    def read(
        self, keys: Sequence[bytes], segments: Sequence[Segment], places: Sequence[np.ndarray], temperature: float = 1.0
    ) -> TokenRows:
        """Tokens of some segments, one segment after the other.

        Args:
            keys: of the segments.
            segments: what `find` said of them.
            places: of each segment the wanted tokens, [k] integers below its length.
            temperature: see `RecordFormat.decode`.

        Raises:
            MkdCacheError: a record is damaged, or not finite.
        """
        counts = [len(part) for part in places]
        records = np.empty((sum(counts), self.meta.records.dtype.itemsize), dtype=np.uint8)
        end = 0
        for segment, part in zip(segments, places, strict=True):
            begin, end = end, end + len(part)
            np.take(self.shards[segment.shard].records, segment.start + part, 0, records[begin:end], mode="clip")
        records = records.view(self.meta.records.dtype).reshape(-1)
        place = np.concatenate([*places, np.zeros(0, np.int64)])
        bad = damaged(records, np.repeat(key_words(keys), counts), place)
        if bad.any():
            first = int(np.repeat(np.arange(len(keys)), counts)[bad.argmax()])
            raise MkdCacheError(
                f"{self.flag} {self.folder}: a record of segment {keys[first].hex()} in shard "
                f"{self.shards[segments[first].shard].path.name} is damaged (its checksum does not fit): remove that "
                "shard with its .json file and write what is missing again (tools/cache_teacher.py verify)"
            )
        try:
            return self.meta.records.decode(records, temperature)
        except MkdCacheError as error:
            raise self._naming(error, keys, segments, np.split(records, np.cumsum(counts)[:-1])) from None

    def _naming(
        self, error: MkdCacheError, keys: Sequence[bytes], segments: Sequence[Segment], parts: Sequence[np.ndarray]
    ) -> MkdCacheError:
        """The error of decoding some segments' records, with the first segment that has it."""
        for key, segment, records in zip(keys, segments, parts, strict=True):
            try:
                self.meta.records.decode(records)
            except MkdCacheError:
                shard = self.shards[segment.shard].path.name
                return MkdCacheError(f"{self.flag} {self.folder}: segment {key.hex()} in shard {shard}: {error}")
        return error
