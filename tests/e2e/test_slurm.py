"""examples/slurm under stand-ins for srun and scontrol (tests/e2e/slurm)."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from mkd.checkpoint.megatron.folder import TRACKER
from tests.e2e.test_resume import EIGHT, SHARDED, tensors
from tests.support.e2e import small_job
from tests.support.e2e.quick_python import serving
from tests.support.e2e.small_job import ROOT, SmallJob, make_small_job

STAND_INS = ROOT / "tests" / "e2e" / "slurm"
JOB_ID = "4711"


@dataclass
class Slurm:
    """A queue with one job, from `sbatch train.sbatch COMMAND...` until it is no longer requeued."""

    folder: Path
    save: Path
    variables: dict[str, str] = field(default_factory=dict)
    nodes: int = 1
    tasks: int = 2
    path: list[Path] = field(default_factory=list)
    """Folders with more executables."""
    output: str = ""
    """Output of all attempts, as with --open-mode=append."""

    def submit(self, *command: str, attempts: int = 5) -> int:
        """Run attempts until one does not requeue the job, at most so many.

        Returns:
            The last one's exit status.
        """
        executables = self._stand_ins()
        script = shutil.copy(ROOT / "examples/slurm/train.sbatch", self.folder / "slurm_script")  # as slurmd does
        requeued = self.folder / "requeued"
        for attempt in range(attempts):
            requeued.unlink(missing_ok=True)
            environment = {
                **os.environ,
                "PATH": ":".join([*map(str, self.path), str(executables), os.environ["PATH"]]),
                "SLURM_JOB_ID": JOB_ID,
                "SLURM_SUBMIT_DIR": str(ROOT),
                "SLURM_JOB_NODELIST": "node[1-2]",
                "SLURM_CPUS_PER_TASK": "1",
                "SLURM_JOB_END_TIME": str(int(time.time()) + 300),
                "STAND_IN_NODES": str(self.nodes),
                "STAND_IN_TASKS": str(self.tasks),
                "STAND_IN_CALLS": str(self.folder / "calls"),
                "STAND_IN_REQUEUED": str(requeued),
                "STAND_IN_HELD": str(self.folder / "held"),
                "SAVE": str(self.save),
                "TRAIN_ITERS": "8",
                **({"SLURM_RESTART_COUNT": str(attempt)} if attempt else {}),
                **self.variables,
            }
            done = subprocess.run(
                ["bash", script, *command], env=environment, cwd="/", capture_output=True, text=True, timeout=300
            )
            self.output += done.stdout + done.stderr
            if not requeued.exists():
                return done.returncode
            assert requeued.read_text().split() == [JOB_ID]
        raise AssertionError(f"requeued {attempts} times\n{self.output}")

    def _stand_ins(self) -> Path:
        folder = self.folder / "bin"
        folder.mkdir(exist_ok=True)
        for name, interpreter in (("srun.py", f"{sys.executable} -IS"), ("scontrol.sh", "/usr/bin/env bash")):
            executable = folder / name.split(".")[0]
            executable.write_text(f"#!{interpreter}\n{(STAND_INS / name).read_text()}")
            executable.chmod(0o755)
        return folder

    def calls(self) -> list[list[str]]:
        """The words after each `srun`."""
        return [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]

    def logs(self) -> list[str]:
        """One entry per attempt."""
        return [path.read_text() for path in sorted((self.save / "logs").glob(f"{JOB_ID}.*.log"))]


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    (tmp_path / "spool").mkdir()
    return Slurm(tmp_path / "spool", tmp_path / "save")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
    return make_small_job(tmp_path_factory.mktemp("job"))


@pytest.fixture
def quick_python(tmp_path: Path) -> Iterator[Path]:
    with serving(tmp_path) as executables:
        yield executables


def values(metrics: Path) -> list[dict[str, Any]]:
    """Lines of the metrics, without values that depend on the clock."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    clock = re.compile("elapsed|per_s|_s$|time|mfu|tflop|mem|gib|eta", re.IGNORECASE)
    return [{name: value for name, value in line.items() if not clock.search(name)} for line in lines]


