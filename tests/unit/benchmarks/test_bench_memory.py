"""benchmarks/bench_memory.py: both figures of every part side by side."""

import sys
from importlib import import_module
from types import ModuleType

import pytest
import torch

from tests.support.e2e import small_job


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(small_job.ROOT / "benchmarks"))
    return import_module("benchmarks.bench_memory")


def test_parts_side_by_side(tool, tmp_path, monkeypatch):
    seen: list[list[str]] = []

    def measure(flags, file):
        seen.append(flags)
        return {tool.HELD: 2**30, tool.TOTAL: 2 * 2**30}

    monkeypatch.setattr(sys, "argv", ["bench_memory.py"])
    monkeypatch.setattr(tool, "measure", measure)
    monkeypatch.setattr(tool.mkd.cpu, "_stands_in", True)
    result = tool.run_case(tool.SMOKE[1], tmp_path)
    rows = {row["part"]: row for row in result["rows"]}
    assert rows[tool.TOTAL]["measured"] == 2.0 and "--recompute-granularity" in seen[0]
    estimated = sum(rows[part]["estimated"] for part in (tool.HELD, tool.STUDENT, tool.LOSS))
    assert 0.9 * rows[tool.TOTAL]["estimated"] < estimated <= rows[tool.TOTAL]["estimated"]
    rows[tool.TOTAL]["estimated"] = 1.9
    assert "| peak | 1.90 | 2.00 | -5.0% |" in tool.table(list(rows.values()))


def test_what_the_probe_sees(monkeypatch):
    from benchmarks.memory_probe import HELD, LOSS, STUDENT, TEACHER, TOTAL, Probe

    allocated, peak = iter([100, 250]), iter([120, 180, 300, 420, 420])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(allocated))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(peak))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    probe = Probe()
    assert probe._around(lambda: "signal", HELD, TEACHER)() == "signal"
    assert probe._around(lambda: "loss", STUDENT, LOSS)() == "loss"
    assert probe.seen == {HELD: 100, TEACHER: 80, STUDENT: 250, LOSS: 170, TOTAL: 300}


def test_the_probe_wraps_the_teacher_and_the_loss(monkeypatch):
    from benchmarks.memory_probe import Probe
    from mkd.teacher.online import OnlineTeacher
    from mkd.train import objective

    functions = OnlineTeacher.signals, objective.loss_from_hidden
    monkeypatch.setattr(OnlineTeacher, "signals", functions[0])
    monkeypatch.setattr(objective, "loss_from_hidden", functions[1])  # both are restored after the test
    Probe().install()
    assert OnlineTeacher.signals is not functions[0] and objective.loss_from_hidden is not functions[1]


@pytest.mark.slow
def test_the_tool_itself():
    result = small_job.run(["--smoke"], script=small_job.ROOT / "benchmarks/bench_memory.py", by_itself=True)
    assert result.status == 0 and result.output.count("| peak |") == 3, result.errors
