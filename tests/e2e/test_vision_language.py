"""Text models of vision-language folders in jobs: exports during and after a training are whole models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

from mkd.cli.convert import main as convert
from tests.support.e2e.small_job import SmallJob, make_small_job, make_tokenizer, run, save_tokenizer
from tests.support.hf_folders import read_weights
from tests.support.vision_language import PUBLISHED, make_whole

VOCAB = 307
TOKENS = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
TRAINING: dict[str, Any] = {"--train-iters": 2, "--eval-iters": 0, "--save-interval": 2, "--lr": 1e-2}
RANDOM_TEACHER = {"--kd-allow-bad-teacher": True}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
    """A Qwen2.5-VL learns from a Gemma 3, both with a vision tower."""
    job = make_small_job(tmp_path_factory.mktemp("whole"))
    for name, known in (("student", "qwen2_5_vl"), ("teacher", "gemma3")):
        make_whole(job.root / f"whole_{name}", known, vocab_size=VOCAB)
        save_tokenizer(make_tokenizer(), job.root / f"whole_{name}")
    return job


def train(job: SmallJob, save: Path, changes: dict[str, Any], ranks: int = 1) -> None:
    folders = {f"--kd-{name}-hf": job.root / f"whole_{name}" for name in ("student", "teacher")}
    result = run(job.flags({**folders, **TRAINING, **RANDOM_TEACHER, "--save": save, **changes}), ranks)
    assert result.status == 0, result.output[-2000:] + result.errors[-4000:]


def export(*words: Any) -> int:
    return convert(["export", *map(str, words)])


def whole_model(folder: Path) -> PreTrainedModel:
    return AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")


@torch.no_grad()
def logits(model: torch.nn.Module) -> Tensor:
    return model(TOKENS).logits


def assert_trained(folder: Path, before: Path) -> None:
    """The text tensors are others, the tower is the same bit for bit."""
    found, old = read_weights(folder), read_weights(before)
    assert found.keys() == old.keys()
    for name, value in found.items():
        assert torch.equal(value, old[name]) == name.startswith("visual."), name
    assert (folder / "preprocessor_config.json").is_file()


def test_training(job: SmallJob, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """On two ranks, which write the snapshot together."""
    save, student = tmp_path / "save", job.root / "whole_student"
    train(job, save, {"--kd-save-hf-interval": 2, "--tensor-model-parallel-size": 2}, ranks=2)
    snapshot = save / "hf/iter_0000002"
    assert_trained(snapshot, student)
    assert export("--load", save, "--hf", tmp_path / "out") == 0
    assert torch.equal(logits(whole_model(tmp_path / "out")), logits(whole_model(snapshot)))
    moved = student.rename(job.root / "moved")
    assert export("--load", save, "--hf", tmp_path / "none") == 1
    assert f"in {student}, which is not there any more: give the folder" in capsys.readouterr().err
    assert export("--load", save, "--hf", tmp_path / "based", "--base", moved) == 0
    moved.rename(student)
    assert_trained(tmp_path / "based", student)


@pytest.fixture(scope="module")
def experts(job: SmallJob) -> dict[str, Any]:
    """Flags of a Qwen3-VL with experts as student and teacher, on two expert-parallel ranks."""
    folder = job.root / "experts"
    make_whole(folder, PUBLISHED, vocab_size=VOCAB)
    save_tokenizer(make_tokenizer(), folder)
    return {"--kd-student-hf": folder, "--kd-teacher-hf": folder, "--expert-model-parallel-size": 2}


def test_experts(job: SmallJob, experts: dict[str, Any], tmp_path: Path) -> None:
    """Experts that are stored [experts, in, out] are exported so, during and after a training."""
    save, before = tmp_path / "save", read_weights(experts["--kd-student-hf"])
    train(job, save, {**experts, "--kd-save-hf-interval": 2}, ranks=2)
    assert export("--load", save, "--hf", tmp_path / "out") == 0
    for out in (tmp_path / "out", save / "hf/iter_0000002"):
        found = read_weights(out)
        assert {name: value.shape for name, value in found.items()} == {name: old.shape for name, old in before.items()}
        same = {name for name, value in found.items() if torch.equal(value, before[name])}
        assert same == {name for name in before if ".visual." in name}
    assert torch.equal(logits(whole_model(tmp_path / "out")), logits(whole_model(save / "hf/iter_0000002")))


@pytest.mark.slow
def test_adapters_of_experts(job: SmallJob, experts: dict[str, Any], tmp_path: Path) -> None:
    save = tmp_path / "save"
    modules = ["q_proj", "experts.gate_up_proj", "experts.down_proj"]
    train(job, save, {**experts, "--kd-lora": "4:8", "--kd-lora-modules": modules}, ranks=2)
    assert export("--load", save, "--hf", tmp_path / "peft") == 0
    assert export("--load", save, "--hf", tmp_path / "merged", "--merge") == 0
    plain = whole_model(experts["--kd-student-hf"])
    before = logits(plain)
    adapted = logits(PeftModel.from_pretrained(plain, tmp_path / "peft"))
    assert (adapted - before).abs().max() > 0.1
    assert torch.allclose(adapted, logits(whole_model(tmp_path / "merged")), atol=1e-3)


def test_adapters(job: SmallJob, tmp_path: Path) -> None:
    save, student = tmp_path / "save", job.root / "whole_student"
    train(job, save, {"--kd-lora": "4:8"})
    assert export("--load", save, "--hf", tmp_path / "peft") == 0
    assert export("--load", save, "--hf", tmp_path / "merged", "--merge") == 0
    plain = whole_model(student)
    before = logits(plain)
    adapted = logits(PeftModel.from_pretrained(plain, tmp_path / "peft"))
    assert (adapted - before).abs().max() > 0.1
    assert torch.allclose(adapted, logits(whole_model(tmp_path / "merged")), atol=1e-3)
    merged, old = read_weights(tmp_path / "merged"), read_weights(student)
    assert merged.keys() == old.keys()
    assert all(torch.equal(value, old[name]) for name, value in merged.items() if name.startswith("visual."))
    train(job, tmp_path / "continued", {"--kd-student-hf": tmp_path / "peft", "--kd-lora": "4:8"})
