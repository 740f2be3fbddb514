"""mkd/metrics.py: the console line and the JSON lines."""

import json
import math
from pathlib import Path

import pytest
import torch

from mkd import metrics
from mkd.metrics import MetricsLog, clock, perplexity
from mkd.runlog import RunLog


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds; a test sets it."""
    time = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: time[0])
    return time


def make(file: Path | None, **changes: object) -> MetricsLog:
    settings = {"train_iters": 10, "log_interval": 2, "tokens_per_sample": 8, "writes": True}
    return MetricsLog(file=file, **{**settings, **changes})


def step(log: MetricsLog, iteration: int, *, losses: dict[str, float] | None = None, **changes: object) -> None:
    values = {"samples": 4, "lr": 1e-3, "grad_norm": 0.5, "skipped": False, "extra": {"ratio": 0.5, "temperature": 2.0}}
    losses = {"loss": 2.0, "ce": 3.0, "kd": 1.0} if losses is None else losses
    log.iteration(iteration, {name: torch.tensor(v) for name, v in losses.items()}, **{**values, **changes})


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_line_for_each_iteration(tmp_path, now):
    file = tmp_path / "folder" / "metrics.jsonl"
    log = make(file)
    log.start(0)
    now[0] += 3.0  # an evaluation before the step is not the step's time
    log.step_begins()
    now[0] += 2.0
    step(log, 1)
    step(log, 2, losses={"loss": 1.0, "kd": -1e-9}, lr=None, grad_norm=None, skipped=True)
    first, second = lines(file)
    assert first == {
        "iteration": 1,
        "loss": 2.0,
        "ce": 3.0,
        "kd": 1.0,
        "grad_norm": 0.5,
        "lr": 1e-3,
        "tokens": 32,
        "tokens_per_s": 16.0,
        "elapsed_s": 5.0,
        "peak_memory_gib": 0.0,
        "skipped": False,
        "ratio": 0.5,
        "temperature": 2.0,
    }
    assert (second["lr"], second["grad_norm"], second["skipped"]) == (None, None, True)
    assert second["kd"] == pytest.approx(-1e-9) and "ce" not in second


def test_console_line_is_the_mean_of_an_interval(capsys, now):
    log = make(None)
    log.start(0)
    for iteration, kd in ((1, 0.5), (2, -0.75)):
        log.step_begins()
        now[0] += 2.0
        step(log, iteration, losses={"loss": 1.0, "ce": 2.0 * iteration, "kd": kd})
    assert capsys.readouterr().out == (
        "iteration 2/10 | loss 1.0000 | ce 3.0000 | kd -0.1250 | grad norm 0.500 | lr 1.00e-03 | R 0.5 | T 2 | "
        "16 tokens/s | ETA 0:00:16\n"
    )


def test_skipped_steps_are_counted_and_left_out_of_the_means(capsys, now):
    log = make(None)
    log.start(0)
    now[0] += 1.0
    step(log, 1, losses={"loss": 1.0})
    step(log, 2, losses={"loss": math.inf}, skipped=True)
    out = capsys.readouterr().out
    assert "loss 1.0000" in out and "skipped 1" in out
    step(log, 3, losses={"loss": math.nan}, skipped=True)
    step(log, 4, losses={"loss": math.nan}, skipped=True)
    out = capsys.readouterr().out
    assert "skipped 2" in out and "loss" not in out


def test_console_lines_at_intervals_and_at_the_end(capsys, now):
    log = make(None, train_iters=5)
    log.start(0)
    for iteration in range(1, 6):
        now[0] += 1.0
        step(log, iteration)
    assert [line.split(" |")[0] for line in capsys.readouterr().out.splitlines()] == [
        "iteration 2/5",
        "iteration 4/5",
        "iteration 5/5",
    ]


def test_eta_of_a_resumed_run_counts_its_own_iterations(capsys, now):
    log = make(None)
    log.start(6)
    now[0] += 20.0
    step(log, 7)
    now[0] += 20.0
    step(log, 8)
    assert capsys.readouterr().out.rstrip().endswith("ETA 0:00:40")  # 2 more at 20 s each


def test_resuming_drops_the_lines_of_the_attempt_that_was_lost(tmp_path, now):
    file = tmp_path / "metrics.jsonl"
    log = make(file)
    log.start(0)
    for iteration in (1, 2, 3, 4):
        now[0] += 1.0
        step(log, iteration)
        log.evaluation("valid", iteration, {"ce": torch.tensor(1.0)})
    with file.open("a") as out:
        out.write('{"iteration": 5, "lo')  # killed while it wrote
    again = make(file)
    again.start(2)
    now[0] += 1.0
    assert [line["iteration"] for line in lines(file)] == [1, 1, 2, 2]
    step(again, 3)
    assert [line["iteration"] for line in lines(file)] == [1, 1, 2, 2, 3]
    assert RunLog.read(str(file)).curve("loss") == ([1, 2, 3], [2.0, 2.0, 2.0])
    make(file).start(0)
    assert file.read_text() == ""


def test_a_torn_line_without_a_new_line_is_dropped_even_if_it_is_json(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"iteration": 1}\n{"iteration": 2}')
    make(file).start(5)
    assert [line["iteration"] for line in lines(file)] == [1]


def test_only_one_rank_writes(tmp_path, capsys):
    file = tmp_path / "metrics.jsonl"
    file.write_text("kept")
    log = make(file, writes=False)
    log.start(0)
    step(log, 2)
    log.evaluation("valid", 2, {"ce": torch.tensor(1.0)})
    assert file.read_text() == "kept" and capsys.readouterr().out == ""


def test_evaluation(tmp_path, capsys):
    file = tmp_path / "metrics.jsonl"
    log = make(file)
    log.start(0)
    values = {"loss": 0.75, "ce": 2.0, "kd": -0.5, "teacher_ce": 1.0, "agreement": 0.625}
    log.evaluation("valid", 4, {name: torch.tensor(value) for name, value in values.items()})
    log.evaluation("test", 9, {"ce": torch.tensor(800.0)})
    log.evaluation("test", 9, {})
    assert capsys.readouterr().out == (
        "validation at iteration 4 | ce 2.0000 (ppl 7.39) | kd -0.5000 | teacher ce 1.0000 (ppl 2.72) | "
        "top-1 agreement 62.5%\n"
        "test at iteration 9 | ce 800.0000 (ppl inf)\n"
    )
    assert lines(file) == [
        {
            "iteration": 4,
            "valid_loss": 0.75,
            "valid_ce": 2.0,
            "valid_kd": -0.5,
            "valid_teacher_ce": 1.0,
            "valid_agreement": 0.625,
            "valid_perplexity": math.exp(2.0),
        },
        {"iteration": 9, "test_ce": 800.0, "test_perplexity": math.inf},
    ]


def test_perplexity():
    assert perplexity(0.0) == 1.0
    assert perplexity(1.0) == math.e
    assert perplexity(699.0) == math.exp(699.0) > 1e303
    assert perplexity(700.0) == perplexity(1e9) == perplexity(math.inf) == math.inf
    assert math.isnan(perplexity(math.nan))


@pytest.mark.parametrize(
    "seconds, text",
    [(0, "0:00:00"), (0.4, "0:00:00"), (59.6, "0:01:00"), (3599, "0:59:59"), (3600, "1:00:00"), (360061, "100:01:01")],
)
def test_clock(seconds, text):
    assert clock(seconds) == text
