"""Patches of mixtures of experts."""

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
    there is no reduce-scatter. In both cases the data-parallel ranks of experts sum the gradient over all tokens, but
    the bias is marked as one whose gradient the tensor-parallel ranks sum once more.
    """
    from megatron.core.tensor_parallel import layers

    reduce_scatter, init = layers.reduce_scatter_to_sequence_parallel_region, layers.RowParallelLinear.__init__
    if reduce_scatter.__module__ == __name__:
        return

    def reduce_scatter_over_several(input_: Any, group: Any = None, *args: Any, **kwargs: Any) -> Any:
        if group is not None and group.size() == 1:
            return input_
        return reduce_scatter(input_, group, *args, **kwargs)

    @wraps(init)
    def init_with_reduced_bias(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if self.is_expert and self.bias is not None:
            self.bias.sequence_parallel = False

    layers.reduce_scatter_to_sequence_parallel_region = reduce_scatter_over_several
    layers.RowParallelLinear.__init__ = init_with_reduced_bias
