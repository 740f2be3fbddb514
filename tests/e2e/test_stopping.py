"""Stop signals: a job saves and exits with status 0, and the next attempt is equal to an undisturbed run."""

import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from mkd.checkpoint.megatron.folder import TRACKER
from mkd.report.run_log import RunLog
from tests.e2e.test_resume import SHARDED, Attempts
from tests.support.e2e.quick_python import serving
from tests.support.e2e.small_job import ROOT, SCRIPT, Result, SmallJob, make_small_job, under_torchrun

# One of two ranks makes 1 forward step of each of 3 evaluation steps, and of each training step: 3 for the evaluation
# before training, 3 for iterations 1 to 3, 3 for the evaluation there, ...
EVALUATED = {"--eval-iters": 3, "--eval-interval": 3, "--save-interval": 6, **SHARDED}
IN_FIRST_EVALUATION, IN_STEP, IN_EVALUATION = 2, 3 + 2, 3 + 3 + 2
VALUES = ("iteration", "valid_loss", "valid_ce", "valid_kd", "valid_agreement")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
    return make_small_job(tmp_path_factory.mktemp("job"))


def validations(result: Result) -> list[dict[str, Any]]:
    """Validation lines of the metrics, without values that depend on the clock."""
    lines = [line for line in result.metrics if "valid_loss" in line]
    return [{key: line[key] for key in VALUES} for line in lines]


def stopped(attempts: Attempts, step: int, name: str, rank: int = 1) -> Result:
    """An attempt in which one rank receives a signal in its `step`-th forward step."""
    result = attempts.start(f"step:{step}:{name}", MKD_TEST_KILL_RANK=str(rank))
    assert result.status == 0, result.output[-3000:] + result.errors[-6000:]
    assert f"killed at step:{step}\n" in result.errors
    return result


def tracked(attempts: Attempts) -> str | None:
    tracker = attempts.save / TRACKER
    return tracker.read_text() if tracker.is_file() else None


def test_stopped_in_evaluations_and_in_a_step(job: SmallJob, tmp_path: Path) -> None:
    undisturbed = Attempts(job, tmp_path / "undisturbed", EVALUATED, ranks=2)
    whole = undisturbed.finished()
    assert [line["iteration"] for line in validations(whole)] == [0, 3, 6, 8]
    assert len({line["valid_loss"] for line in validations(whole)}) == 4

    attempts = Attempts(job, tmp_path / "save", EVALUATED, ranks=2)
    result = stopped(attempts, IN_FIRST_EVALUATION, "SIGTERM", rank=0)
    assert "mkd: SIGTERM: stopping after this step" in result.output
    assert "no step was taken, nothing is saved" in result.output
    assert tracked(attempts) is None

    result = stopped(attempts, IN_EVALUATION, "SIGUSR1")
    assert "a signal to another rank: stopping after this step" in result.output
    assert tracked(attempts) == "3"
    assert [line["iteration"] for line in validations(result)] == [0]

    # It begins with the evaluation that was not finished: three forward steps.
    result = stopped(attempts, IN_STEP, "SIGINT", rank=0)
    assert "mkd: Ctrl-C: the job saves and ends after this step; a second Ctrl-C ends it at once" in result.errors
    assert "mkd: SIGINT: stopping after this step" in result.output
    assert tracked(attempts) == "5"
    assert [line["iteration"] for line in validations(result)] == [0, 3]

    attempts.assert_like((undisturbed.save, whole), result := attempts.finished())
    assert validations(result) == validations(whole)


def test_stopped_in_the_last_evaluation(job: SmallJob, tmp_path: Path) -> None:
    """All steps are done and saved; the same command, started again, only evaluates."""
    short = {**EVALUATED, "--eval-interval": 100, "--train-iters": 2}
    whole = Attempts(job, tmp_path / "undisturbed", short).start()
    attempts = Attempts(job, tmp_path / "save", short)
    # With two microbatches per step: 6 forward steps, 4, and 6 for the last evaluation.
    result = stopped(attempts, 12, "SIGTERM", rank=0)
    assert tracked(attempts) == "2"
    assert [line["iteration"] for line in validations(result)] == [0]
    again = attempts.start()
    assert [line["iteration"] for line in validations(again)] == [0, 2]
    assert validations(again) == validations(whole)


def test_ctrl_c_at_torchrun(job: SmallJob, tmp_path: Path) -> None:
    """The terminal sends SIGINT to torchrun, whose ranks are in sessions of their own; torchrun sends it to them."""
    save = tmp_path / "save"
    flags = job.flags({"--train-iters": 100_000, "--save": save, "--load": save, "--save-interval": 100_000})
    with serving(tmp_path) as executables, (tmp_path / "output").open("w") as output:
        command, env = under_torchrun(executables / "python", [str(SCRIPT), *flags])
        torchrun = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=output)
        try:
            deadline = time.monotonic() + 120.0
            while not (metrics := save / "metrics.jsonl").is_file() or not metrics.stat().st_size:
                assert torchrun.poll() is None and time.monotonic() < deadline, (tmp_path / "output").read_text()
                time.sleep(0.1)
            torchrun.send_signal(signal.SIGINT)
            assert torchrun.wait(60.0) == 1  # of torchrun itself, after its ranks have ended
        finally:
            torchrun.kill()
    text = (tmp_path / "output").read_text()
    assert "Ctrl-C: the job saves and ends after this step (torchrun allows 30 s)" in text
    assert "SIGKILL" not in text
    assert int((save / TRACKER).read_text()) == RunLog.read(str(metrics)).curve("loss")[0][-1]
