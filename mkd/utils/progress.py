"""Progress of long work: how much is done, at which rate, and how long the rest takes.

`Progress` counts; `ByteProgress` shows it on stderr: a bar on a terminal, plain lines elsewhere.
"""

import sys
import time
from types import TracebackType
from typing import Self

import rich.progress
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

_LINE_SECONDS = 5.0


class Progress:
    """Counts finished work; the clock starts with the object."""

    def __init__(self, total: int, line_seconds: float, *, slowing: bool = False) -> None:
        """Args:
        total: amount of work.
        line_seconds: shortest time between two lines.
        slowing: the time between two lines grows to a tenth of the elapsed time, for work that may take hours.
        """
        self.total, self.done = total, 0
        self._line_seconds, self._slowing = line_seconds, slowing
        self._start = time.monotonic()
        self._skipped = 0
        self._next_line = self._start + line_seconds

    def advance(self, amount: int) -> None:
        """Add finished work, up to the total."""
        self.done = min(self.done + amount, self.total)

    def restart_clock(self) -> None:
        """Exclude the time and the work so far from the rate, because they were spent on skipping."""
        self._start, self._skipped = time.monotonic(), self.done

    def line_is_due(self) -> bool:
        """True if a line should be printed now; the next one is due some seconds later."""
        now = time.monotonic()
        if now < self._next_line:
            return False
        self._next_line = now + max(self._line_seconds, (now - self._start) / 10 if self._slowing else 0.0)
        return True

    @property
    def seconds(self) -> float:
        """Time since the start of the clock; never 0."""
        return max(time.monotonic() - self._start, 1e-9)

    @property
    def rate(self) -> float:
        """Work per second."""
        return (self.done - self._skipped) / self.seconds

    @property
    def seconds_left(self) -> float | None:
        """Time for the rest at this rate; None before any work was timed."""
        rate = self.rate
        return (self.total - self.done) / rate if rate else None


class ByteProgress:
    """Shows the bytes of one task on stderr; use it as a context manager."""

    def __init__(self, label: str, total: int) -> None:
        self._label = label
        self._progress = Progress(total, _LINE_SECONDS, slowing=True)
        self._bar = None
        if sys.stderr.isatty():
            columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._bar = rich.progress.Progress(TextColumn("{task.description}"), *columns, console=Console(stderr=True))
            self._bar.add_task(label, total=total)

    def advance(self, nbytes: int) -> None:
        """Add finished bytes."""
        self._progress.advance(nbytes)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], advance=nbytes)
        elif self._progress.line_is_due():
            self._print_line()

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif kind is None:
            self._print_line()

    def _print_line(self) -> None:
        progress = self._progress
        print(
            f"{self._label}: {decimal(progress.done)} of {decimal(progress.total)}, {decimal(int(progress.rate))}/s, "
            f"{progress.seconds_left or 0.0:.0f} s left",
            file=sys.stderr,
            flush=True,
        )
