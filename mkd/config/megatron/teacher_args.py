"""The teacher's Megatron arguments: its architecture and its parallel layout."""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch
from megatron.training.vocab_utils import calculate_padded_vocab_size

from mkd.config.flags import default_arguments
from mkd.config.megatron.arg_names import ArgRole, frozen_values, names_with
from mkd.config.megatron.checks.teachers import check_teacher_divides
from mkd.config.megatron.fp8_teacher import compute_in_fp8
from mkd.config.megatron.layouts import has_own_layout, teacher_layout_args
from mkd.errors import MkdConfigError

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
