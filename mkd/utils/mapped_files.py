"""Files that are mapped into memory and may become shorter while they are read.

A read beyond the end of a mapped file kills the process with SIGBUS, without a message. `SizeGuard` is checked before
each read; it costs one `stat` per file, about a microsecond.
"""

import os
from collections.abc import Iterable
from pathlib import Path


class SizeGuard:
    """The sizes that mapped files have now. A file that is removed or replaced stays mapped, and is not a problem."""

    def __init__(self, paths: Iterable[str | Path]) -> None:
        """Remember the sizes of existing files."""
        self._states = [(os.fspath(path), os.stat(path)) for path in paths]

    def problem(self) -> str | None:
        """The first file that is shorter than it was, with both sizes; None if there is none."""
        for path, before in self._states:
            try:
                now = os.stat(path)
            except OSError:
                continue
            if now.st_size < before.st_size and os.path.samestat(before, now):
                return f"{path} was truncated while it is read: {now.st_size} bytes, {before.st_size} at the start"
        return None
