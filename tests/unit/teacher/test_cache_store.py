"""The folder of a teacher cache: lookup, killed and concurrent writers, and an error for every kind of damage."""

import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from mkd.errors import MkdCacheError
from mkd.teacher.cache.meta import META
from mkd.teacher.cache.store import TeacherStore
from mkd.teacher.cache.writer import StoreWriter
from tests.support.cached_targets import equal_targets, meta_of, some_segment

VOCAB, TOP_K, SEGMENTS = 307, 8, 40
META_OF_TEST = meta_of(true_vocab=VOCAB, top_k=TOP_K)


def fill(folder: Path, numbers=range(SEGMENTS), shard_bytes: int = 1 << 14) -> Path:
    writer = StoreWriter(folder, META_OF_TEST, shard_bytes=shard_bytes)
    for number in numbers:
        writer.add(*some_segment(number, VOCAB, TOP_K))
    writer.flush()
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return fill(tmp_path / "cache")


def contents(folder: Path) -> dict[bytes, bytes]:
    """Key -> records; fails on duplicates."""
    found = [part for shard in TeacherStore(folder, "--cache").shards for part in shard.segments()]
    assert len(found) == len(dict(found)), "duplicates"
    return {key: records.tobytes() for key, records in found}


def whole(store: TeacherStore, key: bytes):
    segment = store.find([key])[0]
    return store.read([key], [segment], [np.arange(segment.length)])


def test_round_trip(cache):
    store = TeacherStore(cache, "--cache")
    assert len(store.shards) > 2 and len(store) == SEGMENTS
    for number in range(SEGMENTS):
        key, targets = some_segment(number, VOCAB, TOP_K)
        record = META_OF_TEST.records
        assert equal_targets(whole(store, key), record.decode(record.encode(targets)))
    assert store.tokens == sum(len(some_segment(n, VOCAB, TOP_K)[1].ids) for n in range(SEGMENTS))


def test_some_tokens_of_some_segments(cache):
    store = TeacherStore(cache, "--cache")
    keys = [some_segment(number, VOCAB, TOP_K)[0] for number in (7, 3, 7, 30)]
    segments = store.find(keys)
    positions = [np.arange(segment.length)[::-1][: 1 + i] for i, segment in enumerate(segments)]
    targets = store.read(keys, segments, positions)
    expected = np.concatenate([whole(store, key).logits[part] for key, part in zip(keys, positions, strict=True)])
    assert np.array_equal(targets.logits, expected)


def test_unknown_keys(cache, tmp_path):
    assert TeacherStore(cache, "--cache").find([b"x" * 16, b"\0" * 16, b"\xff" * 16]) == [None] * 3
    StoreWriter(tmp_path / "empty", META_OF_TEST)
    assert TeacherStore(tmp_path / "empty", "--cache").find([b"x" * 16]) == [None]


def test_keys_with_trailing_zeros(tmp_path):
    targets = some_segment(0, VOCAB, TOP_K)[1]
    writer = StoreWriter(tmp_path, META_OF_TEST)
    keys = [b"ab" + b"\0" * 14, b"\0" * 16, b"ab\0c" + b"\0" * 12]
    for key in keys:
        writer.add(key, targets)
    writer.flush()
    store = TeacherStore(tmp_path, "--cache")
    assert store.keys() == set(keys) == StoreWriter(tmp_path, META_OF_TEST).known
    assert None not in store.find(keys) and store.find([b"ab\0d" + b"\0" * 12]) == [None]


def test_a_segment_is_stored_once(cache):
    before = contents(cache)
    fill(cache, [*range(SEGMENTS), *range(SEGMENTS)])
    assert contents(cache) == before


def test_two_writers_share_a_folder(tmp_path):
    one, other = (StoreWriter(tmp_path, META_OF_TEST) for _ in range(2))
    for number in range(SEGMENTS):
        (one, other)[number % 2].add(*some_segment(number, VOCAB, TOP_K))
        other.add(*some_segment(0, VOCAB, TOP_K))  # both store it: a harmless duplicate
        (one, other)[number % 3 > 0].flush()
    one.flush()
    other.flush()
    store = TeacherStore(tmp_path, "--cache")
    assert store.keys() == {some_segment(n, VOCAB, TOP_K)[0] for n in range(SEGMENTS)}
    whole(store, some_segment(0, VOCAB, TOP_K)[0])


def write_all(folder: Path, segments: list) -> None:
    writer = StoreWriter(folder, META_OF_TEST, shard_bytes=1)  # one shard per segment
    for key, targets in segments:
        writer.add(key, targets)
    writer.flush()


