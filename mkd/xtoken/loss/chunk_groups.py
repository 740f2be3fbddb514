"""What the losses of a group of chunks take and give, and cross-entropy beside a divergence that is computed apart."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from mkd.losses.inputs import PLAIN_LOGITS, KernelContext, TokenWeights, statistics_dtype
from mkd.losses.kernels.interface import Chunk, Kernels
from mkd.losses.statistics import Softmaxes, TokenTerms
from mkd.xtoken.loss.chunks import Group


class GroupWeights(NamedTuple):
    """Weights of a group's terms."""

    ce: Tensor | None
    """[n] of the student's rows; None: CE and z-loss are not computed."""
    kd: Tensor
    """[chunks]"""
    factor: Tensor | float
    """What multiplies both in the gradient."""


class GroupTerms(NamedTuple):
    """Values of a group."""

    kd: Tensor
    """[chunks] divergence in nats, with T^2 if the spec says so."""
    ce: Tensor | None
    """[n] cross-entropy in nats, 0 where its weight is 0, NaN where the label is no token; None without CE."""
    log_sum: Tensor | None
    """[n] ln sum_j exp z_j, 0 where the CE weight is 0."""


TermsOfGroup = Callable[[Tensor, Tensor, Group, GroupWeights, Tensor | None], GroupTerms]
"""(student's products [n, columns], teacher's, group, weights, gradient) -> terms. The products are those of the LM
heads before `LogitMap`, and may be overwritten. The gradient by the student's is written into the last, unless it is
None; it may be the products themselves."""

Divergence = Callable[[Tensor, Tensor, Group, Tensor, Tensor | None], Tensor]
"""(student's logits [n, columns], teacher's, group, weight [chunks], gradient) -> [chunks]. The logits are overwritten
and the gradient of sum weight * value by the student's is added to the last, unless it is None."""


@dataclass(frozen=True)
class Apart:
    """A divergence of logits in the precision of the statistics, and cross-entropy."""

    divergence: Divergence
    setting: KernelContext
    kernels: Kernels

    def __call__(
        self, products: Tensor, teacher: Tensor, group: Group, weights: GroupWeights, gradient: Tensor | None
    ) -> GroupTerms:
        """See `TermsOfGroup`."""
        maps, dtype = self.setting.maps, statistics_dtype(products)
        z = maps.student.apply_(products.to(dtype))
        total = None if gradient is None else torch.zeros_like(z)
        slope = maps.student.derivative(z)
        terms = self._cross_entropy(z, group, weights, total)
        if len(group.numbers):
            u = maps.teacher.apply_(teacher.to(dtype))
            terms = terms._replace(kd=self.divergence(z, u, group, weights.kd * weights.factor, total))
        if gradient is not None:
            gradient.copy_(total.mul_(slope))
        return terms

    def _cross_entropy(self, z: Tensor, group: Group, weights: GroupWeights, gradient: Tensor | None) -> GroupTerms:
        none = weights.kd.new_zeros(0)
        if weights.ce is None:
            return GroupTerms(none, None, None)
        # At T = 1, of logits that are mapped already.
        setting = replace(self.setting, maps=PLAIN_LOGITS, with_kd=False)
        rows = TokenWeights(group.student.labels, weights.ce, None)
        chunk = Chunk(z, None, rows)
        stats = setting.shard.exchange(self.kernels.softmax_stats(chunk, setting)).wait()
        normalizers = Softmaxes.merge(stats, 1.0)
        terms = TokenTerms.of(stats, None, normalizers, rows, setting.shard.true_vocab, setting.spec)
        if gradient is not None:
            weighted = chunk._replace(tokens=rows.times(weights.factor))
            self.kernels.write_gradient(weighted, stats, None, setting, gradient)
        return GroupTerms(none, terms.ce, terms.log_sum)
