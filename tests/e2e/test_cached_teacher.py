"""--kd-teacher-cache on the command line: trains like the online top-k, resumes, and refuses unsuitable flags."""

import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.megatron.folder import TRACKER
from mkd.data.segments import segment_hash
from mkd.errors import MkdCacheError, MkdConfigError
from mkd.job.job import Job
from mkd.job.plan.plan import plan
from mkd.teacher.cache.meta import META, CacheMeta
from mkd.teacher.cache.store import TeacherStore
from mkd.teacher.cache.writer import StoreWriter
from tests.e2e.test_bad_input import attempt, refused  # noqa: F401
from tests.e2e.test_resume import steps, tensors
from tests.support.cached_targets import some_segment
from tests.support.e2e.small_job import (
    END,
    ROOT,
    VOCAB,
    SmallJob,
    make_small_job,
    make_tokenizer,
    run,
    text,
    write_data,
)
from tests.support.hf_folders import change_json
from tests.support.tolerance import FP32

TOP_K = 16
FOUR = {
    "--kd-packing": "best_fit",
    "--kd-packing-multiple": 8,
    "--train-iters": 4,
    "--lr-decay-iters": 4,
    "--save-interval": 2,
    "--global-batch-size": 4,
    "--seq-length": 64,
}
WRITTEN_WITH = {"--seed": 77, "--micro-batch-size": 1, "--tensor-model-parallel-size": 2}
"""Flags that the cache is written with: another order, other microbatches, another layout."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
    job = make_small_job(tmp_path_factory.mktemp("cached"))
    return replace(job, data=write_data(job.root / "some_documents", documents()))


def documents() -> list[list[int]]:
    """Few enough that the cache has all of them."""
    tokenizer = make_tokenizer()
    parts = [part for part in text().split("\n\n") if part][:60]
    return [[*tokenizer.encode(part).ids, tokenizer.token_to_id(END)] for part in parts]


def fingerprint(job: SmallJob) -> str:
    return HFFolder(job.teacher, "--kd-teacher-hf").fingerprint()


@pytest.fixture(scope="module")
def cache(job: SmallJob) -> Path:
    """Written by the tool, in the one pass over every text that it makes without a number of steps."""
    out = job.root / "targets"
    flags = job.flags({**FOUR, **WRITTEN_WITH, "--train-iters": None, "--eval-iters": 4})
    result = run(
        ["write", "--out", str(out), "--top-k", str(TOP_K), "--lossless", "--", *flags],
        ranks=2,
        script=ROOT / "tools" / "cache_teacher.py",
    )
    assert result.status == 0, result.output[-3000:] + result.errors[-6000:]
    return out


def from_cache(folder: Path | str, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    return {**FOUR, "--kd-teacher-hf": None, "--kd-teacher-cache": folder, **(changes or {})}


def test_trains_as_online_and_resumes(job: SmallJob, cache: Path, tmp_path: Path) -> None:
    online = run(job.flags({**FOUR, "--kd-top-k": TOP_K, "--save": tmp_path / "online"}))
    assert online.status == 0, online.errors[-6000:]
    save = tmp_path / "cached"
    changes = {"--save": save, "--load": save, "--pipeline-model-parallel-size": 2}
    cached = run(job.flags(from_cache(cache, changes)), ranks=2)
    assert cached.status == 0, cached.output[-3000:] + cached.errors[-6000:]
    assert f"mkd: teacher    cache {cache} of {fingerprint(job)} (float32): " in cached.output
    assert f" texts, K = {TOP_K}, fp32, T = 1, " in cached.output
    assert f"of the teacher's {TOP_K} most probable tokens, tail bucket" in cached.output
    teacher_lines = [line for line in (online.output + cached.output).splitlines() if "CE ln V" in line]
    assert len(teacher_lines) == 2 and teacher_lines[0] == teacher_lines[1]
    for name in ("loss", "ce", "kd", "grad_norm"):
        seen, expected = ([line[name] for line in steps(result)] for result in (cached, online))
        assert len(seen) == 4 and seen == pytest.approx(expected, rel=FP32), name
    evaluations = [[line for line in result.metrics if "valid_ce" in line] for result in (cached, online)]
    for name in ("valid_kd", "valid_ce", "valid_teacher_ce", "valid_agreement"):
        seen, expected = ([line[name] for line in lines] for lines in evaluations)
        assert len(seen) == 2 and seen == pytest.approx(expected, rel=FP32), name
    _resumes(job, cache, changes, save, tmp_path / "resumed")


def _resumes(job: SmallJob, cache: Path, changes: dict, whole: Path, save: Path) -> None:
    """Resuming after the second of four steps gives the same bits."""
    shutil.copytree(whole, save)
    shutil.rmtree(save / "iter_0000004")
    (save / TRACKER).write_text("2")
    result = run(job.flags(from_cache(cache, {**changes, "--save": save, "--load": save})), ranks=2)
    assert result.status == 0, result.output[-3000:] + result.errors[-6000:]
    assert (save / "metrics.jsonl").is_file() and [line["iteration"] for line in steps(result)] == [1, 2, 3, 4]
    expected, seen = tensors(whole), tensors(save)
    assert expected.keys() == seen.keys()
    for key, value in expected.items():
        assert torch.equal(value, seen[key]), key


def without_training_texts(cache: Path, out: Path) -> Path:
    """A copy of the cache without the shorter texts of the training set."""
    left_out = {segment_hash(torch.tensor(tokens[:-1])) for tokens in documents()[:48]}
    store = TeacherStore(cache, "--cache")
    writer = StoreWriter(out, store.meta)
    for key, records in (segment for shard in store.shards for segment in shard.segments()):
        if key not in left_out:
            writer.add_records(key, records)
    writer.flush()
    assert 0 < len(writer.known) < len(store)
    return out


def test_missing_texts(job: SmallJob, cache: Path, tmp_path: Path) -> None:
    part = without_training_texts(cache, tmp_path / "part")
    result = run(job.flags(from_cache(part)), ranks=2)
    assert result.status == 1
    lines = [line for line in result.errors.splitlines() if line.startswith("pretrain_kd.py: error: ")]
    assert lines[0].startswith(f"pretrain_kd.py: error: --kd-teacher-cache {part} does not have segment ")
    assert "of row " in lines[0] and lines[0].endswith("or give --kd-cache-missing ce_only")
    assert "Traceback" not in result.errors and "iteration 4/4" not in result.output

    tolerant = {"--kd-cache-missing": "ce_only", "--kd-top-k": 4, "--kd-metrics-file": tmp_path / "metrics.jsonl"}
    result = run(job.flags(from_cache(part, tolerant)))
    assert result.status == 0, result.output[-3000:] + result.errors[-6000:]
    training = [line for line in result.metrics if "grad_norm" in line]
    missing = [line["kd_missing"] for line in training]
    assert len(missing) == 4 and max(missing) >= 1 and all(number == int(number) for number in missing)
    assert any(line["kd"] > 0 for line in training)
    assert "of the teacher's 4 most probable tokens" in result.output


def test_evaluation_without_any_cached_text(job: SmallJob, tmp_path: Path) -> None:
    """Prints a note and reports no means. Without ce_only it is an error that names the evaluation."""
    changes = {"--kd-cache-missing": "ce_only", "--train-iters": 1, "--kd-metrics-file": tmp_path / "metrics.jsonl"}
    folder = small_cache(job, tmp_path / "cache")
    strict = run(job.flags(from_cache(folder)))
    assert "of this evaluation step: write this data too (mkd cache, with more" in strict.errors
    result = run(job.flags(from_cache(folder, changes)))
    assert result.status == 0, result.errors[-6000:]
    assert "the cache has no text of the first validation microbatch" in result.output
    lines = [line for line in result.metrics if "valid_ce" in line]
    assert lines and all(line["valid_kd_missing"] > 0 and "valid_kd" not in line for line in lines)


def small_cache(job: SmallJob, folder: Path, **changes: Any) -> Path:
    """A cache with two random texts and the fingerprint of this job's teacher."""
    meta = CacheMeta(
        **{
            "teacher": fingerprint(job),
            "tokenizer": HFFolder(job.student, "--kd-student-hf").tokenizer_hash(),
            "true_vocab": VOCAB,
            "top_k": 8,
            "values": "fp32",
            "temperatures": (1.0, 2.0),
        }
        | changes
    )
    writer = StoreWriter(folder, meta)
    for seed in range(2):
        key, rows = some_segment(seed, meta.true_vocab, meta.top_k, meta.temperatures)
        writer.add(key, rows)
        writer.flush()
    return folder


