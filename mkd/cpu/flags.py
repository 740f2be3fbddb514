"""Megatron flags with a single valid value on CPU, set so that the launch line of a GPU job runs unchanged."""

from argparse import Namespace
from typing import Any

from mkd.errors import MkdConfigError

# Megatron's argument names. Transformer Engine, fused kernels, CUDA graphs and communication overlap inside a layer
# need a GPU; the results do not depend on them.
VALUES: dict[str, Any] = {
    "transformer_impl": "local",
    "distributed_backend": "gloo",
    "use_cpu_initialization": True,
    "no_persist_layer_norm": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "cross_entropy_loss_fusion": False,
    "tp_comm_overlap": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "cuda_graph_impl": "none",
    "external_cuda_graph": False,  # an older flag of the same
    "nccl_ub": False,
    "use_sharp": False,
}


def set_cpu_values(args: Namespace) -> list[str]:
    """Set `VALUES` in Megatron's parsed arguments, in place.

    Returns:
        The names of those that had another value before.

    Raises:
        MkdConfigError: a flag needs arithmetic that is not available on CPU.
    """
    for name in ("fp8", "fp4"):
        if getattr(args, name, None):
            raise MkdConfigError(
                f"--{name}-format is {getattr(args, name)}, which needs a GPU: leave it out on CPU "
                "(mkd doctor checks a job for GPUs)"
            )
    changed = [name for name, value in VALUES.items() if getattr(args, name) != value]
    for name, value in VALUES.items():
        setattr(args, name, value)

    return changed