def test_two_preemptions(job: SmallJob, slurm: Slurm, quick_python: Path, tmp_path: Path) -> None:
    """The first in a training step, the second in an evaluation; the result is equal to an undisturbed run."""
    flags = {**EIGHT, **SHARDED, "--eval-iters": 3, "--eval-interval": 4, "--num-workers": 1, "--save-interval": 8}
    undisturbed = tmp_path / "undisturbed"
    whole = small_job.run(
        job.flags({**flags, "--save": undisturbed, "--load": undisturbed, "--num-workers": 0}), ranks=2
    )
    assert whole.status == 0, whole.errors[-3000:]

    slurm.path = [quick_python]
    slurm.variables = {
        "MKD_DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
        # Forward steps of a rank: 3 of the evaluation before training, then 2 iterations; 2 iterations, 2 of the next.
        "STAND_IN_SIGNALS": json.dumps({"0": [3 + 2, "SIGTERM"], "1": [2 + 2, "SIGUSR1"]}),
    }
    command = [
        "python",
        "tests/support/e2e/holder.py",
        *job.flags({**flags, "--save": slurm.save, "--load": slurm.save}),
    ]
    assert slurm.submit(*command) == 0, slurm.output + "".join(log[-3000:] for log in slurm.logs())

    first, second, third = slurm.logs()
    assert "SIGTERM: stopping after this step" in first
    assert "SIGUSR1: stopping after this step" in second
    assert "validation at iteration 4" not in second
    assert "validation at iteration 4" in third
    assert "iteration 8 of 8 is saved: done" in slurm.output
    began = [line.split() for line in (slurm.save / "ATTEMPTS").read_text().splitlines()]
    assert [line[:2] for line in began] == [[JOB_ID, "0"], [JOB_ID, "1"], [JOB_ID, "2"]]
    assert [line[2] for line in began] == ["0", "2", "4"]

    expected, seen = tensors(undisturbed), tensors(slurm.save)
    assert expected.keys() == seen.keys()
    for key, value in expected.items():
        assert torch.equal(value, seen[key]), key
    assert values(slurm.save / "metrics.jsonl") == values(undisturbed / "metrics.jsonl")


def test_no_progress_ends_after_three_attempts(slurm: Slurm) -> None:
    assert slurm.submit("sh", "-c", "echo out of memory; exit 0") == 1  # the exit status is of no use here
    assert len(slurm.calls()) == 3
    assert slurm.logs() == ["out of memory\n" * 2] * 3
    assert "error: 3 attempts in a row started at iteration 0 of 8 and saved nothing beyond it" in slurm.output
    assert f"Find the reason in {slurm.save / 'logs'}" in slurm.output
    # The job that is submitted after the reason is fixed counts from 0.
    slurm.variables["SLURM_JOB_ID"] = "4712"
    assert slurm.submit("sh", "-c", 'echo 8 >"$SAVE/latest_checkpointed_iteration.txt"; exit 1') == 0
    assert len(slurm.calls()) == 4


def test_errors_are_in_the_output_of_the_script(slurm: Slurm) -> None:
    slurm.variables["MAX_ATTEMPTS"] = "1"
    lines = [
        "mkd train: error: --lr is missing",
        "Traceback",
        "mkd train: error: --lr is missing",
        "a script: in b: error: x",
    ]
    assert slurm.submit("sh", "-c", f"printf '{'\\n'.join(lines)}\\n'; exit 1") == 1
    log = slurm.save / "logs" / f"{JOB_ID}.0.log"
    assert f"attempt 0 starts at iteration 0 of 8; follow it in {log}" in slurm.output
    after = slurm.output.split(f"its log is {log}\n")[1].splitlines()
    assert after[0] == "mkd train: error: --lr is missing" and "train.sbatch: error: 1 attempts" in after[1]
    slurm.variables["SLURM_JOB_ID"] = "4712"
    assert slurm.submit("bash", "examples/llama/8b_to_1b.sh") == 1
    assert "\n8b_to_1b.sh: error: TEACHER is not set: the teacher's Hugging Face folder" in slurm.output


