"""The teacher's parallel sizes: what the flags say, and whether they fit the ranks, the teacher and the rows."""

import math
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import copy
from typing import Any

from mkd.config.kd_config import KDConfig
from mkd.config.megatron_checks import (
    check_attention_heads,
    check_attention_kernels,
    check_context_parallel,
    check_divisions,
    check_packing,
    check_ranks,
    check_sequence,
    length_multiple,
)
from mkd.errors import MkdConfigError

SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
)
"""Megatron arguments that describe a layout."""


def teacher_layout_args(args: Namespace, given: Mapping[str, int], experts: int | None) -> Namespace:
    """The job's arguments as if its layout were the teacher's.

    Sequence parallelism comes with a tensor-parallel size of the teacher's own; otherwise it is as the student's.

    Args:
        args: Megatron's, of the job.
        given: `KDConfig.teacher_sizes`.
        experts: the teacher's number of them; None for a dense one.
    """
    own = copy(args)
    own.num_experts = experts
    vars(own).update(given)
    tp = own.tensor_model_parallel_size
    if tp != args.tensor_model_parallel_size:
        own.sequence_parallel = tp > 1
        own.expert_tensor_parallel_size = given.get("expert_tensor_parallel_size", tp)
    if experts is None:
        # Expert-parallel ranks are data-parallel ones to a dense teacher.
        own.expert_model_parallel_size, own.expert_tensor_parallel_size = 1, None
    return own


def has_own_layout(teacher: Namespace, args: Namespace) -> bool:
    """Whether the teacher runs in another layout than the student.

    Args:
        teacher: Megatron arguments, of the teacher.
        args: of the job.
    """

    def groups(of: Namespace) -> tuple[int, ...]:
        sizes = (of.tensor_model_parallel_size, of.pipeline_model_parallel_size, of.context_parallel_size)
        if teacher.num_experts is None:
            return sizes
        return (*sizes, of.expert_model_parallel_size, of.expert_tensor_parallel_size or sizes[0])

    return groups(teacher) != groups(args)


def row_multiple(args: Namespace, kd: KDConfig) -> int:
    """What the length of a row must be a multiple of, in tokens, for student and teacher to cut it."""
    return math.lcm(length_multiple(args), length_multiple(teacher_layout_args(args, kd.teacher_sizes, None)))


def check_teacher_layout(args: Namespace, kd: KDConfig, experts: int | None) -> None:
    """Refuse parallel sizes of the teacher's own that do not fit the ranks, the rows or the kernels of the job.

    Args:
        args: Megatron's, of the job.
        kd: has the sizes.
        experts: the teacher's number of them; None for a dense one.

    Raises:
        MkdConfigError: naming the flag, its value and what it does not fit.
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
    with _naming_its_flags():
        check_ranks(own)
        check_sequence(own)
        check_context_parallel(own)
        check_packing(own, kd)
        check_attention_kernels(own, kd)
        levels = own.hierarchical_context_parallel_sizes or []
        if kind == "a2a+p2p" and cp > 1 and math.prod(levels) != cp:
            raise MkdConfigError(
                f"--context-parallel-size {cp} is not the product of --hierarchical-context-parallel-sizes "
                f"{' '.join(map(str, levels))}, which --cp-comm-type a2a+p2p needs"
            )
    if experts is not None and args.num_experts is not None and args.moe_token_dispatcher_type == "flex":
        raise MkdConfigError(
            "--moe-token-dispatcher-type flex has one buffer for all experts of a process: a teacher with experts in a "
            "layout of its own (--kd-teacher-...-parallel-size) beside a student with experts needs alltoall"
        )


def check_teacher_divides(sizes: dict[str, Any], own: Namespace, args: Namespace) -> None:
    """Refuse parallel sizes that do not divide the teacher's heads, widths, layers or experts.

    Args:
        sizes: its architecture, by Megatron argument name.
        own: see `teacher_layout_args`.
        args: Megatron's, of the job.
    """
    with _naming_its_flags() if has_own_layout(own, args) else nullcontext():
        check_divisions("the teacher", sizes, own.tensor_model_parallel_size, own.pipeline_model_parallel_size)
        check_attention_heads("the teacher", sizes, own)
        ep, experts = own.expert_model_parallel_size, sizes.get("num_experts")
        if experts and experts % ep:
            raise MkdConfigError(
                f"--expert-model-parallel-size {ep} does not divide the {experts} experts of the teacher"
            )


_FLAG = re.compile(r"--((?:tensor-model|pipeline-model|context|expert-model|expert-tensor)-parallel-size)")


@contextmanager
def _naming_its_flags() -> Iterator[None]:
    """What is said of Megatron's flags inside is about the teacher's."""
    try:
        yield
    except MkdConfigError as error:
        raise MkdConfigError(_FLAG.sub(r"--kd-teacher-\1", str(error))) from error
