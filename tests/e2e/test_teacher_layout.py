"""pretrain_kd.py with a teacher in a parallel layout of its own: the numbers of a teacher in the student's layout."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.small_job import SmallJob, make_small_job, run
from tests.tolerance import GRADIENT

TP2 = {"--kd-teacher-tensor-model-parallel-size": 2}
KEYS = ("loss", "ce", "kd", "grad_norm", "valid_ce", "valid_kd", "valid_teacher_ce", "valid_agreement")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
    return make_small_job(tmp_path_factory.mktemp("job"))


def trained(job: SmallJob, file: Path, changes: dict[str, Any], ranks: int = 2) -> tuple[str, list[list[float]]]:
    """What a run prints, and `KEYS` of every line of its metrics, as far as it has them."""
    result = run(job.flags({"--kd-metrics-file": file, "--train-iters": 2, **changes}), ranks)
    assert result.status == 0, result.output[-2000:] + result.errors[-6000:]
    return result.output, [[line[key] for key in KEYS if key in line] for line in result.metrics]


def introduced(output: str) -> str:
    """What is said of the teacher before the first step."""
    (line,) = (line for line in output.splitlines() if line.startswith("mkd: teacher ") and "perplexity" in line)
    return line


def test_data_parallel_student_and_tensor_parallel_teacher(job: SmallJob, tmp_path: Path) -> None:
    alike, expected = trained(job, tmp_path / "alike", {})
    apart, seen = trained(job, tmp_path / "apart", TP2)
    assert "mkd: layout     DP 2\n" in alike and "mkd: teacher's" not in alike
    assert "mkd: layout     DP 2\n" in apart and "mkd: teacher's  layout DP 1, TP 2, SP\n" in apart
    assert introduced(apart) == introduced(alike)
    assert len(expected) == 4, "an evaluation, two steps, an evaluation"
    for line, (numbers, others) in enumerate(zip(seen, expected, strict=True)):
        assert numbers == pytest.approx(others, rel=GRADIENT), f"line {line}"
