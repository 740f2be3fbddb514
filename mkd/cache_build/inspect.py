"""Looking into finished caches: what they hold, whether it is whole, and several into one. Needs no model."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mkd.errors import MkdCacheError
from mkd.teacher.cache.record_format import damaged, key_words
from mkd.teacher.cache.store import META, CacheMeta, Shard, TeacherStore
from mkd.teacher.cache.writer import StoreWriter, check_folder
from mkd.utils.atomic_files import new_folder, partial_path


def describe(folder: Path, flag: str) -> dict[str, str]:
    """What a cache holds, a line each.

    Args:
        folder: of the cache.
        flag: that named it, for messages.

    Raises:
        MkdCacheError: it is no cache, or a shard is missing or torn.
    """
    store = TeacherStore(folder, flag)
    meta, segments, tokens = store.meta, len(store), store.tokens
    temperatures = ", ".join(f"{t:g}" for t in meta.temperatures)
    if meta.samples:
        answers = f"{meta.samples} draws a token at temperature {meta.temperatures[-1]:g}"
    else:
        answers = f"the {meta.top_k} most probable tokens, {meta.values}; tails at temperature {temperatures}"
    size = sum(shard.path.stat().st_size for shard in store.shards)
    doubles = segments - len(store.keys())
    return {
        "teacher": f"{meta.teacher} in {meta.teacher_dtype}",
        "tokenizer": meta.tokenizer or "not known",
        "vocabulary": f"{meta.true_vocab:,} tokens",
        "answers": answers,
        "positions": f"begin anew with each {meta.positions}",
        "segments": f"{segments:,}" + (f", {doubles:,} of them doubles (merge drops them)" if doubles else ""),
        "tokens": f"{tokens:,}",
        "bytes": f"{size:,}, {size / max(tokens, 1):.1f} a token, {meta.records.dtype.itemsize} of them its record",
        "shards": f"{len(store.shards):,}",
    }


def problems(folder: Path, flag: str) -> list[str]:
    """What is wrong with a cache, after reading all of it; nothing if it is whole.

    Raises:
        MkdCacheError: it is no cache.
    """
    meta, found = CacheMeta.read(folder, flag), []
    names = {path.stem for kind in ("json", "safetensors") for path in folder.glob(f"*.{kind}") if path.name != META}
    for name in sorted(names):
        path = folder / f"{name}.safetensors"
        try:
            if not path.with_suffix(".json").exists():
                raise MkdCacheError(f"shard {path} has no .json file yet: its writer runs, or was killed; write on")
            shard = Shard(path, meta)
            shard.check()
            _check_records(shard, meta)
        except MkdCacheError as error:
            found.append(str(error))
    return found


def _check_records(shard: Shard, meta: CacheMeta) -> None:
    for key, records in shard.segments():
        word = np.repeat(key_words([key]), len(records))
        if damaged(records, word, np.arange(len(records))).any():
            raise MkdCacheError(f"shard {shard.path}: a record of segment {key.hex()} does not fit its checksum")
        try:
            meta.records.decode(records)
        except MkdCacheError as error:
            raise MkdCacheError(f"shard {shard.path}: segment {key.hex()}: {error}") from error


def merge(out: Path, parts: Sequence[Path], flag: str) -> int:
    """Several caches of one kind into a new one, every segment once; it appears when it is whole.

    Args:
        out: the new folder.
        parts: caches.
        flag: of the folders, for messages.

    Returns:
        How many segments were left out because an earlier cache has them.

    Raises:
        MkdCacheError: the caches are of different teachers, tokenizers or settings; one is damaged; or `out` is there.
    """
    if out.exists():
        raise MkdCacheError(f"{flag} {out} exists: give the name of a new folder")
    stores = [TeacherStore(part, flag) for part in parts]
    for store in stores[1:]:
        if differences := stores[0].meta.differences(store.meta):
            raise MkdCacheError(
                f"{flag}: {stores[0].folder} and {store.folder} do not go together ({'; '.join(differences)})"
            )
    meta, doubles = stores[0].meta, 0
    check_folder(partial_path(out), meta, flag)
    with new_folder(out) as partial:
        writer = StoreWriter(partial, meta, flag)
        for store in stores:
            for shard in store.shards:
                shard.check()
                for key, records in shard.segments():
                    doubles += key in writer.known
                    writer.add_records(key, records)
        writer.flush()
    return doubles
