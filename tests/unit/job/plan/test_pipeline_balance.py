"""The proposed number of layers of the last pipeline stage, against numbers by hand."""

from dataclasses import replace
from typing import Any

import pytest

from mkd.config.kd_config import KDConfig
from mkd.config.lora import LoraOptions
from mkd.job.memory import Workload, estimate, fullest
from mkd.job.plan.pipeline_balance import StageWork, balance_text, stage_work
from mkd.models.lora import Lora
from tests.support.memory_jobs import llama_arguments

SHAPE = {"padded_vocab_size": 128256, "seq_length": 4096, "micro_batch_size": 2, "global_batch_size": 16}
PP, LAST = "pipeline_model_parallel_size", "decoder_last_pipeline_num_layers"
FLAG = "--decoder-last-pipeline-num-layers"
HEAD_1B, HEAD_8B = 2 * 2048 * 128256, 2 * 4096 * 128256
"""Operations of an LM head for one token."""
LAYER_1B = 2 * (2048 * (2048 + 2 * 512) + 2048 * 2048 + 3 * 2048 * 8192) + 2 * 2048 * 4096
"""Operations of a layer's forward pass for one token: projections and feed-forward, attention to half of 4096."""


def work(kd: dict[str, Any] | None = None, teachers: int = 1, **changes: Any) -> Workload:
    """Shapes of Llama-3.2-1B (student) and Llama-3.1-8B (teachers) in two pipeline stages."""
    student = llama_arguments(16, 2048, 8192, 32, 8, True, **{**SHAPE, PP: 2, "world_size": 2, **changes})
    teacher = llama_arguments(32, 4096, 14336, 32, 8, False, **{**SHAPE, PP: student.pipeline_model_parallel_size})
    return Workload(
        student, [teacher] * teachers, KDConfig(**{"teacher_hf": ["T"] * teachers, "ratio": 0.5, **(kd or {})}), True
    )


def heads(job: Workload, losses: int = 1) -> float:
    return stage_work(job, losses).heads


def test_proposal_by_hand() -> None:
    """With 6 layers' worth of heads, 2 stages of 16 layers are 8 and 14; those of 11 and 5 are 11 and 11."""
    stages = StageWork(layers=16, stages=2, heads=6.0)
    assert stages.of_stages(8) == (8, 14) and stages.of_stages(5) == (11, 11)
    assert stages.proposed() == 5 and stages.saved(5) == pytest.approx(3 / 14)


@pytest.mark.parametrize(
    ("layers", "stages", "heads", "proposed"),
    [
        (16, 4, 6.0, 1),  # 5, 5, 5 and 7 in place of 4, 4, 4 and 10: three stages divide no other number below 4
        (32, 4, 6.0, 2),  # 10, 10, 10 and 8 in place of 8, 8, 8 and 14; 5 leaves 9, 9, 9 and 11: 11 is more than 10
        (32, 4, 4.0, 5),  # 9, 9, 9 and 9
        (16, 2, 100.0, 1),  # 101 in place of 108: the heads alone are far more than all layers
        (16, 2, 300.0, None),  # 301 in place of 308 is 2%
        (16, 2, 0.8, None),  # 9 and 7.8 in place of 8 and 8.8 is slower
        (80, 2, 3.0, None),  # 42 in place of 43 is 2%
        (8, 4, 1.0, None),  # 7 layers do not divide evenly among 3 stages
        (4, 4, 5.0, None),  # a stage has at least one layer
    ],
)
def test_proposals(layers: int, stages: int, heads: float, proposed: int | None) -> None:
    assert StageWork(layers, stages, heads).proposed() == proposed


def test_work_of_8b_and_1b() -> None:
    """Three products with the student's LM head and one with the teacher's, against three passes of a layer."""
    assert (
        heads(work())
        == pytest.approx((3 * HEAD_1B + HEAD_8B) / (3 * LAYER_1B), rel=1e-12)
        == pytest.approx(6.326, rel=1e-3)
    )
    assert stage_work(work(), 1).proposed() == 5


