"""Training with adapters: checkpoints hold adapters alone and resume bit-equal, and what does not fit is refused."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mkd.checkpoint.megatron_folder import MegatronFolder
from tests.support.e2e.small_job import Result, SmallJob, make_small_job, run

LORA = {"--kd-lora": "4:8", "--lr": 1e-2, "--eval-iters": 0, "--train-iters": 4, "--lr-decay-iters": 4}
TWO_RANKS = {"--tensor-model-parallel-size": 2, "--sequence-parallel": True}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
    return make_small_job(tmp_path_factory.mktemp("lora"))


def train(job: SmallJob, save: Path, changes: dict[str, Any], ranks: int = 1) -> Result:
    result = run(job.flags({**LORA, "--save": save, "--load": save, "--save-interval": 2, **changes}), ranks)
    assert result.status == 0, result.output[-2000:] + result.errors[-4000:]
    return result


@pytest.fixture(scope="module")
def trained(job: SmallJob) -> tuple[Path, Result]:
    """Four steps on one rank, with a save every second step."""
    save = job.root / "whole"
    return save, train(job, save, {})


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    found = MegatronFolder(folder, "--load")
    state = {
        key: torch.empty(value.size, dtype=value.properties.dtype)
        for key, value in found.metadata.state_dict_metadata.items()
        if isinstance(value, TensorStorageMetadata)
    }
    dcp.load(state, checkpoint_id=found.iteration_dir, no_dist=True)
    return state


def losses(result: Result) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in result.metrics if "grad_norm" in line]


def test_resumed_run_is_bit_equal(job: SmallJob, trained: tuple[Path, Result], tmp_path: Path) -> None:
    save, whole = trained
    assert len({loss for loss, _ in losses(whole)}) == 4
    shutil.copytree(save, tmp_path / "save", ignore=shutil.ignore_patterns("iter_0000004", "metrics.jsonl"))
    (tmp_path / "save/latest_checkpointed_iteration.txt").write_text("2")
    resumed = train(job, tmp_path / "save", {})
    assert losses(resumed)[-2:] == losses(whole)[2:]
    expected, found = tensors(save), tensors(tmp_path / "save")
    assert expected.keys() == found.keys()
    assert {key for key, value in expected.items() if not torch.equal(value, found[key])} == set()


def test_checkpoints_hold_adapters_alone(trained: tuple[Path, Result]) -> None:
    stored = tensors(trained[0])
    weights = {key for key in stored if not key.startswith("optimizer.")}
    layers = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    names = [f"kd_lora.model.layers.{number}.{layer}.lora_{f}" for number in range(4) for layer in layers for f in "AB"]
    assert weights == set(names)
    assert all(stored[name].norm() > 0.0 for name in names)
    moments = {key for key in stored if key.startswith("optimizer.state.exp_avg.")}
    assert len(moments) == len(names)


def test_other_layout_continues(job: SmallJob, trained: tuple[Path, Result], tmp_path: Path) -> None:
    save, whole = trained
    shutil.copytree(save, tmp_path / "save", ignore=shutil.ignore_patterns("iter_0000004", "metrics.jsonl"))
    (tmp_path / "save/latest_checkpointed_iteration.txt").write_text("2")
    resumed = train(job, tmp_path / "save", TWO_RANKS, ranks=2)
    for (loss, norm), (there, size) in zip(losses(resumed)[-2:], losses(whole)[2:], strict=True):
        assert loss == pytest.approx(there, rel=1e-5)
        assert norm == pytest.approx(size, rel=1e-4)


REFUSED = {
    "other rank": ({"--kd-lora": "2"}, "adapters of rank 4, alpha 8 on down_proj"),
    "all weights": ({"--kd-lora": None}, "holds adapters without the weights under them: give --kd-lora 4:8"),
    "other weights": ({"--kd-student-hf": "OTHER"}, "has adapters of other weights"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_before_work_starts(
    job: SmallJob, trained: tuple[Path, Result], changes: dict[str, Any], message: str
) -> None:
    if changes.get("--kd-student-hf") == "OTHER":
        changes = {"--kd-student-hf": shutil.copytree(job.student, job.root / "other", dirs_exist_ok=True)}
        file = job.root / "other/model.safetensors"
        file.write_bytes(file.read_bytes()[:-4] + b"\1\1\1\1")
    result = run(job.flags({**LORA, "--load": trained[0], **changes}))
    assert result.status == 1
    assert message in " ".join(result.errors.split()), result.errors[-3000:]
    assert "loading distributed checkpoint" not in result.output
