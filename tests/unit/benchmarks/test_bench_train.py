"""benchmarks/bench_train.py: the arithmetic of its table, failed trainings, and the command lines of its rows."""

import itertools
import json
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.e2e import small_job


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(small_job.ROOT / "benchmarks"))
    return import_module("benchmarks.bench_train")


def test_efficiency_is_that_of_the_fastest_teacher_with_the_same_work(tool: ModuleType) -> None:
    cases = [tool.Case("a", 2), tool.Case("b", 4), tool.Case("c", 2, teacher=tool.FP8), tool.Case("d", 2)]
    rows = [
        {"step_s": 2.0, "student_s": 0.8, "teacher_s": 1.2},
        {"step_s": 1.5, "student_s": 0.5, "teacher_s": 1.0},
        {"step_s": 1.0, "student_s": 0.5, "teacher_s": 0.5},
        {"failed": "out of memory"},
    ]
    tool.add_efficiency(rows, cases)
    assert [row.get("efficiency") for row in rows] == [pytest.approx(0.9), pytest.approx(1.0), pytest.approx(1.0), None]


def test_figures_of_a_training(tool: ModuleType) -> None:
    lines = [
        {"loss": 1.0, "step_s": s, "teacher_s": s / 2, "tokens_per_s_per_gpu": 1 / s} for s in (9, 9, 9, 9, 2, 4, 3)
    ]
    lines[2]["peak_memory_gib"] = 7.0
    training = tool.Training.of(lines, 40.0)
    assert (training.step_s, training.teacher_s, training.peak_gib, training.mfu) == (3, 1.5, 7.0, None)


def test_a_training_that_fails_has_its_reason(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Job(subprocess.Popen):
        def __init__(self, words: list[str], **options: object) -> None:
            super().__init__(
                [sys.executable, "-c", "print('x'); print('MkdConfigError: no'); raise SystemExit(3)"], **options
            )

    monkeypatch.setattr(tool.subprocess, "Popen", Job)
    with pytest.raises(RuntimeError, match=r"^MkdConfigError: no$"):
        tool.train([], 2, tmp_path / "metrics.jsonl", 30.0)


def test_the_first_step_is_timed_and_a_training_that_takes_too_long_fails(tool: ModuleType, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"

    def start(words: list[str], log: Path, ranks: int, limit_s: float) -> tuple[int, str]:
        metrics.write_text("".join(json.dumps({"loss": 1.0, "step_s": 1.0}) + "\n" for _ in range(6)))
        time.sleep(0.5)
        return (tool.TIMED_OUT if limit_s < 1 else 0), ""

    training = tool.train([], 2, metrics, 30.0, start=start)
    assert training.first_step_s < 0.4 and training.step_s == 1.0
    with pytest.raises(RuntimeError, match=r"^not ended after 0\.5 s$"):
        tool.train([], 2, metrics, 0.5, start=start)


def test_a_peer_trains_without_mkds_teacher(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(flags: list[str], gpus: int, metrics: Path, limit_s: float, script: Path, start: object) -> object:
        given = dict(itertools.pairwise(flags))
        assert (given["--kd-ratio"], given["--tensor-model-parallel-size"], gpus) == ("0", "2", 2)
        assert script.name == "train_modelopt.py" and script.exists()
        return tool.Training(2.0, None, 3.0, 0.5, 4.0, 5.0, 6.0)

    monkeypatch.setattr(tool, "train", train)
    (case,) = (case for case in tool.cases_for(2) if case.name == "Model-Optimizer, TP2 SP")
    row = tool.measure(case, tmp_path, 6, 1.0, tool.torchrun, {})
    assert row["step_s"] == 2.0 and row["mfu"] is None
    rows = [row | {"name": case.name, "pair": case.pair}]
    tool.add_efficiency(rows, [case])
    assert "efficiency" not in rows[0] and "| 2.000 |" in tool.markdown(tool.COLUMNS, rows)


def test_a_peer_beside_mkds_teacher_is_refused(tool: ModuleType, tmp_path: Path) -> None:
    case = tool.Case("a", 1, "small", micro_batch=1, rows=2, seq_length=64)
    tool.prepare(case, tool.SMALL_PAIRS, tmp_path, 6)
    script = small_job.ROOT / "benchmarks" / "train_modelopt.py"
    result = small_job.run([*tool.flags_of(case, tmp_path, 6), "--kd-ratio", "0.5"], script=script)
    assert result.status == 1 and "error: --kd-ratio is not 0" in result.errors, result.errors


def test_rows_per_step_of_context_parallel_ranks(tool: ModuleType, tmp_path: Path) -> None:
    flags = tool.flags_of(tool.Case("CP", 8, "x", tool.parallel(cp=4), rows=1, seq_length=64), tmp_path, 6)
    given = dict(itertools.pairwise(flags))
    assert given["--global-batch-size"] == "2" and given["--context-parallel-size"] == "4"


def test_unknown_layouts_are_refused(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tool.parse(["--gpus", "2", "--rows-of", "DP;TP3"])
    assert "'TP3'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_the_doctor_accepts_every_row(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    """The estimate is computed without a GPU, so the layouts of all nodes are checked here."""
    monkeypatch.setattr(tool, "make_random", tool_inputs().make_sparse)
    monkeypatch.setattr(tool.mkd.cpu, "_stands_in", True)
    for case in tool.cases_for(gpus):
        if case.peer:
            continue  # its memory is not estimated
        needs_kernels = "fp8" in case.teacher or "--context-parallel-size" in case.layout  # of Transformer Engine
        flags = ["--no-rope-fusion"] if needs_kernels else ["--transformer-impl", "local"]
        tool.prepare(case, tool.PAIRS, tmp_path, 6)
        assert tool.estimated_gib([*tool.flags_of(case, tmp_path, 6), *flags], gpus) > 1.0, case


def tool_inputs() -> ModuleType:
    return import_module("benchmarks.inputs")


@pytest.mark.slow
def test_the_tool_itself(tmp_path: Path) -> None:
    words = ["--small", "--steps", "6", "--json", str(tmp_path / "train.json")]
    result = small_job.run(words, script=small_job.ROOT / "benchmarks/bench_train.py", by_itself=True)
    rows = json.loads((tmp_path / "train.json").read_text())["rows"]
    assert result.status == 0 and len(rows) == 5, result.errors
    assert all(row["step_s"] > 0 and row["efficiency"] > 0 for row in rows)
