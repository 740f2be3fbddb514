"""The teacher's Megatron arguments: its architecture and its parallel layout."""

import math
from argparse import Namespace
from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from megatron.training.vocab_utils import calculate_padded_vocab_size

from mkd.config.flags import default_arguments
from mkd.config.kd_config import KDConfig
from mkd.config.megatron.arg_names import ArgRole, frozen_values, names_with
from mkd.config.megatron.checks.attention import check_attention_heads, check_attention_kernels, check_context_parallel
from mkd.config.megatron.checks.cuda_graphs import reason_against_capture
from mkd.config.megatron.checks.layout import check_divisions, check_ranks
from mkd.config.megatron.checks.rows import check_packing, check_sequence, length_multiple
from mkd.config.megatron.fp8_teacher import compute_in_fp8
from mkd.errors import MkdConfigError

TEACHER_PREFIX = "--kd-teacher-"
"""Prefix of the flags of the teacher's own parallel sizes; the student's have `--`."""


def teacher_layout_args(args: Namespace, given: Mapping[str, int], experts: int | None) -> Namespace:
    """A copy of the job's arguments with the teacher's layout in place of the student's.

    A tensor-parallel size of the teacher's own implies sequence parallelism; otherwise that is as the student's.

    Args:
        args: Megatron's arguments of the job.
        given: `KDConfig.teacher_sizes`.
        experts: number of the teacher's experts; None for a dense teacher.
    """
    own = copy(args)
    own.num_experts = experts
    vars(own).update(given)
    tp = own.tensor_model_parallel_size
    if tp != args.tensor_model_parallel_size:
        own.sequence_parallel = tp > 1
        own.expert_tensor_parallel_size = given.get("expert_tensor_parallel_size", tp)
    if experts is None:
        # To a dense teacher, expert-parallel ranks are data-parallel ones.
        own.expert_model_parallel_size, own.expert_tensor_parallel_size = 1, None
    return own


def has_own_layout(teacher: Namespace, args: Namespace) -> bool:
    """True if the teacher runs in another layout than the student.

    Args:
        teacher: Megatron's arguments of the teacher.
        args: Megatron's arguments of the job.
    """

    def groups(model: Namespace) -> tuple[int, ...]:
        sizes = (model.tensor_model_parallel_size, model.pipeline_model_parallel_size, model.context_parallel_size)
        if teacher.num_experts is None:
            return sizes
        return (*sizes, model.expert_model_parallel_size, model.expert_tensor_parallel_size or sizes[0])

    return groups(teacher) != groups(args)


def row_multiple(args: Namespace, kd: KDConfig) -> int:
    """Divisor of every row length, in tokens, under the layouts of student and teacher."""
    return math.lcm(length_multiple(args), length_multiple(teacher_layout_args(args, kd.teacher_sizes, None)))


def check_teacher_layout(args: Namespace, kd: KDConfig, experts: int | None) -> None:
    """Refuse parallel sizes of the teacher's own that do not fit the ranks, the rows or the kernels of the job.

    Args:
        args: Megatron's arguments of the job.
        kd: holds the sizes.
        experts: number of the teacher's experts; None for a dense teacher.

    Raises:
        MkdConfigError: names the flag, its value and what it does not fit.
    """
    own = teacher_layout_args(args, kd.teacher_sizes, experts)
    if kd.variable_seq_lengths and own.expert_model_parallel_size > 1 and args.moe_token_dispatcher_type == "allgather":
        raise MkdConfigError(
            "--kd-variable-seq-lengths does not work with --moe-token-dispatcher-type allgather, which the teacher's "
            "experts would use: give alltoall"
        )
    if not has_own_layout(own, args):
        return
    cp, kind = own.context_parallel_size, own.cp_comm_type[0]
    check_ranks(own, TEACHER_PREFIX)
    check_sequence(own, TEACHER_PREFIX)
    check_context_parallel(own)
    check_packing(own, kd, TEACHER_PREFIX)
    check_attention_kernels(own, kd, TEACHER_PREFIX)
    levels = own.hierarchical_context_parallel_sizes or []
    if kind == "a2a+p2p" and cp > 1 and math.prod(levels) != cp:
        raise MkdConfigError(
            f"{TEACHER_PREFIX}context-parallel-size {cp} is not the product of --hierarchical-context-parallel-sizes "
            f"{' '.join(map(str, levels))}, which --cp-comm-type a2a+p2p needs"
        )
    if experts is not None and args.num_experts is not None and args.moe_token_dispatcher_type == "flex":
        raise MkdConfigError(
            "--moe-token-dispatcher-type flex has one buffer for all experts of a process: a teacher with experts in a "
            "layout of its own (--kd-teacher-...-parallel-size) beside a student with experts needs alltoall"
        )


