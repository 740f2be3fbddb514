"""A shard of a teacher cache: one safetensors file with the records of many segments, and the .json file beside it.

The .json file is the shard's manifest: size in bytes and SHA-256 of the shard, and a checksum of what precedes its
records (header, lengths and keys).
"""

import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mkd.errors import MkdCacheError
from mkd.teacher.cache.meta import CacheMeta
from mkd.utils.json_files import parse_json, read_json

KEY_BYTES = 16
_INDEX_BYTES, _INDEX_CHECKSUM = "index_bytes", "index_blake2b"
"""Keys of a manifest: how many bytes precede the records, and their checksum."""
_HEADER_BYTES = 1 << 20
"""Longest safetensors header of a shard, which describes three tensors."""


class CacheShard:
    """One file of a cache, memory-mapped."""

    def __init__(self, path: Path, meta: CacheMeta) -> None:
        """Map a file and check its size and header.

        Raises:
            MkdCacheError: it is missing, truncated or damaged, or belongs to another cache.
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
            differences = meta.shard_differences(self._header.get("__metadata__"))
            self._names_its_cache = differences is not None
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
        if differences:
            raise MkdCacheError(
                f"shard {path} belongs to another teacher cache (this one, the shard: {'; '.join(differences)}): move "
                "it and its .json file there"
            )

    def _check_sizes(self) -> None:
        if self.keys.shape != (len(self.lengths), KEY_BYTES):
            raise ValueError(f"keys of shape {self.keys.shape} for {len(self.lengths)} segments")
        count, record = self.records.shape
        if record != self._dtype.itemsize or count != self.lengths.sum(dtype=np.int64) or (self.lengths < 0).any():
            raise ValueError(f"{count} records of {record} bytes for {self.lengths.sum()} tokens")

    @property
    def is_checked(self) -> bool:
        """False if an older version of mkd wrote the shard, without a checksum of its keys or the properties of its
        cache."""
        return _INDEX_CHECKSUM in self.manifest and self._names_its_cache

    def _check_index(self, whole: np.ndarray, base: int) -> None:
        if _INDEX_CHECKSUM not in self.manifest:
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