@pytest.mark.parametrize("deaths", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_writers(tmp_path, cache, deaths):
    """Each resumes where the last one was killed; the result is that of an undisturbed writer."""
    folder, rng, died = tmp_path / "killed", random.Random(0), 0
    segments = [
        some_segment(n, VOCAB, TOP_K) for n in range(SEGMENTS)
    ]  # before the fork, after which torch does not work
    context = multiprocessing.get_context("fork")
    for _ in range(deaths):
        before = len(list(folder.glob("*.safetensors"))) if folder.is_dir() else 0
        writer = context.Process(target=write_all, args=(folder, segments))
        writer.start()
        while writer.is_alive() and len(list(folder.glob("*.safetensors"))) <= before:
            time.sleep(0.001)
        time.sleep(rng.random() * 0.005)
        writer.kill()
        writer.join()
        died += writer.exitcode == -signal.SIGKILL
        for shard in TeacherStore(folder, "--cache").shards:
            shard.check()
    assert died > deaths / 2
    write_all(folder, segments)
    assert contents(folder) == contents(cache)


def test_shard_without_manifest(cache):
    """The writer was killed between renaming the shard and writing its .json."""
    before, shard = contents(cache), next(cache.glob("*.safetensors"))
    shard.with_suffix(".json").unlink()
    assert len(contents(cache)) < len(before)
    StoreWriter(cache, META_OF_TEST)
    assert contents(cache) == before


def test_stale_partial_files_are_removed(cache):
    for name, age in ((".shard-a-0.safetensors.partial", 7200), (".shard-b-0.safetensors.partial", 1)):
        (cache / name).write_bytes(b"x")
        os.utime(cache / name, (time.time() - age,) * 2)
    StoreWriter(cache, META_OF_TEST)
    assert [path.name for path in cache.glob(".*")] == [".shard-b-0.safetensors.partial"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"teacher": "other"}, "teacher: "), ({"tokenizer": None}, "tokenizer: "), ({"top_k": 9}, "top_k: 8, 9")],
)
def test_folder_of_another_teacher_is_refused(cache, changes, message):
    changes = {"true_vocab": VOCAB, "top_k": TOP_K} | changes
    with pytest.raises(MkdCacheError, match="other properties"):
        StoreWriter(cache, meta_of(**changes))
    assert message in META_OF_TEST.differences(meta_of(**changes))[0]


def test_foreign_folder(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(MkdCacheError, match="not a teacher cache, and not empty"):
        StoreWriter(tmp_path, META_OF_TEST)
    with pytest.raises(MkdCacheError, match="is not a teacher cache: it has no meta"):
        TeacherStore(tmp_path, "--cache")
    with pytest.raises(MkdCacheError, match="does not exist"):
        TeacherStore(tmp_path / "nowhere", "--cache")


@pytest.mark.parametrize("name", [f"chats-{'0a' * 16}-chat.json", f"{'0a' * 16}-GPTDataset-train-document_index.npy"])
def test_data_cache_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(MkdCacheError, match=r"not a teacher cache, but mkd's data cache .--data-cache-path; "):
        StoreWriter(tmp_path, META_OF_TEST)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda meta: meta | {"version": 2}, "has format version 2, this version of mkd reads 1"),
        (lambda meta: meta | {"format": "other"}, "meta.json has the format 'other'"),
        (lambda meta: {name: value for name, value in meta.items() if name != "top_k"}, "damaged"),
        (lambda meta: [meta], "damaged"),
    ],
)
def test_invalid_meta(cache, change, message):
    (cache / META).write_text(json.dumps(change(json.loads((cache / META).read_text()))))
    with pytest.raises(MkdCacheError, match=message):
        TeacherStore(cache, "--cache")


def test_shards_keep_no_file_open(tmp_path):
    writer, segments = StoreWriter(tmp_path, META_OF_TEST), [some_segment(n, VOCAB, TOP_K) for n in range(40)]
    for segment in segments:
        writer.add(*segment)
        writer.flush()
    before = len(os.listdir("/proc/self/fd"))
    store = TeacherStore(tmp_path, "--cache")
    assert all(len(whole(store, key).ids) == len(targets.ids) for key, targets in segments)
    assert len(store.shards) == 40 and len(os.listdir("/proc/self/fd")) < before + 10


def test_missing_shard(cache):
    next(cache.glob("*.safetensors")).unlink()
    with pytest.raises(MkdCacheError, match="is missing"):
        TeacherStore(cache, "--cache")


def test_truncated_shard(cache):
    shard = next(cache.glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(MkdCacheError, match=r"truncated: \d+ bytes instead of"):
        TeacherStore(cache, "--cache")


def flip(file: Path, offset: int) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 16
    file.write_bytes(content)


def test_flipped_byte(cache):
    """Detected both when the record is read and when the whole file is checked."""
    shard = TeacherStore(cache, "--cache").shards[0]
    flip(shard.path, -20)
    store = TeacherStore(cache, "--cache")
    with pytest.raises(MkdCacheError, match="its SHA-256"):
        store.shards[0].check()
    with pytest.raises(MkdCacheError, match="its checksum does not match"):
        whole(store, shard.keys[-1].tobytes())
    whole(store, shard.keys[0].tobytes())


@pytest.mark.parametrize("offset", [9, 7, 4, 0, 114, 200], ids=["name", "huge", "large", "small", "shape", "offsets"])
def test_flipped_byte_in_the_header(cache, offset):
    """Including the bytes that hold the length of the header."""
    flip(next(cache.glob("*.safetensors")), offset)
    with pytest.raises(MkdCacheError, match="is damaged"):
        TeacherStore(cache, "--cache")


def test_nan_in_the_store(tmp_path):
    """Written by code that does not validate."""
    key, targets = some_segment(0, VOCAB, TOP_K)
    records = META_OF_TEST.records.encode(targets)
    records["values"][0, 3] = np.nan
    writer = StoreWriter(tmp_path, META_OF_TEST)
    writer.add_records(key, records)
    writer.add(*some_segment(1, VOCAB, TOP_K))
    writer.flush()
    store = TeacherStore(tmp_path, "--cache")
    keys = [some_segment(1, VOCAB, TOP_K)[0], key]
    with pytest.raises(MkdCacheError, match=f"--cache .*segment {key.hex()} in shard shard-.*: .*not finite"):
        store.read(keys, store.find(keys), [np.arange(1), np.arange(len(targets.ids))])
