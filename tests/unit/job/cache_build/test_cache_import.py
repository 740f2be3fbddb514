"""Import of targets from other tools: every target belongs to the right token, and invalid files are refused."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mkd.data.segments import segment_hash
from mkd.errors import MkdCacheError, MkdDataError
from mkd.job.cache_build.import_axolotl import ImportCounts, ImportOptions, import_targets
from mkd.teacher.cache.lookup import ReadRequest
from mkd.teacher.cache.meta import CacheMeta
from mkd.teacher.cache.reader import CacheReader
from mkd.teacher.cache.record_format import TokenTargets
from mkd.teacher.cache.store import TeacherStore
from tests.support.tolerance import FP32, assert_close_norm

VOCAB, TOP_K, PROMPT = 40, 6, 4


def make_text(seed: int, length: int = 14) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, and [length, VOCAB] float64 log-probabilities at each token, peaked at the token itself."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (length,), generator=generator)
    logits = 3 * torch.randn(length, VOCAB, generator=generator)
    logits[torch.arange(length), ids] += 5
    return ids, logits.double().log_softmax(1)


def record_of(seed: int, align: str = "token", renormalized: bool = False, **changes: Any) -> dict[str, Any]:
    """A record of a data set: padding before the first supervised token, labels from there on."""
    ids, log_p = make_text(seed)
    top, top_ids = log_p.topk(TOP_K)
    if renormalized:
        top = top.log_softmax(1)
    targets = [([0] * TOP_K, [-1e9] * TOP_K)] * PROMPT + list(
        zip(top_ids[PROMPT:].tolist(), top[PROMPT:].tolist(), strict=True)
    )
    if align == "next":
        targets = [*targets[1:], ([0] * TOP_K, [-1e9] * TOP_K)]
    return {
        "input_ids": ids.tolist(),
        "labels": [-100] * PROMPT + ids[PROMPT:].tolist(),
        "target_token_ids": [row for row, _ in targets],
        "target_logprobs": [row for _, row in targets],
    } | changes


def write_records(file: Path, records: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def run_import(tmp_path: Path, records: list[dict[str, Any]], **changes: Any) -> tuple[CacheMeta, ImportCounts]:
    file = write_records(tmp_path / "targets.jsonl", records)
    options = {"out": tmp_path / "cache", "files": (file,), "teacher": "somebody", "tokenizer": "k" * 32}
    return import_targets(ImportOptions(**{**options, "vocab": VOCAB, "lossless": True, **changes}))


def stored(folder: Path, seed: int) -> TokenTargets:
    store = TeacherStore(folder, "--cache")
    key = segment_hash(make_text(seed)[0][:-1])
    (segment,) = store.find([key])
    return store.read([key], [segment], [np.arange(segment.length)])


@pytest.mark.parametrize("align", ["token", "next"])
def test_targets_belong_to_the_next_token(tmp_path: Path, align: str) -> None:
    meta, counts = run_import(tmp_path, [record_of(seed, align) for seed in range(3)], align=align)
    assert (meta.top_k, meta.labels_only, meta.has_tail, counts) == (TOP_K, True, True, ImportCounts(3, 0))
    for seed in range(3):
        ids, log_p = make_text(seed)
        targets = stored(tmp_path / "cache", seed)
        assert len(targets.ids) == len(ids) - 1
        for t in range(PROMPT, len(ids)):
            expected, top_ids = log_p[t].topk(TOP_K)
            order = top_ids.sort().indices
            assert targets.ids[t - 1].tolist() == top_ids[order].tolist()
            assert_close_norm(torch.from_numpy(targets.logits[t - 1]), expected[order], FP32, "log p")
            tail = log_p[t].index_fill(0, top_ids, -torch.inf).logsumexp(0)
            assert abs(targets.tail_lse[t - 1, 0] - tail) < 1e-3 and targets.lse[t - 1, 0] == 0
            own = log_p[t, ids[t]].item()
            if ids[t] in top_ids:
                assert targets.label_log_prob[t - 1] == pytest.approx(own, abs=1e-5)
            else:  # only a bound is known
                assert own - 1e-5 <= targets.label_log_prob[t - 1] <= expected[-1] + 1e-5


@pytest.mark.parametrize(("actual", "given"), [("next", "token"), ("token", "next")])
def test_wrong_alignment_is_refused(tmp_path: Path, actual: str, given: str) -> None:
    with pytest.raises(MkdDataError, match="--align"):
        run_import(tmp_path, [record_of(seed, actual) for seed in range(5)], align=given)


def test_without_a_tail(tmp_path: Path) -> None:
    meta, _ = run_import(tmp_path, [record_of(seed, renormalized=True) for seed in range(3)])
    assert not meta.has_tail
    targets = stored(tmp_path / "cache", 0)
    assert_close_norm(torch.from_numpy(np.exp(targets.logits[PROMPT:]).sum(1)), torch.ones(13 - PROMPT), FP32, "sum")


def test_incomplete_texts_are_left_out(tmp_path: Path) -> None:
    """Texts without targets for a supervised token, or without supervised tokens."""
    gap, idle = record_of(1), record_of(2, labels=[-100] * 14)
    gap["target_token_ids"][8], gap["target_logprobs"][8] = [], []
    _, counts = run_import(tmp_path, [record_of(0), gap, idle, record_of(3)])
    assert counts == ImportCounts(stored=2, incomplete=2)
    assert len(TeacherStore(tmp_path / "cache", "--cache")) == 2


def test_smaller_top_k_than_in_the_file(tmp_path: Path) -> None:
    run_import(tmp_path, [record_of(0)], top_k=2)
    log_p = make_text(0)[1][PROMPT]
    targets = stored(tmp_path / "cache", 0)
    assert set(targets.ids[PROMPT - 1].tolist()) == set(log_p.topk(2).indices.tolist())
    tail = log_p.index_fill(0, log_p.topk(2).indices, -torch.inf).logsumexp(0)
    assert targets.tail_lse[PROMPT - 1, 0] == pytest.approx(tail.item(), abs=1e-3)


def short_row() -> dict[str, Any]:
    record = record_of(1)
    for name in ("target_token_ids", "target_logprobs"):
        record[name][9] = record[name][9][:2]
    return record


def foreign_id() -> dict[str, Any]:
    record = record_of(1)
    record["target_token_ids"][9][0] = VOCAB
    return record


def changed_row(value: float) -> dict[str, Any]:
    record = record_of(1)
    record["target_logprobs"][9][0] = value
    return record


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([record_of(0), changed_row(float("nan"))], "line 2: target_logprobs has the list .*not log-probabilities"),
        ([record_of(0), changed_row(0.5)], "line 2: target_logprobs has the list .*not log-probabilities"),
        ([record_of(0) | {"target_logprobs": None}], "line 1 has no column target_logprobs"),
        ([record_of(0), record_of(1, labels=[1, 2])], "line 2: input_ids has 14 entries, labels 2"),
        ([*[record_of(n) for n in range(64)], short_row()], "line 65: token 9 has 2 targets, others have 6"),
        ([*[record_of(n) for n in range(64)], foreign_id()], "line 65: target_token_ids has id 40"),
        ([record_of(0, labels=[-100] * 14)], "no text has a supervised token"),
        ([record_of(0, input_ids=[0.5] * 14)], "line 1: input_ids has a list of float64, not of integers"),
        ([record_of(0, input_ids=["7"] * 14)], "line 1: input_ids has a list of <U1, not of integers"),
        ([record_of(0, input_ids=[10**30] * 14)], "line 1: input_ids has a list of object, not of integers"),
        ([record_of(0, input_ids=[[1], [1, 2]])], "line 1: input_ids has a list that is not one of numbers"),
        ([record_of(0, input_ids=7)], "line 1: input_ids is a int, not a list"),
        ([record_of(0, labels={"a": 1})], "line 1: labels has .* where a list of numbers is needed"),
        ([record_of(0, target_token_ids=[[True]] * 14)], "line 1: target_token_ids has a list of bool"),
        ([record_of(0, target_logprobs=["-1"] * 14)], "line 1: target_logprobs has '-1' where a list"),
    ],
    ids=[
        *("nan", "probabilities", "column", "lengths", "short", "vocabulary", "nothing"),
        *("fractions", "texts", "large", "ragged", "a number", "labels", "booleans", "characters"),
    ],
)
def test_invalid_records(tmp_path: Path, records: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(MkdDataError, match=message):
        run_import(tmp_path, records)


def test_tokens_without_targets_are_refused(tmp_path: Path) -> None:
    """The job's data has more supervised tokens than the imported data set."""
    meta, _ = run_import(tmp_path, [record_of(0)], lossless=False)
    store = TeacherStore(tmp_path / "cache", "--cache")
    key = segment_hash(make_text(0)[0][:-1])
    segments, reader = store.find([key]), CacheReader(store, TOP_K, 1.0)

    def read(*positions: int) -> torch.Tensor:
        tokens = np.array(positions)
        return reader.read(ReadRequest([key], segments, [tokens], tokens, (1, 13)))

    assert meta.labels_only and read(*range(PROMPT - 1, 13)).any()
    with pytest.raises(
        MkdCacheError, match=f"segment {key.hex()} has no targets for the token at position {PROMPT - 2}"
    ):
        read(*range(PROMPT - 2, 13))


