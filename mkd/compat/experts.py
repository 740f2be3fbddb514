"""Patches of mixtures of experts."""

from collections.abc import Callable
from functools import wraps
from typing import Any


def balance_experts_over_unequal_ranks() -> None:
    """Make the load-balancing loss independent of the number of tensor- and context-parallel ranks that share a
    sequence, and of the distribution of its padding over them. Calling it again does nothing.

    megatron-core 0.19 multiplies the loss by the number of ranks and by the rank's own number of tokens. With a padding
    mask that number is the sum over all ranks, because the counts it is taken from were reduced in place. With
    expert-bias balancing, moreover, it applies the mask [tokens] to the routing map [tokens, experts] as a mask of
    experts.
    """
    from megatron.core.transformer.moe import router

    count = router.get_tokens_per_expert_and_token_count
    if count.__module__ == __name__:
        return

    def count_per_rank(
        routing_map: Any, reduce_group: Any, topk: int | None = None, with_padding_mask: bool = False
    ) -> tuple:
        everywhere, here, total = count(routing_map, reduce_group, topk, with_padding_mask)
        return everywhere, total / reduce_group.size() if with_padding_mask else here, total

    apply_bias = router.TopKRouter._apply_expert_bias

    def apply_bias_with_mask(self: Any, routing_map: Any, padding_mask: Any = None) -> None:
        apply_bias(self, routing_map, None if padding_mask is None else padding_mask.unsqueeze(-1))

    router.get_tokens_per_expert_and_token_count = count_per_rank
    router.TopKRouter._apply_expert_bias = apply_bias_with_mask


def train_biased_experts_on_whole_ranks() -> None:
    """Make experts with biases trainable under sequence parallelism: tensor parallelism does not shard them
    (--expert-tensor-parallel-size 1). Calling it again does nothing.

    megatron-core 0.19 passes an expert's output through a reduce-scatter over one rank, which returns its input as a
    view of a custom autograd function, and then adds the bias in place: autograd refuses that. With expert parallelism
    there is no reduce-scatter, but the output of Transformer Engine's layers is such a view in every layout. The
    data-parallel ranks of experts sum the gradient over all tokens, but the bias is marked as one whose gradient the
    tensor-parallel ranks sum once more.
    """
    from megatron.core.tensor_parallel import layers

    reduce_scatter, init = layers.reduce_scatter_to_sequence_parallel_region, layers.RowParallelLinear.__init__
    if reduce_scatter.__module__ == __name__:
        return

    def reduce_scatter_over_several(input_: Any, group: Any = None, *args: Any, **kwargs: Any) -> Any:
        if group is not None and group.size() == 1:
            return input_
        return reduce_scatter(input_, group, *args, **kwargs)

    layers.reduce_scatter_to_sequence_parallel_region = reduce_scatter_over_several
    layers.RowParallelLinear.__init__ = with_whole_bias(init)
    from megatron.core.extensions import transformer_engine

    if transformer_engine.HAVE_TE:
        linear = transformer_engine.TERowParallelLinear
        linear.__init__, linear.forward = with_whole_bias(linear.__init__), with_own_output(linear.forward)


def add_router_biases_in_fp32() -> None:
    """Add the router's bias (gpt-oss) to its logits in their dtype. Calling it again does nothing.

    With Transformer Engine, megatron-core 0.19 passes a bias of bf16 to a product whose output is fp32
    (--moe-router-dtype fp32). Transformer Engine sets the type of a bias in FP8 products only, and cuBLASLt takes that
    of the output otherwise: it reads two numbers of bf16 as one of fp32, and memory behind the bias.
    """
    from megatron.core.transformer.moe import moe_utils, router

    product = router.router_gating_linear
    if moe_utils.te_general_gemm is None or product.__module__ == __name__:
        return

    def logits_of(tokens: Any, weight: Any, bias: Any, dtype: Any) -> Any:
        if bias is None or bias.dtype == dtype:
            return product(tokens, weight, bias, dtype)
        return product(tokens, weight, None, dtype) + bias.to(dtype)

    router.router_gating_linear = logits_of


def with_whole_bias(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor of row-parallel layers after which the bias of an expert has its whole gradient on each rank."""

    @wraps(init)
    def construct(self: Any, *args: Any, is_expert: bool = False, **kwargs: Any) -> None:
        init(self, *args, is_expert=is_expert, **kwargs)
        self.is_biased_expert = is_expert and self.bias is not None
        if self.is_biased_expert:
            self.bias.sequence_parallel = False

    return construct


def with_own_output(forward: Callable[..., tuple]) -> Callable[..., tuple]:
    """A forward pass of row-parallel layers whose output an expert can change in place: Transformer Engine's is a view
    of a custom autograd function, to which autograd refuses to add the bias."""

    @wraps(forward)
    def compute(self: Any, x: Any) -> tuple:
        output, bias = forward(self, x)
        return (output.clone() if self.is_biased_expert and bias is not None else output), bias

    return compute
