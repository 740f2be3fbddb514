"""mkd.config: flags, adopted architectures, layout checks, and the arguments of the teacher."""

import itertools
import re
import sys
from argparse import Namespace
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mkd import cpu
from mkd.checkpoint.hf.check import read_architecture
from mkd.checkpoint.hf.folder import HFFolder
from mkd.config import flags
from mkd.config.check_list import run_checks
from mkd.config.flags import flag_parser, flags_given, parse_command_line, refuse_contradictions
from mkd.config.kd_config import KDConfig, LayerPair
from mkd.config.megatron.arg_names import ArgRole, names_with
from mkd.config.megatron.arguments import ARGUMENT_CHECKS, CommandLine, adopt_architecture
from mkd.config.megatron.checks.attention import check_attention_heads, check_attention_kernels
from mkd.config.megatron.checks.batches import check_batches_grow, check_virtual_stages
from mkd.config.megatron.checks.checkpoints import has_checkpoint
from mkd.config.megatron.checks.experts import check_experts
from mkd.config.megatron.checks.losses import check_layer_pairs
from mkd.config.megatron.checks.parallel_sizes import check_divisions
from mkd.config.megatron.checks.rows import check_variable_lengths
from mkd.config.megatron.checks.run_length import REQUIRED, check_required
from mkd.config.megatron.data_args import data_prefixes, dataset_config
from mkd.config.megatron.layouts import length_multiple
from mkd.config.megatron.teacher_args import teacher_arguments
from mkd.errors import MkdConfigError, MkdDataError, MkdPackageError
from mkd.models.gpt import gpt_config
from tests.support.hf_folders import LLAMA3_ROPE, make_llama


def test_flags_given_finds_every_spelling():
    argv = ["--hidden-size", "8", "--lr=0.1", "--kd-ratio", "0.5", "--disable-bias-linear", "--hidden-sizes", "hidden"]
    assert flags_given(argv) == {
        "hidden_size": "--hidden-size",
        "lr": "--lr",
        "kd_ratio": "--kd-ratio",
        "add_bias_linear": "--disable-bias-linear",
    }
    assert flags_given([]) == {}


def test_flags_given_reads_the_command_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pretrain_kd.py", "--num-layers", "3"])
    assert flags_given() == {"num_layers": "--num-layers"}


def test_parse_command_line(monkeypatch):
    words = "--kd-teacher-hf T --kd-ratio 0.25 --kd-temperature 2 --kd-no-temperature-squared --hidden-size 8"
    monkeypatch.setattr(sys, "argv", ["pretrain_kd.py", *words.split()])
    args, kd = parse_command_line()
    assert (kd.teacher_hf, kd.ratio, kd.temperature, kd.temperature_squared) == (["T"], 0.25, 2.0, False)
    assert (kd.student_hf, kd.loss, kd.teacher_offload, kd.dry_run) == (None, "forward_kl", False, False)
    assert args.hidden_size == 8


@pytest.mark.parametrize(
    ("words", "loss"), [("--kd-xtoken-loss", "partition_kl"), ("--kd-xtoken-loss gold", "gold"), ("", None)]
)
def test_the_flag_for_other_tokenizers_may_name_the_loss(monkeypatch, words, loss):
    monkeypatch.setattr(sys, "argv", f"x --kd-teacher-hf T --kd-ratio 0.5 {words} --hidden-size 8".split())
    assert parse_command_line()[1].xtoken_loss == loss


@pytest.mark.parametrize("words", [["--kd-ratio"], ["--kd-loss", "kl"], ["--kd-loss-chunk-rows", "1.5"], ["stray"]])
def test_what_the_parser_refuses_is_one_line(monkeypatch, capsys, words):
    monkeypatch.setattr(sys, "argv", ["x", *words])
    with pytest.raises(MkdConfigError) as caught:
        parse_command_line()
    assert words[0] in str(caught.value) and "\n" not in str(caught.value)
    assert capsys.readouterr() == ("", "")


def test_contradictions_need_the_whole_beginning():
    refuse_contradictions(["--logits", "--export-k", "value", "--load", "freeze-all-layers"])
    for words in (["--spec", "my.layers", "spec"], ["--spec=my.layers"]):
        with pytest.raises(MkdConfigError, match=r"--spec my\.layers is not supported: leave it out"):
            refuse_contradictions(words)
    with pytest.raises(MkdConfigError, match="--freeze-all-layers contradicts"):
        refuse_contradictions(["--load", "x", "--freeze-all-layers"])