def check_teacher_passes(teacher: Namespace, args: Namespace, kd: KDConfig) -> None:
    """Refuse --kd-teacher-micro-batch-size where passes cannot be joined.

    Args:
        teacher: Megatron's arguments of the teacher, in its layout.
        args: Megatron's arguments of the job.
        kd: the flags.

    Raises:
        MkdConfigError: names the reason and what to change.
    """
    rows = kd.teacher_micro_batch_size
    if rows is None:
        return
    tp = teacher.tensor_model_parallel_size
    shares_experts = teacher.num_experts is not None and (
        teacher.expert_model_parallel_size > 1 or (teacher.expert_tensor_parallel_size or tp) > tp
    )
    for is_so, reason in (
        (
            rows % args.micro_batch_size != 0,
            f"it is not a multiple of --micro-batch-size {args.micro_batch_size}: give one",
        ),
        (
            shares_experts and kd.variable_seq_lengths,
            "with --kd-variable-seq-lengths the ranks that share the teacher's experts would run unequally many "
            "passes: leave one of them out",
        ),
    ):
        if is_so:
            raise MkdConfigError(f"--kd-teacher-micro-batch-size is {rows}, but {reason}")


def check_teacher_graph(teacher: Namespace, kd: KDConfig) -> None:
    """Refuse --kd-teacher-cuda-graph for a teacher whose forward pass the host takes part in.

    Args:
        teacher: Megatron's arguments of the teacher, in its layout.
        kd: the flags.

    Raises:
        MkdConfigError: names the reason and what to change.
    """
    if not kd.teacher_cuda_graph:
        return
    pp, cp = teacher.pipeline_model_parallel_size, teacher.context_parallel_size
    reason = reason_against_capture(teacher)
    if pp > 1:
        reason = f"it has {pp} pipeline stages, which send messages in the order of the host"
    elif cp > 1:
        reason = f"graphs of a teacher with {cp} context-parallel ranks are untested"
    if reason is not None:
        raise MkdConfigError(f"--kd-teacher-cuda-graph does not work with this teacher: {reason}; leave it out")


def check_teacher_divides(sizes: Mapping[str, Any], own: Namespace, args: Namespace) -> None:
    """Refuse parallel sizes that do not divide the teacher's heads, widths, layers or experts.

    Args:
        sizes: the teacher's architecture, by Megatron argument name.
        own: see `teacher_layout_args`.
        args: Megatron's arguments of the job.
    """
    prefix = TEACHER_PREFIX if has_own_layout(own, args) else "--"
    check_divisions("the teacher", sizes, own.tensor_model_parallel_size, own.pipeline_model_parallel_size, prefix)
    check_attention_heads("the teacher", sizes, own, prefix)
    ep, experts = own.expert_model_parallel_size, sizes.get("num_experts")
    if experts and experts % ep:
        raise MkdConfigError(
            f"{prefix}expert-model-parallel-size {ep} does not divide the {experts} experts of the teacher"
        )


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def teacher_arguments(
    architecture: dict[str, Any],
    args: Namespace,
    dtype: str | None,
    own_tokens: tuple[int, int] | None = None,
    sizes: Mapping[str, int] | None = None,
    is_packed: bool = False,
) -> Namespace:
    """Megatron arguments of the teacher: its own architecture and layout, and from the student how it is computed.

    Args:
        architecture: Megatron argument name -> value, from the teacher's config.json or checkpoint.
        args: the student's arguments, after `mkd.config.megatron.arguments.finish`.
        dtype: fp32, bf16, fp16 or fp8; None takes the student's.
        own_tokens: vocabulary size and tokens per row of a teacher with another tokenizer.
        sizes: parallel sizes that differ from the student's, see `KDConfig.teacher_sizes`.
        is_packed: rows hold several samples and may be longer than the teacher's positions.

    Raises:
        MkdConfigError: parallel sizes that do not divide the teacher, rows longer than its positions, or layers of code
            that its checkpoint names.
    """
    if (spec := architecture.get("spec")) is not None:
        # Megatron would import the module.
        raise MkdConfigError(
            f"the teacher's checkpoint was trained with --spec {spec}, which names code: mkd imports none that a "
            "checkpoint names; give a checkpoint of Megatron's own layers, or a Hugging Face folder"
        )
    teacher = Namespace(**{**vars(default_arguments()), **architecture, **frozen_values()})
    for name in names_with(ArgRole.SHARED):
        setattr(teacher, name, getattr(args, name))
    own = teacher_layout_args(args, sizes or {}, teacher.num_experts)
    for name in names_with(ArgRole.LAYOUT):
        setattr(teacher, name, getattr(own, name))
    row_flag, vocabulary = "--seq-length", args.padded_vocab_size
    if own_tokens is not None:
        row_flag = "--kd-teacher-seq-length"
        vocabulary, teacher.seq_length = own_tokens
    if own_tokens is not None or has_own_layout(own, args):
        teacher.padded_vocab_size = calculate_padded_vocab_size(
            vocabulary, args.make_vocab_size_divisible_by, teacher.tensor_model_parallel_size, logging_enabled=False
        )
    teacher.params_dtype = _DTYPES[dtype] if dtype else args.params_dtype
    teacher.bf16 = teacher.params_dtype == torch.bfloat16
    teacher.fp16 = teacher.params_dtype == torch.float16
    if dtype == "fp8":
        compute_in_fp8(teacher)
    check_teacher_divides(vars(teacher), own, args)
    positions = teacher.max_position_embeddings
    may_be_longer = is_packed and teacher.position_embedding_type != "learned_absolute"  # see check_positions
    if positions is not None and teacher.seq_length > positions and not may_be_longer:
        raise MkdConfigError(
            f"{row_flag} {teacher.seq_length} is longer than the teacher's {positions} positions "
            "(max_position_embeddings in its config.json)"
        )
    return teacher
