"""Describes, checks and merges caches; needs no model."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mkd.errors import MkdCacheError
from mkd.teacher.cache.meta import META, CacheMeta
from mkd.teacher.cache.record_format import damaged, key_words
from mkd.teacher.cache.shard import CacheShard
from mkd.teacher.cache.store import TeacherStore, warn_of_older_version
from mkd.teacher.cache.writer import StoreWriter, check_folder
from mkd.teacher.inference.known_text import KnownTextFile, known_text_of
from mkd.utils.atomic_files import new_folder


def describe(folder: Path, flag: str) -> dict[str, str]:
    """Contents of a cache: label -> text.

    Args:
        folder: the cache.
        flag: the flag that names it, for messages.

    Raises:
        MkdCacheError: the folder is not a cache, or a shard is missing or truncated.
    """
    store = TeacherStore(folder, flag)
    meta, segments, tokens = store.meta, len(store), store.tokens
    temperatures = ", ".join(f"{t:g}" for t in meta.temperatures)
    if meta.samples:
        targets = f"{meta.samples} samples per token at temperature {meta.temperatures[-1]:g}"
    else:
        targets = f"the {meta.top_k} most probable tokens, {meta.values}; tails at temperature {temperatures}"
    size = sum(shard.path.stat().st_size for shard in store.shards)
    duplicates = segments - len(store.keys())
    return {
        "teacher": f"{meta.teacher} in {meta.teacher_dtype}",
        "tokenizer": meta.tokenizer or "not known",
        "vocabulary": f"{meta.true_vocab:,} tokens",
        "targets": targets,
        "positions": f"restart at each {meta.positions}",
        "segments": f"{segments:,}" + (f", {duplicates:,} of them duplicates (merge drops them)" if duplicates else ""),
        "tokens": f"{tokens:,}",
        "bytes": f"{size:,}, {size / max(tokens, 1):.1f} per token, {meta.records.dtype.itemsize} of them its record",
        "shards": f"{len(store.shards):,}",
    }


def problems(folder: Path, flag: str) -> list[str]:
    """Read a whole cache; one text per damaged shard, an empty list if there is none.

    Raises:
        MkdCacheError: the folder is not a cache.
    """
    meta, found, shards = CacheMeta.read(folder, flag), [], []
    names = {path.stem for kind in ("json", "safetensors") for path in folder.glob(f"*.{kind}") if path.name != META}
    for name in sorted(names):
        path = folder / f"{name}.safetensors"
        try:
            if not path.with_suffix(".json").exists():
                raise MkdCacheError(
                    f"shard {path} has no .json file yet: its writer is running, or was killed; run the write command "
                    "again"
                )
            shard = CacheShard(path, meta)
            shard.check()
            _check_records(shard, meta)
            shards.append(shard)
        except MkdCacheError as error:
            found.append(str(error))
    warn_of_older_version(folder, flag, meta, shards)
    return found


def _check_records(shard: CacheShard, meta: CacheMeta) -> None:
    for key, records in shard.segments():
        words = np.repeat(key_words([key]), len(records))
        if damaged(records, words, np.arange(len(records))).any():
            raise MkdCacheError(f"shard {shard.path}: a record of segment {key.hex()} does not match its checksum")
        try:
            meta.records.decode(records)
        except MkdCacheError as error:
            raise MkdCacheError(f"shard {shard.path}: segment {key.hex()}: {error}") from error


def merge(out: Path, parts: Sequence[Path], flag: str) -> int:
    """Merge several caches into a new one, each segment once. The folder appears when it is complete.

    Args:
        out: the new folder.
        parts: the caches to merge.
        flag: the flag that names the folders, for messages.

    Returns:
        Number of segments that were dropped as duplicates.

    Raises:
        MkdCacheError: the caches have different teachers, tokenizers or options; one is damaged; or `out` exists.
        MkdTeacherError: they have answers of two servers with one name and different weights.
    """
    if out.exists():
        raise MkdCacheError(f"{flag} {out} exists: give the name of a new folder")
    stores = [TeacherStore(part, flag) for part in parts]
    for store in stores[1:]:
        if differences := stores[0].meta.differences(store.meta):
            raise MkdCacheError(
                f"{flag}: {stores[0].folder} and {store.folder} cannot be merged ({'; '.join(differences)})"
            )
    known = known_text_of([KnownTextFile(flag, part) for part in parts])
    meta, duplicates = stores[0].meta, 0
    check_folder(out, meta, flag)
    with new_folder(out) as partial:
        writer = StoreWriter(partial, meta, flag)
        for store in stores:
            for shard in store.shards:
                shard.check()
                for key, records in shard.segments():
                    duplicates += key in writer.known
                    writer.add_records(key, records)
        writer.flush()
        if known is not None:
            KnownTextFile(flag, partial).write(known)
    return duplicates
