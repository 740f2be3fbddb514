"""Errors that end a rank in one line: mkd/cli/job_process.py and train_job.py."""

import sys
from pathlib import Path

import pytest
import torch

from mkd.cli import train_job
from mkd.cli.job_process import exit_status_of_rank
from mkd.errors import MkdConfigError
from mkd.job.job import Job
from mkd.utils.logging import close_file


@pytest.mark.parametrize("size", [2**60, 2**50])
def test_host_memory_that_does_not_exist(size: int, capsys: pytest.CaptureFixture) -> None:
    """Such an allocation is that of attention over a million tokens on a CPU."""
    assert exit_status_of_rank(lambda: torch.empty(size, dtype=torch.uint8, device="cpu")) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "error: no host memory is left" in line and "--seq-length" in line


def test_other_faults_have_a_traceback() -> None:
    def fail() -> None:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        exit_status_of_rank(fail)


def refused(*flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `mkd train` with flags that a check refuses."""

    def refuse() -> Job:
        raise MkdConfigError("--train-iters 9: 8 in the checkpoint")

    monkeypatch.setattr(train_job, "prepare", lambda flags: None)
    monkeypatch.setattr(Job, "from_command_line", refuse)
    monkeypatch.setattr(sys, "argv", ["mkd train", *flags])
    try:
        assert train_job.run() == 1
    finally:
        close_file()


@pytest.mark.parametrize("form", ["words", "equals", "file"])
def test_early_errors_are_in_the_log_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    save, file = tmp_path / "save", tmp_path / "run.yaml"
    save.mkdir()
    (save / "mkd.log").write_text("plan\n")
    file.write_text(f"save: {save}\n")
    flags = {"words": ["--save", "x", "--save", str(save)], "equals": [f"--save={save}"]}
    refused(*flags.get(form, ["--kd-config", str(file)]), monkeypatch=monkeypatch)
    plan, line = (save / "mkd.log").read_text().splitlines()
    assert plan == "plan" and line.endswith(" ERROR   rank 0: --train-iters 9: 8 in the checkpoint")


def test_a_refused_job_creates_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other, run = tmp_path / "other", tmp_path / "run"
    for folder in (other, run):
        folder.mkdir()
    (run / "mkd.log").write_text("plan\n")
    for flags in (
        ["--save", str(tmp_path / "new")],
        ["--save", str(other)],
        ["--save", str(run), "--kd-dry-run"],
        ["--save"],
        [],
    ):
        refused(*flags, monkeypatch=monkeypatch)
    assert {path.name for path in tmp_path.rglob("*")} == {"other", "run", "mkd.log"}
    assert (run / "mkd.log").read_text() == "plan\n"
