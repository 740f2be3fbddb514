"""The loss of a group of chunks as a function: its inputs and outputs, and cross-entropy beside a divergence."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from mkd.losses.inputs import PLAIN_LOGITS, KernelContext, TokenWeights
from mkd.losses.kernels.interface import Chunk, Kernels
from mkd.losses.statistics import Softmaxes, TokenTerms
from mkd.xtoken.loss.chunks import ChunkGroup


class GroupWeights(NamedTuple):
    """Weights of a group's terms."""

    ce: Tensor | None
    """[n] of the student's tokens; None: CE and z-loss are not computed."""
    kd: Tensor
    """[chunks]"""
    factor: Tensor | float
    """Factor of both in the gradient."""


class GroupValues(NamedTuple):
    """Values of a group."""

    kd: Tensor
    """[chunks] divergence in nats, with T^2 if the spec sets it."""
    ce: Tensor | None
    """[n] cross-entropy in nats, 0 where its weight is 0, NaN where the label is not a token; None without CE."""
    log_sum: Tensor | None
    """[n] ln sum_j exp z_j, 0 where the CE weight is 0."""


GroupLoss = Callable[[Tensor, Tensor, ChunkGroup, GroupWeights, Tensor | None], GroupValues]
"""(student's products [n, columns], teacher's, group, weights, gradient) -> values. The products are those of the LM
heads before `LogitMap`, and may be overwritten. The gradient by the student's products is written into the last
argument unless that is None; it may be the products themselves."""

Divergence = Callable[[Tensor, Tensor, ChunkGroup, Tensor, Tensor | None], Tensor]
"""(student's logits [n, columns], teacher's, group, weight [chunks], gradient) -> [chunks]. The logits are overwritten
and the gradient of sum weight * value by the student's logits is added to the last argument unless that is None."""


@dataclass(frozen=True)
class SeparateCE:
    """A `GroupLoss`: a divergence of logits in the precision of the statistics, and separate cross-entropy."""

    divergence: Divergence
    context: KernelContext
    kernels: Kernels

    def __call__(
        self, products: Tensor, teacher: Tensor, group: ChunkGroup, weights: GroupWeights, gradient: Tensor | None
    ) -> GroupValues:
        maps, dtype = self.context.maps, self.context.statistics_dtype(products)
        z = maps.student.apply_(products.to(dtype))
        total = None if gradient is None else torch.zeros_like(z)
        slope = maps.student.derivative(z)
        values = self._cross_entropy(z, group, weights, total)
        if len(group.numbers):
            u = maps.teacher.apply_(teacher.to(dtype))
            values = values._replace(kd=self.divergence(z, u, group, weights.kd * weights.factor, total))
        if gradient is not None:
            gradient.copy_(total.mul_(slope))
        return values

    def _cross_entropy(
        self, z: Tensor, group: ChunkGroup, weights: GroupWeights, gradient: Tensor | None
    ) -> GroupValues:
        none = weights.kd.new_zeros(0)
        if weights.ce is None:
            return GroupValues(none, None, None)
        # At T = 1, of logits that are mapped already.
        context = replace(self.context, maps=PLAIN_LOGITS, with_kd=False)
        tokens = TokenWeights(group.student.labels, weights.ce, None)
        chunk = Chunk(z, None, tokens)
        stats = context.shard.exchange(self.kernels.softmax_stats(chunk, context)).wait()
        softmaxes = Softmaxes.merge(stats, 1.0)
        terms = TokenTerms.of(stats, None, softmaxes, tokens, context.shard.true_vocab, context.spec)
        if gradient is not None:
            weighted = chunk._replace(tokens=tokens.times(weights.factor))
            self.kernels.write_gradient(weighted, stats, None, context, gradient)
        return GroupValues(none, terms.ce, terms.log_sum)
