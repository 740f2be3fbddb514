"""Atomic files and folders: write under a temporary name, fsync, rename, fsync the folder around it.

After a crash of the process or the machine a path holds the old content or the new one, whole. This is the only module
that renames; `tests/unit/utils/test_atomic_files.py` checks that.

A link is followed: the file that it leads to is replaced. Devices, pipes and sockets are refused, since a renamed file
would take the place of /dev/null. Two processes that write one path do so one after the other, or the second is
refused.
"""

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import BinaryIO, TextIO
from uuid import uuid4

from mkd.errors import MkdConfigError

PARTIAL = ".partial"
"""End of the temporary names."""
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}
"""errno of file systems without locks."""
_KINDS = {
    stat.S_ISDIR: "a folder",
    stat.S_ISCHR: "a character device",
    stat.S_ISBLK: "a block device",
    stat.S_ISFIFO: "a named pipe",
    stat.S_ISSOCK: "a socket",
}


def partial_path(path: Path) -> Path:
    """The hidden temporary name of a file or folder, beside it. The same for all processes, so that the next one finds
    and replaces what a killed one left."""
    return path.with_name(f".{path.name}{PARTIAL}")


def regular_target(path: Path, flag: str = "") -> Path:
    """The regular file, or the absent one, that a path and its links lead to.

    Args:
        path: a file to replace.
        flag: the flag that named it, for messages.

    Raises:
        MkdConfigError: it is a folder, a device, a pipe, a socket, or a link that leads in a circle.
    """
    target = Path(os.path.realpath(path))
    try:
        mode = target.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return target
    except OSError as error:
        raise MkdConfigError(f"{flag} {path}: {error.strerror}; give the path of a file".strip()) from error
    if not stat.S_ISREG(mode):
        kind = next(name for is_kind, name in _KINDS.items() if is_kind(mode))
        where = path if target == path.absolute() else f"{path} leads to {target}, which"
        raise MkdConfigError(
            f"{flag} {where} is {kind}, and only regular files are replaced: give the path of a file".strip()
        )
    return target


@contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Inside the `with` block no other process writes an output of this name, which takes longer than a moment.

    Raises:
        MkdConfigError: another process is writing it.
    """
    path = Path(os.path.realpath(path))
    lock = path.with_name(f".{path.name}.lock")
    descriptor = _locked(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if descriptor is None:
        raise MkdConfigError(
            f"{path}: another process is writing it ({lock.name} is locked); wait for it, or give another name"
        )
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _locked(path: Path, kind: int) -> int | None:
    """A descriptor of a file that this process has locked, created if absent; None if another process has locked it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            fcntl.flock(descriptor, kind)
            if _names(path, descriptor):  # else another process has renamed or removed it since
                return descriptor
            os.close(descriptor)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return descriptor
            os.close(descriptor)
            raise


def _names(path: Path, descriptor: int) -> bool:
    """True if the path names the open file."""
    try:
        return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """An OSError of a write, which names no file, names this one."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def _writing(target: Path) -> Iterator[BinaryIO]:
    """A binary file that replaces `target` when the `with` block ends. Another writer of the path waits."""
    partial = partial_path(target)
    with _naming(target), open(_locked(partial, fcntl.LOCK_EX), "wb") as file:
        try:
            file.truncate(0)
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(partial, target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    sync_folder(target.parent)


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """Open a text file that replaces `path` when the `with` block ends; after an exception `path` is unchanged."""
    with _writing(regular_target(path)) as binary:
        file = TextIOWrapper(binary, encoding="utf-8", write_through=True)
        try:
            yield file
        finally:
            file.flush()
            file.detach()


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file. Several processes may do so at the same time; the last one wins."""
    path = regular_target(path)
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
    with Path(source).open("rb") as original, _writing(regular_target(path)) as copy:
        shutil.copyfileobj(original, copy)


def publish_files(finals: Mapping[Path, Path]) -> None:
    """Rename written files of one folder to their final names, in order; the last name therefore implies all others.

    Args:
        finals: temporary path -> final path. All content is on disk before the first file is renamed.
    """
    targets = {partial: regular_target(final) for partial, final in finals.items()}
    for partial in targets:
        sync_file(partial)
    for partial, target in targets.items():
        try:
            os.replace(partial, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            copy_file(partial, target)  # a link to another file system
            partial.unlink()
        sync_folder(target.parent)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which is renamed to `path` when the `with` block ends, and removed after an exception.

    What a killed process left under the temporary name is removed first. `path` is absent or an empty folder, or a link
    to one.

    Raises:
        MkdConfigError: another process is writing it, or it is a file.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_dir():
        raise MkdConfigError(f"{path} exists and is not a folder: give the path of a new one")
    path.parent.mkdir(parents=True, exist_ok=True)
    with only_writer(path):
        partial = partial_path(path)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
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
    """Rename a folder within its folder; a target that exists is an empty folder."""
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