def test_a_wrong_flag_is_not_tried_again(slurm: Slurm, quick_python: Path) -> None:
    slurm.path, slurm.variables = [quick_python], {"MKD_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    assert slurm.submit("python", "pretrain_kd.py", "--kd-ratoi", "0.5") == 1
    assert len(slurm.calls()) == 1
    assert "did you mean --kd-ratio?" in slurm.output
    assert (
        "error: the flags or the environment are wrong, and another attempt would end in the same way" in slurm.output
    )
    error = slurm.save / "logs" / f"{JOB_ID}.0.error.json"
    assert f"Correct what {error} names" in slurm.output and "--kd-ratoi" in error.read_text()


def test_other_errors_are_tried_again(slurm: Slurm) -> None:
    """A full disk, for example; an error file of another attempt does not count."""
    (slurm.save / "logs").mkdir(parents=True)
    (slurm.save / "logs" / f"{JOB_ID}.0.error.json").write_text('{"is_configuration": true}')
    write = """echo '{"message": {}, "is_configuration": false}' >"$TORCHELASTIC_ERROR_FILE"; exit 1"""
    assert slurm.submit("sh", "-c", write) == 1
    assert len(slurm.calls()) == 3


def test_an_error_of_the_configuration_after_another_end_is_tried_again(slurm: Slurm) -> None:
    """The flags were right in the first attempt; the node of a later one may lack a GPU."""
    write = """echo '{"message": {}, "is_configuration": true}' >"$TORCHELASTIC_ERROR_FILE"; exit 1"""
    command = f'[ "$(wc -l <"$SAVE/ATTEMPTS")" -ne 1 ] || exit 3; {write}'
    assert slurm.submit("sh", "-c", command) == 1
    assert len(slurm.calls()) == 3


def test_progress_then_none(slurm: Slurm) -> None:
    """Two attempts without progress, one that saves, three without progress."""
    steps = 'n=$(wc -l <"$SAVE/ATTEMPTS"); [ "$n" -ne 3 ] || echo 5 >"$SAVE/latest_checkpointed_iteration.txt"; exit 3'
    assert slurm.submit("sh", "-c", steps, attempts=10) == 1
    assert len(slurm.calls()) == 6
    assert "3 attempts in a row started at iteration 5" in slurm.output
    assert "ended with status 3" in slurm.output


def test_a_cache_writer(slurm: Slurm, tmp_path: Path) -> None:
    """A new shard and a signal, two attempts without progress, a new shard, done; then a job without any progress."""
    shard = 'mkdir -p "$CACHE_OUT"; n=$(wc -l <"$SAVE/ATTEMPTS"); case $n in 1|4) touch "$CACHE_OUT/$n.json";; esac; '
    slurm.variables = {"CACHE_OUT": str(tmp_path / "the cache"), "TRAIN_ITERS": ""}
    slurm.tasks = 1
    assert slurm.submit("sh", "-c", shard + "[ $n -eq 5 ] || exit 75", attempts=9) == 0
    assert len(slurm.calls()) == 5
    began = [line.split()[2] for line in (slurm.save / "ATTEMPTS").read_text().splitlines()]
    assert began == ["0", "1", "1", "1", "2"]
    assert "shard 2 is saved: done" in slurm.output
    (slurm.save / "ATTEMPTS").unlink()
    assert slurm.submit("sh", "-c", "exit 75", attempts=9) == 1
    assert len(slurm.calls()) == 8 and "3 attempts in a row started at shard 2" in slurm.output
    slurm.variables["TRAIN_ITERS"] = "8"
    assert slurm.submit("true") == 1 and "CACHE_OUT and TRAIN_ITERS are both set" in slurm.output


def test_superseded_job_does_not_start_again(slurm: Slurm) -> None:
    assert slurm.submit("sh", "-c", 'echo 4712 0 0 >>"$SAVE/ATTEMPTS"; exit 1') == 1
    assert "error: another job has started in" in slurm.output and "(4712 0 0)" in slurm.output


def test_finished_job_starts_nothing(slurm: Slurm) -> None:
    slurm.save.mkdir()
    (slurm.save / TRACKER).write_text("8")
    assert slurm.submit("false") == 0
    assert not (slurm.folder / "calls").exists()
    assert "iteration 8 of 8 is saved: done" in slurm.output


def test_environment_of_each_rank(slurm: Slurm) -> None:
    slurm.nodes, slurm.tasks = 2, 3
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "NNODES", "GPUS_PER_NODE", "MASTER_ADDR", "MASTER_PORT")
    told = " ".join(f"${name}" for name in names)
    command = f'echo "{told}"; echo 8 >"$SAVE/latest_checkpointed_iteration.txt"'
    assert slurm.submit("sh", "-c", command) == 0
    assert sorted(slurm.logs()[0].splitlines()) == [
        f"{rank} {rank % 3} 6 {rank // 3} 2 3 127.0.0.1 24711" for rank in range(6)
    ]
    (words,) = slurm.calls()
    assert words[words.index("--cpus-per-task") + 1] == "1"
    assert "--kill-on-bad-exit=1" in words
    assert not any(word.startswith("--container") for word in words)


