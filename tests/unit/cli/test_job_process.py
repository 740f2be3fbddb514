"""Errors that end a rank in one line: mkd/cli/job_process.py and train_job.py."""

import json
import socket
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from mkd import cpu
from mkd.cli import train_job
from mkd.cli.job_process import exit_status_of_rank
from mkd.cli.torchrun_report import ERROR_FILE, report_to_torchrun
from mkd.errors import MkdCheckpointError, MkdConfigError, MkdDataError, MkdError, MkdNodeError, exit_status
from mkd.job.job import Job
from mkd.utils.logging import close_file


@pytest.mark.parametrize("size", [2**60, 2**50])
def test_host_memory_that_does_not_exist(size: int, capsys: pytest.CaptureFixture) -> None:
    """Such an allocation is that of attention over a million tokens on a CPU."""
    assert exit_status_of_rank(lambda: torch.empty(size, dtype=torch.uint8, device="cpu")) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "error: no host memory is left" in line and "--seq-length" in line


def test_gpu_memory_that_is_used_up(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total capacity ...")

    monkeypatch.delenv("RANK", raising=False)
    assert exit_status_of_rank(fail) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "error: no GPU memory is left on rank 0 (CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0" in line
    assert "--micro-batch-size" in line and "--kd-teacher-offload" in line


def test_a_port_of_the_rendezvous_that_is_taken(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        assert exit_status_of_rank(lambda: TCPStore("127.0.0.1", port, 1, is_master=True)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(
        f"error: MASTER_PORT {port} is in use by another process of this machine: give another one (torchrun "
        "--master-port PORT), or end that process"
    )


def fail() -> None:
    raise RuntimeError("shapes differ")


def test_other_faults_have_a_traceback() -> None:
    with pytest.raises(RuntimeError, match="shapes differ"):
        exit_status_of_rank(fail)


@pytest.mark.parametrize(("device", "is_configuration"), [("cpu", True), ("", False)])
def test_an_error_on_a_node_whose_gpu_is_missing_may_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, is_configuration: bool
) -> None:
    def refuse() -> None:
        raise MkdConfigError("--transformer-impl transformer_engine needs a GPU")

    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    monkeypatch.setenv("MKD_DEVICE", device)
    assert cpu.is_active()
    assert exit_status_of_rank(refuse) == 1
    assert json.loads((tmp_path / "error.json").read_text())["is_configuration"] == is_configuration


@pytest.mark.parametrize("error", [MkdNodeError, MkdCheckpointError, MkdDataError])
def test_an_error_of_files_may_pass_on_another_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[MkdError]
) -> None:
    """A file system may be missing on one node, or read-only."""

    def refuse() -> None:
        raise error("--kd-teacher-hf T is not a folder")

    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    monkeypatch.setenv("MKD_DEVICE", "cpu")
    assert exit_status_of_rank(refuse) == 1
    assert not json.loads((tmp_path / "error.json").read_text())["is_configuration"]


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


def test_a_file_of_flags_that_cannot_be_read_is_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "mkd.log"
    log.touch()
    refused("--save", str(tmp_path), "--kd-config", str(tmp_path / "none.yaml"), monkeypatch=monkeypatch)
    assert f"ERROR   rank 0: --kd-config {tmp_path / 'none.yaml'} cannot be read" in log.read_text()


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


def torchruns_message(path: Path) -> str:
    """The text that torchrun prints after the word traceback, for a rank with this error file."""
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
    assert failure.timestamp < time.time() - 0.5
    return str(ChildFailedError("mkd", {0: failure})).split("traceback : ", 1)[1].splitlines()[0]


def test_torchruns_report_repeats_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv(ERROR_FILE, str(path))
    refused(monkeypatch=monkeypatch)
    assert torchruns_message(path) == "mkd train: error: --train-iters 9: 8 in the checkpoint"
    path.unlink()
    with pytest.raises(RuntimeError):
        exit_status_of_rank(fail)
    assert torchruns_message(path) == "RuntimeError: shapes differ"


@pytest.mark.parametrize("place", ["error.json", "missing/error.json", ""])
def test_an_error_file_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """The first error of a rank is kept; a folder that is gone changes nothing."""
    path = tmp_path / "error.json"
    path.write_text("first")
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / place) if place else "")
    refused(monkeypatch=monkeypatch)
    assert path.read_text() == "first"


def test_tools_report_to_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))

    def refuse() -> None:
        raise MkdConfigError("--hf x: the folder does not exist")

    assert exit_status(refuse, report_to_torchrun) == 1
    assert torchruns_message(tmp_path / "error.json") == "error: --hf x: the folder does not exist"
