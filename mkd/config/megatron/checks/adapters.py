"""Adapters (--kd-lora): Megatron's flags and the layouts that they do not work with."""

from argparse import Namespace
from collections.abc import Sequence

from mkd import cpu
from mkd.config.lora import LoraOptions
from mkd.errors import MkdConfigError

_WITHOUT = {
    "fp8": ("--fp8-format", "the frozen weights are kept in the student's dtype"),
    "fp4": ("--fp4-format", "the frozen weights are kept in the student's dtype"),
    "tp_comm_overlap": ("--tp-comm-overlap", "its linear layers do not return the inputs that adapters read"),
    "use_transformer_engine_op_fuser": ("--use-transformer-engine-op-fuser", "it has no separate linear layers"),
    "moe_shared_expert_overlap": ("--moe-shared-expert-overlap", "it calls the shared experts' layers in parts"),
    "overlap_moe_expert_parallel_comm": ("--overlap-moe-expert-parallel-comm", "it calls the layers in parts"),
    "delay_wgrad_compute": ("--delay-wgrad-compute", "frozen weights have no gradients"),
    "use_megatron_fsdp": ("--use-megatron-fsdp", "it shards the frozen weights too"),
    "use_torch_fsdp2": ("--use-torch-fsdp2", "it shards the frozen weights too"),
    "pretrained_checkpoint": ("--pretrained-checkpoint", "the frozen weights are read from --kd-student-hf"),
    "finetune": ("--finetune", "the adapters of a checkpoint are continued; to start over, give another --load"),
}
"""Megatron argument -> its flag, and the reason that it does not work with adapters."""


def check_lora_arguments(args: Namespace, options: LoraOptions) -> None:
    """Refuse Megatron's flags that adapters do not work with.

    Raises:
        MkdConfigError: names the flag and the reason.
    """
    given = f"--kd-lora {options.rank}"
    for name, (flag, reason) in _WITHOUT.items():
        value = getattr(args, name, None)
        if value not in (None, False):
            shown = flag if value is True else f"{flag} {value}"
            raise MkdConfigError(f"{shown} does not work with {given}: {reason}; leave one of them out")
    if args.ckpt_format != "torch_dist":
        raise MkdConfigError(f"--ckpt-format is {args.ckpt_format}; with {given} it must be torch_dist")


def check_query_groups(args: Namespace, options: LoraOptions) -> None:
    """Refuse adapters of queries, keys and values if a tensor-parallel rank holds a part of a query group.

    Raises:
        MkdConfigError: names the sizes.
    """
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    if groups % args.tensor_model_parallel_size:
        raise MkdConfigError(
            f"--kd-lora {options.rank} has adapters of queries, keys and values, and --tensor-model-parallel-size "
            f"{args.tensor_model_parallel_size} does not divide the student's {groups} key-value heads: give a divisor "
            "of it, or leave q_proj, k_proj and v_proj out of --kd-lora-modules"
        )


def check_latent_adapters(args: Namespace, options: LoraOptions, modules: Sequence[str]) -> None:
    """Refuse adapters of the projection to the latent of keys and values where their gradients would be partial.

    Transformer Engine's layer is whole on every tensor-parallel rank, whose heads share its channels with rope.
    Without --sequence-parallel, nothing sums the gradients of these channels over the ranks.

    Args:
        args: Megatron's arguments.
        options: of the adapters.
        modules: names of the layers with adapters.

    Raises:
        MkdConfigError: names the layer and the flag.
    """
    name, tp = "kv_a_proj_with_mqa", args.tensor_model_parallel_size
    if name in modules and tp > 1 and not args.sequence_parallel and not cpu.is_target():
        raise MkdConfigError(
            f"--kd-lora {options.rank} has adapters of {name}, whose gradients are not summed over "
            f"--tensor-model-parallel-size {tp} without --sequence-parallel: add it, or leave {name} out of "
            "--kd-lora-modules"
        )
