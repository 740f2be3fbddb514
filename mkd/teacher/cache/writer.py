"""Writes the shards of a cache. A shard appears only when it is complete, and several writers may share a folder."""

import json
import os
import re
import secrets
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np

from mkd.errors import MkdCacheError
from mkd.teacher.cache.meta import META, CacheMeta
from mkd.teacher.cache.record_format import TokenTargets, seal
from mkd.teacher.cache.shard import KEY_BYTES, manifest_of
from mkd.teacher.cache.store import TeacherStore
from mkd.utils.atomic_files import naming, partial_path, publish_files, write_bytes

SHARD_BYTES = 256 << 20
_STALE_SECONDS = 3600.0
_DATA_CACHE = re.compile(r"(^|-)[0-9a-f]{32}-(chat|pairs|\w*Dataset)\b")
"""Names of files in the data cache: tokens of chats, aligned texts, Megatron's indices of documents."""
"""Age at which an unfinished file is taken to be left by a killed writer."""


class StoreWriter:
    """Adds segments to a folder. Concurrent writers each write shards of their own."""

    def __init__(self, folder: Path, meta: CacheMeta, flag: str = "--out", shard_bytes: int = SHARD_BYTES) -> None:
        """Create the folder, or continue it.

        Args:
            folder: new, empty, or a cache.
            meta: properties of the records to add.
            flag: the flag that names the folder, for messages.
            shard_bytes: size of the records at which a shard is closed.

        Raises:
            MkdCacheError: the folder holds something else, or was written with another teacher, tokenizer or options.
        """
        self._folder, self.meta, self._shard_bytes = folder, meta, shard_bytes
        _create(folder, meta, flag)
        recover(folder)
        self.known: set[bytes] = TeacherStore(folder, flag).keys()
        """Keys of all segments that are stored or buffered."""
        self._name, self._number = secrets.token_hex(6), 0
        self._keys: list[bytes] = []
        self._records: list[np.ndarray] = []
        self._bytes = 0

    def add(self, key: bytes, targets: TokenTargets) -> None:
        """Add a segment, all its tokens in order, unless its key is known."""
        if key not in self.known:
            self.add_records(key, self.meta.records.encode(targets))

    def add_records(self, key: bytes, records: np.ndarray) -> None:
        """`add`, with [length] records from `RecordFormat.encode`."""
        assert len(key) == KEY_BYTES
        if key in self.known:
            return
        records = np.ascontiguousarray(records)
        seal(records, key)
        self.known.add(key)
        self._keys.append(key)
        self._records.append(records)
        self._bytes += records.nbytes
        if self._bytes >= self._shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write the buffered segments as one shard."""
        if not self._keys:
            return
        path = self._folder / f"shard-{self._name}-{self._number:06d}.safetensors"
        partial = partial_path(path)
        try:
            with naming(path):
                _write(partial, self._keys, self._records, self.meta)
                publish_files({partial: path})
        finally:
            partial.unlink(missing_ok=True)
        _write_manifest(path)
        self._number += 1
        self._keys, self._records, self._bytes = [], [], 0


def check_folder(folder: Path, meta: CacheMeta, flag: str) -> None:
    """Check that a cache can be written into a folder, without changing it.

    Args:
        folder: new, empty, or a cache.
        meta: properties of the records to add.
        flag: the flag that names the folder, for messages.

    Raises:
        MkdCacheError: the folder cannot be written, holds something else, or was written with another teacher,
            tokenizer or options.
    """
    path = folder.absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise MkdCacheError(f"{flag} {folder} cannot be written: {existing} is not a folder, or is read-only")
    if not (folder / META).exists():
        others = [] if existing != path else [name for name in os.listdir(path) if not name.startswith(".")]
        if others and META not in others:  # META may appear meanwhile, from another writer
            tokens = next(filter(_DATA_CACHE.search, others), None)
            what = f"and not empty ({others[0]})"
            if tokens is not None:
                what = f"but mkd's data cache (--data-cache-path; {tokens})"
            raise MkdCacheError(f"{flag} {folder} is not a teacher cache, {what}: give a new folder")
        return
    differences = meta.differences(CacheMeta.read(folder, flag))
    if differences:
        raise MkdCacheError(
            f"{flag} {folder} is a cache with other properties (this job, the cache: {'; '.join(differences)}): give a "
            "new folder"
        )


def _create(folder: Path, meta: CacheMeta, flag: str) -> None:
    check_folder(folder, meta, flag)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / META).exists():
        write_bytes(folder / META, meta.to_json().encode())
    check_folder(folder, meta, flag)  # another writer may have created it first, with other options


def _write(path: Path, keys: list[bytes], records: list[np.ndarray], meta: CacheMeta) -> None:
    """Write a safetensors file with the tensors `lengths`, `keys` and `records`, and the properties of its cache."""
    lengths = np.array([len(part) for part in records], dtype="<i4")
    size = records[0].dtype.itemsize
    entries: dict[str, Any] = {"__metadata__": meta.to_shard()}
    end = 0
    for name, kind, shape, nbytes in (
        ("lengths", "I32", [len(keys)], lengths.nbytes),
        ("keys", "U8", [len(keys), KEY_BYTES], KEY_BYTES * len(keys)),
        ("records", "U8", [int(lengths.sum()), size], int(lengths.sum()) * size),
    ):
        begin, end = end, end + nbytes
        entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header + lengths.tobytes() + b"".join(keys))
        for part in records:
            file.write(part.tobytes())


def _write_manifest(path: Path) -> None:
    """Write the .json file of a shard, which makes the shard part of the cache."""
    write_bytes(path.with_suffix(".json"), json.dumps(manifest_of(path)).encode())


def recover(folder: Path) -> None:
    """Complete the work of a killed writer: add the missing manifests of shards, remove stale partial files.

    A shard gets its name only when it is complete, so every writer computes the same manifest for it.
    """
    for path in folder.glob("shard-*.safetensors"):
        if path.is_file() and not path.with_suffix(".json").exists():
            _write_manifest(path)
    for path in folder.glob(".*.partial"):
        try:
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()
        except FileNotFoundError:  # another writer removed it
            continue
