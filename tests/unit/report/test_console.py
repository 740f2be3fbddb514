"""mkd/report/console.py: lines and tables."""

import math

import pytest

from mkd.report.console import clock, evaluation_line, evaluation_table, number, perplexity, show, training_line

LINE = {
    "iteration": 4,
    "loss": 1.5,
    "ce": 2.0,
    "kd": -0.25,
    "kd_2": 0.00012,
    "grad_norm": 1.25,
    "lr": 1e-4,
    "skipped": False,
    "ratio": 0.9,
    "temperature": 2.0,
    "step_s": 2.0,
    "tokens_per_s": 3000.0,
    "student_tflops_per_gpu": 200.0,
    "teacher_tflops_per_gpu": 100.0,
    "data_s": 0.1,
}
TERMS = ["kd", "kd_2", "loss", "ce", "student_entropy", "agreement"]


def test_training_line_on_cpu() -> None:
    assert training_line([LINE], TERMS, 1000, 0, 61.0) == (
        "iteration    4/1000 | loss   1.5000 | ce   2.0000 | kd  -0.2500 | kd_2  1.2e-04 | grad norm   1.250 | "
        "lr 1.00e-04 | R 0.9 | T 2 |     3,000 tokens/s | time: data  5% | ETA 0:01:01"
    )


def test_training_line_on_gpus() -> None:
    measured = {"student_entropy": 2.5, "teacher_entropy": 2.25, "agreement": 0.5}
    last = {**LINE, **measured, "mfu": 0.25, "peak_memory_gib": 40.5, "teacher_s": 1.0, "cache_s": 0.25}
    line = training_line([{**LINE, "mfu": 0.5, "step_s": 6.0}, last], TERMS, 4, 2, 0.0)
    assert "| entropy 2.500 (teacher 2.250) | agreement  50.0% |" in line
    assert (
        "|     3,000 tokens/s (1,500 per GPU) | 200.0 + 100.0 teacher TFLOP/s per GPU | MFU 43.8% |  40.50 GiB |"
        in line
    )
    assert "time: data  2%, teacher 12%, cache  3%" in line


def test_lines_of_a_run_align() -> None:
    lines = [
        training_line([{**LINE, **changes}], TERMS, 1000, 1, 3.0)
        for changes in (
            {},
            {"iteration": 998, "loss": -14.25, "kd": 3e-7, "tokens_per_s": 912345.0, "grad_norm": 100.5},
        )
    ]
    bars = [[place for place, char in enumerate(line) if char == "|"] for line in lines]
    assert bars[0] == bars[1]


def test_evaluation_line() -> None:
    values = {
        "loss": 0.75,
        "ce": 2.0,
        "perplexity": math.exp(2.0),
        "bits_per_byte": 0.5,
        "kd": -0.5,
        "kd_1": 1e-5,
        "teacher_ce": 1.0,
        "teacher_perplexity": math.e,
        "student_entropy": 2.0,
        "agreement": 0.625,
    }
    assert evaluation_line("valid", 4, values) == (
        "validation at iteration 4 | ce 2.0000 (ppl 7.39, 0.5000 bits/byte) | kd -0.5000 | kd_1 1.0e-05 | "
        "teacher ce 1.0000 (ppl 2.72) | entropy 2.000 | top-1 agreement 62.5%"
    )
    assert evaluation_line("test", 9, {"ce": 800.0, "perplexity": math.inf}) == (
        "test at iteration 9 | ce 800.0000 (ppl inf)"
    )


TWO_TEACHERS = {
    "ce": 2.0,
    "perplexity": math.exp(2.0),
    "kd": 0.5,
    "kd_1": 0.25,
    "teacher_ce_1": 1.0,
    "teacher_bits_per_byte_1": 0.25,
    "teacher_ce_2": 0.0,
    "student_entropy_1": 2.0,
    "teacher_entropy_1": 1.5,
    "student_entropy_2": 2.0,
    "teacher_entropy_2": 1.25,
    "agreement_1": 0.625,
    "agreement_2": 0.5,
}


def test_lines_of_two_teachers() -> None:
    compared = "entropy 2.000 (teacher 1 1.500, teacher 2 1.250) | agreement teacher 1 62.5%, teacher 2 50.0%"
    assert evaluation_line("valid", 4, TWO_TEACHERS) == (
        "validation at iteration 4 | ce 2.0000 (ppl 7.39) | kd 0.5000 | kd_1 0.2500 | "
        "teacher 1 ce 1.0000 (ppl 2.72, 0.2500 bits/byte) | teacher 2 ce 0.0000 (ppl 1.00) | " + compared
    )
    own = {name: value for name, value in TWO_TEACHERS.items() if name.startswith(("stud", "teacher_e", "agree"))}
    line = training_line([{**LINE, **own}], [*TERMS, *own], 1000, 1, 3.0)
    assert compared in line and "agreement_1" not in line


def test_positions_of_written_texts_have_bounds() -> None:
    written = {f"written_{name}": 1.0 for name in ("tokens", "cut_off", "repeated")}
    line = training_line([{**LINE, **written, "kd_first_64": 0.0076}], TERMS, 1000, 1, 3.0)
    assert "| kd at written tokens 1-64: 0.0076 |" in line


def test_tables_are_plain_lines_in_a_log(capsys: pytest.CaptureFixture) -> None:
    show("title", evaluation_table({"teacher": {"ce": 1.0}, "student": {"ce": 2.0, "agreement": 0.5}}))
    assert capsys.readouterr().out.splitlines() == [
        "mkd: title",
        "mkd:   model    cross-entropy  perplexity  agreement",
        "mkd:   teacher         1.0000        2.72",
        "mkd:   student         2.0000        7.39      50.0%",
    ]


def test_tables_are_drawn_on_a_terminal(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    show("title", evaluation_table({"teacher": {"ce": 1.0}}))
    out = capsys.readouterr().out
    assert "─" in out and "mkd:" not in out and "1.0000" in out


def test_number() -> None:
    assert number(0.0) == "  0.0000" and number(-0.5) == " -0.5000" and number(9.9e-4) == " 9.9e-04"
    assert number(math.nan) == "     nan"


def test_perplexity() -> None:
    assert perplexity(0.0) == 1.0
    assert perplexity(1.0) == math.e
    assert perplexity(699.0) == math.exp(699.0) > 1e303
    assert perplexity(700.0) == perplexity(1e9) == perplexity(math.inf) == math.inf
    assert math.isnan(perplexity(math.nan))


@pytest.mark.parametrize(
    "seconds, text",
    [(0, "0:00:00"), (0.4, "0:00:00"), (59.6, "0:01:00"), (3599, "0:59:59"), (3600, "1:00:00"), (360061, "100:01:01")],
)
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


@pytest.mark.parametrize("seconds", [float("nan"), float("inf")])
def test_a_duration_that_is_none(seconds: float) -> None:
    assert clock(seconds) == "?"
