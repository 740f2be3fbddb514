"""Addresses ipc:///FOLDER/NAME of teacher services: socket files in a folder that only its owner can enter.

The permissions of the folder authenticate both sides, so that no secret is needed and nothing is encrypted: only
processes of its owner (and of root) can connect to the socket file, or put another one in its place. Both sides check
them, and those of the folders above it, before they use the file.
"""

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from mkd.errors import MkdConfigError, MkdError, MkdTeacherError

SCHEME = "ipc://"
MOST_PATH_BYTES = 107
"""Longest path of a socket file: `sun_path` has 108 bytes, of which the last is 0."""


@dataclass(frozen=True)
class SocketFile:
    """ipc:///FOLDER/NAME."""

    path: Path
    flag: str = field(compare=False)
    """The flag that has the address, for errors."""

    @classmethod
    def parse(cls, flag: str, text: str) -> "SocketFile":
        """Parse the value of a flag. Links above the folder are resolved here, once.

        Raises:
            MkdConfigError: it is no such address, or its path is too long.
        """
        path = Path(text.removeprefix(SCHEME))
        named = {".", ".."}.isdisjoint(text.split("/"))
        if not text.startswith(SCHEME + "/") or not text.isprintable() or not named or len(path.parts) < 3:
            raise MkdConfigError(
                f"{flag} is {text}; it must be ipc:///FOLDER/NAME, the whole path of a socket file, such as "
                f"ipc:///tmp/mkd-{os.geteuid()}/teacher"
            )
        path = Path(os.path.realpath(path.parent.parent), *path.parts[-2:])
        if (length := len(os.fsencode(path))) > MOST_PATH_BYTES:
            raise MkdConfigError(
                f"{flag} is {text}; its path {path} has {length} bytes, and socket files have at most "
                f"{MOST_PATH_BYTES}: give a shorter one"
            )
        return cls(path, flag)

    def __str__(self) -> str:
        return f"{SCHEME}{self.path}"

    @property
    def is_loopback(self) -> bool:
        """See `ServiceAddress.is_loopback`."""
        return True

    def check_folder(self) -> None:
        """Check that others can neither connect nor replace the folder.

        Raises:
            MkdConfigError: they can, or it does not exist.
        """
        if (fault := _fault_of_folder(self.path.parent)) is not None:
            raise self._error(MkdConfigError, f"{fault}: give a folder with mode 0700 of your own, such as in /tmp")

    def bind(self, service: zmq.Socket) -> None:
        """Listen. The folder is made if it is missing; the socket file of a service that has ended is replaced.

        Raises:
            MkdConfigError: see `check_folder`; or a service listens there, or the file is not a socket.
            zmq.ZMQError: the address cannot be used.
        """
        try:
            self.path.parent.mkdir(0o700, exist_ok=True)
            self.check_folder()
            with _locked(self.path.parent):
                self._check_unused()
                before = os.umask(0o177)
                try:
                    service.bind(str(self))
                finally:
                    os.umask(before)
        except OSError as error:
            raise self._error(MkdConfigError, f"it cannot be used, {error.strerror}: give another path") from error

    def check_service(self) -> None:
        """Check that only this user can listen there, and that what is there, if anything, is this user's socket.

        Raises:
            MkdTeacherError: another user's service may listen there, or the folder does not exist.
        """
        fault = _fault_of_folder(self.path.parent)
        if fault is None and (found := _status(self.path)) is not None:
            fault = _fault_of_owner(self.path, found)
            if not stat.S_ISSOCK(found.st_mode):
                fault = f"{self.path} is not a socket file"
        if fault is not None:
            remedy = "start mkd serve-teacher there as the same user, in a folder with mode 0700"
            raise self._error(MkdTeacherError, f"{fault}: {remedy}")

    def _check_unused(self) -> None:
        """Raise MkdConfigError unless ZeroMQ, which removes what is there, may do so."""
        if (found := _status(self.path)) is None:
            return
        if not stat.S_ISSOCK(found.st_mode):
            raise self._error(MkdConfigError, f"{self.path} is not a socket file: remove it, or give another path")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            if probe.connect_ex(str(self.path)) not in (errno.ECONNREFUSED, errno.ENOENT):
                raise self._error(MkdConfigError, "a service listens there already: stop it, or give another path")

    def _error(self, kind: type[MkdError], text: str) -> MkdError:
        return kind(f"{self.flag} {self}: {text}")


def _status(path: Path) -> os.stat_result | None:
    """The status of a file or of a link; None if there is none."""
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


def _fault_of_folder(folder: Path) -> str | None:
    """A reason for which others can connect to sockets in a folder or pose as them; None if they cannot."""
    found = _status(folder)
    if found is None:
        return f"the folder {folder} does not exist"
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder} is not a folder, or a link to one"
    if (fault := _fault_of_owner(folder, found)) is not None:
        return fault
    for above in folder.parents:
        found = above.lstat()
        if found.st_uid not in (0, os.geteuid()):
            return f"{above} belongs to user {found.st_uid}, who can replace folders in it"
        if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
            return f"others can replace folders in {above}, which has mode {stat.S_IMODE(found.st_mode):04o}"
    return None


def _fault_of_owner(path: Path, found: os.stat_result) -> str | None:
    """A reason for which a file or folder is not only this user's; None if it is."""
    if found.st_uid != os.geteuid():
        return f"{path} belongs to user {found.st_uid}, and this process to user {os.geteuid()}"
    if found.st_mode & 0o077:
        return f"{path} has mode {stat.S_IMODE(found.st_mode):04o}, which is open to others"
    return None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other services from listening in the folder for the first time."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
