"""mkd/job/plan/plan.py: lines of the plan."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mkd import cpu
from mkd.checkpoint.source import ModelSource
from mkd.config import flags
from mkd.config.kd_config import KDConfig
from mkd.config.schedules import Schedule
from mkd.job.plan.plan import _delta_nets, _experts, _routers, implementation_text, learning_rate
from mkd.job.plan.warnings import _missing_cross_entropy, uncompared_tokenizers
from mkd.job.teachers.inference import InferenceSource
from mkd.models.delta_rule import missing_kernel

PRECISE = "eager in float64, which is slower, while T is above 8"


def test_gated_delta_nets_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def model(variant: str | None) -> Namespace:
        return Namespace(experimental_attention_variant=variant, deterministic_mode=False)

    def line(student: str | None, *teachers: str | None) -> str | None:
        job: Any = Namespace(args=model(student), teacher=Namespace(models=[model(teacher) for teacher in teachers]))
        return _delta_nets(job).get("delta nets")

    net = "gated_delta_net"
    assert line(net, net) is None  # on CPU there is no other way
    monkeypatch.setattr(cpu, "is_target", lambda: False)
    monkeypatch.setattr("mkd.models.delta_rule.common.chunk_gated_delta_rule", None)
    assert line(None, None) is None
    reason = missing_kernel(is_trained=True, is_deterministic=False)
    assert line(net, net, net) == f"in PyTorch's operations, slower than kernels; student and teacher: {reason}"
    assert line(None, net) == f"in PyTorch's operations, slower than kernels; teacher: {reason}"
    monkeypatch.setattr(
        "mkd.job.plan.plan.missing_kernel", lambda is_trained, mode: "no gradients" if is_trained else None
    )
    assert line(net, net) == "in PyTorch's operations, slower than kernels; student: no gradients"


def test_experts_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def line(student: int | None, teacher: int | None, grouped: bool = False) -> str | None:
        models = [Namespace(num_experts=experts, moe_grouped_gemm=grouped) for experts in (student, teacher)]
        job: Any = Namespace(args=models[0], teacher=Namespace(models=models[1:]))
        return _experts(job).get("experts")

    assert line(8, 8) is None  # on CPU there is no other way
    monkeypatch.setattr(cpu, "is_target", lambda: False)
    assert line(None, None) is line(8, 8, grouped=True) is None
    assert (line(8, 8) or "").startswith("student and teacher: one after another; --moe-grouped-gemm")
    assert (line(None, 8) or "").startswith("teacher: one after another")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, None),
        ({"moe_aux_loss_coeff": 1e-3}, "+ 0.001 aux_loss (--moe-aux-loss-coeff)"),
        ({"moe_aux_loss_coeff": 1e-3, "num_experts": None}, None),
        ({"moe_aux_loss_coeff": 1e-3, "moe_router_load_balancing_type": "none"}, None),
        (
            {"moe_aux_loss_coeff": [0.0, 0.5], "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]},
            "+ 0.5 seq_aux_loss (--moe-aux-loss-coeff)",
        ),
        (
            {"moe_z_loss_coeff": 0.1, "moe_router_enable_expert_bias": True},
            "+ 0.1 z-loss (--moe-z-loss-coeff); each step moves the biases of experts by 0.001 "
            "(--moe-router-bias-update-rate) toward equal loads",
        ),
        ({"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.0}, None),
    ],
)
def test_what_trains_routers_beside_the_objective(changes: dict[str, Any], text: str | None) -> None:
    args = flags.default_arguments()
    args.num_experts = 8
    vars(args).update(changes)
    assert _routers(args).get("routers") == text


@pytest.mark.parametrize(
    ("options", "implementation", "text"),
    [
        ({"temperature": 8.0}, "triton", "triton"),
        ({"temperature": 9.0}, "triton", PRECISE),
        ({"temperature": 9.0}, "eager", "eager"),
        ({"temperature_schedule": "linear:10:1:100"}, "triton", f"triton, and by {PRECISE}"),
    ],
)
def test_implementation_at_high_temperatures(options: dict[str, float | str], implementation: str, text: str) -> None:
    assert implementation_text(KDConfig(teacher_hf=["T"], ratio=0.5, **options), implementation) == text


def test_uncompared_tokenizers(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")

    def args(kind: str = "HuggingFaceTokenizer", folder: object = tmp_path) -> Namespace:
        return Namespace(tokenizer_type=kind, tokenizer_model=str(folder))

    def model(name: str, digest: str | None) -> ModelSource:
        folder = tmp_path / name
        return ModelSource(f"--kd-teacher-hf {folder}", folder, {}, 9, digest, None, lambda: "", lambda *_: None)

    def reasons(*teachers: Any, student: ModelSource | None = None, of: Namespace | None = None) -> list[str]:
        found = uncompared_tokenizers(args() if of is None else of, student, teachers)
        assert all("cannot be compared with the student's" in text and "meaningless" in text for text in found)
        return found

    known, unknown, student = model("known", "a"), model("unknown", None), model("student", "a")
    cache: Any = SimpleNamespace(origin="--kd-teacher-cache C", path=tmp_path / "c", tokenizer_hash=None)
    assert reasons(known) == reasons(known, student=student) == []
    (text,) = reasons(known, unknown, student=student)
    assert f"teacher --kd-teacher-hf {unknown.path}" in text and "its folder has no tokenizer files" in text
    assert "records no tokenizer" in reasons(cache)[0]
    assert not reasons(InferenceSource((), (), SimpleNamespace(), is_last_check=True)), "a sentence is compared"
    assert not reasons(unknown, student=replace(unknown)), "the same model"
    assert "is no Hugging Face folder" in reasons(known, of=args("GPT2BPETokenizer", "vocab"))[0]
    null = args("NullTokenizer", None)
    assert not reasons(unknown, of=null), "neither has a tokenizer"
    assert reasons(unknown, student=student, of=null)


@pytest.mark.parametrize(
    ("share", "ratio", "warns"),
    [("1", "0.5", True), ("1", "linear:1:0.5:10", True), ("1", "1", False), ("0.5", "0.5", False)],
)
def test_written_texts_alone_have_no_cross_entropy(share: str, ratio: str, warns: bool) -> None:
    kd: Any = Namespace(on_policy_over_time=_schedule(share), ratio_over_time=_schedule(ratio))
    assert bool(_missing_cross_entropy(kd)) == warns


def _schedule(text: str) -> Schedule:
    return Schedule.parse("--kd-ratio", text) if ":" in text else Schedule.constant(float(text))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "0.001, linear decay to 0"),
        ({"lr_decay_style": "constant", "lr_warmup_iters": 3}, "0.001, constant, warmup over 3 iterations"),
        (
            {"lr_decay_style": "cosine", "min_lr": 1e-5, "lr_decay_iters": 90, "lr_warmup_fraction": 0.1},
            "0.001, cosine decay to 1e-05 at iteration 90, warmup over 0.1 of that",
        ),
        (
            {"lr_decay_samples": 800, "lr_warmup_samples": 80},
            "0.001, linear decay to 0 at sample 800, warmup over 80 samples",
        ),
    ],
)
def test_learning_rate_in_words(given: dict[str, Any], text: str) -> None:
    default = {"lr": 1e-3, "min_lr": 0.0, "lr_decay_style": "linear", "lr_decay_iters": None, "lr_decay_samples": None}
    default |= {"lr_warmup_iters": 0, "lr_warmup_samples": 0, "lr_warmup_fraction": None}
    assert learning_rate(Namespace(**default | given)) == text
