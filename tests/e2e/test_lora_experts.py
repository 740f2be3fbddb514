"""Adapters of routed experts: a run over expert-parallel ranks resumes bit-equal, continues on one rank, is exported
for PEFT, and merged."""

import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, Qwen2MoeConfig

from mkd.cli.convert import main as convert
from tests.e2e.test_lora import losses, tensors
from tests.support.e2e.small_job import VOCAB, Result, SmallJob, make_small_job, run

FLAGS = {"--kd-lora": "4:8", "--lr": 1e-2, "--eval-iters": 0, "--train-iters": 4, "--lr-decay-iters": 4}
FLAGS |= {"--use-distributed-optimizer": True}
MODULES = ["all-linear", "experts.gate_up_proj", "mlp.experts.down_proj"]
EP2 = {"--expert-model-parallel-size": 2}
RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
    """Teacher and student are one mixture of experts."""
    job = make_small_job(tmp_path_factory.mktemp("lora_experts"))
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 64, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16}
    sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 128, "vocab_size": VOCAB}
    config = Qwen2MoeConfig(**sizes, bos_token_id=None, eos_token_id=0, router_aux_loss_coef=0.0)
    model = AutoModelForCausalLM.from_config(config)
    model.lm_head.weight.data.mul_(16.0)
    model.save_pretrained(job.root / "mixture")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(job.student / file, job.root / "mixture" / file)
    return job


def train(job: SmallJob, save: Path, ranks: int, **changes: object) -> Result:
    folder = job.root / "mixture"
    flags = {"--kd-student-hf": folder, "--kd-teacher-hf": folder, "--kd-lora-modules": MODULES}
    flags |= {"--save": save, "--load": save, "--save-interval": 2, **FLAGS, **changes}
    result = run(job.flags(flags), ranks)
    assert result.status == 0, result.output[-2000:] + result.errors[-4000:]
    return result


@pytest.fixture(scope="module")
def trained(job: SmallJob) -> tuple[Path, Result]:
    """Four steps with the experts on two ranks, with a save every second step."""
    return job.root / "save", train(job, job.root / "save", 2, **EP2)


def resumed(job: SmallJob, save: Path, to: Path, ranks: int, **changes: object) -> Result:
    """Two more steps from the save after two."""
    shutil.copytree(save, to, ignore=shutil.ignore_patterns("iter_0000004", "metrics.jsonl"))
    (to / "latest_checkpointed_iteration.txt").write_text("2")
    return train(job, to, ranks, **changes)


def test_resumed_run_is_bit_equal(job: SmallJob, trained: tuple[Path, Result], tmp_path: Path) -> None:
    save, whole = trained
    found = resumed(job, save, tmp_path / "save", 2, **EP2)
    assert losses(found)[-2:] == losses(whole)[2:]
    expected, stored = tensors(save), tensors(tmp_path / "save")
    assert expected.keys() == stored.keys()
    assert {key for key, value in expected.items() if not torch.equal(value, stored[key])} == set()
    experts = "kd_lora.model.layers.1.mlp.experts"
    assert expected[f"{experts}.gate_up_proj.lora_A"].shape == (4, 4, 32)
    assert expected[f"{experts}.gate_up_proj.lora_B.1"].shape == (4, 24, 4)
    assert all(expected[f"{experts}.down_proj.lora_B"].flatten(1).norm(dim=1) > 0.0)


def test_one_rank_continues_with_the_optimizer(job: SmallJob, trained: tuple[Path, Result], tmp_path: Path) -> None:
    """After a save in the format of any layout. Without its moments, Adam would differ by its rate, 2.5e-3."""
    (whole, _), two, one = trained, tmp_path / "two", tmp_path / "one"
    resumed(job, whole, two, 2, **EP2, **{RESHARDABLE: True, "--save-interval": 1, "--exit-interval": 3})
    train(job, two, 1, **{RESHARDABLE: True, "--save": one})
    expected, stored = tensors(whole), tensors(one)
    adapters = [key for key in expected if key.startswith("kd_lora.")]
    assert adapters and max((expected[key] - stored[key]).abs().max() for key in adapters) < 2e-4


def test_one_rank_continues(job: SmallJob, trained: tuple[Path, Result], tmp_path: Path) -> None:
    """The adapters are those of the two ranks; by default, the optimizer's state is for one number of such ranks."""
    save, whole = trained
    found = resumed(job, save, tmp_path / "save", 1, **{"--no-load-optim": True})
    assert losses(found)[-2] == pytest.approx(losses(whole)[2], rel=1e-5)


def test_exports(job: SmallJob, trained: tuple[Path, Result], tmp_path: Path) -> None:
    for flags in (["--hf", str(tmp_path / "peft")], ["--hf", str(tmp_path / "merged"), "--merge"]):
        assert convert(["export", "--load", str(trained[0]), *flags]) == 0
    tokens = torch.arange(24).view(1, 24)
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(job.root / "mixture")
        plain = base(tokens).logits
        adapted = PeftModel.from_pretrained(base, tmp_path / "peft")(tokens).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        logits = merged(tokens).logits
    assert (adapted - plain).abs().max() > 1e-2
    assert (adapted - logits).abs().max() < 1e-4
    assert merged.generate(tokens, max_new_tokens=2, do_sample=False).shape == (1, 26)
