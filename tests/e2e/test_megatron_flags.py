"""Megatron flags that change rows, batches and evaluations do so under mkd as they promise."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_pretrain import steps, trained
from tests.support.e2e.small_job import Result, SmallJob, make_small_job
from tests.support.e2e.small_job import run as run_small_job


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
    return make_small_job(tmp_path_factory.mktemp("flags"))


@pytest.fixture(scope="module")
def plain(job: SmallJob, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Three steps of four rows, two of them of warmup."""
    folder = tmp_path_factory.mktemp("plain")
    return run(job, folder, {"--dataloader-type": "single", "--lr-warmup-iters": 2, "--eval-interval": 1})


def run(job: SmallJob, folder: Path, changes: dict[str, Any]) -> Result:
    folder.mkdir(exist_ok=True)
    return trained(job, {"--kd-metrics-file": folder / "metrics.jsonl", **changes})


def losses(result: Result) -> list[tuple[float, float]]:
    return [(line["loss"], line["lr"]) for line in steps(result)]


def tokens(result: Result) -> list[int]:
    """Tokens of the rows of each step."""
    return [line["tokens"] for line in result.metrics if "grad_norm" in line]


def evaluations(result: Result) -> dict[int, float]:
    return {line["iteration"]: line["valid_loss"] for line in result.metrics if "valid_loss" in line}


SAMPLES = {"--train-iters": None, "--train-samples": 12, "--lr-warmup-samples": 8}


def test_a_length_in_samples(job: SmallJob, plain: Result, tmp_path: Path) -> None:
    """--lr-warmup-samples warms up."""
    result = run(job, tmp_path, SAMPLES)
    assert losses(result) == losses(plain)


def test_a_schedule_of_batch_sizes(job: SmallJob, plain: Result, tmp_path: Path) -> None:
    """Thresholds count tokens: two rows in each of the first two steps, then four."""
    changes = {**SAMPLES, "--step-batch-size-schedule": "0:2 128:4", "--global-batch-size": None}
    rows = [count // 32 for count in tokens(run(job, tmp_path, changes))]
    assert rows == [2, 2, 4, 4]
    assert sum(rows) == sum(tokens(plain)) // 32 == 12


def test_batches_become_smaller_at_a_resume(job: SmallJob, plain: Result, tmp_path: Path) -> None:
    """Two steps of four rows, and after the resume two of two."""
    changes = {**SAMPLES, "--global-batch-size": None, "--save": tmp_path, "--load": tmp_path, "--save-interval": 9}
    falling = {**changes, "--step-batch-size-schedule": "0:4 256:2"}
    refused = run_small_job(job.flags(falling))
    assert refused.status == 1
    assert "from 4 to 2 after 8 samples" in refused.errors and "begins after 0" in refused.errors
    first = run(job, tmp_path, {**changes, "--step-batch-size-schedule": "0:4", "--exit-interval": 2})
    assert [count // 32 for count in tokens(first)] == [4, 4]
    second = run(job, tmp_path, falling)
    assert [count // 32 for count in tokens(second)] == [4, 4, 2, 2]


def test_batches_and_start_of_evaluations(job: SmallJob, plain: Result, tmp_path: Path) -> None:
    """The microbatch of an evaluation changes nothing, its global batch the rows."""
    changes = {"--lr-warmup-iters": 2, "--eval-interval": 1, "--eval-micro-batch-size": 1}
    small = run(job, tmp_path, {**changes, "--start-eval-at-iter": 2})
    expected = {step: value for step, value in evaluations(plain).items() if step != 1}
    assert evaluations(small) == pytest.approx(expected, rel=1e-5)
    fewer = run(job, tmp_path / "fewer", {**changes, "--eval-global-batch-size": 2})
    assert evaluations(fewer)[0] != pytest.approx(expected[0], rel=1e-5)


def test_ends_of_documents_without_loss(job: SmallJob, plain: Result, tmp_path: Path) -> None:
    result = run(job, tmp_path, {"--lr-warmup-iters": 2, "--eod-mask-loss": True})
    assert tokens(result) == tokens(plain)
    assert losses(result) != losses(plain)
