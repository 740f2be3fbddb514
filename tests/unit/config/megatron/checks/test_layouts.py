"""Layouts against the ranks, the models and the rows of a job."""

import re
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from mkd import cpu
from mkd.config import flags
from mkd.config.check_list import run_checks
from mkd.config.kd_config import KDConfig
from mkd.config.megatron.arguments import ARGUMENT_CHECKS, CommandLine
from mkd.config.megatron.checks.attention import check_attention_heads, check_attention_kernels
from mkd.config.megatron.checks.batches import check_batches_grow, check_virtual_stages
from mkd.config.megatron.checks.experts import check_experts
from mkd.config.megatron.checks.parallel_sizes import check_divisions
from mkd.config.megatron.checks.rows import check_variable_lengths
from mkd.config.megatron.layouts import length_multiple
from mkd.errors import MkdConfigError, MkdPackageError


def layout(**changes: Any) -> Namespace:
    args = flags.default_arguments()
    sizes = {"num_layers": 6, "hidden_size": 48, "ffn_hidden_size": 72, "num_attention_heads": 6, "world_size": 1}
    sizes |= {"seq_length": 30, "micro_batch_size": 2, "global_batch_size": 24, "max_position_embeddings": 64}
    vars(args).update({**sizes, **changes})
    return args


LAYOUT_CHECKS = (
    "parallel sizes",
    "ranks",
    "student's layout",
    "row length",
    "context parallelism",
    "batch",
    "positions",
)


def check_layout(args: Namespace) -> None:
    """The checks of a job that look at the layout."""
    checks = [check for check in ARGUMENT_CHECKS if check.name in LAYOUT_CHECKS]
    assert len(checks) == len(LAYOUT_CHECKS)
    run_checks(checks, CommandLine(args, KDConfig(teacher_hf=["T"], ratio=0.5)))


EXPERTS = {"num_experts": 4, "moe_router_topk": 2}

QUANTILE = {**EXPERTS, "moe_router_load_balancing_type": ["quantile_balancing"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_model_parallel_size": 2}, "--tensor-model-parallel-size 2 needs --sequence-parallel .* 4 experts"),
        ({"moe_apply_probs_on_input": True}, "--moe-apply-probs-on-input .* the student has 2"),
        ({"moe_latent_size": 8, "moe_shared_expert_overlap": True}, "--moe-shared-expert-overlap .* --moe-latent-size"),
        (
            {"moe_router_load_balancing_type": ["sinkhorn"], "moe_aux_loss_coeff": [0.01]},
            "sinkhorn .* 0.01: give --moe-aux-loss-coeff 0",
        ),
        ({**QUANTILE, "moe_router_fusion": True}, "--moe-router-fusion"),
        ({**QUANTILE, "moe_router_num_groups": 2}, "quantile_balancing does not work with --moe-router-num-groups"),
        ({**QUANTILE, "num_experts": 7}, r"--micro-batch-size 2 \* --seq-length 30 \* 2 .* the 7 experts"),
    ],
)
def test_experts_that_a_training_step_would_refuse(changes, message):
    with pytest.raises((MkdConfigError, MkdPackageError), match=message):
        check_experts(layout(**{**EXPERTS, **changes}))
    if "num_experts" not in changes:
        check_experts(layout(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"moe_router_load_balancing_type": ["sinkhorn"], "moe_aux_loss_coeff": 0.0},
        QUANTILE,
    ],
)
def test_experts_that_train(changes):
    check_experts(layout(**{**EXPERTS, **changes}))


def with_virtual_stages(**changes: Any) -> Namespace:
    """9 microbatches on each of 2 data-parallel ranks, over 3 stages of 2 virtual ones."""
    sizes = {"virtual_pipeline_model_parallel_size": 2, "pipeline_model_parallel_size": 3, "data_parallel_size": 2}
    batches = {"global_batch_size": 36, "eval_global_batch_size": 36, "eval_micro_batch_size": 2}
    return layout(**{**sizes, **batches, "microbatch_group_size_per_vp_stage": None, "eval_iters": 1, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_batch_size": 8}, "--global-batch-size 8 gives 2 microbatches of 2 to each of 2"),
        ({"global_batch_size": 16}, "--global-batch-size 16 gives 4 microbatches .* 3 at a time"),
        ({"microbatch_group_size_per_vp_stage": 10}, "--global-batch-size 36 gives 9 microbatches .* 10 at a time"),
        ({"rampup_batch_size": [8, 4, 100]}, "--rampup-batch-size 8 gives 2 microbatches"),
        ({"eval_global_batch_size": 8}, "--eval-global-batch-size 8 gives 2 microbatches"),
    ],
)
def test_microbatches_of_virtual_stages(changes, message):
    check_virtual_stages(with_virtual_stages())
    check_virtual_stages(with_virtual_stages(**{**changes, "virtual_pipeline_model_parallel_size": None}))
    with pytest.raises(MkdConfigError, match=message):
        check_virtual_stages(with_virtual_stages(**changes))


