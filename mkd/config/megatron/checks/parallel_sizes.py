"""Parallel sizes, against the ranks of the job and the sizes of a model."""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from mkd.config.megatron.arg_names import ArgRole, names_with
from mkd.config.megatron.checks.attention import check_attention_heads
from mkd.errors import MkdConfigError


def check_sizes(args: Namespace) -> None:
    """Refuse parallel sizes below 1."""
    for name in ("tensor_model", "pipeline_model", "context", "expert_model"):
        size = getattr(args, f"{name}_parallel_size")
        if size < 1:
            raise MkdConfigError(f"--{name.replace('_', '-')}-parallel-size is {size}; it must be at least 1")


def check_ranks(args: Namespace, prefix: str = "--") -> None:
    """Refuse parallel sizes that do not divide the ranks of the job.

    Args:
        args: Megatron's, in the layout that is checked.
        prefix: beginning of the flags of its parallel sizes: `--`, or `--kd-teacher-` for the teacher's own layout.
    """
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    ep = args.expert_model_parallel_size
    if args.world_size % (tp * pp * cp):
        raise MkdConfigError(
            f"{prefix}tensor-model-parallel-size {tp} * {prefix}pipeline-model-parallel-size {pp} * "
            f"{prefix}context-parallel-size {cp} = {tp * pp * cp} does not divide the {args.world_size} ranks of this "
            "job"
        )
    expert_tp = args.expert_tensor_parallel_size or tp
    has_expert_groups = args.num_experts is not None or args.expert_tensor_parallel_size  # megatron makes both
    if has_expert_groups and args.world_size % (expert_tp * ep * pp):
        raise MkdConfigError(
            f"{prefix}expert-model-parallel-size {ep} * expert tensor size {expert_tp} "
            "(--expert-tensor-parallel-size) * "
            f"{prefix}pipeline-model-parallel-size {pp} does not divide the {args.world_size} ranks of this job"
        )


def check_student(args: Namespace) -> None:
    """Refuse parallel sizes that do not divide the student."""
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    check_divisions("the student", vars(args), tp, pp)
    check_first_and_last_stage(args)
    check_attention_heads("the student", vars(args), args)


def check_divisions(model: str, sizes: Mapping[str, Any], tp: int, pp: int, prefix: str = "--") -> None:
    """Refuse tensor- and pipeline-parallel sizes that do not divide a model's heads, widths or layers.

    Args:
        model: name of the model in the message, such as "the student".
        sizes: its architecture, by Megatron argument name.
        tp: tensor-parallel size.
        pp: pipeline-parallel size.
        prefix: see `check_ranks`.
    """
    groups = sizes["num_query_groups"] if sizes.get("group_query_attention") else None
    divided = {
        "attention heads": sizes["num_attention_heads"],
        "key-value heads (query groups)": groups,
        "hidden width": sizes["hidden_size"],
        "feed-forward width": sizes.get("ffn_hidden_size"),
    }
    for what, size in divided.items():
        if size and size % tp:
            raise MkdConfigError(
                f"{prefix}tensor-model-parallel-size {tp} does not divide the {size} {what} of {model}"
            )
    layers = sizes["num_layers"]
    if layers and layers % pp and has_even_stages(sizes):
        raise MkdConfigError(
            f"{prefix}pipeline-model-parallel-size {pp} does not divide the {layers} layers of {model}"
        )


def has_even_stages(sizes: Mapping[str, Any]) -> bool:
    """True if no flag divides the layers unevenly among pipeline stages; `sizes` by Megatron argument name."""
    return all(sizes.get(name) in (None, False) for name in names_with(ArgRole.STAGES))


def check_first_and_last_stage(args: Namespace) -> None:
    """Refuse numbers of layers of the student's first and last pipeline stage that leave the others an uneven number,
    or none."""
    given = {
        flag: layers
        for flag, layers in (
            ("--decoder-first-pipeline-num-layers", args.decoder_first_pipeline_num_layers),
            ("--decoder-last-pipeline-num-layers", args.decoder_last_pipeline_num_layers),
        )
        if layers is not None
    }
    if not given or not args.num_layers:
        return
    size, total = args.pipeline_model_parallel_size, args.num_layers
    stages, layers = size - len(given), total - sum(given.values())
    fits = layers >= stages and layers % stages == 0 if stages > 0 else stages == layers == 0
    if min(given.values()) < 1 or not fits:
        flags = " and ".join(f"{flag} {value}" for flag, value in given.items())
        raise MkdConfigError(
            f"{flags}: {layers} of the student's {total} layers are left for the {max(stages, 0)} other stages of "
            f"--pipeline-model-parallel-size {size}; every stage needs at least one layer, and the others equally many"
        )
