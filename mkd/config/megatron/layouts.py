"""Layouts of student and teacher: sizes that a teacher has of its own, and row lengths that a layout can split."""

import math
from argparse import Namespace
from collections.abc import Mapping
from copy import copy

from mkd.config.kd_config import KDConfig


def length_multiple(args: Namespace) -> int:
    """Divisor of every row length, in tokens, under one layout: each context-parallel rank holds two equal parts of a
    row, which sequence parallelism splits over the tensor-parallel ranks."""
    cp = args.context_parallel_size
    slices = args.tensor_model_parallel_size if args.sequence_parallel else 1
    return cp * math.lcm(2, slices) if cp > 1 else slices


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
