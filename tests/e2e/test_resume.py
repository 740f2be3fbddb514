"""Jobs that are killed and restarted, and jobs that resume in changed or damaged folders."""

import os
import random
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoModelForCausalLM

from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.megatron.folder import TRACKER, MegatronFolder
from tests.support.e2e.small_job import ROOT, Result, SmallJob, make_small_job, run

KILLER = ROOT / "tests" / "support" / "e2e" / "killer.py"
EXACT = ("iteration", "loss", "ce", "kd", "grad_norm", "lr", "tokens", "ratio", "temperature")
EIGHT = {
    "--train-iters": 8,
    "--lr-decay-iters": 8,
    "--save-interval": 2,
    "--kd-ratio": None,
    "--kd-ratio-schedule": "linear:0.2:0.9:8",
    "--kd-temperature-schedule": "linear:2:1:8",
    "--eval-iters": 0,
    "--attention-dropout": 0.1,  # makes the random number state matter
}
# Stored by parameter: Megatron's other form has uninitialized memory between the parameters.
SHARDED = {"--use-distributed-optimizer": True, "--dist-ckpt-optim-fully-reshardable": True}
SNAPSHOTS = {"--kd-save-hf-interval": 2, "--kd-save-hf-keep": 2}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
    return make_small_job(tmp_path_factory.mktemp("job"))


def tensors(save: Path) -> dict[str, torch.Tensor]:
    """All tensors of the last checkpoint, unsharded: weights and optimizer."""
    folder = MegatronFolder(save, "--load")
    stored = folder.metadata.state_dict_metadata
    state = {
        key: torch.empty(value.size, dtype=value.properties.dtype)
        for key, value in stored.items()
        if isinstance(value, TensorStorageMetadata)
    }
    assert any(key.startswith("decoder.") for key in state)
    assert any(key.startswith("optimizer.") for key in state)
    dcp.load(state, checkpoint_id=folder.iteration_dir, no_dist=True)
    return state


def steps(result: Result) -> list[dict[str, Any]]:
    """Training records of the metrics, without times."""
    return [{key: line[key] for key in EXACT if key in line} for line in result.metrics if "grad_norm" in line]


@dataclass
class Attempts:
    """A job that is restarted several times in one folder."""

    job: SmallJob
    save: Path
    flags: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1

    def start(self, kill: str | None = None, **variables: str) -> Result:
        """One attempt; `kill` as in killer.py."""
        given = {**variables, **({} if kill is None else {"MKD_TEST_KILL": kill})}
        os.environ.update(given)
        try:
            flags = {**EIGHT, "--save": self.save, "--load": self.save, **self.flags}
            return run(self.job.flags(flags), self.ranks, script=KILLER)
        finally:
            for name in given:
                del os.environ[name]

    def killed(self, kill: str, **variables: str) -> Result:
        result = self.start(kill, **variables)
        assert_killed(result, kill)
        assert_snapshots_are_whole(self.save)
        return result

    def finished(self) -> Result:
        result = self.start()
        assert result.status == 0, result.output[-3000:] + result.errors[-6000:]
        assert (self.save / TRACKER).read_text() == "8"
        assert not list((self.save / "hf").glob(".*"))
        return result

    def assert_like(self, undisturbed: tuple[Path, Result], result: Result) -> None:
        """The finished job has the same weights, optimizer and metrics as the undisturbed one, bit for bit."""
        save, whole = undisturbed
        assert [line["iteration"] for line in steps(result)] == [1, 2, 3, 4, 5, 6, 7, 8]
        assert steps(result) == steps(whole)
        expected, seen = tensors(save), tensors(self.save)
        assert expected.keys() == seen.keys()
        for key, value in expected.items():
            assert torch.equal(value, seen[key]), key


def assert_killed(result: Result, kill: str) -> None:
    """The job was killed at the requested event; with several ranks another rank may exit first."""
    assert result.status in (-signal.SIGKILL, 1), result.errors[-6000:]
    assert f"killed at {kill}\n" in result.errors, result.output[-3000:] + result.errors[-6000:]
    assert "MkdCheckpointError" not in result.errors, result.errors[-6000:]


def assert_snapshots_are_whole(save: Path) -> None:
    for folder in (save / "hf").glob("iter_*"):
        AutoModelForCausalLM.from_pretrained(folder)
        assert (folder / "tokenizer.json").is_file()


