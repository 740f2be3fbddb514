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
import re
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b, file_digest
from io import TextIOWrapper
from pathlib import Path
from socket import gethostname
from typing import BinaryIO, TextIO
from uuid import uuid4

from mkd.errors import MkdConfigError, MkdNodeError

PARTIAL = ".partial"
"""End of the temporary names."""
_LOCK = "lock"
"""Locked file in a scratch folder whose process runs."""
_ABANDONED_SECONDS = 86400.0
"""Age at which a temporary name of another host is taken to be left by a killed process."""
_ONLY_FILES = os.O_NOFOLLOW | os.O_NONBLOCK
"""Flags of `os.open` with which it follows no link and does not wait for the other end of a pipe."""
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}
"""errno of file systems without locks."""
_SHORT_WRITE = re.compile(r"\d+ requested and \d+ written")
"""numpy's message of a short write."""
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
        MkdNodeError: this node cannot look at it.
    """
    target = Path(os.path.realpath(path))
    try:
        mode = target.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return target
    except OSError as error:
        raise MkdNodeError(f"{flag} {path}: {error.strerror}; give the path of a file".strip()) from error
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
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _ONLY_FILES, 0o666)
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
def naming(path: Path) -> Iterator[None]:
    """An OSError of a write, which names no file, names this one.

    numpy reports a short write without an errno; the cause is a full disk.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None and _SHORT_WRITE.search(str(error)):
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({error})", str(path)) from error
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def _writing(target: Path) -> Iterator[BinaryIO]:
    """A binary file that replaces `target` when the `with` block ends. Another writer of the path waits."""
    partial = partial_path(target)
    with naming(target), open(_locked(partial, fcntl.LOCK_EX), "wb") as file:
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
    remove_abandoned(path)
    partial = path.with_name(f".{path.name}.{_token()}{PARTIAL}")
    try:
        with naming(path), open(_locked(partial, fcntl.LOCK_EX), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """A new folder beside `path` for files that `publish_files` renames; it is removed when the `with` block ends.

    Several processes may have one for the same path. What killed ones left is removed first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(path)
    unlocked = path.with_name(f".{path.name}.{_token()}")
    folder = unlocked.with_name(f"{unlocked.name}{PARTIAL}")
    unlocked.mkdir()
    descriptor = _locked(unlocked / _LOCK, fcntl.LOCK_EX)
    try:
        os.replace(unlocked, folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _token() -> str:
    """32 hexadecimal digits: 8 for this host, 24 at random."""
    return _host() + uuid4().hex[:24]


def _host() -> str:
    return blake2b(gethostname().encode(), digest_size=4).hexdigest()


def remove_abandoned(path: Path) -> None:
    """Remove the temporary files and scratch folders of a path whose processes are gone.

    A running process has locked its own. Locks of other hosts may be invisible here, so their names must be old too.
    """
    pattern = re.compile(rf"\.{re.escape(path.name)}\.([0-9a-f]{{32}}){re.escape(PARTIAL)}")
    found = [(match, entry) for entry in os.scandir(path.parent) if (match := pattern.fullmatch(entry.name))]
    for match, entry in found:
        try:
            is_folder = entry.is_dir(follow_symlinks=False)
            is_young = time.time() - entry.stat(follow_symlinks=False).st_mtime < _ABANDONED_SECONDS
            if is_young and not match[1].startswith(_host()):
                continue
            lock = os.open(f"{entry.path}/{_LOCK}" if is_folder else entry.path, os.O_RDWR | _ONLY_FILES)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_folder:
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                os.unlink(entry.path)
        except OSError:  # its process runs, or has ended meanwhile
            continue
        finally:
            os.close(lock)


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
            with naming(path):
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


def hash_of(path: Path) -> str:
    """128-bit hex hash of a file: a gigabyte takes about a second."""
    with path.open("rb") as content:
        return file_digest(content, lambda: blake2b(digest_size=16)).hexdigest()


def free_bytes(path: Path) -> int | None:
    """Free bytes of the file system of a path, which need not exist; None if it does not report its size."""
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    usage = shutil.disk_usage(existing)
    return usage.free if usage.total else None


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on disk: new files, renames and removals."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with naming(folder):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Put a file's content on disk."""
    with naming(path), path.open("rb") as file:
        os.fsync(file.fileno())
