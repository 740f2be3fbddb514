"""The teacher's layout, passes and CUDA graphs, against the job and its model."""

import math
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from mkd.config.kd_config import KDConfig
from mkd.config.megatron.checks.attention import check_attention_heads, check_attention_kernels, check_context_parallel
from mkd.config.megatron.checks.cuda_graphs import reason_against_capture
from mkd.config.megatron.checks.parallel_sizes import check_divisions, check_ranks
from mkd.config.megatron.checks.rows import check_packing, check_sequence
from mkd.config.megatron.layouts import has_own_layout, teacher_layout_args
from mkd.errors import MkdConfigError

TEACHER_PREFIX = "--kd-teacher-"
"""Prefix of the flags of the teacher's own parallel sizes; the student's have `--`."""


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


def check_joined_passes(teacher: Namespace, args: Namespace, kd: KDConfig) -> None:
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


def check_captured_passes(teacher: Namespace, kd: KDConfig) -> None:
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