@pytest.fixture(scope="module")
def undisturbed(job: SmallJob, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """Eight steps on one rank, with a save every second step."""
    attempts = Attempts(job, tmp_path_factory.mktemp("undisturbed") / "save", SNAPSHOTS)
    result = attempts.finished()
    steps_seen = steps(result)
    assert len({line["loss"] for line in steps_seen}) == 8
    assert len({line["ratio"] for line in steps_seen}) == 8
    return attempts.save, result


def test_killed_four_times(job: SmallJob, undisturbed: tuple[Path, Result], tmp_path: Path) -> None:
    attempts = Attempts(job, tmp_path / "save", SNAPSHOTS)
    attempts.killed("step:5")  # with two microbatches per step: in the third step
    assert (attempts.save / TRACKER).read_text() == "2"
    seen = attempts.killed("shard:20")  # in the save after the fourth step
    assert "loading distributed checkpoint" in seen.output
    assert (attempts.save / TRACKER).read_text() == "2"
    assert (attempts.save / "iter_0000004").is_dir()

    attempts.flags = {**SNAPSHOTS, "--async-save": True}
    seen = attempts.killed("shard:20")  # the same event, in the writer process
    assert "iter_0000004 in" in seen.output
    assert "renamed to torn_iter_0000004" in seen.output
    assert "scheduled an async checkpoint save" in seen.output
    assert (attempts.save / TRACKER).read_text() == "2"

    attempts.flags = SNAPSHOTS
    attempts.killed("hf:10")
    assert (attempts.save / TRACKER).read_text() == "4"
    assert (attempts.save / "hf" / ".iter_0000004.partial").is_dir()
    result = attempts.finished()
    assert ".iter_0000004.partial is left" in result.output
    attempts.assert_like(undisturbed, result)
    # The export of iteration 4 was lost, and its checkpoint is not saved again; two exports are kept.
    assert sorted(path.name for path in (attempts.save / "hf").iterdir()) == ["iter_0000006", "iter_0000008"]
    exported = HFFolder(attempts.save / "hf" / "iter_0000008", "--hf")
    expected = HFFolder(undisturbed[0] / "hf" / "iter_0000008", "--hf")
    assert exported.fingerprint() == expected.fingerprint()
    assert exported.tokenizer_hash() == HFFolder(job.student, "--hf").tokenizer_hash()


def test_two_ranks_with_a_distributed_optimizer(job: SmallJob, tmp_path: Path) -> None:
    """One rank dies in the fourth step. Uses Megatron's default optimizer format; test_stopping.py uses `SHARDED`."""
    flags = {**SNAPSHOTS, "--use-distributed-optimizer": True}
    whole = Attempts(job, tmp_path / "undisturbed", flags, ranks=2).finished()
    attempts = Attempts(job, tmp_path / "save", flags, ranks=2)
    attempts.killed("step:4", MKD_TEST_KILL_RANK="1")
    assert (attempts.save / TRACKER).read_text() == "2"
    result = attempts.finished()
    assert "successfully loaded checkpoint" in result.output
    assert [line["iteration"] for line in steps(result)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert steps(result) == steps(whole)


RANDOM_EVENTS = {"step": 32, "shard": 150, "hf": 80, "sync": 40, "rename": 24, "remove": 6}
"""Kind of event -> approximate number of such events in a complete run."""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_twenty_times_at_random(job: SmallJob, undisturbed, tmp_path: Path, ranks: int) -> None:
    """Repeatedly kills a job several times, with synchronous or asynchronous saves, and lets it finish."""
    layout = SHARDED if ranks > 1 else {}
    expected = undisturbed
    if ranks > 1:
        attempts = Attempts(job, tmp_path / "undisturbed", {**SNAPSHOTS, **layout}, ranks)
        expected = attempts.save, attempts.finished()
    random_numbers = random.Random(f"kill {ranks}")
    deaths = dict.fromkeys(RANDOM_EVENTS, 0)
    for number in range(100):
        attempts = Attempts(job, tmp_path / f"save{number}", ranks=ranks)
        for _ in range(3):
            event = random_numbers.choice(list(RANDOM_EVENTS))
            kill = f"{event}:{random_numbers.randint(1, RANDOM_EVENTS[event])}"
            attempts.flags = {**SNAPSHOTS, **layout, "--async-save": random_numbers.choice([True, None])}
            result = attempts.start(kill, MKD_TEST_KILL_RANK=str(random_numbers.randrange(ranks)))
            assert_snapshots_are_whole(attempts.save)
            if result.status == 0:  # fewer events were left
                break
            assert_killed(result, kill)
            deaths[event] += 1
            print(f"died at {kill}", attempts.flags, (attempts.save / TRACKER).is_file(), flush=True)
        attempts.assert_like(expected, attempts.finished())
        shutil.rmtree(attempts.save)
        if sum(deaths.values()) >= 20:
            break
    print(deaths)
    assert sum(deaths.values()) >= 20
    assert all(deaths.values())


def test_writer_of_an_asynchronous_save_exits_with_its_trainer(job: SmallJob, tmp_path: Path) -> None:
    """An orphaned writer would write into the folder of the next attempt."""
    attempts = Attempts(job, tmp_path / "save", {"--async-save": True})
    attempts.killed("shard:20", MKD_TEST_KILL_ALONE=str(tmp_path / "ids"))
    writer, trainer = map(int, (tmp_path / "ids").read_text().split())
    assert writer != trainer
    try:
        deadline = time.monotonic() + 20.0
        while is_running(writer):
            assert time.monotonic() < deadline, "the writer still runs"
            time.sleep(0.05)
    finally:
        os.killpg(trainer, signal.SIGKILL)  # the other processes of its session


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_another_teacher_and_another_architecture(job: SmallJob, undisturbed, tmp_path: Path) -> None:
    save, _ = undisturbed
    common = {**EIGHT, "--save": save, "--load": save, "--kd-dry-run": True}
    before = {path: path.stat().st_mtime_ns for path in save.rglob("*")}
    other = run(job.flags({**common, "--kd-teacher-hf": job.student}))
    assert other.status == 1
    assert "was trained with the teacher" in other.errors
    assert "--kd-other-teacher" in other.errors
    allowed = run(job.flags({**common, "--kd-teacher-hf": job.student, "--kd-other-teacher": True, "--kd-loss": "tvd"}))
    assert allowed.status == 0, allowed.errors
    assert "was trained with the teacher" in allowed.output
    assert "--kd-loss forward_kl -> tvd" in allowed.output
    larger = {"--kd-student-hf": job.teacher}
    refused = run(job.flags({**common, **larger}))
    assert refused.status == 1
    assert "is a checkpoint of another model: --hidden-size is 32 there and 48 in this job" in refused.errors
    assert {path: path.stat().st_mtime_ns for path in save.rglob("*")} == before


def test_more_iterations_at_another_rate(job: SmallJob, undisturbed, tmp_path: Path) -> None:
    save = tmp_path / "save"
    shutil.copytree(undisturbed[0], save)
    changes = {**EIGHT, "--train-iters": 9, "--lr-decay-iters": 16, "--lr": 4e-3, "--save": save, "--load": save}
    refused = run(job.flags({**changes, "--kd-dry-run": True}))
    assert refused.status == 1
    for words in ("--lr is 0.001 there and 0.004", "--lr-decay-iters is 8 there and 16", "--lr-decay-iters is 8"):
        assert words in refused.errors
    result = run(job.flags({**changes, "--override-opt-param-scheduler": True}))
    assert result.status == 0, result.errors[-3000:]
    # The rate of the ninth step: after 8 of 16 decay steps from 4e-3 to 0.
    assert steps(result)[-1]["lr"] == pytest.approx(4e-3 * 7 / 16)
    weights = tensors(save)["decoder.final_layernorm.weight"], tensors(undisturbed[0])["decoder.final_layernorm.weight"]
    assert not torch.equal(*weights)


def test_changes_of_a_run_that_continues_without_the_teacher(job: SmallJob, undisturbed, tmp_path: Path) -> None:
    flags = {**EIGHT, "--load": undisturbed[0], "--save": tmp_path / "save", "--kd-ratio-schedule": None}
    result = run(job.flags({**flags, "--kd-ratio": 0, "--clip-grad": 0.5, "--kd-dry-run": True}))
    assert result.status == 0, result.errors[-3000:]
    assert "--clip-grad 1.0 -> 0.5" in result.output and "--kd-ratio None -> 0.0" in result.output


def test_another_rate_of_the_lm_head_is_listed(job: SmallJob, tmp_path: Path) -> None:
    """Megatron reads the optimizer's state and continues with this command's rate."""
    flags = {**EIGHT, **SHARDED, "--save": tmp_path, "--load": tmp_path, "--decoupled-lr": 1e-3}
    first = run(job.flags({**flags, "--exit-interval": 2}))
    assert first.status == 0, first.errors[-3000:]
    second = run(job.flags({**flags, "--decoupled-lr": 2e-3, "--kd-dry-run": True}))
    assert second.status == 0 and "--decoupled-lr 0.001 -> 0.002" in second.output


def test_schedules_continue_without_the_state_of_the_optimizer(job: SmallJob, undisturbed, tmp_path: Path) -> None:
    """Rate and ratio of each step are those of the whole run."""
    flags = {**EIGHT, "--load": undisturbed[0], "--ckpt-step": 4, "--save": tmp_path / "save", "--no-load-optim": True}
    result = run(job.flags(flags))
    assert result.status == 0, result.errors[-3000:]
    found, expected = (
        [(line["iteration"], line["lr"], line["ratio"]) for line in steps(one)] for one in (result, undisturbed[1])
    )
    assert found == expected[4:]
    assert "the optimizer begins anew (--no-load-optim)" in result.output + result.errors


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_sgd_with_momentum_resumes_to_the_last_bit(job: SmallJob, tmp_path: Path, precision: str) -> None:
    sgd = {"--optimizer": "sgd", "--sgd-momentum": 0.7, "--lr": 0.1, "--bf16": precision == "bf16" or None}
    flags = {**sgd, "--train-iters": 4, "--save-interval": 2, "--eval-iters": 0}
    whole = run(job.flags({**flags, "--save": tmp_path / "whole"}))
    parts = [
        run(job.flags({**flags, **more, "--save": tmp_path / "parts", "--load": tmp_path / "parts"}))
        for more in ({"--exit-interval": 2}, {})
    ]
    assert [result.status for result in (whole, *parts)] == [0, 0, 0], parts[1].errors[-2000:]
    assert steps(parts[1]) == steps(whole) and len(steps(whole)) == 4


@pytest.mark.parametrize("optimizer", [{}, {"--use-distributed-optimizer": True}, SHARDED, {"--optimizer": "sgd"}])
def test_saved_while_all_steps_overflowed_in_fp16(job: SmallJob, tmp_path: Path, optimizer: dict[str, Any]) -> None:
    """The optimizer has no state yet."""
    fp16 = {"--fp16": True, "--initial-loss-scale": 2**18, "--loss-scale-window": 100, "--hysteresis": 1}
    flags = {**fp16, **optimizer, "--train-iters": 8, "--save-interval": 100, "--eval-iters": 0}
    whole = run(job.flags({**flags, "--save": tmp_path / "whole"}))
    parts = [
        run(job.flags({**flags, **more, "--save": tmp_path / "parts", "--load": tmp_path / "parts"}))
        for more in ({"--exit-interval": 2}, {})
    ]
    assert [result.status for result in (whole, *parts)] == [0, 0, 0], parts[1].errors[-2000:]
    norms = [line["grad_norm"] for line in steps(whole)]
    assert norms[:2] == [None, None] and any(norms)
    assert steps(parts[1]) == steps(whole)


def test_flipped_byte_and_empty_tracker_from_the_command_line(job: SmallJob, undisturbed, tmp_path: Path) -> None:
    save = tmp_path / "save"
    shutil.copytree(undisturbed[0], save)
    (save / TRACKER).write_text("")
    shard = save / "iter_0000008" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    (save / "iter_0000006" / "metadata.json").unlink()
    attempts = Attempts(job, save, SNAPSHOTS)
    result = attempts.finished()
    assert "__0_0.distcp is not what was written" in result.output
    assert "at iteration 4" in result.output
    attempts.assert_like(undisturbed, result)
    assert {path.name for path in save.glob("torn_*")} == {"torn_iter_0000006", "torn_iter_0000008"}
    for step in (2, 4):
        shutil.rmtree(save / f"iter_{step:07d}")
    (save / "iter_0000006" / ".metadata").unlink()
    (save / "iter_0000008" / "metadata.json").write_text("{")
    flags = {**EIGHT, "--save": save, "--load": save}
    refused = run(job.flags(flags))
    assert refused.status == 1
    assert "has no complete checkpoint" in refused.errors
    assert refused.errors.strip().splitlines()[-1].startswith("pretrain_kd.py: error: ")
