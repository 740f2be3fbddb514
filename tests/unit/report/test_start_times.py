"""mkd/report/start_times.py: each second of a start belongs to the part that ends next."""

import time

import pytest

from mkd.report.start_times import StartTimes


def test_parts_in_order_and_their_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter((100.0, 109.1, 109.14, 111.34, 112.34, 118.78))
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    start = StartTimes()
    for part in ("imports", "data", "teacher", "evaluation", "first step"):
        start.ended(part)
    text = "18.8 s to the end of the first step: imports 9.1, teacher 2.2, evaluation 1.0, first step 6.4"
    assert str(start) == text  # the 0.04 s of the data are in the sum alone


def test_seconds_of_a_part_that_ends_twice_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter((0.0, 1.0, 3.0, 7.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    start = StartTimes()
    for part in ("evaluation", "student", "evaluation"):
        start.ended(part)
    assert str(start) == "7.0 s to the end of the first step: evaluation 5.0, student 2.0"
