"""Losses over supervised tokens only: selection of hidden states and weights, and values spread over all tokens."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mkd.data.batch import KDBatch
from mkd.data.supervised import SupervisedTokens
from mkd.losses import LossOutput, TokenWeights


def select_hidden(hidden: Tensor, tokens: SupervisedTokens, group: ProcessGroup, sequence_parallel: bool) -> Tensor:
    """[M, H] final hidden states of the supervised tokens, on all tensor-parallel ranks; differentiable.

    The gradient of all other tokens is exactly 0, whatever they hold. Nothing is kept for backward but indices.

    Communication: under sequence parallelism one all-gather of the supervised tokens in forward. None in backward: the
    loss sums the gradient of the [M, H] over the vocabulary shards, so that each rank takes its own part of it.

    Args:
        hidden: [N, H]; [N/tp, H] under sequence parallelism.
        tokens: the M tokens.
        group: tensor-parallel ranks.
        sequence_parallel: each rank holds a part of the tokens.
    """
    gathers = sequence_parallel and group.size() > 1
    return _Select.apply(hidden, tokens, group if gathers else None)


def select_weights(tokens: TokenWeights, batch: KDBatch) -> TokenWeights:
    """Labels and weights of the supervised tokens [M] of a microbatch, from those of all its tokens [s * b]."""
    if batch.supervised is None:
        return tokens
    values = (tokens.labels, tokens.ce_weight, tokens.kd_weight)
    return TokenWeights(*(None if x is None else x.index_select(0, batch.supervised.index) for x in values))


def spread_output(output: LossOutput, batch: KDBatch) -> LossOutput:
    """The output of a loss over supervised tokens, with values per token [s * b] that are 0 elsewhere."""
    if batch.supervised is None:
        return output
    values = (None if x is None else batch.supervised.spread(x) for x in (output.ce, output.kd))
    return LossOutput(output.loss, *values)


class _Select(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, tokens: SupervisedTokens, group: ProcessGroup | None) -> Tensor:
        rank, parts = (0, 1) if group is None else (group.rank(), group.size())
        ctx.tokens, ctx.part = tokens, (rank, parts)
        taken = tokens.take(hidden, rank, parts)
        return taken if group is None else tokens.gather(taken, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        inside, _ = ctx.tokens.part(*ctx.part)
        return ctx.tokens.spread(gradient[inside], *ctx.part), None, None