def test_lm_heads_that_are_computed() -> None:
    layer = 3 * LAYER_1B
    assert heads(work(teachers=0)) == pytest.approx(3 * HEAD_1B / layer), "no teacher, or top columns only"
    job = work(teachers=0)
    served = Workload(job.student, [], job.kd, True, served=work().teachers)
    assert heads(served) == heads(work()), "a service sends hidden states"
    weights = {"teacher_weights": [0.5, 0.5]}
    assert heads(work(weights, 2), losses=2) == pytest.approx((6 * HEAD_1B + 2 * HEAD_8B) / layer)
    averaged = work({**weights, "teachers_mode": "averaged_logits"}, 2)
    assert heads(averaged, losses=1) == pytest.approx((3 * HEAD_1B + 2 * HEAD_8B) / layer)
    assert heads(work({"teachers_mode": "select"}, 2), losses=2) == pytest.approx((6 * HEAD_1B + 4 * HEAD_8B) / layer)
    other = work()
    other.teachers[0].seq_length, other.teachers[0].padded_vocab_size = 5120, 64128
    assert heads(other) == pytest.approx((3 * HEAD_1B + 5 / 4 * HEAD_8B / 2) / layer), "a tokenizer of its own"


def test_passes_of_layers() -> None:
    """Recomputed layers have a fourth pass; frozen ones have no gradient of the weights, nor has their LM head."""
    full = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    assert heads(work(**full)) == pytest.approx(heads(work()) * 3 / 4)
    assert heads(work(**{**full, "recompute_method": "block", "recompute_num_layers": 4})) == pytest.approx(
        heads(work()) * 3 / 3.5
    ), "4 of the 8 layers of each stage"
    assert heads(work(recompute_granularity="selective")) == heads(work())
    job = work()
    lora = Lora(LoraOptions(4, 8.0), (), seed=1)
    frozen = Workload(job.student, job.teachers, job.kd, True, lora=lora)
    assert heads(frozen) == pytest.approx((2 * HEAD_1B + HEAD_8B) / (2 * LAYER_1B))


def test_experts_of_a_token() -> None:
    """8 of 64 experts of an eighth of the width are as much work as one network of the whole width."""
    experts = dict(num_experts=64, moe_router_topk=8, moe_ffn_hidden_size=1024, moe_layer_freq=1)
    assert heads(work(**experts)) == pytest.approx(heads(work()), rel=1e-6)


def test_line() -> None:
    job = work(global_batch_size=16)
    text = balance_text(job, 1)
    assert (
        text is not None
        and f"as slow as 14.3 layers, and the others have 8; {FLAG} 5 makes them 11.3 and 11, 21% less" in text
    )
    peak = fullest(estimate(Workload(work(**{LAST: 5}).student, job.teachers, job.kd, True))).peak
    assert f"about {peak / 2**30:.2f} GiB on the fullest rank" in text and peak > fullest(estimate(job)).peak
    assert text.endswith("; a run that has begun may change to it")
    sharded = balance_text(work(use_distributed_optimizer=True), 1) or ""
    assert sharded.endswith("only with --dist-ckpt-optim-fully-reshardable")
    assert balance_text(work(use_distributed_optimizer=True, dist_ckpt_optim_fully_reshardable=True), 1) == text


@pytest.mark.parametrize(
    "changes",
    [
        {PP: 1},
        {"virtual_pipeline_model_parallel_size": 2},
        {LAST: 6},
        {"decoder_first_pipeline_num_layers": 9},
        {"pipeline_model_parallel_layout": "Et*10|t*6L"},
        {"account_for_loss_in_pipeline_split": True},
        {"padded_vocab_size": 1024, "num_layers": 80},
    ],
    ids=str,
)
def test_no_line(changes: dict[str, Any]) -> None:
    teachers = 0 if "padded_vocab_size" in changes else 1
    assert balance_text(work(teachers=teachers, **changes), 1) is None


def test_no_line_for_a_student_that_shares_the_weights_of_its_teacher() -> None:
    """Uneven stages would end that: the ranks would hold the weights twice."""
    job = replace(work(), lora=Lora(LoraOptions(4, 8.0), (), seed=1))
    assert FLAG in (balance_text(job, 1) or "")
    assert balance_text(replace(job, shares_teacher=True), 1) is None
