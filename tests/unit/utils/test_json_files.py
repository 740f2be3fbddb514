"""The one reader of JSON: bombs, pipes and devices are errors of one line, quickly and in little memory."""

import ast
import json
import os
import threading
import tracemalloc
from pathlib import Path

import pytest

from mkd.utils.json_files import MOST_BYTES, parse_json, read_json, read_regular
from mkd.utils.limits import limited

ROOT = Path(__file__).resolve().parents[3]


def calls_of_json(source: str) -> list[str]:
    """Calls of json.load and json.loads, under whichever name they are imported."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "json":
            found += [f"line {node.lineno}: {alias.name}" for alias in node.names if alias.name.startswith("load")]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.load", "json.loads"):
            found.append(f"line {node.lineno}: {ast.unparse(node.func)}")
    return found


def test_only_this_module_reads_json() -> None:
    files = [*(ROOT / "mkd").rglob("*.py"), *(ROOT / "tools").glob("*.py"), ROOT / "pretrain_kd.py"]
    found = {str(path.relative_to(ROOT)): calls_of_json(path.read_text()) for path in files}
    assert [name for name, calls in found.items() if calls] == ["mkd/utils/json_files.py"]


def test_calls_are_found() -> None:
    assert len(calls_of_json("import json\njson.load(f)\njson.loads(s)\nfrom json import loads\njson.dumps(x)\n")) == 3


BOMBS = {
    "lists": ("[" * 100_000 + "]" * 100_000, "nested deeper than 100 levels"),
    "open lists": ("[" * 5_000_000, "nested deeper"),
    "objects": ('{"a":' * 200 + "1" + "}" * 200, "nested deeper"),
    "mixed": ('[{"a":' * 60 + "1" + "}]" * 60, "nested deeper"),
    "digits": ("[" + "1" * 5000 + "]", "4300 digits"),
    "half": ('{"a": ', "Expecting value"),
    "not UTF-8": ('{"a": "\udcff"}', "utf-8"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs(tmp_path: Path, bomb: str) -> None:
    text, words = BOMBS[bomb]
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=words) as caught:
        read_json(tmp_path / "config.json")
    assert len(str(caught.value).splitlines()) == 1


def test_depth_that_is_read() -> None:
    text = "[" * 100 + "]" * 100
    assert parse_json(text) == json.loads(text)


def test_a_key_that_stands_twice_among_many_is_found_quickly() -> None:
    """Not by a comparison of each key with each."""
    text = "{" + ",".join(f'"{min(number, 49_999)}":0' for number in range(50_001)) + "}"
    with limited(3.0), pytest.raises(ValueError, match="the key '49999' stands twice in an object"):
        parse_json(text, unique=True)


def test_large_files_are_not_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.touch()
    os.truncate(file, MOST_BYTES + 1)
    with pytest.raises(ValueError, match=r"it has 67,108,865 bytes; at most 67,108,864 are read"):
        read_json(file)
    with pytest.raises(ValueError, match="67,108,865 characters"):
        parse_json(" " * (MOST_BYTES + 1))


@pytest.mark.parametrize("kind", ["pipe", "device", "endless device", "folder"])
def test_other_files_are_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = {"device": Path("/dev/null"), "endless device": Path("/dev/zero")}.get(kind, tmp_path / "config.json")
    if kind == "pipe":
        os.mkfifo(path)
    if kind == "folder":
        path.mkdir()
    thread = threading.Thread(target=lambda: errors.append(raised(path)), daemon=True)
    errors: list[str] = []
    thread.start()
    thread.join(5)
    assert errors and ("not a regular file" in errors[0] or "Is a directory" in errors[0])


def test_memory_is_taken_for_what_is_there(tmp_path: Path) -> None:
    """The limit is larger than the memory of most machines."""
    for size in (0, 1, 4096, 4097, 100_000):
        (tmp_path / "a").write_bytes(b"x" * size)
        tracemalloc.start()
        assert read_regular(tmp_path / "a", 1 << 60) == b"x" * size
        assert tracemalloc.get_traced_memory()[1] < 2 * size + 200_000
        tracemalloc.stop()


def raised(path: Path) -> str:
    try:
        read_regular(path, 100)
    except (ValueError, OSError) as error:
        return str(error)
    return ""


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    """`git clone` without Git LFS leaves one in place of each large file."""
    path = tmp_path / "tokenizer.json"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 7\n")
    with pytest.raises(ValueError, match="a pointer of Git LFS, not the file itself: run git lfs pull"):
        read_json(path)