ARCHITECTURE = {"hidden_size": 32, "normalization": "RMSNorm", "hidden_dropout": 0.0, "rotary_base": 10000}


def parsed(monkeypatch: pytest.MonkeyPatch, *words: object) -> Namespace:
    monkeypatch.setattr(sys, "argv", ["x", "--kd-teacher-hf", "T", "--kd-ratio", "0.5", *map(str, words)])
    return parse_command_line()[0]


@pytest.mark.parametrize("words", [[], ["--hidden-size", 32], ["--rotary-base", 10000, "--normalization=RMSNorm"]])
def test_adopt_architecture_sets_what_the_folder_says(monkeypatch, words):
    args = parsed(monkeypatch, *words)
    adopt_architecture(args, ARCHITECTURE, "--kd-student-hf S")
    assert {name: getattr(args, name) for name in ARCHITECTURE} == ARCHITECTURE


@pytest.mark.parametrize(
    "words, message",
    [
        (["--hidden-size", 64], "--hidden-size is 64, but --kd-student-hf S has 32"),
        (["--normalization=LayerNorm"], "--normalization is LayerNorm, but --kd-student-hf S has RMSNorm"),
        (["--rotary-base", 500000], "--rotary-base is 500000, but --kd-student-hf S has 10000"),
    ],
)
def test_adopt_architecture_refuses_a_contradiction(monkeypatch, words, message):
    args = parsed(monkeypatch, *words)
    with pytest.raises(MkdConfigError, match=message):
        adopt_architecture(args, ARCHITECTURE, "--kd-student-hf S")


HEADS = {"num_attention_heads": 4, "group_query_attention": False, "num_query_groups": None}
GROUPS = {"num_attention_heads": 4, "group_query_attention": True, "num_query_groups": 2}


@pytest.mark.parametrize(
    "words, architecture, message",
    [
        (["--group-query-attention", "--num-query-groups", 4], HEADS, None),
        (["--num-query-groups", 4], HEADS, None),
        (["--num-query-groups", 2], HEADS, "--num-query-groups is 2, but S has None"),
        (["--group-query-attention"], HEADS, "--group-query-attention is True, but S has False"),
        (["--group-query-attention"], GROUPS, None),
        (["--group-query-attention", "--num-query-groups", 2], GROUPS, None),
        (["--group-query-attention", "--num-query-groups", 4], GROUPS, "--num-query-groups is 4, but S has 2"),
    ],
)
def test_key_value_heads_in_every_spelling(monkeypatch, words, architecture, message):
    args = parsed(monkeypatch, *words)
    with pytest.raises(MkdConfigError, match=message) if message else nullcontext():
        adopt_architecture(args, architecture, "S")
        assert {name: getattr(args, name) for name in architecture} == architecture


def test_dropout_is_the_choice_of_the_run(monkeypatch):
    args = parsed(monkeypatch, "--hidden-dropout", 0.1)
    adopt_architecture(args, ARCHITECTURE, "--kd-student-hf S")
    assert args.hidden_dropout == 0.1


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


@pytest.mark.parametrize("split", ["nan", "9e1,1,0", "99,-1,0", ""])
def test_shares_that_megatron_would_misread(split):
    args = flags.default_arguments()
    args.split, args.data_path, args.seq_length = split, ["prefix"], 8
    with pytest.raises(MkdConfigError, match="--split is"):
        dataset_config(args, None)


@pytest.mark.parametrize("flag", ["data_path", "valid_data_path"])
@pytest.mark.parametrize(
    ("weight", "rule"),
    [
        ("0", "a weight must be a finite number above 0"),
        ("-1", "a weight must be a finite number above 0"),
        ("nan", "a weight must be a finite number above 0"),
        ("inf", "a weight must be a finite number above 0"),
        ("1e-300", "its share is below 1e-09, so that it would not be read"),
    ],
)
def test_a_weight_of_a_blend_that_reads_nothing(flag: str, weight: str, rule: str) -> None:
    args = flags.default_arguments()
    setattr(args, flag, [weight, "A", "1", "B"])
    with pytest.raises(MkdConfigError, match=f"^A has the weight {float(weight):g} in its blend; {rule}"):
        data_prefixes(args)


def test_an_infinite_weight_is_named_not_those_beside_it() -> None:
    args = flags.default_arguments()
    args.data_path = ["1", "A", "inf", "B"]
    with pytest.raises(MkdConfigError, match=r"^B has the weight inf in its blend; a weight must be a finite number"):
        data_prefixes(args)


def test_equal_weights_of_any_size() -> None:
    args = flags.default_arguments()
    for weight in ("1e-30", "0.5", "1e30"):
        args.data_path = [weight, "A", weight, "B"]
        assert data_prefixes(args) == ["A", "B"]


