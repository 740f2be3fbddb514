"""Socket files of teacher services: who may listen there, and what a student refuses to connect to."""

import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mkd.errors import MkdConfigError, MkdError, MkdTeacherError
from mkd.teacher.service.addresses import Secret, parse_address, require_secret
from mkd.teacher.service.connections import TeacherConnections, request_facts
from mkd.teacher.service.server import TeacherServer
from mkd.teacher.service.socket_file import MOST_PATH_BYTES, SocketFile
from tests.unit.teacher.test_service import FACTS, HEAD, LIMIT_S, Ranks, ask, connected, request_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A socket file in a folder that does not exist."""
    return tmp_path / "own/teacher"


@contextmanager
def running(path: Path, secret: Secret | None = None) -> Iterator[SocketFile]:
    """A service in a thread."""
    address = SocketFile.parse("--address", f"ipc://{path}")
    server, stop = TeacherServer(FACTS, address, secret), threading.Event()
    assert server.address == str(address)
    thread = threading.Thread(target=server.serve, args=(Ranks(), HEAD, stop.is_set))
    thread.start()
    try:
        yield address
    finally:
        stop.set()
        thread.join()
        server.close()


def listen(path: Path) -> None:
    TeacherServer(FACTS, SocketFile.parse("--address", f"ipc://{path}"), None)


def connect(path: Path) -> None:
    request_facts([SocketFile.parse("--url", f"ipc://{path}")], None, 0.2, "--url")


def test_service_and_student(path: Path) -> None:
    """The folder is made; the file can be used again after the service has ended."""
    for _ in range(2):
        with running(path) as address, connected(address) as connections:
            assert request_facts([address], None, LIMIT_S, "--url") == [FACTS]
            assert ask(connections, request_of([[1, 2, 3, 4]])).result(LIMIT_S).tensors[0].shape == (2, 4)
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_secret(path: Path) -> None:
    """It is not needed, and encrypts where it is given."""
    address, secret = parse_address("--address", f"ipc://{path}"), Secret.of("x" * 16)
    require_secret("--address", address, None)
    with running(path, secret):
        assert request_facts([address], secret, LIMIT_S, "--url") == [FACTS]
        with pytest.raises(MkdTeacherError, match="MKD_TEACHER_TOKEN must be the same"):
            request_facts([address], None, LIMIT_S, "--url")


@pytest.mark.parametrize(
    "text",
    ["ipc://x", "ipc://@x/y", "ipc://*", "ipc:///x", "ipc:///a/../b", "ipc:///a/b/.", "ipc:///a/b\n", "ipc:/a/b"],
)
def test_wrong_addresses(text: str) -> None:
    with pytest.raises(MkdConfigError, match=r"--address is ipc:.* ipc:///FOLDER/NAME"):
        parse_address("--address", text)


def test_length_of_the_path(path: Path) -> None:
    longest = path.parent / ("é" * MOST_PATH_BYTES)
    longest = Path(os.fsdecode(os.fsencode(longest)[:MOST_PATH_BYTES]))
    if not str(longest).isprintable():  # half of the last letter
        longest = longest.with_name(longest.name[:-1] + "e")
    with running(longest) as address:
        assert request_facts([address], None, LIMIT_S, "--url") == [FACTS]
    with pytest.raises(MkdConfigError, match=r"--address is ipc://.* has 108 bytes, and socket files have at most 107"):
        parse_address("--address", f"ipc://{longest}e")


def test_sticky_folder(tmp_path: Path) -> None:
    """Others can make folders in it, as in /tmp, and cannot replace this one."""
    tmp_path.chmod(0o1777)
    with running(tmp_path / "own/teacher") as address:
        assert request_facts([address], None, LIMIT_S, "--url") == [FACTS]


def test_links_above_the_folder_are_resolved(path: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with running(tmp_path / "link/own/teacher") as address:
        assert address.path == tmp_path / "real/own/teacher"
        assert SocketFile.parse("--url", f"ipc://{tmp_path}/link/own/teacher") == address


Use = Callable[[Path], None]
Kind = type[MkdError]


@pytest.mark.parametrize(("use", "kind"), [(listen, MkdConfigError), (connect, MkdTeacherError)])
class TestUnsafe:
    """Refused by services and by students."""

    @pytest.mark.parametrize("mode", [0o701, 0o710, 0o750, 0o720, 0o702, 0o777, 0o1777])
    def test_folder_that_is_open_to_others(self, use: Use, kind: Kind, path: Path, mode: int) -> None:
        path.parent.mkdir()
        path.parent.chmod(mode)
        with pytest.raises(kind, match=f"ipc://{path}: {path.parent} has mode {mode:04o}, which is open to others"):
            use(path)

    def test_folder_of_another_user(self, use: Use, kind: Kind, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path.parent.mkdir(0o700)
        mine = os.geteuid()
        monkeypatch.setattr("os.geteuid", lambda: mine + 1)
        with pytest.raises(kind, match=f"{path.parent} belongs to user {mine}, and this process to user {mine + 1}"):
            use(path)

    def test_link_to_a_folder(self, use: Use, kind: Kind, path: Path) -> None:
        (path.parent.parent / "real").mkdir(0o700)
        path.parent.symlink_to("real")
        with pytest.raises(kind, match=f"{path.parent} is not a folder, or a link to one"):
            use(path)

    def test_folder_that_others_can_replace(self, use: Use, kind: Kind, path: Path) -> None:
        path.parent.mkdir(0o700)
        path.parent.parent.chmod(0o770)
        with pytest.raises(kind, match=f"others can replace folders in {path.parent.parent}, which has mode 0770"):
            use(path)

    def test_folder_in_one_of_another_user(
        self, use: Use, kind: Kind, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path.parent.mkdir(0o700)
        above, other, lstat = path.parent.parent, os.geteuid() + 1, Path.lstat

        def of_another(self: Path) -> os.stat_result:
            found = lstat(self)
            return os.stat_result((*found[:4], other, *found[5:])) if self == above else found

        monkeypatch.setattr(Path, "lstat", of_another)
        with pytest.raises(kind, match=f"{above} belongs to user {other}, who can replace folders in it"):
            use(path)

    @pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to("elsewhere"), Path.mkdir])
    def test_file_that_is_no_socket(self, use: Use, kind: Kind, path: Path, make: Use) -> None:
        path.parent.mkdir(0o700)
        make(path)
        with pytest.raises(kind, match=f"{path} is not a socket file"):
            use(path)
        assert os.path.lexists(path)


def test_service_without_a_folder_above(tmp_path: Path) -> None:
    with pytest.raises(MkdConfigError, match=r"--address ipc://.*: it cannot be used, No such file or directory"):
        listen(tmp_path / "missing/own/teacher")


def test_student_without_a_folder(path: Path) -> None:
    with pytest.raises(MkdTeacherError, match=f"the folder {path.parent} does not exist: start mkd serve-teacher"):
        connect(path)
    assert not path.parent.exists()


@pytest.mark.parametrize("mode", [0o660, 0o606, 0o666, 0o755])
def test_socket_that_is_open_to_others(path: Path, mode: int) -> None:
    with running(path):
        path.chmod(mode)
        with pytest.raises(MkdTeacherError, match=f"{path} has mode {mode:04o}, which is open to others"):
            connect(path)


def test_a_running_service_is_not_replaced(path: Path) -> None:
    with running(path) as address:
        before = path.stat()
        with pytest.raises(MkdConfigError, match=f"--address {address}: a service listens there already"):
            listen(path)
        assert path.stat().st_ino == before.st_ino
        assert request_facts([address], None, LIMIT_S, "--url") == [FACTS]


def test_socket_of_a_service_that_was_killed(path: Path) -> None:
    path.parent.mkdir(0o700)
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    path.chmod(0o600)
    with running(path) as address:
        assert request_facts([address], None, LIMIT_S, "--url") == [FACTS]


def test_a_new_connection_is_checked_again(path: Path) -> None:
    """A folder that was opened to others during a run ends the run when the connection is lost."""
    with running(path) as address:
        connections = TeacherConnections([address], None, FACTS, 1 << 20)
        ask(connections, request_of([[1, 2, 3, 4]])).result(LIMIT_S)
        path.parent.chmod(0o777)
    with pytest.raises(MkdTeacherError, match="mode 0777"):
        ask(connections, request_of([[1, 2, 3, 4]])).result(LIMIT_S)
    connections.close()
