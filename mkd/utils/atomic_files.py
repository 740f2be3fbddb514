"""Atomic files and folders: write under a temporary name, fsync, rename, fsync the folder around it.

After a crash of the process or the machine a path holds the old content or the new one, whole. This is the only module
that renames; `tests/unit/utils/test_atomic_files.py` checks that.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO
from uuid import uuid4

PARTIAL = ".partial"
"""End of the temporary names."""


def partial_path(path: Path) -> Path:
    """The hidden temporary name of a file or folder, beside it. The same for all processes, so that the next one finds
    and replaces what a killed one left."""
    return path.with_name(f".{path.name}{PARTIAL}")


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """Open a text file that replaces `path` when the `with` block ends; after an exception `path` is unchanged."""
    partial = partial_path(path)
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
    """Replace a file. Several processes may do so at the same time; the last one wins."""
    partial = path.with_name(f".{path.name}.{uuid4().hex}{PARTIAL}")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def copy_file(source: Path, path: Path) -> None:
    """Replace a file by a copy of another one."""
    partial = partial_path(path)
    try:
        shutil.copyfile(source, partial)
        publish_files({partial: path})
    finally:
        partial.unlink(missing_ok=True)


def publish_files(finals: Mapping[Path, Path]) -> None:
    """Rename written files of one folder to their final names, in order; the last name therefore implies all others.

    Args:
        finals: temporary path -> final path. All content is on disk before the first file is renamed.
    """
    for partial in finals:
        sync_file(partial)
    for partial, final in finals.items():
        os.replace(partial, final)
        sync_folder(final.absolute().parent)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which is renamed to `path` when the `with` block ends, and removed after an exception.

    What a killed process left under the temporary name is removed first. `path` is absent or an empty folder.
    """
    partial = partial_path(path)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for folder, _, files in os.walk(partial, topdown=False):
            for file in files:
                sync_file(Path(folder, file))
            sync_folder(Path(folder))
        rename(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def rename(source: Path, target: Path) -> None:
    """Rename a file or folder within its folder."""
    os.replace(source, target)
    sync_folder(target.absolute().parent)


def remove_folder(path: Path) -> None:
    """Remove a folder under another name, so that a half removed one is never taken for whole."""
    aside = path.with_name(f".{path.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    rename(path, aside)
    shutil.rmtree(aside)


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on disk: new files, renames and removals."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Put a file's content on disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