@pytest.mark.parametrize(
    ("stored", "changes", "words"),
    [
        ({}, {"--kd-top-k": 9}, ["--kd-top-k is 9", "has 8 tokens"]),
        ({}, {"--kd-temperature": 3.0}, ["--kd-temperature is 3", "T = 1, 2"]),
        ({}, {"--kd-temperature-schedule": "linear:2:1:4"}, ["--kd-temperature-schedule linear:2:1:4", "T = 1, 2"]),
        ({"top_k": 1}, {"--kd-top-k-tail": "renormalize"}, ["renormalize", "has one"]),
        ({"tokenizer": "0" * 32}, {}, ["--kd-student-hf", "--kd-teacher-cache", "different tokenizers"]),
        (
            {"values": "counts", "samples": 8},
            {"--kd-loss": "jsd"},
            ["--kd-loss is jsd", "sampled targets", "forward_kl"],
        ),
        ({"values": "counts", "samples": 8}, {"--kd-top-k": 4}, ["--kd-top-k is 4", "sampled targets"]),
        ({"values": "counts", "samples": 8}, {}, ["--kd-temperature is 1", "sampled targets at T = 2"]),
        ({"values": "counts", "samples": 8}, {"--kd-top-k-tail": "renormalize"}, ["--kd-top-k-tail", "no tail"]),
        ({}, {"--kd-hidden-loss": "1:1"}, ["--kd-hidden-loss", "--kd-teacher-cache", "hidden states"]),
        ({}, {"--kd-teacher-dtype": "bf16"}, ["--kd-teacher-dtype", "--kd-teacher-cache"]),
        ({}, {"--kd-teacher-offload": True}, ["--kd-teacher-offload", "--kd-teacher-cache"]),
        ({}, {"--kd-teacher-hf": "{root}/teacher"}, ["exactly one", "--kd-teacher-hf", "--kd-teacher-cache"]),
        ({}, {"--kd-cache-missing": "skip"}, ["--kd-cache-missing", "'skip'", "ce_only"]),
    ],
    ids=lambda value: None if isinstance(value, list) else "-".join(map(str, value)) or "same",
)
def test_flags_that_a_cache_refuses(
    job: SmallJob,
    attempt: Callable[..., Job],  # noqa: F811
    tmp_path: Path,
    stored: dict,
    changes: dict,
    words: Iterable[str],
) -> None:
    folder = small_cache(job, tmp_path / "cache", **stored)
    refused(attempt, MkdConfigError, {"--kd-teacher-hf": None, "--kd-teacher-cache": folder, **changes}, list(words))


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ({"true_vocab": VOCAB + 5}, [f"vocabulary of {VOCAB + 5} tokens", f"share {VOCAB}"]),
        ({"positions": "document"}, ["restart at each document", "write it again without --reset-position-ids"]),
    ],
    ids=["vocabulary", "positions"],
)
def test_cache_of_another_job(
    job: SmallJob,
    attempt: Callable[..., Job],  # noqa: F811
    tmp_path: Path,
    stored: dict,
    words: list[str],
) -> None:
    folder = small_cache(job, tmp_path / "cache", **stored)
    refused(attempt, MkdCacheError, {"--kd-teacher-hf": None, "--kd-teacher-cache": folder}, words)


