"""`mkd serve-teacher` and a student of another job: equal numbers, and the exit status where the teacher is gone."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from mkd.checkpoint.megatron.folder import TRACKER
from mkd.cli import launch
from tests.support.e2e.launch import _rank
from tests.support.e2e.quick_python import serving
from tests.support.e2e.small_job import ROOT, SCRIPT, Result, SmallJob, environment, free_port, make_small_job, run
from tests.support.fork_server import fork_server
from tests.support.hf_folders import change_weights, read_weights

VALUES = ("iteration", "loss", "ce", "kd", "grad_norm", "valid_loss", "valid_kd", "valid_teacher_ce")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
    return make_small_job(tmp_path_factory.mktemp("job"))


FLAGS = {"--train-iters": 30, "--save-interval": 7, "--eval-interval": 12}


@pytest.fixture(scope="module")
def alone(job: SmallJob) -> Result:
    """A run with the teacher on its own ranks."""
    result = run(job.flags({**FLAGS, "--save": job.root / "alone"}))
    assert result.status == 0, result.errors[-3000:]
    return result


Start = Callable[[list[str], Path], BaseProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    """`start(words, folder)`: a started command, with the files `stdout` and `stderr` in `folder`."""
    processes: list[BaseProcess] = []

    def started(words: list[str], folder: Path) -> BaseProcess:
        folder.mkdir(exist_ok=True)
        streams = [folder / "stdout", folder / "stderr"]
        for stream in streams:
            stream.write_text("")
        processes.append(fork_server().Process(target=_rank, args=(words, environment(), streams)))
        processes[-1].start()
        return processes[-1]

    yield started
    for process in processes:
        process.kill()
        process.join()


def wait_for(condition: Callable[[], bool], process: BaseProcess, folder: Path) -> None:
    """Wait for something that a running command does."""
    deadline = time.monotonic() + 120
    while not condition():
        assert process.is_alive() and time.monotonic() < deadline, (folder / "stderr").read_text()[-3000:]
        time.sleep(0.01)


def service(start: Start, job: SmallJob, port: int, folder: Path, *flags: str) -> BaseProcess:
    """A started `mkd serve-teacher`."""
    words = [str(ROOT / "mkd/__main__.py"), "serve-teacher", "--address", f"tcp://127.0.0.1:{port}"]
    words += ["--kd-teacher-hf", str(job.teacher), "--seq-length", "32", "--micro-batch-size", "2", *flags]
    process = start(words, folder)
    wait_for(lambda: "serving the teacher" in (folder / "stdout").read_text(), process, folder)
    return process


def served_flags(port: int, save: Path, **changes: Any) -> dict[str, Any]:
    """Flags of a student that the service teaches."""
    own = {"--kd-teacher-hf": None, "--kd-teacher-url": f"tcp://127.0.0.1:{port}", "--kd-teacher-ahead": 1}
    return {**FLAGS, **own, "--save": save, "--load": save, **changes}


def has_reached(iteration: int, metrics: Path) -> bool:
    """True if the run of these metrics has reached an iteration."""
    return metrics.exists() and f'"iteration": {iteration},' in metrics.read_text()


@contextmanager
def killed_at(process: BaseProcess, iteration: int, metrics: Path) -> Iterator[None]:
    """kill -9 once the job inside has reached an iteration."""

    def watch() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if has_reached(iteration, metrics):
                process.kill()
                return
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    thread.join()


def numbers(result: Result) -> list[dict[str, Any]]:
    return [{key: line.get(key) for key in VALUES} for line in result.metrics]


def test_service_and_student(start: Start, job: SmallJob, alone: Result, tmp_path: Path) -> None:
    """Killed in the middle of a run, which saves and ends with status 75; started again, the run goes to its end."""
    port = free_port()

    def served(timeout_s: float) -> Result:
        return run(job.flags(served_flags(port, tmp_path / "served", **{"--kd-teacher-timeout": timeout_s})))

    first = service(start, job, port, tmp_path)
    with killed_at(first, 3, tmp_path / "served/metrics.jsonl"):
        ended = served(4)
    first.join()
    assert ended.status == 75, ended.output[-3000:] + ended.errors[-3000:]
    assert "the teacher has not answered for 4 s (--kd-teacher-timeout 4)" in ended.output
    assert 3 <= int((tmp_path / "served" / TRACKER).read_text()) < 30

    again = served(1)  # nobody is there
    assert again.status == 75 and "no teacher answers there within 1 s" in again.errors

    second = service(start, job, port, tmp_path)
    whole = served(60)
    assert whole.status == 0, whole.output[-3000:] + whole.errors[-3000:]
    assert "served at tcp://127.0.0.1" in whole.output
    assert numbers(whole) == numbers(alone)
    second.terminate()
    second.join()
    assert second.exitcode == 0
    assert "every request that was received is answered; the service ends" in (tmp_path / "stdout").read_text()


@pytest.mark.slow
def test_signal_during_a_wait(start: Start, job: SmallJob, alone: Result, tmp_path: Path) -> None:
    """A student that waits for a paused service saves and ends at SIGTERM; resumed, it goes to its end."""
    port, save = free_port(), tmp_path / "served"
    teacher = service(start, job, port, tmp_path / "teacher")
    flags = job.flags(served_flags(port, save))
    student = start([str(SCRIPT), *flags], tmp_path / "student")
    metrics = save / "metrics.jsonl"
    wait_for(lambda: has_reached(3, metrics), student, tmp_path / "student")
    os.kill(teacher.pid, signal.SIGSTOP)
    size = -1
    while size != (size := metrics.stat().st_size):
        time.sleep(1.0)
    student.terminate()
    student.join(60)
    assert student.exitcode == 0, (tmp_path / "student/stderr").read_text()[-3000:]
    assert "SIGTERM: stopping" in (tmp_path / "student/stdout").read_text()
    assert 3 <= int((save / TRACKER).read_text()) < 30
    os.kill(teacher.pid, signal.SIGCONT)
    whole = run(flags)
    assert whole.status == 0, whole.output[-3000:] + whole.errors[-3000:]
    assert numbers(whole) == numbers(alone)
    teacher.terminate()
    teacher.join()


@pytest.mark.slow
def test_five_kills_in_sixty_steps(start: Start, job: SmallJob, tmp_path: Path) -> None:
    port, save = free_port(), tmp_path / "served"
    alone = run(job.flags({**FLAGS, "--train-iters": 60, "--save": tmp_path / "alone"}))
    teacher = service(start, job, port, tmp_path / "teacher")
    words = job.flags(served_flags(port, save, **{"--train-iters": 60, "--kd-teacher-ahead": 2}))
    student = start([str(SCRIPT), *words], tmp_path / "student")
    chance = random.Random(1)
    for iteration in sorted(chance.sample(range(1, 55), 5)):
        wait_for(lambda: has_reached(iteration, save / "metrics.jsonl"), student, tmp_path / "student")  # noqa: B023
        time.sleep(chance.uniform(0.0, 0.05))
        teacher.kill()
        teacher.join()
        teacher = service(start, job, port, tmp_path / "teacher")
    student.join(120)
    assert student.exitcode == 0, (tmp_path / "student/stderr").read_text()[-3000:]
    assert (tmp_path / "student/stdout").read_text().count("lost the teacher") == 5
    seen = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    assert numbers(replace(alone, metrics=seen)) == numbers(alone)
    teacher.terminate()
    teacher.join()


@pytest.fixture
def quick_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`mkd launch` starts ranks that need not import anything."""
    with serving(tmp_path) as folder:
        script = tmp_path / "python"
        script.write_text(f'#!/bin/sh\nshift 2\nexec {folder}/python {ROOT}/mkd/__main__.py "$@"\n')
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
        monkeypatch.setenv("MKD_DEVICE", "cpu")
        yield


