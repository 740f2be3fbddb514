"""examples/teacher_service: the script with small models, as a user calls it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mkd.checkpoint.megatron.folder import TRACKER
from tests.support.e2e.small_job import ROOT, make_small_job

pytestmark = pytest.mark.slow


def test_trains_and_prints_the_overlap(tmp_path: Path) -> None:
    job = make_small_job(tmp_path)
    data = tmp_path / "data"
    data.mkdir()
    for part in ("train", "valid"):
        for ending in ("bin", "idx"):
            (data / f"{part}_text_document.{ending}").hardlink_to(f"{job.data}.{ending}")
    (tmp_path / "bin").mkdir()
    for name, words in {"python": "", "mkd": "-m mkd"}.items():
        command = tmp_path / "bin" / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        command.chmod(0o755)
    variables = {"TEACHER": job.teacher, "STUDENT": job.student, "DATA": data, "RUNS": tmp_path / "runs"}
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"MKD_SKIP_SETUP": "1", "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    environment |= {name: str(value) for name, value in variables.items()} | {"SEQ_LENGTH": "64"}
    done = subprocess.run(
        ["bash", ROOT / "examples/teacher_service/run.sh"], env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (tmp_path / "runs/student-served" / TRACKER).read_text() == "20"
    assert "17 steps of" in done.stdout and "the student waits for the teacher in" in done.stdout
    assert "validation cross-entropy, student" in done.stdout
