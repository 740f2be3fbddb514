"""Training with adapters: checkpoints hold adapters alone and resume bit-equal, and what does not fit is refused."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import PeftModel
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoModelForCausalLM

from mkd.checkpoint.adapters.peft_folder import PeftFolder, open_hf_folder
from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.megatron.folder import MegatronFolder
from mkd.cli.convert import main as convert
from mkd.config.lora import LoraOptions
from mkd.errors import MkdConfigError
from mkd.job.checks import _check_first_adapters
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
    return save, train(job, save, {"--kd-save-hf-interval": 4})


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


@pytest.fixture(scope="module")
def peft_folder(job: SmallJob, trained: tuple[Path, Result]) -> Path:
    """The trained adapters as a PEFT folder."""
    assert convert(["export", "--load", str(trained[0]), "--hf", str(job.root / "peft")]) == 0
    return job.root / "peft"


@pytest.fixture(scope="module")
def merged(job: SmallJob, trained: tuple[Path, Result]) -> Path:
    """The student with the trained adapters as a whole model."""
    assert convert(["export", "--load", str(trained[0]), "--hf", str(job.root / "merged"), "--merge"]) == 0
    return job.root / "merged"


def measured(job: SmallJob, ranks: int = 1, **changes: Any) -> Result:
    """A job that saves nothing but its metrics."""
    file = job.root / "measured.jsonl"
    file.unlink(missing_ok=True)
    return run(job.flags({**LORA, "--kd-metrics-file": file, **changes}), ranks)


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


LAYOUTS: dict[str, dict[str, Any]] = {
    "virtual PP": {"--pipeline-model-parallel-size": 2, "--num-virtual-stages-per-pipeline-rank": 2},
    "CP": {"--context-parallel-size": 2},
    "DP": {
        "--micro-batch-size": 1,
        "--use-distributed-optimizer": True,
        "--overlap-grad-reduce": True,
        "--overlap-param-gather": True,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_train_alike(job: SmallJob, trained: tuple[Path, Result], tmp_path: Path, layout: dict) -> None:
    found = train(job, tmp_path / "save", layout, ranks=2)
    for (loss, norm), (there, size) in zip(losses(found), losses(trained[1]), strict=True):
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


def test_exports_agree_with_peft(job: SmallJob, trained: tuple[Path, Result], peft_folder: Path, merged: Path) -> None:
    """PEFT loads the folder, its merged weights are those of --merge, and --kd-save-hf-interval wrote the same."""
    tokens = torch.arange(24).view(1, 24)
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(job.student)
        plain = base(tokens).logits
        model = PeftModel.from_pretrained(base, peft_folder)
        adapted = model(tokens).logits
        whole = AutoModelForCausalLM.from_pretrained(merged)
        logits = whole(tokens).logits
    assert (adapted - plain).abs().max() > 1e-2
    assert (adapted - logits).abs().max() < 1e-5
    expected = model.merge_and_unload().state_dict()
    for name, value in whole.state_dict().items():
        assert torch.allclose(value, expected[name], rtol=0.0, atol=1e-6), name
    assert (merged / "tokenizer.json").is_file() and (peft_folder / "tokenizer.json").is_file()
    snapshot = load_file(trained[0] / "hf/iter_0000004/adapter_model.safetensors")
    exported = load_file(peft_folder / "adapter_model.safetensors")
    assert snapshot.keys() == exported.keys()
    assert all(torch.equal(value, exported[name]) for name, value in snapshot.items())
    stored = tensors(trained[0])
    name = "model.layers.0.mlp.up_proj.lora_B"
    assert torch.equal(exported[f"base_model.model.{name}.weight"], stored[f"kd_lora.{name}"])


START: dict[str, dict[str, Any]] = {
    "continued": {},
    "merged": {"--kd-lora": None},
    "teacher": {"--kd-teacher-hf": "PEFT", "--kd-ratio": 1.0},
}


def test_peft_folder_as_student_and_teacher(job: SmallJob, peft_folder: Path, merged: Path) -> None:
    """Adapters are continued, or merged where a whole model is needed."""
    folder = open_hf_folder(peft_folder, "--hf")
    whole = HFFolder(merged, "--hf")
    assert whole.tensors == folder.tensors
    assert all(torch.equal(whole.read(name), folder.read(name)) for name in whole.tensors)
    name, part = "model.layers.1.self_attn.o_proj.weight", (slice(3, 9), slice(5, 20))
    assert torch.equal(folder.read(name, *part), whole.read(name)[part])
    assert folder.fingerprint() not in (whole.fingerprint(), HFFolder(job.student, "--hf").fingerprint())

    once = {"--train-iters": 1, "--lr-decay-iters": 1, "--kd-ratio": 0.5, "--kd-student-hf": peft_folder}
    paths = {"PEFT": peft_folder}
    first = {
        name: measured(job, **{flag: paths.get(str(value), value) for flag, value in {**once, **change}.items()})
        for name, change in START.items()
    }
    assert {name: result.status for name, result in first.items()} == dict.fromkeys(START, 0)
    found = {name: losses(result)[0][0] for name, result in first.items()}
    assert found["merged"] == pytest.approx(found["continued"], rel=1e-6)
    assert found["teacher"] == pytest.approx(0.0, abs=1e-6)
    with pytest.raises(MkdConfigError, match="give --kd-lora 4:8 --kd-lora-modules down_proj gate_proj k_proj o_proj"):
        _check_first_adapters(PeftFolder(peft_folder, "--kd-student-hf"), (), LoraOptions(4, 8.0))


def test_student_and_teacher_share_one_copy(job: SmallJob) -> None:
    """A teacher that is offloaded has weights of its own: the losses are the same to the last bit."""
    same = {"--kd-teacher-hf": job.student, "--kd-ratio": 0.5, "--train-iters": 2, "--lr-decay-iters": 2}
    shared, apart = (measured(job, **same, **change) for change in ({}, {"--kd-teacher-offload": True}))
    assert "frozen, shared with the teacher" in shared.output
    assert "shared with the teacher" not in apart.output
    assert losses(shared) == losses(apart)
    assert losses(shared)[1][0] != losses(shared)[0][0]
    stages = {"--pipeline-model-parallel-size": 2, "--decoder-last-pipeline-num-layers": 1}
    uneven = measured(job, 2, **same, **stages)  # the teacher's stages are even, so it holds other layers on each rank
    assert uneven.status == 0, uneven.errors
    assert "shared with the teacher" not in uneven.output
    assert losses(uneven) == [pytest.approx(step, rel=1e-5) for step in losses(shared)]


def test_inspect(trained: tuple[Path, Result], peft_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(["inspect", "--load", str(trained[0])]) == convert(["inspect", "--hf", str(peft_folder)]) == 0
    text = capsys.readouterr().out
    assert "rank 4, alpha 8, on down_proj gate_proj k_proj" in text
    assert "PEFT folder" in text and "scale 2, on down_proj" in text
