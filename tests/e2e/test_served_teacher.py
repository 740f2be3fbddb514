"""`mkd serve-teacher` and a student of another job: equal numbers, and the exit status where the teacher is gone."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from mkd.checkpoint.megatron_folder import TRACKER
from tests.support.e2e.launch import _rank
from tests.support.e2e.small_job import ROOT, Result, SmallJob, environment, free_port, make_small_job, run
from tests.support.fork_server import fork_server

VALUES = ("iteration", "loss", "ce", "kd", "grad_norm", "valid_loss", "valid_kd", "valid_teacher_ce")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
    return make_small_job(tmp_path_factory.mktemp("job"))


def service(job: SmallJob, port: int, folder: Path) -> BaseProcess:
    """A started `mkd serve-teacher`."""
    streams = [folder / "stdout", folder / "stderr"]
    for stream in streams:
        stream.touch()
    words = [str(ROOT / "mkd/__main__.py"), "serve-teacher", "--address", f"tcp://127.0.0.1:{port}"]
    words += ["--kd-teacher-hf", str(job.teacher), "--seq-length", "32", "--micro-batch-size", "2"]
    process = fork_server().Process(target=_rank, args=(words, environment(), streams))
    process.start()
    deadline = time.monotonic() + 120
    while "serving the teacher" not in streams[0].read_text():
        assert process.is_alive() and time.monotonic() < deadline, streams[1].read_text()[-3000:]
        time.sleep(0.1)
    streams[0].write_text("")
    return process


@contextmanager
def killed_at(process: BaseProcess, iteration: int, metrics: Path) -> Iterator[None]:
    """kill -9 once the job inside has reached an iteration."""

    def watch() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if metrics.exists() and f'"iteration": {iteration},' in metrics.read_text():
                process.kill()
                return
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    thread.join()


def numbers(result: Result) -> list[dict[str, Any]]:
    return [{key: line.get(key) for key in VALUES} for line in result.metrics]


def test_service_and_student(job: SmallJob, tmp_path: Path) -> None:
    """Killed in the middle of a run, which saves and ends with status 75; started again, the run goes to its end."""
    port = free_port()
    flags = {"--train-iters": 30, "--save-interval": 7, "--eval-interval": 12}
    alone = run(job.flags({**flags, "--save": tmp_path / "alone"}))
    assert alone.status == 0, alone.errors[-3000:]
    own = {"--kd-teacher-hf": None, "--kd-teacher-url": f"tcp://127.0.0.1:{port}", "--kd-teacher-ahead": 1}
    own |= {"--save": tmp_path / "served", "--load": tmp_path / "served"}

    def served(timeout_s: float) -> Result:
        return run(job.flags({**flags, **own, "--kd-teacher-timeout": timeout_s}))

    first = service(job, port, tmp_path)
    with killed_at(first, 3, tmp_path / "served/metrics.jsonl"):
        ended = served(8)
    first.join()
    assert ended.status == 75, ended.output[-3000:] + ended.errors[-3000:]
    assert "the teacher has not answered for 8 s (--kd-teacher-timeout 8)" in ended.output
    assert 3 <= int((tmp_path / "served" / TRACKER).read_text()) < 30

    again = served(1)  # nobody is there
    assert again.status == 75 and "no teacher answers there within 1 s" in again.errors

    second = service(job, port, tmp_path)
    whole = served(60)
    assert whole.status == 0, whole.output[-3000:] + whole.errors[-3000:]
    assert "served at tcp://127.0.0.1" in whole.output
    assert numbers(whole) == numbers(alone)
    second.terminate()
    second.join()
    assert second.exitcode == 0
    assert "every request that was received is answered; the service ends" in (tmp_path / "stdout").read_text()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"--address": "tcp://0.0.0.0:5757"}, ["--address tcp://0.0.0.0:5757", "MKD_TEACHER_TOKEN"]),
        ({"--kd-teacher-dtype": "fp8"}, ["--kd-teacher-dtype is fp8", "give bf16"]),
        ({"--kd-teacher-tensor-model-parallel-size": 2}, ["give --tensor-model-parallel-size 2"]),
        ({"--kd-teacher-hf": None}, ["exactly one teacher source"]),
        ({"--seq-length": None}, ["--seq-length is missing"]),
    ],
)
def test_refused(job: SmallJob, changes: dict[str, Any], words: list[str]) -> None:
    flags = {"--kd-teacher-hf": job.teacher, "--seq-length": 32, "--micro-batch-size": 2, **changes}
    listed = [str(word) for flag, value in flags.items() if value is not None for word in (flag, value)]
    result = run(["serve-teacher", *listed], script=ROOT / "mkd/__main__.py")
    assert result.status == 1 and result.errors.count("\n") == 1
    assert [word for word in words if word not in result.errors] == []
