"""`mkd launch`: the flags of both jobs, and how the processes of a node end."""

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mkd.cli import launch, node_jobs
from mkd.cli.launch import flags_of, jobs, parse_arguments
from mkd.cli.launched import LAUNCHER
from mkd.cli.node_jobs import NodeJob, ranks_environment, run_jobs
from mkd.errors import MkdConfigError
from mkd.teacher.service.addresses import TOKEN
from mkd.utils.logging import logger
from tests.support.e2e.small_job import ROOT

FLAGS = (
    "--kd-teacher-hf T --kd-student-hf S --kd-ratio 0.5 --seq-length 64 --micro-batch-size 2 --bf16 --lr 1e-4 "
    "--tensor-model-parallel-size 2 --sequence-parallel --kd-teacher-dtype fp8"
)


def both(flags: str, *own: str, devices: list[str] | None = None) -> tuple[list[NodeJob], NodeJob]:
    arguments, words = parse_arguments([*own, "--", *shlex.split(flags)])
    return jobs(arguments, flags_of(words), devices, Path("/tmp/sockets"))


def sizes(teacher: int, student: int) -> list[str]:
    return ["--teacher-gpus", str(teacher), "--student-gpus", str(student)]


def test_flags_of_both_jobs() -> None:
    [service], student = both(FLAGS, *sizes(1, 2))
    url = "ipc:///tmp/sockets/teacher-1"
    assert service.words == (
        *("serve-teacher", "--address", url, "--kd-teacher-hf", "T", "--seq-length", "64", "--micro-batch-size", "2"),
        *("--bf16", "--kd-teacher-dtype", "fp8"),
    )
    assert student.words == (
        *("train", "--kd-student-hf", "S", "--kd-ratio", "0.5", "--seq-length", "64", "--micro-batch-size", "2"),
        *("--bf16", "--lr", "1e-4", "--tensor-model-parallel-size", "2", "--sequence-parallel"),
        *("--kd-teacher-url", url),
    )
    assert (service.ranks, student.ranks, student.devices) == (1, 2, None)


def test_the_tokenizer_is_that_of_both_jobs() -> None:
    given = "--tokenizer-type NullTokenizer --vocab-size 512"
    [service], student = both(f"{FLAGS} {given}", *sizes(1, 2))
    assert given in " ".join(service.words) and given in " ".join(student.words)
    other = f"{FLAGS} {given} --kd-xtoken-loss gold --kd-teacher-seq-length 80"
    [service], student = both(other, *sizes(1, 2))
    assert "NullTokenizer" not in service.words and given in " ".join(student.words)


def test_replicas_layout_and_devices() -> None:
    own = [*sizes(4, 2), "--teacher-flags=--batch-tokens 99"]
    teachers, student = both(FLAGS + " --kd-teacher-tensor-model-parallel-size 2", *own, devices=list("abcdefgh"))
    assert [one.devices for one in teachers] == [("c", "d"), ("e", "f")] and student.devices == ("a", "b")
    for one in teachers:
        assert one.ranks == 2 and one.words[-2:] == ("--batch-tokens", "99")
        assert "--tensor-model-parallel-size 2 --sequence-parallel" in " ".join(one.words)
    assert "--kd-teacher-tensor-model-parallel-size" not in student.words
    assert len(set(student.words[student.words.index("--kd-teacher-url") + 1 :])) == 2


def test_several_teachers_and_another_tokenizer() -> None:
    flags = FLAGS.replace("-hf T", "-hf T U") + " --kd-xtoken-loss gold --kd-teacher-seq-length 80"
    teachers, student = both(flags, *sizes(2, 1))
    assert [one.words[4] for one in teachers] == ["T", "U"]
    assert all("--seq-length 80" in " ".join(one.words) for one in teachers)
    text = " ".join(student.words)
    assert "--kd-teacher-weights 0.5 0.5" in text and "--kd-teacher-tokenizer T U" in text


def test_flags_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("models:\n  kd-teacher-hf: T\nlr: 1e-4\nbf16: true\nseq-length: 8\n")
    [service], student = both(f"--kd-config {tmp_path}/run.yaml --lr -1 --seq-length 16", *sizes(1, 1))
    assert service.words[3:] == ("--kd-teacher-hf", "T", "--seq-length", "16", "--bf16")
    assert student.words[:-2] == ("train", "--bf16", "--lr=-1", "--seq-length", "16")


