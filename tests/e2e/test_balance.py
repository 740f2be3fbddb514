"""--kd-balance from the command line: what the loss is, and that resumes and pipeline stages do not change it."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_pretrain import assert_same_weights, cut_back, steps, trained
from tests.support.e2e.small_job import Result, SmallJob, make_small_job
from tests.support.tolerance import GRADIENT

RATIO = 0.25
FLAGS = {
    "--kd-balance": True,
    "--kd-ratio": RATIO,
    "--train-iters": 4,
    "--lr-decay-iters": 4,
    "--save-interval": 2,
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
    return make_small_job(tmp_path_factory.mktemp("balance"))


@pytest.fixture(scope="module")
def four_steps(job: SmallJob, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    save = tmp_path_factory.mktemp("four") / "save"
    return save, trained(job, FLAGS | {"--save": save, "--load": save})


def training(result: Result) -> list[dict[str, Any]]:
    return [line for line in result.metrics if "grad_norm" in line]


def test_kd_gets_the_size_that_ce_had_a_step_before(four_steps: tuple[Path, Result]) -> None:
    factor = 1.0
    for line in training(four_steps[1]):
        assert line["balance"] == pytest.approx(factor, rel=1e-6)
        assert line["loss"] == pytest.approx((1 - RATIO) * line["ce"] + RATIO * factor * line["kd"], rel=1e-6)
        factor = line["ce"] / line["kd"]
    assert factor > 2.0


def test_resume_is_bit_equal(job: SmallJob, four_steps: tuple[Path, Result], tmp_path: Path) -> None:
    save, whole = four_steps
    resumed = cut_back(save, tmp_path / "save", 2)
    result = trained(job, FLAGS | {"--save": resumed, "--load": resumed})
    assert steps(result) == steps(whole)
    assert [line["balance"] for line in training(result)] == [line["balance"] for line in training(whole)]
    assert_same_weights(save, resumed)


def test_pipeline_stages_agree_on_the_factor(job: SmallJob, four_steps: tuple[Path, Result], tmp_path: Path) -> None:
    """It is stored by the first stage and used by the last."""
    save = tmp_path / "save"
    pp2 = FLAGS | {"--pipeline-model-parallel-size": 2, "--save": save, "--load": save}
    trained(job, pp2 | {"--exit-interval": 2}, ranks=2)
    result = trained(job, pp2, ranks=2)
    for seen, expected in zip(training(result), training(four_steps[1]), strict=True):
        for key in ("loss", "kd", "balance"):
            assert seen[key] == pytest.approx(expected[key], rel=GRADIENT), (seen["iteration"], key)
