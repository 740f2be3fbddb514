"""mkd/utils/atomic_files.py: a path holds the old content or the new one, and nothing else renames."""

import ast
import errno
import os
import socket
import stat
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest

from mkd.errors import MkdConfigError
from mkd.utils import atomic_files
from mkd.utils.atomic_files import (
    copy_file,
    naming,
    new_folder,
    only_writer,
    partial_path,
    publish_files,
    regular_target,
    remove_folder,
    rename,
    replacing,
    scratch_folder,
    write_bytes,
)

ROOT = Path(__file__).resolve().parents[3]
SIZE = 20_000


def renaming_calls(source: str) -> list[str]:
    """Calls that rename: os.replace, os.rename, shutil.move, Path.replace(target) and Path.rename(target)."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name, call = node.func.attr, ast.unparse(node.func)
            of_a_path = name in ("replace", "rename") and len(node.args) == 1 and not node.keywords
            if of_a_path or call in ("os.replace", "os.rename", "os.renames", "shutil.move"):
                found.append(f"line {node.lineno}: {call}")
    return found


def test_only_this_module_renames() -> None:
    files = [*(ROOT / "mkd").rglob("*.py"), *(ROOT / "tools").glob("*.py"), ROOT / "pretrain_kd.py"]
    found = {str(path.relative_to(ROOT)): renaming_calls(path.read_text()) for path in files}
    assert [name for name, calls in found.items() if calls] == ["mkd/utils/atomic_files.py"]


def test_renaming_calls_are_found() -> None:
    source = "os.replace(a, b)\npath.rename(b)\n'x'.replace('x', 'y')\nreplace(config, a=1)\npath.replace(b)\n"
    assert renaming_calls(source) == ["line 1: os.replace", "line 2: path.rename", "line 5: path.replace"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Durable operations in their order: "fsync NAME" and "NAME -> NAME"."""
    seen: list[str] = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor: int) -> None:
        seen.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def record_replace(source: Path, target: Path) -> None:
        seen.append(f"{source.name} -> {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    return seen


def test_replaced_file_is_on_disk_before_it_has_its_name(tmp_path: Path, calls: list[str]) -> None:
    with replacing(tmp_path / "a.json") as file:
        file.write("1")
        assert not (tmp_path / "a.json").exists()
    assert calls == ["fsync .a.json.partial", ".a.json.partial -> a.json", f"fsync {tmp_path.name}"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "1"


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(RuntimeError), replacing(tmp_path / "a") as file:
        file.write("new")
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_bytes_and_copies(tmp_path: Path, calls: list[str]) -> None:
    write_bytes(tmp_path / "a", b"1")
    assert [call.split()[0] for call in calls] == ["fsync", calls[1].split()[0], "fsync"]
    assert calls[1].endswith(".partial -> a")
    calls.clear()
    copy_file(tmp_path / "a", tmp_path / "b")
    assert calls == ["fsync .b.partial", ".b.partial -> b", f"fsync {tmp_path.name}"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert (tmp_path / "b").read_bytes() == b"1"


def test_files_are_published_in_order_when_all_are_on_disk(tmp_path: Path, calls: list[str]) -> None:
    names = ("bin", "json", "idx")
    for name in names:
        (tmp_path / f"{name}.partial").touch()
    publish_files({tmp_path / f"{name}.partial": tmp_path / name for name in names})
    assert calls[:3] == [f"fsync {name}.partial" for name in names]
    assert calls[3::2] == [f"{name}.partial -> {name}" for name in names]
    assert calls[4::2] == [f"fsync {tmp_path.name}"] * 3


def test_new_folder_appears_when_all_of_it_is_on_disk(tmp_path: Path, calls: list[str]) -> None:
    with new_folder(tmp_path / "out") as partial:
        (partial / "inner").mkdir()
        (partial / "inner" / "x").write_text("1")
        assert not (tmp_path / "out").exists()
    assert calls == ["fsync x", "fsync inner", "fsync .out.partial", ".out.partial -> out", f"fsync {tmp_path.name}"]


def test_failed_folder_leaves_nothing_and_a_killed_one_is_replaced(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), new_folder(tmp_path / "out") as partial:
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    partial_path(tmp_path / "out").mkdir()
    (partial_path(tmp_path / "out") / "old").touch()
    with new_folder(tmp_path / "out") as partial:
        assert list(partial.iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_folder_loses_its_name_before_its_files(tmp_path: Path, calls: list[str]) -> None:
    (tmp_path / "a").mkdir()
    rename(tmp_path / "a", tmp_path / "b")
    remove_folder(tmp_path / "b")
    assert calls == ["a -> b", f"fsync {tmp_path.name}", "b -> .b.old", f"fsync {tmp_path.name}"]
    assert list(tmp_path.iterdir()) == []


def make_device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))  # as /dev/null
    except PermissionError:
        pytest.skip("no permission to create a device")


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


SPECIAL = {
    "a named pipe": os.mkfifo,
    "a socket": make_socket,
    "a character device": make_device,
    "a folder": Path.mkdir,
}


def replace_text(path: Path) -> None:
    with replacing(path) as file:
        file.write("new")


def copy_new(path: Path) -> None:
    source = path.with_name("source")
    source.write_text("new")
    copy_file(source, path)


def publish_new(path: Path) -> None:
    source = path.with_name("source")
    source.write_text("new")
    publish_files({source: path})


WRITERS = {
    "replacing": replace_text,
    "write_bytes": lambda path: write_bytes(path, b"new"),
    "copy_file": copy_new,
    "publish_files": publish_new,
}


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("is_link", [False, True])
def test_only_regular_files_are_replaced(writer: str, kind: str, is_link: bool, tmp_path: Path) -> None:
    special = path = tmp_path / "special"
    SPECIAL[kind](special)
    before = special.lstat()
    if is_link:
        path = tmp_path / "link"
        path.symlink_to("special")
    with pytest.raises(MkdConfigError, match=f"{path}.* is {kind}, .*give the path of a file") as error:
        WRITERS[writer](path)
    assert "\n" not in str(error.value)
    assert (special.lstat().st_mode, special.lstat().st_ino) == (before.st_mode, before.st_ino)
    assert path.is_symlink() == is_link


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_and_its_file_is_replaced(writer: str, exists: bool, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "file", tmp_path / "link"
    if exists:
        target.write_text("old")
    link.symlink_to(target)
    WRITERS[writer](link)
    assert link.is_symlink() and target.read_text() == "new"
    assert [path.name for path in target.parent.iterdir()] == ["file"]


def test_a_circle_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(MkdConfigError, match=r"--kd-metrics-file .*/a: Too many levels of symbolic links"):
        regular_target(tmp_path / "a", "--kd-metrics-file")


def test_a_file_is_published_over_a_link_to_another_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "source", tmp_path / "other" / "target"
    target.parent.mkdir()
    source.write_text("new")
    (tmp_path / "link").symlink_to(target)
    replace = os.replace

    def replace_in_one_folder(old: Path, new: Path) -> None:
        if old.parent != new.parent:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        replace(old, new)

    monkeypatch.setattr(os, "replace", replace_in_one_folder)
    publish_files({source: tmp_path / "link"})
    assert target.read_text() == "new" and not source.exists()


def test_a_folder_over_a_link_fills_its_target_and_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    with new_folder(tmp_path / "link") as partial:
        (partial / "x").touch()
    assert (tmp_path / "link").is_symlink() and (tmp_path / "empty" / "x").exists()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(MkdConfigError, match="is not a folder"), new_folder(tmp_path / "pipe"):
        pass
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_two_writers_of_a_folder_are_one_too_many(tmp_path: Path) -> None:
    with new_folder(tmp_path / "out") as partial:
        (partial / "x").touch()
        with pytest.raises(MkdConfigError, match="another process"), new_folder(tmp_path / "out"):
            pass
        assert (partial / "x").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_lock_of_a_killed_process_is_taken(tmp_path: Path) -> None:
    (tmp_path / ".out.lock").touch()
    with only_writer(tmp_path / "out"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_writers_of_a_file_wait_for_each_other(tmp_path: Path) -> None:
    """Each of four processes writes the file 50 times; every reader sees one writer's content, whole."""
    path = tmp_path / "file"
    processes = [get_context("fork").Process(target=write_often, args=(path, str(number))) for number in range(4)]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        content = path.read_text() if path.exists() else "0" * SIZE
        assert len(content) == SIZE and len(set(content)) == 1
    assert [process.exitcode for process in processes] == [0] * 4
    assert [left.name for left in tmp_path.iterdir()] == ["file"]


def write_often(path: Path, letter: str) -> None:
    for _ in range(50):
        with replacing(path) as file:
            for _ in range(SIZE // 1000):
                file.write(letter * 1000)


def die(*args: object) -> None:
    os._exit(9)


def killed_in(function: Callable[[Path], None], path: Path) -> list[str]:
    """Names in the folder after a process was killed before it renamed anything."""

    def run() -> None:
        os.fsync = die
        function(path)

    process = get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert process.exitcode == 9
    return [entry.name for entry in path.parent.iterdir()]


def write_whole(path: Path) -> None:
    write_bytes(path, b"content")


def write_in_scratch(path: Path) -> None:
    with scratch_folder(path) as folder:
        (folder / "bin").write_bytes(b"content")
        publish_files({folder / "bin": path})


@pytest.mark.parametrize("write", [write_whole, write_in_scratch])
def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path, write: Callable[[Path], None]) -> None:
    path = tmp_path / "projection.safetensors"
    (left,) = killed_in(write, path)
    assert left.startswith(".projection.safetensors.") and left.endswith(".partial")
    write(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["projection.safetensors"]


@pytest.mark.parametrize("write", [write_whole, write_in_scratch])
def test_what_running_processes_write_is_kept(tmp_path: Path, write: Callable[[Path], None]) -> None:
    path = tmp_path / "out"
    with scratch_folder(path) as folder:
        (folder / "a").write_text("a")
        write(path)
        assert (folder / "a").read_text() == "a"
    others = [tmp_path / f".out.{'0' * 32}.partial", tmp_path / ".out.partial", tmp_path / ".out.x.partial"]
    for other in others:  # of another host, and of other kinds
        other.touch()
    write(path)
    assert all(other.exists() for other in others)
    os.utime(others[0], (0, 0))
    write(path)
    assert [other.exists() for other in others] == [False, True, True]


def test_a_full_disk_in_numpy_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left on device") as caught, naming(tmp_path / "x"):
        raise OSError("8 requested and 0 written")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "x"))


def test_errors_of_libraries_are_not_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"^Can't load the tokenizer$") as caught, naming(tmp_path / "x"):
        raise OSError("Can't load the tokenizer")
    assert caught.value.filename is None


@pytest.mark.parametrize("sync", [atomic_files.sync_folder, atomic_files.sync_file])
def test_a_failed_sync_is_named(sync: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that names no file is taken for a fault of the program."""

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    (tmp_path / "a").touch()
    path = tmp_path if sync is atomic_files.sync_folder else tmp_path / "a"
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError) as caught:
        sync(path)
    assert caught.value.filename == str(path)