def test_without_gpus_of_the_teachers_own(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("kd-teacher-cache: C\n")
    flags = f"--kd-config {tmp_path}/run.yaml --lr -1 --tensor-model-parallel-size 2 --kd-dry-run"
    services, student = both(flags, "--student-gpus", "2", devices=list("abc"))
    assert services == []
    assert student == NodeJob(
        "student",
        ("train", "--kd-teacher-cache", "C", "--lr=-1", "--tensor-model-parallel-size", "2", "--kd-dry-run"),
        2,
        ("a", "b"),
    )
    assert student.environments({}, 1)[1] == {
        **{"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
        **{"MASTER_PORT": "1", "CUDA_VISIBLE_DEVICES": "a,b", LAUNCHER: str(os.getpid())},
    }
    with pytest.raises(MkdConfigError, match="--teacher-flags --batch-tokens 9 is for services: give --teacher-gpus"):
        both(flags, "--student-gpus", "2", "--teacher-flags=--batch-tokens 9")


def test_the_error_of_all_ranks_is_printed_once(shell: None, capfd: pytest.CaptureFixture[str]) -> None:
    """The first rank prints it at once, the others after a while."""
    fails = "if [ $RANK != 0 ]; then sleep 3; fi; echo mkd train: error: --lr is missing >&2; exit 1"
    student = NodeJob("student", (fails,), 3, None)
    before = time.monotonic()
    assert run_jobs([], student, ranks_environment(3)) == 1
    assert capfd.readouterr().err == "mkd train: error: --lr is missing\n" and time.monotonic() - before < 2.9


@pytest.mark.parametrize(
    ("flags", "own", "words"),
    [
        ("--lr 1", sizes(1, 1), "no teacher to run: give --kd-teacher-hf"),
        ("--kd-teacher-hf", sizes(1, 1), "--kd-teacher-hf has no value"),
        ("--kd-teacher-hf T --kd-teacher-load U", sizes(1, 1), "--kd-teacher-hf and --kd-teacher-load"),
        ("lr", sizes(1, 1), "lr is not a flag"),
        ("--kd-teacher-hf T", sizes(-1, 1), "--teacher-gpus is -1; it must be at least 0"),
        ("--kd-teacher-hf T", sizes(1, -1), "--student-gpus is -1"),
        ("--kd-teacher-hf T U", sizes(3, 1), "--teacher-gpus 3 is not a multiple of 1 ranks of a replica x 2"),
        ("--kd-teacher-hf T --kd-teacher-context-parallel-size x", sizes(1, 1), "parallel-size is x"),
        ("--kd-teacher-hf T --kd-xtoken-loss gold", sizes(1, 1), "needs --kd-teacher-seq-length"),
        ("--kd-teacher-hf T --kd-dry-run", sizes(1, 1), "give --print"),
        ("--kd-teacher-hf T", [*sizes(1, 1), "--teacher-flags='"], "--teacher-flags '"),
    ],
)
def test_refused(flags: str, own: list[str], words: str) -> None:
    with pytest.raises(MkdConfigError, match=words):
        both(flags, *own)


def test_more_gpus_than_there_are() -> None:
    with pytest.raises(MkdConfigError, match="are 3 GPUs, and there are 2"):
        both(FLAGS, *sizes(1, 2), devices=["0", "1"])


@pytest.mark.parametrize("mode", [0o700, 0o770])
def test_folder_of_the_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int) -> None:
    """It belongs to the user alone, is not in one that others can replace, and is gone after the jobs."""
    modes = []

    def run(teachers: list[NodeJob], student: NodeJob, environ: dict[str, str], log: Path | None) -> int:
        path = Path(student.words[-1].removeprefix("ipc://"))
        modes.append(path.parent.stat().st_mode & 0o777)
        path.touch()
        assert TOKEN not in environ
        assert log == Path("runs/a/mkd.log")
        return 7

    tmp_path.chmod(mode)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(launch, "run_jobs", run)
    monkeypatch.setattr(launch, "ranks_environment", lambda ranks: ranks_environment(ranks, {}))
    monkeypatch.setenv("MKD_DEVICE", "cpu")
    own, words = parse_arguments([*sizes(1, 1), "--", "--save", "runs/a", *FLAGS.split()])
    if mode == 0o700:
        assert launch.launch(own, words) == 7 and modes == [0o700]
    else:
        with pytest.raises(MkdConfigError, match=f"TMPDIR ipc://.*others can replace folders in {tmp_path}"):
            launch.launch(own, words)
    assert list(tmp_path.iterdir()) == []


def test_long_path_of_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/tmp/" + "x" * 90)
    monkeypatch.setenv("MKD_DEVICE", "cpu")
    own, words = parse_arguments([*sizes(1, 1), "--print", "--", *FLAGS.split()])
    with pytest.raises(MkdConfigError, match=r"TMPDIR is ipc:///tmp/x+/mkd-\d+/teacher-1; .* at most 107"):
        launch.launch(own, words)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m mkd TEXT` runs a text of the shell."""
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\ncd "$(dirname "$0")"\nexec sh -c "$3"\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(node_jobs, "_GRACE_S", 0.2)


UNTIL_TERM = "trap 'echo ended > {}; exit {}' TERM; while :; do sleep 0.02; done"


def run_shell(teacher: str, student: str, ranks: int = 1, log: Path | None = None) -> int:
    teachers = [NodeJob("teacher", (teacher,), 1, None)]
    environ = ranks_environment(2, {**os.environ, TOKEN: "t" * 16})
    return run_jobs(teachers, NodeJob("student", (student,), ranks, None), environ, log)


@pytest.mark.parametrize(("student", "status"), [("exit 0", 0), ("exit 75", 75), ("kill -9 $$", 137)])
def test_status_of_the_student(shell: None, tmp_path: Path, student: str, status: int) -> None:
    waits = "while [ ! -e ready ]; do sleep 0.02; done; "
    assert run_shell("touch ready; " + UNTIL_TERM.format("teacher", 0), waits + student) == status


def test_failed_teacher_ends_the_student(shell: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    teacher = "while [ ! -e ready ]; do sleep 0.02; done; echo bad folder; exit 3"
    assert run_shell(teacher, UNTIL_TERM.format("student", 0).replace("while", "touch ready; while")) == 3
    assert (tmp_path / "student").exists()
    assert "teacher | bad folder" in capfd.readouterr().out


@pytest.mark.parametrize("has_log", [True, False])
def test_the_log_of_the_student_has_the_reason(shell: None, tmp_path: Path, has_log: bool) -> None:
    log = tmp_path / "save" / "mkd.log"
    makes_log = f"mkdir {log.parent}; echo plan > {log}; " if has_log else ""
    teacher = "while [ ! -e ready ]; do sleep 0.02; done; kill -9 $$"
    student = makes_log + UNTIL_TERM.format("student", 0).replace("while", "touch ready; while")
    assert run_shell(teacher, student, log=log) == 137
    assert log.exists() == has_log
    if has_log:
        plan, line = log.read_text().splitlines()
        assert plan == "plan"
        assert line.endswith("WARNING rank 0: teacher has ended with status 137: the student saves and ends")
    logger.warning("after the jobs")
    assert not has_log or "after the jobs" not in log.read_text()


def test_output_that_nobody_reads(shell: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        def write(self, _: bytes) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=Closed()))
    teacher = "head -c 200000 /dev/zero | tr '\\0' '\\n'; touch ready; " + UNTIL_TERM.format("teacher", 0)
    assert run_shell(teacher, "while [ ! -e ready ]; do sleep 0.02; done") == 0


def test_ranks_that_hang_after_another_has_failed(shell: None) -> None:
    hangs = "trap '' TERM; if [ $RANK = 1 ]; then exit 4; fi; while :; do sleep 0.02; done"
    assert run_shell(UNTIL_TERM.format("teacher", 0), hangs, ranks=2) == 4


RANK = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import os, time
from mkd.cli.launched import end_with_launcher
end_with_launcher()
print(os.getpid(), flush=True)
time.sleep(99)
"""
LAUNCH = f"""
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {RANK!r}], env={{"{LAUNCHER}": str(os.getpid())}})
time.sleep(99)
"""


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_rank_ends_with_a_killed_launcher() -> None:
    with subprocess.Popen([sys.executable, "-c", LAUNCH], stdout=subprocess.PIPE, text=True) as process:
        rank = int(process.stdout.readline())
        assert is_running(rank)
        process.kill()
    deadline = time.monotonic() + 60
    while is_running(rank):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_rank_that_starts_after_its_launcher_has_ended() -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    environ = {LAUNCHER: str(ended.pid)}
    assert subprocess.run([sys.executable, "-c", RANK], env=environ, check=False).returncode == -signal.SIGTERM


def test_signals_and_environment(shell: None, tmp_path: Path) -> None:
    """A signal reaches each rank of the student, and the teacher ends after it."""
    student = (
        "trap 'echo $RANK/$WORLD_SIZE/$MKD_TEACHER_TOKEN/$MKD_LAUNCHER > got.$RANK; exit 0' USR1; touch ready.$RANK; "
        "while :; do sleep 0.02; done"
    )

    def send() -> None:
        while not all((tmp_path / f"ready.{rank}").exists() for rank in (0, 1)):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=send)
    thread.start()
    assert run_shell("[ -e got.0 ]; " + UNTIL_TERM.format("teacher", 0), student, ranks=2) == 0
    thread.join()
    assert [(tmp_path / f"got.{rank}").read_text() for rank in (0, 1)] == [
        f"{rank}/2/{'t' * 16}/{os.getpid()}\n" for rank in (0, 1)
    ]
