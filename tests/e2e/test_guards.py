"""A job that goes wrong ends with a reason, on all its ranks, and leaves a sound checkpoint behind."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mkd.checkpoint.megatron.integrity import changed_files, find_damage
from tests.support.e2e.quick_python import serving
from tests.support.e2e.small_job import ROOT, Result, SmallJob, make_small_job, run, under_torchrun, write_data
from tests.support.small_disk import small_disk

KILLER = ROOT / "tests" / "support" / "e2e" / "killer.py"

RARE = 290
"""A token that only the text of `spoil` has."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
    return make_small_job(tmp_path_factory.mktemp("job"))


def with_nan(model: Path, folder: Path) -> Path:
    """The model, knowing nothing of one token."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][RARE] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("flag", "source"),
    [
        (
            "--kd-teacher-hf",
            "NaN or infinity at iteration 1, rank 0: the teacher's signal in microbatch 0 of the samples ",
        ),
        ("--kd-student-hf", "embedding.word_embeddings.weight of the student are not finite before the first step"),
    ],
)
def test_nan_stops_all_ranks_and_is_told_once(job: SmallJob, tmp_path: Path, flag: str, source: str) -> None:
    plain = write_data(tmp_path / "valid", [[5, 6, 7, 8] * 60])
    rare = write_data(tmp_path / "train", [[5, 6, 7, RARE] * 60])
    model = with_nan(job.teacher if flag == "--kd-teacher-hf" else job.student, tmp_path / "model")
    changes = {"--data-path": None, "--split": None, "--train-data-path": rare, "--valid-data-path": plain}
    save = {"--save": tmp_path / "save", "--save-interval": 1, "--use-distributed-optimizer": True}
    result = run(job.flags({**changes, **save, flag: model}), ranks=2)
    assert result.status == 1, result.errors[-3000:]
    lines = [line for line in result.errors.splitlines() if "pretrain_kd.py: error:" in line]
    assert lines and set(lines) == {lines[0]}
    assert source in lines[0]
    assert "Traceback" not in result.errors
    assert not (tmp_path / "save" / "latest_checkpointed_iteration.txt").exists()


def test_a_teacher_worse_than_none_is_refused(job: SmallJob, tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(job.teacher, teacher)
    tensors = load_file(teacher / "model.safetensors")
    tensors["lm_head.weight"] *= 20  # sure of what it does not know
    save_file(tensors, teacher / "model.safetensors", metadata={"format": "pt"})
    flags = {"--kd-teacher-hf": teacher, "--train-iters": 1}
    refused = run(job.flags(flags))
    assert refused.status == 1
    assert "has a cross-entropy of" in refused.errors and "--kd-allow-bad-teacher" in refused.errors
    made_up = {"--data-path": None, "--split": None, "--mock-data": True}
    for more in ({"--kd-allow-bad-teacher": True}, made_up):
        assert run(job.flags({**flags, **more})).status == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    with small_disk(tmp_path / "disk", "16m") as disk:
        yield disk


def test_a_full_disk_leaves_the_checkpoint_before(job: SmallJob, disk: Path) -> None:
    """There is no room for a second checkpoint, then for nothing at all; then there is."""
    save = disk / "save"

    def train(iterations: int) -> Result:
        steps = {"--train-iters": iterations, "--override-opt-param-scheduler": True}
        return run(job.flags({"--save": save, "--load": save, "--save-interval": 1, "--eval-iters": 0, **steps}))

    assert train(1).status == 0
    for room, words in [(2**16, ["iter_0000002 was not saved, 0.000 GiB are free", "iter_0000001 is still complete"]),
                        (0, ["No space left on device", str(save)])]:  # fmt: skip
        (disk / "other").write_bytes(bytes(shutil.disk_usage(disk).free - room))
        full = train(2)
        assert full.status == 1 and "Traceback" not in full.errors
        error = next(line for line in full.errors.splitlines() if "pretrain_kd.py: error:" in line)
        assert all(word in error for word in words), error
        assert (save / "latest_checkpointed_iteration.txt").read_text() == "1"
        (disk / "other").unlink()
    size = sum(path.stat().st_size for path in (save / "iter_0000001").iterdir())
    again = train(2)
    assert again.status == 0, again.errors[-3000:]
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "2"
    # Several asynchronous saves, with room for one: one is complete.
    shutil.rmtree(save)
    (disk / "other").write_bytes(bytes(shutil.disk_usage(disk).free - size - size // 2))
    flags = {"--save": save, "--save-interval": 1, "--eval-iters": 0, "--train-iters": 4, "--async-save": True}
    full = run(job.flags(flags))
    assert full.status == 1 and "Traceback" not in full.errors
    assert "iter_0000002 was not saved" in full.errors and "iter_0000001 is still complete" in full.errors
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert find_damage(save / "iter_0000001") is None and changed_files(save / "iter_0000001") == []


def test_a_lost_rank_ends_the_job(job: SmallJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Under torchrun; the other rank waits for it in a collective of half an hour."""
    monkeypatch.setenv("MKD_TEST_KILL", "step:2")
    monkeypatch.setenv("MKD_TEST_KILL_RANK", "1")
    flags = job.flags({"--eval-iters": 0, "--distributed-timeout-minutes": 30})
    with serving(tmp_path) as executables:
        command, env = under_torchrun(executables / "python", [str(KILLER), *flags])
        lost = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=180)
    assert lost.returncode != 0
    assert "killed at step:2" in lost.stderr and "ChildFailedError" in lost.stderr