def test_unreadable_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content, message in (
        ("torn.jsonl", "{", "line 1 is not JSON"),
        ("list.jsonl", "[1]", "line 1 is not a JSON object"),
        ("targets.csv", "", r"neither .jsonl nor .parquet"),
        ("targets.parquet", "PAR", "pyarrow"),
    ):
        (tmp_path / name).write_text(content)
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(MkdDataError, match=message):
            run_import(tmp_path, [], files=(tmp_path / name,))
    with pytest.raises(MkdDataError, match="does not exist"):
        run_import(tmp_path, [], files=(tmp_path / "nowhere.jsonl",))


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = tmp_path / "targets.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([record_of(seed) for seed in range(3)]), file)
    _, counts = run_import(tmp_path, [], files=(file,))
    assert counts == ImportCounts(3, 0)
    (tmp_path / "torn.parquet").write_bytes(file.read_bytes()[:-10])
    with pytest.raises(MkdDataError, match="cannot be read as parquet"):
        run_import(tmp_path, [], files=(tmp_path / "torn.parquet",))


def test_cache_of_another_teacher(tmp_path: Path) -> None:
    run_import(tmp_path, [record_of(0)])
    run_import(tmp_path, [record_of(0), record_of(1)])
    assert len(TeacherStore(tmp_path / "cache", "--cache")) == 2
    with pytest.raises(MkdCacheError, match="teacher: somebody else, somebody"):
        run_import(tmp_path, [record_of(0)], teacher="somebody else")


def test_lines_that_are_not_utf_8_are_named(tmp_path: Path) -> None:
    (tmp_path / "targets.jsonl").write_bytes(json.dumps(record_of(0)).encode() + b'\n{"input_ids": "\xff"}\n')
    options = {"out": tmp_path / "cache", "files": (tmp_path / "targets.jsonl",), "teacher": "T", "tokenizer": None}
    with pytest.raises(MkdDataError, match="line 2 is not JSON"):
        import_targets(ImportOptions(**options, vocab=VOCAB))
