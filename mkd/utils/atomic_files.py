"""Files that are either there as a whole or not at all, also after the machine went down."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO
from uuid import uuid4


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """A text file that takes the place of `path` in one step when the `with` block ends, and never if it fails."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_bytes(path: Path, content: bytes) -> None:
    """Put a file in the place of `path` in one step. Several processes may do so at the same time."""
    partial = path.with_name(f".{path.name}.{uuid4().hex}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable: new files, renames and removals."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Make a file's content durable."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
