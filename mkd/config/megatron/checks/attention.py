"""Attention and its substitutes in a layout: kernels, communication, and heads that ranks share out."""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from mkd import cpu
from mkd.config.kd_config import KDConfig
from mkd.errors import MkdConfigError

_CP_COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")


def check_context_parallel(args: Namespace) -> None:
    """Refuse context-parallel communication types that do not exist or that the attention kernels lack."""
    if args.hybrid_context_parallel:
        raise MkdConfigError("--hybrid-context-parallel is not supported: give --context-parallel-size alone")
    if args.context_parallel_size == 1:
        return
    kinds = args.cp_comm_type
    for kind in kinds:
        if kind not in _CP_COMM_TYPES:
            raise MkdConfigError(f"--cp-comm-type is {kind!r}; legal values are {', '.join(_CP_COMM_TYPES)}")
    if len(kinds) > 1:
        raise MkdConfigError(
            f"--cp-comm-type {' '.join(kinds)} is a list over layers: give one, which student and teacher share"
        )


def check_attention_kernels(args: Namespace, kd: KDConfig, prefix: str = "--") -> None:
    """Refuse packed rows and context parallelism on GPUs without Transformer Engine and half precision, which alone
    have the kernels; `prefix` as in `parallel_sizes.check_ranks`."""
    if args.context_parallel_size > 1:
        what = f"{prefix}context-parallel-size {args.context_parallel_size}"
    elif kd.packing != "none":
        what = f"--kd-packing {kd.packing}"
    else:
        return
    if cpu.is_target():
        return
    if args.transformer_impl != "transformer_engine":
        raise MkdConfigError(f"{what} needs --transformer-impl transformer_engine on GPUs, not {args.transformer_impl}")
    if not (args.bf16 or args.fp16):
        raise MkdConfigError(f"{what} needs --bf16 or --fp16: Transformer Engine has no such attention in fp32")
    if kd.teacher_dtype == "fp32":
        raise MkdConfigError(
            f"{what} does not work with --kd-teacher-dtype fp32: Transformer Engine has no such attention in fp32"
        )
    kind = args.cp_comm_type[0]
    if args.context_parallel_size > 1 and kd.packing != "none" and kind not in ("p2p", "a2a"):
        raise MkdConfigError(
            f"--cp-comm-type {kind} does not work with --kd-packing {kd.packing}: Transformer Engine exchanges packed "
            "rows by p2p or a2a"
        )


def check_attention_heads(model: str, sizes: Mapping[str, Any], args: Namespace, prefix: str = "--") -> None:
    """Refuse all-to-all context parallelism over ranks that do not divide a model's heads: it distributes heads. Refuse
    what a gated delta net or a Mamba layer cannot compute.

    Args:
        model: name of the model in the message, such as "the student".
        sizes: its architecture, by Megatron argument name.
        args: Megatron's, in the layout of the model.
        prefix: see `parallel_sizes.check_ranks`.
    """
    if sizes.get("experimental_attention_variant") == "gated_delta_net":
        _check_delta_net(model, sizes, args, prefix)
    if "M" in (sizes.get("layer_mixers") or ()):
        _check_mamba(model, sizes, args, prefix)
    ranks = {"a2a": args.context_parallel_size, "a2a+p2p": (args.hierarchical_context_parallel_sizes or [1])[0]}
    kind = args.cp_comm_type[0]
    if args.context_parallel_size == 1 or kind not in ranks:
        return
    tp = args.tensor_model_parallel_size
    groups = sizes["num_query_groups"] if sizes.get("group_query_attention") else sizes["num_attention_heads"]
    for what, count in (("attention heads", sizes["num_attention_heads"]), ("key-value heads", groups)):
        if count and count % (tp * ranks[kind]):
            raise MkdConfigError(
                f"--cp-comm-type {kind} distributes heads: {model} has {count} {what}, which "
                f"{prefix}tensor-model-parallel-size {tp} * {ranks[kind]} context-parallel ranks do not divide; give "
                "p2p or all_gather, which split the sequence"
            )


def _check_delta_net(model: str, sizes: Mapping[str, Any], args: Namespace, prefix: str) -> None:
    """Arguments as in `check_attention_heads`."""
    tp, cp, heads = args.tensor_model_parallel_size, args.context_parallel_size, sizes["linear_num_key_heads"]
    if heads % (tp * cp):
        raise MkdConfigError(
            f"{prefix}tensor-model-parallel-size {tp} * {prefix}context-parallel-size {cp} does not divide the {heads} "
            f"key heads (linear_num_key_heads) of the gated delta net of {model}, which both distribute"
        )
    packing = getattr(args, "kd_packing", "none")
    if args.deterministic_mode and packing != "none":
        raise MkdConfigError(
            f"--deterministic-mode does not work with --kd-packing {packing}: {model} has a gated delta net, of which "
            "megatron has no deterministic kernels for packed rows; leave one of the two out"
        )


def _check_mamba(model: str, sizes: Mapping[str, Any], args: Namespace, prefix: str) -> None:
    """Arguments as in `check_attention_heads`."""
    tp, cp, groups = args.tensor_model_parallel_size, args.context_parallel_size, sizes["mamba_num_groups"]
    if groups % (tp * cp):
        raise MkdConfigError(
            f"{prefix}tensor-model-parallel-size {tp} * {prefix}context-parallel-size {cp} does not divide the "
            f"{groups} groups (mamba_num_groups) of the Mamba layers of {model}, which both distribute"
        )
