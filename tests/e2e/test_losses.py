"""Every --kd-loss trains from the command line, and by the definition it gives the same numbers."""

from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file, save_file

from mkd.config.loss_spec import Divergence
from tests.support.e2e.small_job import SmallJob, make_small_job, run
from tests.support.tolerance import FP32

TWO = {"--train-iters": 2, "--lr-decay-iters": 2, "--eval-iters": 0}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
    return make_small_job(tmp_path_factory.mktemp("losses"))


def numbers(job: SmallJob, folder: Path, changes: dict) -> list[float]:
    result = run(job.flags({**TWO, "--kd-metrics-file": folder / "metrics.jsonl", **changes}))
    assert result.status == 0, result.errors[-4000:]
    assert f"computed by {changes.get('--kd-loss-impl', 'eager')}" in result.output
    lines = [line for line in result.metrics if "grad_norm" in line]
    assert len(lines) == 2
    return [line[key] for line in lines for key in ("loss", "ce", "kd", "grad_norm")]


@pytest.mark.parametrize("divergence", get_args(Divergence))
def test_every_divergence_trains_as_defined(job: SmallJob, tmp_path: Path, divergence: str) -> None:
    changes = {"--kd-loss": divergence, "--kd-temperature": 2.0, "--kd-z-loss": 1e-3}
    fast = numbers(job, tmp_path / "eager", changes)
    right = numbers(job, tmp_path / "reference", {**changes, "--kd-loss-impl": "reference"})
    assert fast == pytest.approx(right, rel=FP32)
    assert all(value > 0 for value in fast)


def test_a_teacher_of_nan_is_refused(job: SmallJob, tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    for path in job.teacher.iterdir():
        (teacher / path.name).write_bytes(path.read_bytes())
    tensors = load_file(teacher / "model.safetensors")
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, teacher / "model.safetensors", metadata={"format": "pt"})
    result = run(job.flags({**TWO, "--eval-iters": 1, "--kd-teacher-hf": teacher}))
    assert result.status != 0
    assert "--kd-teacher-hf" in result.errors and "not finite" in result.errors