def test_the_list_of_required_flags():
    assert list(REQUIRED) == [
        *("--num-layers", "--seq-length", "--micro-batch-size", "--train-iters", "--lr", "--eval-interval"),
    ]


@pytest.mark.parametrize("name", ["num_layers", "seq_length", "micro_batch_size", "train_iters", "lr", "eval_interval"])
def test_required_flags(name):
    args = layout(train_iters=3, lr=0.1, eval_interval=2)
    flag = f"--{name.replace('_', '-')}"
    check_required(args, flag)
    setattr(args, name, None)
    with pytest.raises(MkdConfigError, match=f"{flag} is missing"):
        check_required(args, flag)


def test_data_prefixes(tmp_path):
    blend, per_split = tmp_path / "blend", tmp_path / "per_split"
    blend.write_text("1 a 2 b")
    per_split.write_text('{"train": ["a"], "valid": "0.5 b 0.5 c", "test": null}')
    cases = [
        ({"data_path": ["a"]}, ["a"]),
        ({"data_path": ["a", "b"]}, ["a", "b"]),
        ({"data_path": ["0.3", "a", "0.7", "b"]}, ["a", "b"]),
        ({"train_data_path": ["a"], "valid_data_path": ["1", "b"]}, ["a", "b"]),
        ({"data_args_path": str(blend)}, ["a", "b"]),
        ({"per_split_data_args_path": str(per_split)}, ["a", "b", "c"]),
        ({"mock_data": True}, []),
    ]
    for changes, expected in cases:
        assert data_prefixes(layout(**changes)) == expected
    for changes in ({}, {"data_args_path": "nowhere"}):
        with pytest.raises(MkdDataError):
            data_prefixes(layout(**changes))


ROPE = {**LLAMA3_ROPE, "rope_theta": 5000.0}
TEACHER = {"rope_parameters": ROPE, "tie_word_embeddings": True, "rms_norm_eps": 3e-4, "num_hidden_layers": 3}


