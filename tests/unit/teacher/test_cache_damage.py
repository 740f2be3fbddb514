"""A flipped bit in any file of a teacher cache is found, or changes no value that is read."""

import json
import logging
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mkd.errors import MkdCacheError
from mkd.job.cache_build.inspect import merge, problems
from mkd.teacher.cache.meta import META, CacheMeta
from mkd.teacher.cache.store import TeacherStore
from mkd.teacher.cache.writer import StoreWriter, recover
from tests.support.cached_targets import meta_of, some_segment

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "commit_715961d"
VOCAB, TOP_K = 307, 4


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache of three segments in two shards."""
    folder = tmp_path / "cache"
    writer = StoreWriter(folder, meta_of(true_vocab=VOCAB, top_k=TOP_K, values="log12", temperatures=(1.0, 2.0)))
    for number in (4, 15, 8):
        writer.add(*some_segment(number, VOCAB, TOP_K, (1.0, 2.0)))
        if number == 4:
            writer.flush()
    writer.flush()
    return folder


def everything(folder: Path) -> list[Any]:
    """All that a job reads: the properties, and the targets of each segment by its key."""
    store = TeacherStore(folder, "--cache")
    found: list[Any] = [store.meta]
    for key in sorted(store.keys()):
        (segment,) = store.find([key])
        targets = store.read([key], [segment], [np.arange(segment.length)], 1.0)
        found += [
            key,
            targets.ids.tobytes(),
            targets.logits.tobytes(),
            targets.lse.tobytes(),
            targets.tail_lse.tobytes(),
        ]
    return found


def flips(folder: Path, json_step: int, shard_step: int) -> Iterator[str]:
    """Bytes at these distances, with one bit flipped, in each file."""
    rng = random.Random(0)
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for offset in range(0, len(content), json_step if path.suffix == ".json" else shard_step):
            bit = 1 << rng.randrange(8)
            path.write_bytes(content[:offset] + bytes([content[offset] ^ bit]) + content[offset + 1 :])
            yield f"{path.name}, byte {offset}, bit {bit}"
        path.write_bytes(content)


def test_flipped_bits(cache: Path) -> None:
    before = everything(cache)
    harmless = 0
    for where in flips(cache, 1, 9):
        try:
            assert everything(cache) == before, where
        except MkdCacheError as error:
            assert len(str(error).splitlines()) == 1, where
        else:
            harmless += 1
    # The hashes that only `verify` compares, the names of keys that older caches lack, and whitespace.
    assert harmless < 600


def test_verify_finds_what_a_read_does_not_compare(cache: Path) -> None:
    before = everything(cache)
    for where in flips(cache, 5, 31):
        try:
            found = problems(cache, "verify")
        except MkdCacheError:
            continue
        if not found:
            assert everything(cache) == before, where


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("values", "fp32"),
        ("temperatures", [1.0, 4.0]),
        ("teacher", "x" * 32),
        ("tokenizer", None),
        ("samples", 3),
        ("positions", "document"),
        ("has_tail", False),
        ("labels_only", True),
        ("teacher_dtype", "bfloat16"),
        ("true_vocab", 306),
    ],
)
def test_changed_properties(cache: Path, name: str, value: Any) -> None:
    change(cache / META, name, value)
    with pytest.raises(MkdCacheError, match=r"meta.json is damaged \(its checksum does not match"):
        TeacherStore(cache, "--cache")
    with pytest.raises(MkdCacheError, match="checksum does not match"):
        problems(cache, "verify")


@pytest.mark.parametrize("moved", ["shard", "meta", "shard without manifest"])
def test_a_shard_of_another_cache(cache: Path, moved: str) -> None:
    """Its records have the same layout, and its own checksums match."""
    other = cache.with_name("other")
    writer = StoreWriter(other, replace(CacheMeta.read(cache, "--cache"), teacher="x" * 32))
    writer.add(*some_segment(23, VOCAB, TOP_K, (1.0, 2.0)))
    writer.flush()
    for path in other.glob("shard-*"):
        if moved == "shard" or (moved == "shard without manifest" and path.suffix != ".json"):
            shutil.copy(path, cache)
    if moved == "meta":
        shutil.copy(other / META, cache)
    recover(cache)
    words = rf"belongs to another teacher cache \(this one, the shard: teacher: {'x' if moved == 'meta' else 't'}+, "
    with pytest.raises(MkdCacheError, match=words):
        TeacherStore(cache, "--cache")
    assert any("belongs to another" in one for one in problems(cache, "verify"))


def change(file: Path, name: str, value: Any) -> None:
    content = json.loads(file.read_text())
    if value is ...:
        del content[name]
    else:
        content[name] = value
    file.write_text(json.dumps(content))


WRONG_TYPES = {
    "teacher": [None, 3, ["x"]],
    "tokenizer": [3, {}],
    "true_vocab": ["307", 307.0, True, -1, 0, 10**30, None],
    "top_k": ["4", 4.0, 0, 400, None, True],
    "values": [None, 3, "log13", [], "counts"],
    "temperatures": [None, 1.0, [], ["1"], [2.0], [1.0, 0.0], [1.0, 1e999], [1.0, 10**400], [1.0] * 1000, {"1.0": 1}],
    "samples": [-1, 1.0, "0", 5000, 2],
    "teacher_dtype": [None, 16],
    "positions": [None, "row"],
    "labels_only": [0, None, "false"],
    "has_tail": [1, None],
    "version": [2, "1", None],
    "record": [None, {}, {"bytes": 4}],
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_wrong_types_without_a_checksum(cache: Path, name: str) -> None:
    change(cache / META, "checksum", ...)
    content = (cache / META).read_text()
    for value in [*WRONG_TYPES[name], ...]:
        (cache / META).write_text(content)
        change(cache / META, name, value)
        with pytest.raises(MkdCacheError) as caught:
            TeacherStore(cache, "--cache")
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("text", ["[]", "3", "null", "", "{}", "[" * 100_000, '{"format": ' + "1" * 5000 + "}"])
@pytest.mark.parametrize("which", ["meta", "shard"])
def test_other_json(cache: Path, text: str, which: str) -> None:
    file = cache / META if which == "meta" else next(cache.glob("shard-*.json"))
    file.write_text(text)
    with pytest.raises(MkdCacheError, match="damaged") as caught:
        TeacherStore(cache, "--cache")
    assert len(str(caught.value).splitlines()) == 1


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("mkd"), "propagate", True)
    return caplog


@pytest.mark.parametrize("name", ["cache_log12", "cache_fp32", "cache_counts"])
def test_older_caches_are_read_with_a_warning(tmp_path: Path, warnings: pytest.LogCaptureFixture, name: str) -> None:
    folder = Path(shutil.copytree(FIXTURES / name, tmp_path / name))
    old = everything(folder)
    assert "older version of mkd" in warnings.text and "merge" in warnings.text
    assert not old[0].is_checked
    warnings.clear()
    assert problems(folder, "verify") == [] and "older version of mkd" in warnings.text
    warnings.clear()
    merge(tmp_path / "new", [folder], "merge")
    warnings.clear()
    assert everything(tmp_path / "new") == old
    assert warnings.text == ""
    assert CacheMeta.read(tmp_path / "new", "--cache").is_checked


def test_older_caches_are_continued(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FIXTURES / "cache_log12", tmp_path / "cache"))
    meta = CacheMeta.read(folder, "--out")
    before = TeacherStore(folder, "--out").tokens
    writer = StoreWriter(folder, meta)
    writer.add(*some_segment(3, meta.true_vocab, meta.top_k, meta.temperatures))
    writer.flush()
    assert TeacherStore(folder, "--out").tokens > before


def test_truncated_while_it_is_read(cache: Path) -> None:
    """A mapped file would end the process with SIGBUS."""
    store = TeacherStore(cache, "--cache")
    (path,) = [shard.path for shard in store.shards if len(shard.keys) == 2]
    key = next(shard for shard in store.shards if shard.path == path).keys[0].tobytes()
    (segment,) = store.find([key])
    os.truncate(path, 100)
    with pytest.raises(MkdCacheError, match=r"was truncated while it is read: 100 bytes"):
        store.read([key], [segment], [np.arange(segment.length)])


@pytest.mark.parametrize("begin", [-1, 2**62, "7", None, 1.5])
def test_a_shard_without_a_manifest_is_checked(cache: Path, begin: Any) -> None:
    """A writer that continues a cache completes such shards."""
    shard = next(cache.glob("shard-*.safetensors"))
    shard.with_suffix(".json").unlink()
    header = json.dumps({"records": {"data_offsets": [begin, 4]}}).encode()
    shard.write_bytes(len(header).to_bytes(8, "little") + header + b"0" * 64)
    with pytest.raises(MkdCacheError, match=r"is damaged .*: remove it"):
        recover(cache)