@pytest.mark.parametrize(("rows", "is_refused"), [(0, True), (9, True), (10, False), (11, False)])
def test_batches_that_become_smaller_after_the_beginning_of_a_job(rows: int, is_refused: bool) -> None:
    args = layout(global_batch_size=None, step_batch_size_schedule="0:8 300:4 600:4 900:8")
    expected = pytest.raises(MkdConfigError, match=f"from 8 to 4 after 10 samples.*begins after {rows}")
    with expected if is_refused else nullcontext():
        check_batches_grow(args, rows)


TP, PP, EP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"

TE = "transformer_impl"

SCHEDULE = {"global_batch_size": None}

CP, HIERARCHY = "context_parallel_size", "hierarchical_context_parallel_sizes"

FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"

FLAG_OF_FIRST = "--decoder-first-pipeline-num-layers"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"world_size": 6, TP: 2, PP: 3},
        {"world_size": 4, TP: 2, "sequence_parallel": True},
        {"world_size": 4, EP: 2, "num_experts": 4},
        {"world_size": 2, CP: 2, "seq_length": 32},
        {"world_size": 6, CP: 3, TP: 2, "sequence_parallel": True, "cp_comm_type": ["a2a"]},
        {"world_size": 4, CP: 4, "seq_length": 32, "cp_comm_type": ["a2a+p2p"], HIERARCHY: [2, 2]},
        {"global_batch_size": 3, "rampup_batch_size": ["2", "2", "8"]},
        {"global_batch_size": None, "step_batch_size_schedule": "0:4 1K:4 3K:8"},
        {"global_batch_size": None},
        {"max_position_embeddings": None},
        {"world_size": 5, PP: 5, FIRST: 2},
        {"world_size": 2, PP: 2, LAST: 1},
        {"world_size": 2, PP: 2, FIRST: 5, LAST: 1},
        {"world_size": 5, PP: 5, "num_layers": 9, "account_for_loss_in_pipeline_split": True},
        {"num_layers": None, "hidden_size": None, "num_attention_heads": None},
    ],
    ids=str,
)
def test_layouts_that_fit(changes):
    if changes.get("world_size") == 5:
        changes = {**changes, "global_batch_size": 2}
    check_layout(layout(**changes))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"world_size": 3, TP: 2}, ["--tensor-model-parallel-size 2", "= 2 does not divide the 3 ranks"]),
        ({"world_size": 6, TP: 2, PP: 2}, ["= 4 does not divide the 6 ranks"]),
        ({"world_size": 4, TP: 4}, ["--tensor-model-parallel-size 4", "6 attention heads of the student"]),
        ({"world_size": 4, PP: 4}, ["--pipeline-model-parallel-size 4", "6 layers of the student"]),
        ({"world_size": 3, EP: 2, "num_experts": 4}, ["--expert-model-parallel-size 2", "the 3 ranks"]),
        ({"expert_tensor_parallel_size": 3}, ["expert tensor size 3 (--expert-tensor-parallel-size)", "the 1 ranks"]),
        ({"world_size": 2, TP: 2, "sequence_parallel": True, "seq_length": 31}, ["--seq-length 31", "parallel-size 2"]),
        ({"world_size": 2, "global_batch_size": 26}, ["--global-batch-size 26", "--micro-batch-size 2 * 2"]),
        ({"seq_length": 65}, ["--seq-length 65", "student's 64 positions"]),
        (
            {**SCHEDULE, "step_batch_size_schedule": "0:4 8:8"},
            ["-schedule 0:4 8:8 (", "strictly increasing", "0:64 30000:"],
        ),
        ({**SCHEDULE, "step_batch_size_schedule": "0:4 x:8"}, ["-schedule 0:4 x:8 (", "write TOKENS:BATCH"]),
        ({**SCHEDULE, "step_batch_size_schedule": "4"}, ["-schedule 4 (", "write TOKENS:BATCH"]),
        (
            {**SCHEDULE, "step_batch_size_schedule": "0:4 3K:8", "train_iters": 9},
            ["-schedule 0:4 3K:8 does not work with --train-iters 9", "give --train-samples"],
        ),
        ({"world_size": 2, CP: 2}, ["--seq-length 30", "multiple of 4", "2 * --context-parallel-size 2 needs"]),
        ({"world_size": 3, CP: 2}, ["--context-parallel-size 2 = 2 does not divide the 3 ranks"]),
        (
            {"world_size": 6, CP: 2, TP: 3, "sequence_parallel": True, "seq_length": 32},
            ["--seq-length 32", "multiple of 12", "--context-parallel-size 2 and --tensor-model-parallel-size 3 with"],
        ),
        ({"world_size": 2, CP: 2, "seq_length": 32, "cp_comm_type": ["ring"]}, ["--cp-comm-type is 'ring'", "p2p"]),
        ({"world_size": 2, CP: 2, "seq_length": 32, "cp_comm_type": ["p2p", "a2a"]}, ["--cp-comm-type p2p a2a"]),
        ({"world_size": 2, CP: 2, "seq_length": 32, "hybrid_context_parallel": True}, ["--hybrid-context-parallel"]),
        (
            {"world_size": 4, CP: 4, "seq_length": 32, "global_batch_size": 2, "cp_comm_type": ["a2a"]},
            ["--cp-comm-type a2a", "the student has 6 attention heads", "1 * 4"],
        ),
        ({"world_size": 3, PP: 3, LAST: 1}, ["--decoder-last-pipeline-num-layers 1: 5 of", "for the 2 other stages"]),
        ({"world_size": 2, PP: 2, LAST: 6}, ["--decoder-last-pipeline-num-layers 6: 0 of", "at least one layer"]),
        ({"world_size": 2, PP: 2, LAST: 7}, ["--decoder-last-pipeline-num-layers 7: -1 of the student's 6 layers"]),
        ({"world_size": 2, PP: 2, FIRST: 4, LAST: 1}, [f"{FLAG_OF_FIRST} 4 and --decoder-last-pipeline", "0 other"]),
        ({"world_size": 2, PP: 2, FIRST: 0}, [f"{FLAG_OF_FIRST} 0: 6 of"]),
        ({LAST: 1}, ["--decoder-last-pipeline-num-layers 1: 5 of", "for the 0 other stages"]),
        ({TP: 0}, ["--tensor-model-parallel-size is 0"]),
        ({EP: -1}, ["--expert-model-parallel-size is -1"]),
    ],
)
def test_layouts_that_do_not_fit(changes, words):
    with pytest.raises(MkdConfigError) as caught:
        check_layout(layout(**changes))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "sizes, tp, pp, words",
    [
        ({"group_query_attention": True, "num_query_groups": 3}, 2, 1, "2 does not divide the 3 key-value heads"),
        ({"hidden_size": 50}, 3, 1, "3 does not divide the 50 hidden width"),
        ({"ffn_hidden_size": 71}, 2, 1, "2 does not divide the 71 feed-forward width"),
        ({"num_layers": 5}, 1, 2, "2 does not divide the 5 layers of the teacher"),
    ],
)
def test_sizes_that_do_not_divide(sizes, tp, pp, words):
    plain = {"num_attention_heads": 6, "hidden_size": 48, "ffn_hidden_size": 72, "num_layers": 6}
    check_divisions("the teacher", {**plain, "group_query_attention": False, "num_query_groups": 1}, tp, 1)
    with pytest.raises(MkdConfigError, match=words):
        check_divisions("the teacher", {**plain, **sizes}, tp, pp)


