"""mkd/utils/atomic_files.py: a path holds the old content or the new one, and nothing else renames."""

import ast
import os
from pathlib import Path

import pytest

from mkd.utils.atomic_files import (
    copy_file,
    new_folder,
    partial_path,
    publish_files,
    remove_folder,
    rename,
    replacing,
    write_bytes,
)

ROOT = Path(__file__).resolve().parents[3]


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
