"""tools/cache_teacher.py write: targets equal the teacher's outputs, in every layout and after killed jobs."""

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from mkd.data.segments import segment_hash
from mkd.teacher.cache.record_format import TokenTargets
from mkd.teacher.cache.store import TeacherStore
from tests.support.e2e.small_job import (
    END,
    ROOT,
    Result,
    SmallJob,
    make_small_job,
    make_tokenizer,
    run,
    text,
    write_data,
)
from tests.support.tolerance import FP32, LOGITS, assert_close_norm

TOOL, KILLER = ROOT / "tools" / "cache_teacher.py", ROOT / "tests" / "support" / "e2e" / "cache_killer.py"
TOP_K = 8
TP2_PP2 = {"--tensor-model-parallel-size": 2, "--pipeline-model-parallel-size": 2}
TP2_CP2 = {"--tensor-model-parallel-size": 2, "--sequence-parallel": True, "--context-parallel-size": 2}
ROWS: dict[str, Any] = {
    "--data-path": "{root}/twice",
    "--kd-packing": "best_fit",
    "--kd-packing-multiple": 8,
    "--seq-length": 64,
    "--train-iters": 30,
    "--split": "80,20,0",
}
"""More rows than an epoch has: most texts are read more than once, and some are in the data twice."""
NO_STUDENT: dict[str, Any] = {"--kd-student-hf": None, "--kd-ratio": None, "--lr": None}


@pytest.fixture(scope="module")
def documents() -> list[list[int]]:
    tokenizer = make_tokenizer()
    parts = [part for part in text().split("\n\n") if part][:40]
    found = [[*tokenizer.encode(part).ids, tokenizer.token_to_id(END)] for part in parts]
    return [*found, *found[:10]]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]]) -> SmallJob:
    job = make_small_job(tmp_path_factory.mktemp("job"))
    write_data(job.root / "twice", documents)
    return job


def written(job: SmallJob, out: Path, own: list[str], changes: dict[str, Any], ranks: int = 1) -> Result:
    """Result of `write`; the flags after -- are those of a training job."""
    flags = [word.replace("{root}", str(job.root)) for word in job.flags({**ROWS, **changes})]
    result = run(["write", "--out", str(out), *own, "--", *flags], ranks, script=TOOL)
    assert result.status == 0, result.output[-3000:] + result.errors[-6000:]
    return result


def contents(folder: Path) -> dict[bytes, TokenTargets]:
    """Key -> targets; fails on duplicates and damage."""
    store = TeacherStore(folder, "--cache")
    found: dict[bytes, TokenTargets] = {}
    for shard in store.shards:
        shard.check()
        for key, records in shard.segments():
            assert key not in found, "a duplicate"
            found[key] = store.meta.records.decode(records)
    return found


def assert_same(one: dict[bytes, TokenTargets], other: dict[bytes, TokenTargets]) -> None:
    assert set(one) == set(other)
    for name in ("ids", "logits", "label_log_prob", "tail_lse"):
        parts = [torch.from_numpy(np.concatenate([getattr(cache[key], name) for key in one])) for cache in (other, one)]
        assert_close_norm(*parts, FP32, name)


@pytest.fixture(scope="module")
def one_rank(job: SmallJob, tmp_path_factory: pytest.TempPathFactory) -> dict[bytes, TokenTargets]:
    out = tmp_path_factory.mktemp("cache") / "one_rank"
    result = written(job, out, ["--top-k", str(TOP_K), "--lossless"], NO_STUDENT)
    assert "segments are stored already" in result.output
    return contents(out)


def test_targets_are_the_teachers(
    job: SmallJob, documents: list[list[int]], one_rank: dict[bytes, TokenTargets]
) -> None:
    """Compared with transformers on each text alone; every label is the next token."""
    model = AutoModelForCausalLM.from_pretrained(job.teacher, dtype=torch.float32).eval()
    whole = [ids for ids in documents if segment_hash(torch.tensor(ids[:-1])) in one_rank]
    assert len(whole) >= 10, "texts that fit a row"
    for ids in whole[:8]:
        tokens = torch.tensor(ids)
        with torch.no_grad():
            log_p = model(tokens[None, :-1]).logits[0].double().log_softmax(-1)
        targets = one_rank[segment_hash(tokens[:-1])]
        assert len(targets.ids) == len(ids) - 1
        expected = log_p.gather(1, torch.from_numpy(targets.ids).long())
        assert (torch.from_numpy(targets.logits) - expected).abs().max() < LOGITS
        assert expected.min(1).values.ge(log_p.topk(TOP_K).values[:, -1] - LOGITS).all()
        assert (torch.from_numpy(targets.label_log_prob) - log_p.gather(1, tokens[1:, None])[:, 0]).abs().max() < LOGITS