def test_key_value_heads_that_all_to_all_cannot_deal_out():
    sizes = {"num_attention_heads": 8, "group_query_attention": True, "num_query_groups": 2}
    for changes in ({TP: 2}, {CP: 2}, {CP: 4, "cp_comm_type": ["p2p"]}):
        check_attention_heads("the teacher", sizes, layout(**{"cp_comm_type": ["a2a"], **changes}))
    with pytest.raises(MkdConfigError, match=r"the teacher has 2 key-value heads.* 2 \* 2 context-parallel ranks"):
        check_attention_heads("the teacher", sizes, layout(**{TP: 2, CP: 2, "cp_comm_type": ["a2a"]}))
    hierarchy = {CP: 4, "cp_comm_type": ["a2a+p2p"], HIERARCHY: [2, 2]}
    check_attention_heads("the teacher", sizes, layout(**hierarchy))
    with pytest.raises(MkdConfigError, match="1 \\* 4 context-parallel ranks"):
        check_attention_heads("the teacher", sizes, layout(**{**hierarchy, HIERARCHY: [4, 1]}))


def test_gated_delta_net() -> None:
    sizes = {"num_attention_heads": 8, "group_query_attention": False, "linear_num_key_heads": 2}
    sizes |= {"experimental_attention_variant": "gated_delta_net", "linear_num_value_heads": 4}
    check_attention_heads("the student", sizes, layout(**{TP: 2, "kd_packing": "best_fit"}))
    with pytest.raises(MkdConfigError, match=r"size 2 does not divide the 2 key heads .* of the student"):
        check_attention_heads("the student", sizes, layout(**{TP: 2, CP: 2}))
    with pytest.raises(MkdConfigError, match="--deterministic-mode does not work with --kd-packing best_fit"):
        check_attention_heads("the student", sizes, layout(deterministic_mode=True, kd_packing="best_fit"))


