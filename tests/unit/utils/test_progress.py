"""mkd/utils/progress.py: rate, time left and when a line is due."""

import pytest

from mkd.utils.progress import ByteProgress, Progress


class Clock:
    """Replaces time.monotonic."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("time.monotonic", clock)
    return clock


def test_rate_and_time_left(clock: Clock) -> None:
    progress = Progress(100, 10.0)
    assert progress.seconds_left is None
    clock.now += 5.0
    progress.advance(20)
    assert (progress.done, progress.rate, progress.seconds_left) == (20, 4.0, 20.0)
    progress.advance(1000)
    assert (progress.done, progress.seconds_left) == (100, 0.0)


def test_skipped_work_does_not_count(clock: Clock) -> None:
    progress = Progress(100, 10.0)
    clock.now += 1.0
    progress.advance(50)
    progress.restart_clock()
    assert progress.seconds_left is None
    clock.now += 5.0
    progress.advance(10)
    assert (progress.seconds, progress.rate, progress.seconds_left) == (5.0, 2.0, 20.0)


@pytest.mark.parametrize(("slowing", "times"), [(False, [10, 20, 30]), (True, [10, 20, 30])])
def test_lines_at_an_interval(clock: Clock, slowing: bool, times: list[int]) -> None:
    progress = Progress(1, 10.0, slowing=slowing)
    seen = []
    for second in range(35):
        clock.now = 100.0 + second
        if progress.line_is_due():
            seen.append(second)
    assert seen == times


def test_lines_of_long_work_become_rare(clock: Clock) -> None:
    progress = Progress(1, 5.0, slowing=True)
    clock.now += 1000.0
    assert progress.line_is_due()
    clock.now += 99.0
    assert not progress.line_is_due()
    clock.now += 1.0
    assert progress.line_is_due()


def test_plain_lines_on_stderr(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with ByteProgress("reading x", 4_000_000) as progress:
        clock.now += 1.0
        progress.advance(1_000_000)
        clock.now += 4.0
        progress.advance(1_000_000)
        clock.now += 5.0
        progress.advance(2_000_000)
    assert capsys.readouterr() == (
        "",
        "reading x: 2.0 MB of 4.0 MB, 400.0 kB/s, 5 s left\n"
        "reading x: 4.0 MB of 4.0 MB, 400.0 kB/s, 0 s left\n"
        "reading x: 4.0 MB of 4.0 MB, 400.0 kB/s, 0 s left\n",
    )


def test_nothing_is_printed_at_the_end_after_an_error(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError), ByteProgress("reading x", 1):
        raise RuntimeError
    assert capsys.readouterr().err == ""