@pytest.mark.parametrize(
    ("layout", "iterations"),
    [
        pytest.param(TP2_PP2, None, id="tp2-pp2-one-epoch"),
        pytest.param(TP2_CP2, 30, id="tp2-sp-cp2", marks=pytest.mark.slow),
    ],
)
def test_layouts(
    job: SmallJob, one_rank: dict[bytes, TokenTargets], tmp_path: Path, layout: dict[str, Any], iterations: int | None
) -> None:
    """The flags of the student and its objective are ignored; one epoch covers all texts."""
    student = {"--kd-hidden-loss": "1:1", "--kd-loss": "jsd", "--kd-ratio-schedule": "linear:0:1:5", "--kd-ratio": None}
    flags = {**layout, **student, "--train-iters": iterations}
    written(job, tmp_path / "cache", ["--top-k", str(TOP_K), "--lossless"], flags, ranks=4)
    assert_same(one_rank, contents(tmp_path / "cache"))


def counts_of(folder: Path) -> dict[bytes, dict[tuple[int, int], int]]:
    """Key -> (position, id) -> how often it was sampled."""
    samples = TeacherStore(folder, "--cache").meta.samples
    return {
        key: {
            (position, int(targets.ids[position, slot])): int(np.rint(np.exp(targets.logits[position, slot]) * samples))
            for position, slot in np.argwhere(targets.logits > -20)
        }
        for key, targets in contents(folder).items()
    }


def test_sampled_targets_do_not_depend_on_the_layout(job: SmallJob, tmp_path: Path) -> None:
    few = {**ROWS, "--train-iters": 2, "--eval-iters": 0, "--split": "100,0,0"}
    own = ["--sample", "6", "--temperature", "2"]
    written(job, tmp_path / "one", own, few)
    written(job, tmp_path / "two", own, {**few, "--context-parallel-size": 2}, 2)
    one, two = counts_of(tmp_path / "one"), counts_of(tmp_path / "two")
    assert TeacherStore(tmp_path / "one", "--cache").meta.temperatures == (1.0, 2.0)
    assert all(sum(counts.values()) % 6 == 0 for counts in one.values())
    # A number at the bound of an id's interval may fall to the neighboring id if a logit differs in its last bit.
    assert one.keys() == two.keys()
    moved = sum(len(one[key].items() ^ two[key].items()) for key in one)
    assert moved < 0.005 * sum(map(len, one.values()))


@pytest.mark.parametrize("deaths", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_writers(job: SmallJob, one_rank: dict[bytes, TokenTargets], tmp_path: Path, deaths: int) -> None:
    """Two data-parallel ranks, one of which is killed at some point; then one gets SIGTERM; then they finish."""
    rng, out = random.Random(deaths), tmp_path / "cache"
    events = [f"{rng.choice(['sync', 'rename'])}:{rng.randrange(1, 40 // deaths)}" for _ in range(deaths)]
    for number, event in enumerate([*events, "sync:4:SIGTERM"]):
        result = attempt(job, out, MKD_TEST_KILL=event, MKD_TEST_KILL_RANK=str(number % 2))
        assert f"killed at {event.removesuffix(':SIGTERM')}" in result.errors, result.errors[-3000:]
        assert (result.status == 75) == event.endswith("SIGTERM"), result.errors[-3000:]
    assert "is not complete: the same command resumes it" in result.output
    before = len(contents(out))
    assert 0 < before < len(one_rank)
    assert attempt(job, out).status == 0
    assert_same(one_rank, contents(out))


def attempt(job: SmallJob, out: Path, **variables: str) -> Result:
    flags = [word.replace("{root}", str(job.root)) for word in job.flags({**ROWS, **NO_STUDENT})]
    os.environ.update(variables)
    try:
        return run(["write", "--out", str(out), "--top-k", str(TOP_K), "--lossless", "--", *flags], 2, script=KILLER)
    finally:
        for name in variables:
            del os.environ[name]
