"""tests/chaos: a few cases of each kind; a whole session is `bash tests/chaos/run.sh`."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.e2e.small_job import ROOT


def test_a_small_session(tmp_path: Path) -> None:
    """Every outcome is bit-equal or refused in one line."""
    command = ["bash", str(ROOT / "tests/chaos/run.sh"), "--small", "--seed", "1", "--out", str(tmp_path)]
    environment = os.environ | {"MKD_CHAOS_PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["findings"] == []
    assert sum(sum(kinds.values()) for kinds in report["counts"].values()) >= 15
