"""tests/chaos: a few cases of each kind; a whole session is `bash tests/chaos/run.sh`."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.e2e.small_job import ROOT
from tests.support.fork_server import fork_server

CASES = {"signals": 1, "calls": 1, "disk": 1, "places": 1, "fuzz": 4, "flags": 2, "readers": 40}
"""Number of experiments of each kind with --small."""


def check(report: Path) -> None:
    """Every outcome is bit-equal or refused in one line, and no experiment is left out."""
    content = json.loads(report.read_text())
    assert content["findings"] == []
    found: dict[str, int] = {}
    for row, kinds in content["counts"].items():
        name = row.partition(":")[0]
        found[name] = found.get(name, 0) + sum(kinds.values())
    has_compiler = shutil.which("cc") or shutil.which("gcc")
    assert found == (CASES if has_compiler else {n: k for n, k in CASES.items() if n not in ("calls", "disk")})


def test_a_small_session(tmp_path: Path) -> None:
    """Runs in a fork of the process that has imported everything."""
    session = fork_server().Process(target=_session, args=(tmp_path,))
    session.start()
    session.join(300)
    text = (tmp_path / "output.txt").read_text()
    assert session.exitcode == 0, text[-6000:]
    check(tmp_path / "report.json")


def _session(folder: Path) -> None:
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(OMP_NUM_THREADS="1", MKD_DEVICE="cpu", TRITON_INTERPRET="1", HF_HUB_OFFLINE="1")
    os.environ["PYTHONPATH"] = str(ROOT)
    sys.argv = ["run.sh", "--small", "--seed", "1", "--out", str(folder)]
    from tests.chaos.__main__ import main

    sys.exit(main())


@pytest.mark.slow
def test_the_script(tmp_path: Path) -> None:
    """The same session as a command."""
    command = ["bash", str(ROOT / "tests/chaos/run.sh"), "--small", "--seed", "1", "--out", str(tmp_path)]
    environment = os.environ | {"MKD_CHAOS_PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    check(tmp_path / "report.json")