@pytest.fixture(scope="module")
def architecture(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The architecture of a teacher that differs from Megatron's defaults in every value."""
    folder = make_llama(tmp_path_factory.mktemp("teacher"), **TEACHER)
    return read_architecture(HFFolder(folder, "--kd-teacher-hf"))[1]


def student(odd: bool) -> Namespace:
    """A student's arguments. If `odd`, everything that is not the layout's or the machine's has a strange value."""
    args = flags.default_arguments()
    if odd:
        numbers = itertools.count(7)
        for name, value in vars(args).items():
            kinds = {bool: not value, int: next(numbers), float: next(numbers) + 0.5}
            if name not in names_with(ArgRole.SHARED):
                setattr(args, name, kinds.get(type(value), "odd"))
    on_cpu = {"transformer_impl": "local", "use_cpu_initialization": True, "apply_rope_fusion": False}
    vars(args).update(on_cpu, rank=0, world_size=1, seq_length=32, padded_vocab_size=256, params_dtype=torch.float32)
    vars(args).update(bias_swiglu_fusion=False, gradient_accumulation_fusion=False, no_persist_layer_norm=True)
    return args


def test_nothing_of_the_student_leaks_into_the_teacher(architecture):
    assert not set(architecture) & set(names_with(ArgRole.SHARED))
    plain = teacher_arguments(architecture, student(odd=False), None)
    odd = teacher_arguments(architecture, student(odd=True), None)
    assert vars(odd) == vars(plain)
    assert vars(student(odd=True)) != vars(student(odd=False))
    a, b = gpt_config(plain), gpt_config(odd)
    assert {**vars(a), "transformer": None} == {**vars(b), "transformer": None}
    different = {
        name
        for name, value in vars(a.transformer).items()
        if value != getattr(b.transformer, name) and not callable(value)
    }
    assert different == set()


def test_the_teacher_is_what_its_config_json_says(architecture):
    config = gpt_config(teacher_arguments(architecture, student(odd=True), "bf16"))
    t = config.transformer
    assert (t.num_layers, t.hidden_size, t.ffn_hidden_size) == (3, 48, 72)
    assert (t.num_attention_heads, t.num_query_groups, t.kv_channels) == (6, 2, 16)
    assert (t.normalization, t.layernorm_epsilon, t.add_bias_linear, t.gated_linear_unit) == (
        "RMSNorm",
        3e-4,
        False,
        True,
    )
    assert (config.rotary_base, config.rope_scaling, config.rope_scaling_factor) == (5000, True, 32.0)
    assert config.share_embeddings_and_output_weights
    assert config.position_embedding_type == "rope"
    assert (t.hidden_dropout, t.attention_dropout, t.bf16, t.params_dtype) == (0.0, 0.0, True, torch.bfloat16)
    assert t.virtual_pipeline_model_parallel_size is None and t.fp8 is None


@pytest.mark.parametrize(
    "dtype, expected",
    [
        *((None, torch.float32), ("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)),
        ("fp8", torch.bfloat16),
    ],
)
def test_dtype_of_the_teacher(architecture, dtype, expected):
    args = teacher_arguments(architecture, student(odd=False), dtype)
    assert args.params_dtype == expected
    assert args.fp8_param_gather == bool(args.fp8) == (dtype == "fp8")
    assert (args.bf16, args.fp16) == (expected == torch.bfloat16, expected == torch.float16)


def test_sequences_may_be_as_long_as_the_teacher_knows_positions(architecture):
    args = student(odd=False)
    args.seq_length = 96
    assert teacher_arguments(architecture, args, None).seq_length == 96
    args.seq_length = 97
    with pytest.raises(MkdConfigError, match="--seq-length 97 is longer than the teacher's 96 positions"):
        teacher_arguments(architecture, args, None)
    assert teacher_arguments(architecture, args, None, is_packed=True).seq_length == 97
    table = {**architecture, "position_embedding_type": "learned_absolute"}
    with pytest.raises(MkdConfigError, match="the teacher's 96 positions"):
        teacher_arguments(table, args, None, is_packed=True)


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


def test_no_code_that_a_checkpoint_names(architecture):
    with pytest.raises(MkdConfigError, match="imports none that a checkpoint names"):
        teacher_arguments({**architecture, "spec": ["os", "path"]}, student(odd=False), None)


def test_a_dense_teacher_ignores_the_students_expert_parallelism(architecture):
    args = student(odd=False)
    args.expert_model_parallel_size, args.expert_tensor_parallel_size, args.num_experts = 2, 1, 4
    teacher = teacher_arguments(architecture, args, None)
    assert (teacher.num_experts, teacher.expert_model_parallel_size) == (None, 1)


def test_a_checkpoint_of_another_layout_is_a_teacher_in_this_one(architecture):
    """Megatron stores into how many parts the job that wrote it cut each weight."""
    stored = {"tensor_parallel_num_weight_shards": 1, "expert_tensor_parallel_num_weight_shards": 1}
    args = student(odd=False)
    args.tensor_model_parallel_size = 2
    config = gpt_config(teacher_arguments({**architecture, **stored}, args, None))
    assert config.transformer.tensor_model_parallel_size == 2


def test_has_checkpoint(tmp_path: Path):
    assert not has_checkpoint(None)
    assert not has_checkpoint(str(tmp_path))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    assert has_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    "flag, value",
    [
        ("--overlap-moe-expert-parallel-comm", None),
        ("--use-megatron-fsdp", None),
        ("--use-torch-fsdp2", None),
    ],
)
def test_flags_under_which_a_layers_output_cannot_be_reached(monkeypatch, flag, value):
    args = parsed(monkeypatch, "--num-layers", 4, flag, *([value] if value else []))
    check_layer_pairs((), args, teacher_layers=4)
    with pytest.raises(MkdConfigError, match=f"--kd-hidden-loss does not work with {flag}"):
        check_layer_pairs((LayerPair(1, 1),), args, teacher_layers=4)


def test_pairs_of_layers_that_exist(monkeypatch):
    args = parsed(monkeypatch, "--num-layers", 4)
    check_layer_pairs((LayerPair(1, 8), LayerPair(4, 1)), args, teacher_layers=8)
    for pair, words in ((LayerPair(5, 1), "student has no layer 5"), (LayerPair(1, 9), "teacher has no layer 9")):
        with pytest.raises(MkdConfigError, match=words):
            check_layer_pairs((LayerPair(1, 1), pair), args, teacher_layers=8)


def test_a_value_that_no_flag_has_is_an_error_of_one_line() -> None:
    """Whatever the flag: no KeyError from a lookup."""
    parser = flag_parser()
    for flag, action in parser._option_string_actions.items():
        if action.nargs != 0:
            with suppress(MkdConfigError):  # anything else is raised
                parser.parse_known_args([flag, "zzz"])
    with pytest.raises(MkdConfigError, match=r"--attention-backend: invalid choice: 'zzz' \(choose from flash, "):
        parser.parse_known_args(["--attention-backend", "zzz"])