def test_mamba_layers() -> None:
    sizes = {"num_attention_heads": 8, "group_query_attention": False, "mamba_num_groups": 2}
    mamba = {**sizes, "layer_mixers": ["M", "-", "*"]}
    check_attention_heads("the student", mamba, layout(**{TP: 2, "kd_packing": "best_fit"}))
    check_attention_heads("the student", {**sizes, "layer_mixers": ["*", "-"]}, layout(**{TP: 4, CP: 2}))
    check_attention_heads("the student", mamba, layout(**{CP: 2, "kd_packing": "best_fit"}))
    for sizes, product in (
        ({TP: 4}, "4 * --context-parallel-size 1"),
        ({TP: 2, CP: 2}, "2 * --context-parallel-size 2"),
    ):
        words = re.escape(f"--tensor-model-parallel-size {product} does not divide the 2 groups")
        with pytest.raises(MkdConfigError, match=rf"{words} .* of the student"):
            check_attention_heads("the student", mamba, layout(**sizes))


@pytest.mark.parametrize(
    "changes, options, word",
    [
        (
            {CP: 2, "bf16": True, TE: "local"},
            {},
            "--context-parallel-size 2 needs --transformer-impl transformer_engine",
        ),
        ({CP: 2}, {}, "--context-parallel-size 2 needs --bf16 or --fp16"),
        ({}, {"packing": "best_fit"}, "--kd-packing best_fit needs --bf16 or --fp16"),
        ({"bf16": True}, {"packing": "best_fit", "teacher_dtype": "fp32"}, "--kd-teacher-dtype fp32"),
        ({"bf16": True, CP: 2, "cp_comm_type": ["all_gather"]}, {"packing": "best_fit"}, "all_gather .* p2p or a2a"),
    ],
)
def test_attention_that_gpus_do_not_have(monkeypatch, changes, options, word):
    args, kd = layout(**{TE: "transformer_engine", **changes}), KDConfig(teacher_hf=["T"], ratio=0.5, **options)
    monkeypatch.setattr(cpu, "is_target", lambda: True)
    check_attention_kernels(args, kd)
    monkeypatch.setattr(cpu, "is_target", lambda: False)
    check_attention_kernels(layout(), KDConfig(teacher_hf=["T"], ratio=0.5))
    check_attention_kernels(layout(**{CP: 2, "bf16": True, TE: "transformer_engine"}), replace(kd, teacher_dtype=None))
    with pytest.raises(MkdConfigError, match=word):
        check_attention_kernels(args, kd)


@pytest.mark.parametrize(
    "changes, flag",
    [
        ({"tp_comm_overlap": True}, "--tp-comm-overlap"),
        ({"num_experts": 4, "moe_token_dispatcher_type": "allgather"}, "--moe-token-dispatcher-type allgather"),
    ],
)
def test_flags_that_fix_lengths(changes, flag):
    check_variable_lengths(layout(moe_token_dispatcher_type="allgather"))
    with pytest.raises(MkdConfigError, match=f"--kd-variable-seq-lengths .* {flag}"):
        check_variable_lengths(layout(**changes))


@pytest.mark.parametrize(
    "changes, multiple",
    [
        ({}, 1),
        ({TP: 3}, 1),
        ({TP: 3, "sequence_parallel": True}, 3),
        ({CP: 2}, 4),
        ({CP: 2, TP: 3, "sequence_parallel": True}, 12),
        ({CP: 4, TP: 4, "sequence_parallel": True}, 16),
    ],
)
def test_what_rows_are_a_multiple_of(changes, multiple):
    assert length_multiple(layout(**changes)) == multiple


def test_packed_rows_may_be_longer_than_the_students_positions():
    (check,) = (check for check in ARGUMENT_CHECKS if check.name == "positions")

    def run(packing="best_fit", positions=64, kind="rope"):
        args = layout(seq_length=640, max_position_embeddings=positions, position_embedding_type=kind)
        run_checks([check], CommandLine(args, KDConfig(teacher_hf=["T"], ratio=0.5, packing=packing)))

    run()
    with pytest.raises(MkdConfigError, match=r"--seq-length 640 .* student's 64 positions .*: --kd-packing best_fit"):
        run(packing="none")
    with pytest.raises(MkdConfigError, match=r"student's 64 positions [^;]*$"):
        run(kind="learned_absolute")
    with pytest.raises(MkdConfigError, match="--kd-packing-multiple 16 is longer than the student's 8 positions"):
        run(positions=8)