def test_teacher_services_on_nodes_of_their_own(slurm: Slurm, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\ntrap "echo ended; exit 0" TERM\necho "$MASTER_ADDR $WORLD_SIZE $MKD_TEACHER_TOKEN $*"\n'
        f"touch {tmp_path}/up.$RANK\nwhile :; do sleep 0.02; done\n"
    )
    python.chmod(0o755)
    slurm.path = [tmp_path]
    slurm.variables = {"TEACHER_NODES": "1", "TEACHER_FLAGS": "--kd-teacher-hf T", "SLURM_NTASKS_PER_NODE": "2"}
    waits = f"while [ ! -e {tmp_path}/up.0 ] || [ ! -e {tmp_path}/up.1 ]; do sleep 0.02; done; "
    command = waits + f'echo "$MASTER_ADDR $WORLD_SIZE $MKD_TEACHER_TOKEN $*"; echo 8 >"$SAVE/{TRACKER}"'
    assert slurm.submit("sh", "-c", command, "train") == 0, slurm.output
    [service] = [path.read_text() for path in (slurm.save / "logs").glob("*.teacher-node2.log")]
    [student] = [path.read_text() for path in (slurm.save / "logs").glob(f"{JOB_ID}.0.log")]
    token = student.split()[2]
    assert len(token) == 64
    assert student == f"127.0.0.1 2 {token} --kd-teacher-url tcp://node2:24712\n" * 2
    started = f"node2 2 {token} -m mkd serve-teacher --address tcp://0.0.0.0:24712 --kd-teacher-hf T\n"
    assert sorted(service.splitlines()) == sorted([*[started.strip()] * 2, "ended", "ended"])
    slurm.variables["TEACHER_NODES"] = "2"
    (slurm.save / TRACKER).unlink()
    assert slurm.submit("true") == 1 and "TEACHER_NODES is 2 of 2 nodes" in slurm.output


def test_in_a_container(slurm: Slurm, tmp_path: Path) -> None:
    for name in ("teacher/snapshots/0123", "student", "data"):
        (tmp_path / name).mkdir(parents=True)
    slurm.variables = {
        "CONTAINER_IMAGE": "nvcr.io#nvidia/pytorch:25.09-py3",
        "CONTAINER_MOUNTS": "/scratch:/scratch",
        "TEACHER": str(tmp_path / "teacher/snapshots/0123"),  # its files are links into teacher/blobs
        "STUDENT": str(tmp_path / "student"),
        "DATA": str(tmp_path / "data" / "text_document"),
    }
    script = f"echo 8 >{slurm.save}/latest_checkpointed_iteration.txt"
    assert slurm.submit("sh", "-c", script) == 0
    (words,) = slurm.calls()
    container = {flag: words[words.index(flag) + 1] for flag in words if flag.startswith("--container")}
    folders = [ROOT, slurm.save, slurm.save / "logs", *(tmp_path / name for name in ("teacher", "student", "data"))]
    assert container == {
        "--container-image": "nvcr.io#nvidia/pytorch:25.09-py3",
        "--container-mounts": ",".join(["/scratch:/scratch", *(f"{folder}:{folder}" for folder in folders)]),
        "--container-workdir": str(ROOT),
    }
    assert words[-5:] == ["bash", "examples/slurm/rank.sh", "sh", "-c", script]


@pytest.mark.parametrize("missing", ["SAVE", "TRAIN_ITERS"])
def test_required_variables(slurm: Slurm, missing: str) -> None:
    slurm.variables[missing] = ""
    assert slurm.submit("true") == 1
    assert f"{missing}: is not set" in slurm.output


def test_a_command_is_needed(slurm: Slurm) -> None:
    assert slurm.submit() == 1
    assert "error: no command" in slurm.output


def test_cluster_without_requeueing(slurm: Slurm) -> None:
    slurm.variables["STAND_IN_REQUEUED"] = "/nowhere/requeued"
    assert slurm.submit("true") == 1
    assert "submit it again, and it resumes" in slurm.output


def test_ranks_that_hang_are_killed_before_the_job_is(slurm: Slurm) -> None:
    slurm.variables["SLURM_JOB_END_TIME"] = str(int(time.time()) + 62)
    slurm.variables["MAX_ATTEMPTS"] = "1"
    begin = time.monotonic()
    assert slurm.submit("sleep", "100") == 1
    assert time.monotonic() - begin < 60
    assert "attempt 0 ended with status 124" in slurm.output
