"""Output of pretrain_kd.py: console, metrics file, log file and TensorBoard."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.e2e.small_job import Result, SmallJob, make_small_job, run


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
    return make_small_job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def pp2_run(job: SmallJob) -> Result:
    """Four steps with PP2 and all metrics enabled."""
    changes = {
        "--train-iters": 4,
        "--eval-interval": 2,
        "--log-interval": 2,
        "--pipeline-model-parallel-size": 2,
        "--kd-metrics-file": job.root / "all.jsonl",
        "--kd-compare-interval": 2,
        "--tensorboard-dir": job.root / "board",
        "--log-validation-ppl-to-tensorboard": True,
        "--save": job.root / "save",
        "--save-interval": 4,
    }
    result = run(job.flags(changes), ranks=2)
    assert result.status == 0, result.errors[-3000:]
    return result


def test_console(pp2_run: Result) -> None:
    lines = pp2_run.output.splitlines()
    trained = [line for line in lines if line.startswith("iteration ")]
    assert [line.split(" |")[0] for line in trained] == ["iteration 2/4", "iteration 4/4"]
    parts = ("loss", "ce", "kd", "entropy", "agreement", "grad norm", "lr", "R", "T", "time: data", "ETA")
    for line in trained:
        assert [part for part in parts if f"| {part} " not in line] == []
        assert " tokens/s |" in line and " GiB |" in line
        assert "MFU" not in line and "GPU" not in line
    evaluations = [line for line in lines if line.startswith("validation at iteration")]
    assert [line.split(" |")[0].split()[-1] for line in evaluations] == ["0", "2", "4"]
    table = [line for line in lines if line.startswith("mkd:   ")]
    assert [line.split("  ")[1].strip() for line in table[1:4]] == [
        "teacher",
        "student at iteration 0",
        "student at iteration 4",
    ]
    assert "PPL" not in pp2_run.output


def test_log_file(job: SmallJob, pp2_run: Result) -> None:
    """Everything that mkd prints after the checks; the plan is from rank 0, the metrics from the last rank."""
    logged = [line.partition(": ") for line in (job.root / "save" / "mkd.log").read_text().splitlines()]
    own = ("mkd: ", "iteration ", "validation at ")
    printed = [line.removeprefix("mkd: ") for line in pp2_run.output.splitlines() if line.startswith(own)]
    printed = [line for line in printed if not line.startswith("on CPU: ")]  # printed during the checks
    assert sorted(text for _, _, text in logged) == sorted(printed)
    ranks = {text.split()[0]: start.split()[-1] for start, _, text in logged}
    assert (ranks["layout"], ranks["batch"], ranks["iteration"]) == ("0", "0", "1")


def test_metrics_file(pp2_run: Result) -> None:
    trained = [line for line in pp2_run.metrics if "grad_norm" in line]
    evaluated = [line for line in pp2_run.metrics if "valid_ce" in line]
    assert [line["iteration"] for line in evaluated] == [0, 2, 4]
    for line in trained:
        assert (line["tokens"], line["padding_tokens"]) == (4 * 32, 0)
        assert line["tokens_per_s_per_gpu"] == pytest.approx(line["tokens_per_s"] / 2)
        assert line["student_tflops_per_gpu"] > 0.0 and line["teacher_tflops_per_gpu"] > 0.0
        assert 0.0 < line["teacher_s"] < line["step_s"] and 0.0 < line["data_s"] < line["step_s"]
        parts = [line[f"{name}_s"] for name in ("teacher", "student", "optimizer")]
        assert min(parts) > 0.0 and sum(parts) < line["step_s"]
        measured = line["iteration"] % 2 == 0
        for name in ("student_entropy", "teacher_entropy", "agreement", "peak_memory_gib"):
            assert (name in line) == measured
    for line in evaluated:
        assert sum(line["valid_calibration"]["share"]) == pytest.approx(1.0)
        assert line["valid_student_entropy"] > 0.0 and line["valid_calibration_error"] >= 0.0
        # A byte costs less than a token, and as much for the teacher as by its own loss.
        ratio = line["valid_ce"] / line["valid_bits_per_byte"]
        assert line["valid_teacher_ce"] / line["valid_teacher_bits_per_byte"] == pytest.approx(ratio, rel=0.05)


def test_tensorboard_names_have_a_prefix(job: SmallJob, pp2_run: Result) -> None:
    seen = EventAccumulator(str(job.root / "board")).Reload()
    tags = set(seen.Tags()["scalars"])
    assert {"kd/loss", "kd/kd", "kd/agreement", "kd/valid_bits_per_byte", "kd/tokens_per_s", "learning-rate"} <= tags
    # Megatron writes none of the losses, nor exp of a divergence.
    assert not [tag for tag in tags if tag in ("loss", "ce", "kd") or tag.startswith(("loss ", "ce ", "kd "))]
    losses = {event.step: event.value for event in seen.Scalars("kd/loss")}
    assert losses == {line["iteration"]: pytest.approx(line["loss"]) for line in pp2_run.metrics if "loss" in line}
    assert [event.step for event in seen.Scalars("kd/valid_ce")] == [0, 2, 4]


def test_comparing_changes_no_gradient(job: SmallJob, tmp_path: Path) -> None:
    runs = []
    for interval in (None, 1):
        changes = {"--kd-compare-interval": interval, "--kd-metrics-file": tmp_path / f"{interval}.jsonl"}
        result = run(job.flags({**changes, "--eval-iters": 0}))
        assert result.status == 0, result.errors[-3000:]
        runs.append([{key: line[key] for key in ("loss", "kd", "ce", "grad_norm")} for line in result.metrics])
        assert ("agreement" in result.metrics[0]) == (interval is not None)
    assert runs[0] == runs[1]
