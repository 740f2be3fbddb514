"""requirements.lock and docs/licenses.md are complete and agree with the other lists of packages."""

import importlib.util
import re
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

from mkd.errors import MkdDataError
from tools.environment import licenses

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "requirements.lock").read_text()
LOCKED = {name.lower().replace("_", "-"): version for name, version in licenses.locked(TEXT).items()}
WITHOUT_FILES = {"cuda-toolkit"}
"""Packages that only require others."""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_package_has_hashes_and_no_address() -> None:
    blocks = re.split(r"\n(?=[a-z0-9])", TEXT, flags=re.IGNORECASE)
    entries = [block for block in blocks if "==" in block.splitlines()[0]]
    assert len(entries) == len(LOCKED) > 60
    assert [entry.splitlines()[0] for entry in entries if "--hash=sha256:" not in entry] == []
    assert not re.search(r"://|--(extra-)?index|--find-links", TEXT)


def test_tested_versions_are_locked() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    tested = {normal(name): version for name, version in (line.split("==") for line in lines)}
    assert {name: version for name, version in tested.items() if LOCKED.get(name) != version} == {}


def test_required_packages_are_locked() -> None:
    stated = [Requirement(text) for text in metadata.requires("mkd") or []]
    wanted = [found for found in stated if found.marker is None or found.marker.evaluate({"extra": "dev"})]
    assert len(wanted) > 10
    for requirement in wanted:
        version = LOCKED.get(normal(requirement.name))
        assert version is not None and requirement.specifier.contains(version), f"{requirement}: run tools/lock_env.sh"


def test_licenses_are_listed() -> None:
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| (.+) \|$", (ROOT / "docs/licenses.md").read_text(), re.MULTILINE)
    table = {normal(name): (version, kind) for name, version, kind in rows if name not in ("package", "---")}
    assert {name: version for name, (version, _) in table.items()} == LOCKED, "run tools/lock_env.sh"
    assert {name for name, (_, kind) in table.items() if kind == "not stated"} <= WITHOUT_FILES


@pytest.fixture
def make_teacher() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_teacher", ROOT / "examples/quickstart/make_teacher.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_weights_of_the_quickstart_have_a_digest(make_teacher: ModuleType, tmp_path: Path) -> None:
    file = make_teacher.gguf_file()  # the installed one is the expected one
    copy = tmp_path / file.name
    copy.write_bytes(file.read_bytes()[:-1] + b"\0")
    with pytest.raises(MkdDataError, match=r"has the SHA-256 digest [0-9a-f]{64} instead of .*setup_env.sh"):
        make_teacher.check_digest(copy)
