"""mkd/report/metrics.py: values, and when they are written. Texts of the lines: test_console.py."""

import json
import math
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from mkd.data.text_size import TextSize
from mkd.report import metrics
from mkd.report.flops import FlopCounter
from mkd.report.metrics import IterationMetrics, MetricsLog
from mkd.report.run_log import RunLog
from mkd.report.samples import Sample


class Flops(FlopCounter):
    """One TFLOP per token for the student, half of one for the teacher."""

    def of_student(self, text: TextSize) -> float:
        return 1e12 * text.tokens

    def of_teachers(self, text: TextSize) -> float:
        return 0.5e12 * text.tokens


class Tracker:
    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []

    def write(self, values: dict[str, float], iteration: int) -> None:
        self.seen.append((iteration, values))

    def write_samples(self, samples: list[Sample], iteration: int) -> None:
        self.seen.append((iteration, samples))


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds; a test sets it."""
    time = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: time[0])
    return time


def make(file: Path | None, **changes: object) -> MetricsLog:
    settings = {"train_iters": 10, "log_interval": 2, "writes": True, "ranks": 4, "on_gpus": True}
    return MetricsLog(file=file, flops=Flops(Namespace(), []), **{**settings, **changes})


def step(log: MetricsLog, iteration: int, *, losses: dict[str, float] | None = None, **changes: object) -> None:
    losses = {"loss": 2.0, "ce": 3.0, "kd": 1.0} if losses is None else losses
    values = {
        "text": TextSize(24, 300, 32),
        "lr": 1e-3,
        "grad_norm": 0.5,
        "skipped": False,
        "ratio": 0.5,
        "temperature": 2.0,
        "seconds": {"data": 0.5},
        "peak_memory_gib": None,
    }
    log.iteration(
        IterationMetrics(iteration, {name: torch.tensor(v) for name, v in losses.items()}, **{**values, **changes})
    )


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_one_line_per_iteration(tmp_path, now):
    file = tmp_path / "folder" / "metrics.jsonl"
    log = make(file, peak_tflops=100.0)
    log.start(0)
    now[0] += 3.0  # an evaluation before the step is not the step's time
    log.step_begins()
    now[0] += 2.0
    step(log, 1)
    step(log, 2, losses={"loss": 1.0, "kd_2": -1e-9}, lr=None, grad_norm=None, skipped=True, peak_memory_gib=7.5)
    step(log, 3, ratio=0.0)
    first, second, third = lines(file)
    assert first == {
        "iteration": 1,
        "loss": 2.0,
        "ce": 3.0,
        "kd": 1.0,
        "grad_norm": 0.5,
        "lr": 1e-3,
        "tokens": 24,
        "padding_tokens": 8,
        "step_s": 2.0,
        "tokens_per_s": 12.0,
        "tokens_per_s_per_gpu": 3.0,
        "student_tflops_per_gpu": 3.0,
        "teacher_tflops_per_gpu": 1.5,
        "mfu": 0.045,
        "data_s": 0.5,
        "elapsed_s": 5.0,
        "skipped": False,
        "ratio": 0.5,
        "temperature": 2.0,
    }
    assert (second["lr"], second["grad_norm"], second["skipped"]) == (None, None, True)
    assert second["kd_2"] == pytest.approx(-1e-9) and "ce" not in second and second["peak_memory_gib"] == 7.5
    assert third["teacher_tflops_per_gpu"] == 0.0 and third["mfu"] == 0.03  # at R = 0 the teacher has not run


def test_no_mfu_for_an_unknown_card(tmp_path, now):
    log = make(tmp_path / "m.jsonl")
    log.start(0)
    now[0] += 1.0
    step(log, 1)
    assert "mfu" not in lines(tmp_path / "m.jsonl")[0]


def test_console_line_is_the_mean_of_an_interval(capsys, now):
    log = make(None)
    log.start(0)
    for iteration, kd in ((1, 0.5), (2, -0.75)):
        log.step_begins()
        now[0] += 2.0
        step(log, iteration, losses={"loss": 1.0, "ce": 2.0 * iteration, "kd": kd})
    out = capsys.readouterr().out
    assert out.startswith("iteration  2/10 | loss   1.0000 | ce   3.0000 | kd  -0.1250 | grad norm   0.500 |")
    assert out.endswith("ETA 0:00:16\n")


def test_skipped_steps_are_counted_and_excluded_from_the_means(capsys, now):
    log = make(None)
    log.start(0)
    now[0] += 1.0
    step(log, 1, losses={"loss": 1.0})
    step(log, 2, losses={"loss": math.inf}, skipped=True)
    out = capsys.readouterr().out
    assert "loss   1.0000" in out and "skipped 1" in out
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


def test_resuming_drops_lines_of_the_killed_attempt(tmp_path, now):
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


def test_last_line_without_newline_is_dropped_even_if_it_is_json(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"iteration": 1}\n{"iteration": 2}')
    make(file).start(5)
    assert [line["iteration"] for line in lines(file)] == [1]


def test_damaged_lines_do_not_stop_a_job(tmp_path, capsys):
    """From a crash of the machine, or an edit by hand."""
    file = tmp_path / "metrics.jsonl"
    damaged = [
        "\0" * 40,
        "",
        "[1]",
        '{"event": 1}',
        '{"iteration": 3, "lo{"iteration": 3}',
        '{"iteration": null}',
        "\udcff",
    ]
    text = "\n".join(['{"iteration": 1}', *damaged, '{"iteration": 2}', '{"iteration": 4}']) + "\n"
    file.write_bytes(text.encode(errors="surrogateescape"))
    make(file).start(3)
    assert file.read_text() == '{"iteration": 1}\n{"iteration": 2}\n'
    assert capsys.readouterr().out == f"mkd: {file}: {len(damaged)} damaged lines are skipped\n"


def test_non_finite_numbers_are_null(tmp_path, now):
    """JSON has no representation for them, and most readers reject the file."""
    file = tmp_path / "metrics.jsonl"
    log = make(file)
    log.start(0)
    now[0] += 1.0
    step(log, 1, losses={"loss": math.nan}, grad_norm=math.inf)
    log.evaluation("valid", 1, {"ce": torch.tensor(math.nan)}, {**CALIBRATION, "student": [math.nan, 0.5]})
    assert "NaN" not in file.read_text() and "Infinity" not in file.read_text()
    trained, evaluated = lines(file)
    assert (trained["loss"], trained["grad_norm"], trained["skipped"]) == (None, None, False)
    assert evaluated["valid_ce"] is None and evaluated["valid_calibration"]["student"] == [None, 0.5]
    make(file).start(1)
    assert RunLog.read(str(file)).curve("loss") == ([], [])


def test_only_one_rank_writes(tmp_path, capsys):
    file, tracker = tmp_path / "metrics.jsonl", Tracker()
    file.write_text("kept")
    log = make(file, writes=False, trackers=[tracker])
    log.start(0)
    step(log, 2)
    log.evaluation("valid", 2, {"ce": torch.tensor(1.0)})
    assert file.read_text() == "kept" and capsys.readouterr().out == "" and tracker.seen == []


CALIBRATION = {
    "tokens": [2500.0, 7500.0],
    "share": [0.25, 0.75],
    "teacher": [0.25, 0.75],
    "student": [0.5, 0.5],
    "agreement": [0.5, 1.0],
}


def test_evaluation(tmp_path, capsys):
    file = tmp_path / "metrics.jsonl"
    log = make(file)
    log.start(0)
    values = {"loss": 0.75, "ce": 2.0, "kd": -0.5, "teacher_ce": 1.0, "agreement": 0.625}
    log.evaluation("valid", 4, {name: torch.tensor(value) for name, value in values.items()}, CALIBRATION)
    log.evaluation("test", 9, {"ce": torch.tensor(800.0)})
    log.evaluation("test", 9, {})
    assert capsys.readouterr().out.count("\n") == 2  # no table: training has not ended
    assert lines(file) == [
        {
            "iteration": 4,
            "valid_loss": 0.75,
            "valid_ce": 2.0,
            "valid_kd": -0.5,
            "valid_teacher_ce": 1.0,
            "valid_agreement": 0.625,
            "valid_perplexity": math.exp(2.0),
            "valid_teacher_perplexity": math.e,
            "valid_calibration_error": 0.25,
            "valid_calibration": CALIBRATION,
        },
        {"iteration": 9, "test_ce": 800.0, "test_perplexity": None},
    ]


def test_last_evaluation_prints_a_table(tmp_path, capsys):
    """In a resumed run the first evaluation comes from the file."""
    file = tmp_path / "metrics.jsonl"
    log = make(file)
    log.start(0)
    log.evaluation("valid", 0, {"ce": torch.tensor(3.0), "kd": torch.tensor(1.5), "teacher_ce": torch.tensor(1.0)})
    log.evaluation("valid", 5, {"ce": torch.tensor(2.5), "kd": torch.tensor(1.25), "teacher_ce": torch.tensor(1.0)})
    again = make(file)
    again.start(5)
    capsys.readouterr()
    values = {"ce": 2.0, "kd": 0.5, "teacher_ce": 1.0, "teacher_entropy": 0.75, "student_entropy": 1.5}
    again.evaluation("valid", 10, {name: torch.tensor(value) for name, value in values.items()}, CALIBRATION)
    table = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert table[0] == ["mkd:", "validation"]
    assert table[1] == ["mkd:", "model", "cross-entropy", "perplexity", "KD", "entropy"]
    assert table[2] == ["mkd:", "teacher", "1.0000", "2.72", "0.750"]
    assert table[3] == ["mkd:", "student", "at", "iteration", "0", "3.0000", "20.09", "1.5000"]
    assert table[4] == ["mkd:", "student", "at", "iteration", "10", "2.0000", "7.39", "0.5000", "1.500"]
    assert table[-1] == ["mkd:", "0.5", "to", "1.0", "75.0%", "0.750", "0.500", "100.0%"]


def test_last_evaluation_of_two_teachers(capsys):
    log = make(None)
    log.start(0)
    values = {"ce": 2.0, "kd": 0.5, "teacher_ce_1": 1.0, "teacher_ce_2": 0.0, "teacher_entropy_1": 0.75}
    values |= {"student_entropy_1": 1.5, "agreement_1": 0.625, "agreement_2": 0.5}
    log.evaluation("valid", 10, {name: torch.tensor(value) for name, value in values.items()})
    table = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()[1:]]
    assert table == [
        "mkd: validation",
        "mkd: model cross-entropy perplexity KD entropy agreement 1 agreement 2",
        "mkd: teacher 1 1.0000 2.72 0.750",
        "mkd: teacher 2 0.0000 1.00",
        "mkd: student at iteration 10 2.0000 7.39 0.5000 1.500 62.5% 50.0%",
    ]


def test_calibration_of_few_tokens_is_one_line(tmp_path, capsys):
    log = make(None)
    log.start(0)
    values = {"ce": torch.tensor(2.0)}
    log.evaluation("valid", 10, values, {**CALIBRATION, "tokens": [250.0, 750.0]})
    assert capsys.readouterr().out.splitlines()[-1] == (
        "mkd: the teacher's most probable token: probability 0.625 from the teacher, 0.500 from the student; "
        "calibration error 0.250 (1,000 tokens; a table of bins from 10,000 on)"
    )
    log.evaluation("valid", 10, values, CALIBRATION)
    out = capsys.readouterr().out
    assert "(10,000 tokens)\n" in out and "0.5 to 1.0" in out


@pytest.mark.parametrize(("ce", "told"), [(2.4, True), (2.3, False)])
def test_student_worse_than_uniform_prints_one_hint(ce, told, capsys):
    log = make(None, vocabulary=10)
    log.start(0)
    for iteration in (0, 5):
        log.evaluation("valid", iteration, {"ce": torch.tensor(ce)})
    assert capsys.readouterr().out.count("is above ln V = 2.30") == told


def test_trackers_get_the_numbers_at_their_interval(now):
    tracker = Tracker()
    log = make(None, trackers=[tracker], tracker_interval=3, log_interval=100)
    log.start(0)
    now[0] += 1.0
    for iteration in range(1, 4):
        step(log, iteration, grad_norm=None)
    log.evaluation("valid", 4, {"ce": torch.tensor(2.0)}, CALIBRATION)
    (trained, values), (evaluated, validation) = tracker.seen
    assert (trained, evaluated) == (3, 4)
    assert values["kd"] == 1.0 and values["tokens"] == 24.0
    assert not {"iteration", "grad_norm", "skipped"} & values.keys()
    assert validation == {"valid_ce": 2.0, "valid_perplexity": math.exp(2.0), "valid_calibration_error": 0.25}


def test_a_job_that_lost_its_file_to_a_newer_one_writes_no_more(tmp_path, capsys):
    """The newer job resumed at an earlier iteration; the lines of the older one would be read as its own."""
    file = tmp_path / "metrics.jsonl"
    older, newer = make(file), make(file)
    older.start(0)
    for iteration in (1, 2, 3):
        step(older, iteration)
    newer.start(2)
    step(older, 4)
    step(newer, 3)
    older.evaluation("valid", 4, {"ce": torch.tensor(1.0)})
    step(newer, 4)
    third = make(file)  # its file may get the number of the first one's, if that is closed
    third.start(4)
    step(older, 5)
    step(third, 5)
    assert [line["iteration"] for line in lines(file)] == [1, 2, 3, 4, 5]
    assert capsys.readouterr().out.count("was replaced by another job") == 1


def test_a_removed_file_is_made_again(tmp_path):
    file = tmp_path / "save" / "metrics.jsonl"
    log = make(file)
    log.start(0)
    step(log, 1)
    file.unlink()
    file.parent.rmdir()
    step(log, 2)
    step(log, 3)
    assert [line["iteration"] for line in lines(file)] == [2, 3]


def test_a_full_disk_names_the_file():
    log = make(Path("/dev/full"))
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        step(log, 1)


@pytest.mark.parametrize(
    ("first", "train_iters", "seconds", "expected"),
    [
        pytest.param(0, 12, 1.0, list(range(1, 13)), id="short run: every step"),
        pytest.param(0, 250, 1.0, [*range(1, 11), 40, 70, 100, 130, 160, 190, 200, 230, 250], id="every 30 s"),
        pytest.param(0, 250, 0.01, [*range(1, 11), 100, 200, 250], id="fast steps: every hundredth"),
        pytest.param(120, 250, 0.01, [*range(121, 131), 200, 250], id="resumed"),
        pytest.param(0, 120, 40.0, list(range(1, 121)), id="slow steps: each"),
    ],
)
def test_console_lines_without_an_interval(capsys, now, first, train_iters, seconds, expected):
    log = make(None, train_iters=train_iters, log_interval=100, log_interval_is_given=False)
    log.start(first)
    for iteration in range(first + 1, train_iters + 1):
        log.step_begins()
        now[0] += seconds
        step(log, iteration)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("iteration")]
    assert [int(line.split()[1].split("/")[0]) for line in printed] == expected


def test_a_given_interval_has_no_further_lines(capsys, now):
    log = make(None, train_iters=40, log_interval=15)
    log.start(0)
    for iteration in range(1, 41):
        log.step_begins()
        now[0] += 100.0
        step(log, iteration)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["15/40", "30/40", "40/40"]


def test_ranks_measure_in_the_same_iterations_whatever_the_time(now):
    """The peak memory is reduced over all ranks, whose clocks differ."""
    one, other = (make(None, train_iters=300, log_interval=100, log_interval_is_given=False) for _ in range(2))
    one.start(0)
    now[0] += 1000.0
    other.start(0)
    measured = [[i for i in range(1, 301) if log.measures(i)] for log in (one, other)]
    assert measured == [[*range(1, 11), 100, 200, 300]] * 2


SAMPLES = [Sample("Once upon\na", " time\x1b[2J", 3, ended=True), Sample("p" * 100, "t" * 500, 64, ended=False)]


def test_samples_are_printed_and_written(tmp_path, capsys):
    tracker = Tracker()
    log = make(tmp_path / "m.jsonl", trackers=[tracker])
    log.start(0)
    log.evaluation("valid", 5, {"ce": torch.tensor(2.0)})
    log.samples(5, SAMPLES)
    printed = capsys.readouterr().out.splitlines()[1:]
    assert printed[0] == r"sample 1 at iteration 5: Once upon\na =>  time\x1b[2J"
    assert printed[1] == f"sample 2 at iteration 5: ...{'p' * 60} => {'t' * 400}..."
    assert lines(tmp_path / "m.jsonl")[1] == {
        "iteration": 5,
        "samples": [
            {"prompt": "Once upon\na", "text": " time\x1b[2J", "tokens": 3, "ended": True},
            {"prompt": "p" * 100, "text": "t" * 500, "tokens": 64, "ended": False},
        ],
    }
    assert tracker.seen[-1] == (5, SAMPLES)
    assert RunLog.read(str(tmp_path / "m.jsonl")).last("valid_ce") == 2.0
    make(tmp_path / "none.jsonl", writes=False).samples(5, SAMPLES)
    assert not (tmp_path / "none.jsonl").exists()