def damage(kind: str, folder: Path) -> str:
    """Damage a cache; returns a part of the expected message."""
    shard = sorted(folder.glob("*.safetensors"))[0]
    if kind == "missing shard":
        shard.unlink()
        return f"shard {shard} is missing"
    if kind == "truncated shard":
        shard.write_bytes(shard.read_bytes()[:-1])
        return f"shard {shard} of the teacher cache is truncated"
    if kind == "newer version":
        change_json(folder / META, {"version": 2})
        return "has format version 2, this version of mkd reads 1"
    if kind == "foreign folder":
        change_json(folder / META, {"format": "other"})
        return "meta.json has the format 'other'"
    for path in folder.glob("shard-*"):
        path.unlink()
    return "has no cached targets yet"


@pytest.mark.parametrize("kind", ["missing shard", "truncated shard", "newer version", "foreign folder", "empty"])
def test_damaged_folders(
    job: SmallJob,
    attempt: Callable[..., Job],  # noqa: F811
    tmp_path: Path,
    kind: str,
) -> None:
    folder = small_cache(job, tmp_path / "cache")
    words = ["--kd-teacher-cache", damage(kind, folder)] if "shard" not in kind else [damage(kind, folder)]
    refused(attempt, MkdCacheError, {"--kd-teacher-hf": None, "--kd-teacher-cache": folder}, words)


def test_accepted_flags(job: SmallJob, attempt: Callable[..., Job], tmp_path: Path) -> None:  # noqa: F811
    folder = {"--kd-teacher-hf": None, "--kd-teacher-cache": small_cache(job, tmp_path / "cache")}
    assert "memory" in plan(attempt({**folder, "--kd-temperature": 2.0}))
    renormalized = {"--kd-top-k-tail": "renormalize", "--kd-temperature-schedule": "linear:3:1:4"}
    assert "tail renormalize" in plan(attempt({**folder, **renormalized}))["loss"]
    sampled = small_cache(job, tmp_path / "sampled", values="counts", samples=8)
    summary = plan(attempt({**folder, "--kd-teacher-cache": sampled, "--kd-temperature": 2.0}))
    assert "8 sampled targets per token" in summary["loss"] and "8 samples, counts" in summary["teacher"]
    attempt({**folder, "--kd-ratio": 0.0})
