"""benchmarks/bench_service.py: the arithmetic of its table, and the command lines of its jobs."""

import json
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.e2e import small_job


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(small_job.ROOT / "benchmarks"))
    return import_module("benchmarks.bench_service")


def test_figures_of_a_row(tool: ModuleType) -> None:
    lines = [{"step_s": s, "teacher_s": 0.5, "cache_s": s / 4, "tokens": 10} for s in (2.0, 4.0, 3.0)]
    assert tool.at_hand(lines) == 2.5
    row = {"teacher": "t", "at_hand_s": 2.5, "alone_s": 2.7}
    tool.add_ratios(row)
    assert "of_slower" not in row
    row |= tool.figures_of_served(lines)
    tool.add_ratios(row)
    assert (row["step_s"], row["waited"], row["tokens_per_s"]) == (3.0, 0.25, pytest.approx(30 / 9))
    assert (row["of_at_hand"], row["of_slower"]) == (pytest.approx(1.2), pytest.approx(0.9))


def test_jobs_of_a_row(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool.mkd.cpu, "wanted", lambda: False)
    monkeypatch.setattr(tool.mkd.cpu, "is_target", lambda: False)
    flags = tool.flags_of_training(tool.FULL, tmp_path, 6, 2)
    teacher = next(one for one in tool.FULL.teachers if one.fp8)
    services, student = tool.Places(2, 2).split(teacher, flags, tmp_path, tmp_path)
    assert [one.devices for one in services] == [("2",), ("3",)] and student.devices == ("0", "1")
    for service in services:
        assert "--kd-teacher-dtype fp8" in " ".join(service.words) and "--bf16" in service.words
    assert "--use-distributed-optimizer" in student.words and "--kd-teacher-dtype" not in student.words
    sparse = next(one for one in tool.FULL.teachers if one.top_k)
    services, student = tool.Places(1, 1).split(sparse, flags, tmp_path, tmp_path)
    assert "--kd-teacher-targets" in student.words and "--kd-top-k" not in services[0].words


def test_unknown_teachers_are_refused(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tool.parse(["--rows-of", "8B, bf16;70B"])
    assert "'70B'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_tool_itself(tmp_path: Path) -> None:
    words = ["--small", "--steps", "8", "--json", str(tmp_path / "service.json")]
    result = small_job.run(words, script=small_job.ROOT / "benchmarks/bench_service.py", by_itself=True)
    rows = json.loads((tmp_path / "service.json").read_text())["rows"]
    assert result.status == 0 and len(rows) == 2, result.errors
    assert all(row["of_at_hand"] > 0 and row["of_slower"] > 0 for row in rows) and rows[0]["sharing_s"] > 0