def test_launch(quick_launch: None, job: SmallJob, alone: Result, tmp_path: Path) -> None:
    """Two services and a student by one command, as with the teacher on the student's rank."""
    port = free_port()
    own = ["--teacher-gpus", "2", "--student-gpus", "1", "--teacher-flags", f"--metrics-port {port}"]
    words = job.flags({**FLAGS, "--save": tmp_path / "launched"})
    assert launch.main([*own, "--", *words]) == 1  # both services at one port
    own[-1] = "--metrics-port 0"
    assert launch.main([*own, "--", *words]) == 0
    seen = [json.loads(line) for line in (tmp_path / "launched/metrics.jsonl").read_text().splitlines()]
    assert numbers(replace(alone, metrics=seen)) == numbers(alone)


@pytest.mark.slow
def test_killed_launch(job: SmallJob, tmp_path: Path) -> None:
    """The student saves and ends; the services end."""
    save = tmp_path / "launched"
    words = job.flags({**FLAGS, "--save": save, "--load": save, "--train-iters": 9999, "--kd-teacher-hf": job.teacher})
    command = [sys.executable, "-m", "mkd", "launch", "--teacher-gpus", "1", "--student-gpus", "1", "--", *words]
    environ = {**os.environ, "MKD_DEVICE": "cpu", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.DEVNULL) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        deadline = time.monotonic() + 120
        while not has_reached(2, save / "metrics.jsonl"):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        ranks = [Path("/proc", pid, "cmdline") for pid in children.read_text().split()]
        assert len(ranks) == 2
        process.kill()
    while any(rank.exists() and rank.read_bytes() for rank in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert int((save / "latest_checkpointed_iteration.txt").read_text()) >= 2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(job: SmallJob, tmp_path: Path, value: float) -> None:
    """A student would find them with its first answer; the service ends before it has one."""
    teacher, name = Path(shutil.copytree(job.teacher, tmp_path / "teacher")), "model.layers.1.mlp.down_proj.weight"
    weights = read_weights(teacher)[name].clone()
    weights[0, :3] = value
    change_weights(teacher, {name: weights})
    flags = ["--address", f"tcp://127.0.0.1:{free_port()}", "--kd-teacher-hf", str(teacher)]
    flags += ["--seq-length", "32", "--micro-batch-size", "2"]
    result = run(["serve-teacher", *flags], script=ROOT / "mkd/__main__.py")
    assert result.status == 1 and "serving the teacher" not in result.output
    assert f"--kd-teacher-hf {teacher} holds weights that are not finite" in result.errors
    assert "3 values of decoder.layers.1.mlp.linear_fc2.weight on rank 0" in result.errors


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"--address": "tcp://0.0.0.0:5757"}, ["--address tcp://0.0.0.0:5757", "MKD_TEACHER_TOKEN"]),
        ({"--kd-teacher-dtype": "fp8"}, ["--kd-teacher-dtype is fp8", "give bf16"]),
        ({"--kd-teacher-tensor-model-parallel-size": 2}, ["give --tensor-model-parallel-size 2"]),
        ({"--kd-teacher-url": "tcp://h:1"}, ["--kd-teacher-url tcp://h:1", "give --kd-teacher-hf"]),
        ({"--kd-teacher-micro-batch-size": 4}, ["--kd-teacher-micro-batch-size 4", "give --batch-tokens"]),
        ({"--kd-teacher-offload": True}, ["--kd-teacher-offload is for", "leave it out"]),
        ({"--kd-teachers-mode": "select"}, ["--kd-teachers-mode select is for", "leave it out"]),
        ({"--kd-teacher-seq-length": 64}, ["--kd-teacher-seq-length 64", "give --seq-length"]),
        ({"--kd-teacher-hf": None}, ["exactly one teacher source"]),
        ({"--seq-length": None}, ["--seq-length is missing"]),
    ],
)
def test_refused(job: SmallJob, changes: dict[str, Any], words: list[str]) -> None:
    flags = {"--kd-teacher-hf": job.teacher, "--seq-length": 32, "--micro-batch-size": 2, **changes}
    listed = {flag: [] if value is True else [str(value)] for flag, value in flags.items() if value is not None}
    result = run(["serve-teacher", *launch.words_of_flags(listed)], script=ROOT / "mkd/__main__.py")
    assert result.status == 1 and result.errors.count("\n") == 1
    assert [word for word in words if word not in result.errors] == []


def test_flags_without_effect_are_named(job: SmallJob, tmp_path: Path) -> None:
    (file := tmp_path / "shared.yaml").write_text("kd-ratio: 0.5\nkd-packing: best_fit\n")
    words = ["--kd-config", str(file), "--kd-no-temperature-squared", "--kd-dry-run", "--kd-teacher-hf", job.teacher]
    words = ["serve-teacher", *map(str, words), "--seq-length", "32", "--micro-batch-size", "2"]
    result = run(words, script=ROOT / "mkd/__main__.py")
    assert result.status == 0, result.errors
    named = "no effect on a teacher service, which has no student, data or loss: "
    line = next(line for line in (result.output + result.errors).splitlines() if named in line)
    assert line.partition(named)[2] == "--kd-no-temperature-squared, --kd-ratio"
