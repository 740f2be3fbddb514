"""Progress of long reads and writes: a bar with rate and time left on a terminal, plain lines elsewhere."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

_LINE_SECONDS = 5.0


class ByteProgress:
    """Counts bytes of one task on stderr; use it as a context manager."""

    def __init__(self, label: str, total: int) -> None:
        self._label, self._total = label, total
        self._done, self._start = 0, time.monotonic()
        self._next_line = self._start + _LINE_SECONDS
        self._bar = None
        if sys.stderr.isatty():
            columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._bar = Progress(TextColumn("{task.description}"), *columns, console=Console(stderr=True))
            self._bar.add_task(label, total=total)

    def advance(self, nbytes: int) -> None:
        """Count `nbytes` more."""
        self._done += nbytes
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], advance=nbytes)
        elif time.monotonic() >= self._next_line:
            now = time.monotonic()
            self._next_line = now + max(_LINE_SECONDS, (now - self._start) / 10)  # hours shall not fill a log
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
        seconds = max(time.monotonic() - self._start, 1e-6)
        rate = self._done / seconds
        left = (self._total - self._done) / rate if rate else 0.0
        print(
            f"{self._label}: {decimal(self._done)} of {decimal(self._total)}, {decimal(int(rate))}/s, "
            f"{left:.0f} s left",
            file=sys.stderr,
            flush=True,
        )
