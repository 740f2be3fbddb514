"""Patches of the router of a mixture of experts."""

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
