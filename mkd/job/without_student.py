"""Megatron's arguments of a job that runs a teacher and has no student."""

from argparse import Namespace
from collections.abc import Collection, Mapping
from typing import Any

from mkd import cpu
from mkd.checkpoint.source import ModelSource
from mkd.config.kd_fields import KDFields, flag_of
from mkd.config.megatron.arg_names import ArgRole, names_with, values_without_student
from mkd.config.megatron.checks.attention import check_attention_heads
from mkd.config.megatron.checks.parallel_sizes import check_divisions
from mkd.errors import MkdConfigError
from mkd.models.delta_rule import missing_kernel
from mkd.models.gated_delta_net import VARIANT
from mkd.utils.logging import logger
from mkd.utils.model_folders.tokenizer_flag import adopt_tokenizer


def describe_teacher(args: Namespace, source: ModelSource, student: ModelSource | None) -> None:
    """Change Megatron's arguments, in place, to those of a job whose model is the teacher.

    Raises:
        MkdConfigError: the layout does not divide the teacher.
    """
    for name, value in values_without_student().items():
        setattr(args, name, value)
    shape = source.architecture
    reason = missing_kernel(is_trained=False, is_deterministic=args.deterministic_mode)
    if shape.get("experimental_attention_variant") == VARIANT and reason is not None and not cpu.is_target():
        logger.info(f"gated delta nets in PyTorch's operations, slower than kernels: {reason}")
    for name in names_with(ArgRole.CHECKED_BY_LAYOUT):
        setattr(args, name, shape.get(name))
    if args.num_experts is None:
        args.moe_layer_freq, args.moe_router_topk = 1, 2  # Megatron's defaults
        args.expert_model_parallel_size, args.expert_tensor_parallel_size = 1, None
    args.max_position_embeddings = max(shape.get("max_position_embeddings") or 0, args.seq_length or 0)
    if min(args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size) > 0:
        check_divisions("the teacher", shape, args.tensor_model_parallel_size, args.pipeline_model_parallel_size)
        check_attention_heads("the teacher", shape, args)
    own = args.tokenizer_model is None
    model = student or source
    if own and model.tokenizer_folder is not None:
        args.tokenizer_type = args.tokenizer_type or "HuggingFaceTokenizer"
        adopt_tokenizer(args, str(model.tokenizer_folder), model.origin)
    if student is not None or own:
        args.vocab_size = model.vocab_size


def refuse_flags_of_teachers(given: Mapping[str, Any], used: Collection[str], instead: Mapping[str, str]) -> None:
    """Refuse flags of a teacher that have no effect without a student.

    Args:
        given: the values of all fields of `KDConfig`, given or not.
        used: the fields that have an effect.
        instead: field -> what to do about it; other fields are to be left out. The parallel sizes of a teacher beside a
            student (--kd-teacher-...-parallel-size) need no entry.

    Raises:
        MkdConfigError: names the flag, its value and what to do.
    """
    for name, value in given.items():
        if not name.startswith("teacher") or name in used or value == getattr(KDFields, name):
            continue
        text = "" if value is True else f" {' '.join(map(str, value)) if isinstance(value, list) else value}"
        what = instead.get(name, "it has no effect: leave it out")
        if name.endswith("_parallel_size"):
            flag = name.removeprefix("teacher_").replace("_", "-")
            what = f"give --{flag}{text}, which is the teacher's"
        raise MkdConfigError(f"{flag_of(name)}{text} is for a job with a student, and there is no student here: {what}")
