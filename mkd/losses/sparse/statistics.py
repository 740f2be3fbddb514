"""Values and gradient coefficients beside a sparse teacher, from the statistics that the vocabulary shards exchange.

With z the student's logits, shard r sums over its own top columns (those that the teacher lists) and, separately, over
its own columns of the tail (all others), each relative to its own maximum. The tail's probability is never formed as
1 - that of the top columns: it may be far smaller than their rounding error.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mkd.losses.divergences import DIVERGENCES, weighted
from mkd.losses.inputs import KernelContext, TokenWeights
from mkd.losses.sparse.teacher import SparseTarget
from mkd.losses.statistics import GradCoeffs, Softmax, Softmaxes, Statistics, TokenTerms


class SparseSoftmaxes(NamedTuple):
    """The student's softmaxes, merged over the shards."""

    ce: Softmax
    """Softmax at T = 1 over all columns."""
    top: Tensor
    """[tp, N] the largest logit of a shard, which `ce` is relative to."""
    categories: Softmax
    """Softmax at T over top columns and tail, or over the top columns alone; its parts are the shards' top columns,
    then their tails."""
    tail: Softmax
    log_q_tail: Tensor
    """[N] ln of the tail's probability; -inf without a tail."""

    @classmethod
    def merge(cls, stats: Statistics, target: SparseTarget, context: KernelContext) -> "SparseSoftmaxes":
        """Merge the statistics of the softmax pass, name -> [tp, N]."""
        temperature, tops = context.temperature, (stats["topk_max"], stats["student_max"])
        sums = stats["topk_sum_exp"], stats["student_sum_exp"]
        top = torch.maximum(*tops)
        everything = Softmax.merge(torch.cat(tops), torch.cat(sums), temperature)
        ce = Softmax.merge(top, stats["ce_sum_exp"], 1.0) if "ce_sum_exp" in stats else everything
        tail = Softmax.merge(tops[1], sums[1], temperature)
        if target.log_tail is None:
            topk = Softmax.merge(tops[0], sums[0], temperature)
            return cls(ce, top, topk, tail, torch.full_like(tail.log_sum_exp, -torch.inf))
        distance = (tops[1].amax(dim=0) - top.amax(dim=0)) / temperature
        return cls(ce, top, everything, tail, tail.log_sum_exp + distance - everything.log_sum_exp)

    def for_cross_entropy(self, stats: Statistics) -> tuple[Statistics, Softmaxes]:
        """The statistics and softmaxes that `TokenTerms` and `GradCoeffs` need for CE."""
        return {"student_max": self.top, "label_logit": stats.get("label_logit")}, Softmaxes(self.ce, self.ce, None)


def sparse_terms(
    stats: Statistics, sums: Statistics | None, tokens: TokenWeights, context: KernelContext, target: SparseTarget
) -> TokenTerms:
    """Values per token from the statistics of both passes, name -> [tp, N]."""
    vocab, spec = context.shard.true_vocab, context.spec
    softmaxes = SparseSoftmaxes.merge(stats, target, context)
    without_kd = TokenWeights(tokens.labels, tokens.ce_weight, None)
    ce_stats, ce_softmaxes = softmaxes.for_cross_entropy(stats)
    terms = TokenTerms.of(ce_stats, None, ce_softmaxes, without_kd, vocab, spec)
    value, _ = _divergence_and_dlogq_sum(stats, sums, softmaxes, context, target)
    used = tokens.kd_weight != 0
    kd = torch.where(used, value * spec.temperature_factor, 0).masked_fill(used & target.out_of_vocab, torch.nan)
    return terms._replace(kd=kd)


def _divergence_and_dlogq_sum(
    stats: Statistics,
    sums: Statistics | None,
    softmaxes: SparseSoftmaxes,
    context: KernelContext,
    target: SparseTarget,
) -> tuple[Tensor, Tensor]:
    """([N] divergence in nats without T^2, [N] sum over the categories of its derivatives by ln q)."""
    entry, spec = DIVERGENCES[context.spec.divergence], context.spec
    categories, shards = softmaxes.categories, context.shard.size
    of_tail = dlogq_of_tail = torch.zeros_like(categories.log_sum_exp)
    if target.log_tail is not None:
        pair = softmaxes.log_q_tail, target.log_tail
        of_tail, dlogq_of_tail = entry.pointwise(*pair, spec), entry.dlogq(*pair, spec)
    if entry.single_pass is None:
        return sums["pointwise"].sum(dim=0) + of_tail, sums["dlogq"].sum(dim=0) + dlogq_of_tail
    shift = categories.shift[:shards]
    if entry.single_pass.under == "teacher":
        # sum of p (ln p - ln q): the shard used an ln q that is log_sum_exp - shift too large
        parts = stats["log_ratio"] + weighted(stats["topk_prob"], categories.log_sum_exp - shift)
        value = parts.sum(dim=0) + of_tail
    else:
        relative = stats["log_ratio"] + weighted(stats["topk_sum_exp"], shift - categories.log_sum_exp)
        # A shard of weight 0 may hold an infinite ratio.
        weight = (shift - categories.log_sum_exp).exp()
        value = torch.where(weight > 0, weight * relative, 0).sum(dim=0) + of_tail
    return value, entry.single_pass.dlogq_sum(value)


class SparseGradCoeffs(NamedTuple):
    """Coefficients of one shard's gradient by its columns; each [N]."""

    top: Tensor
    """The largest logit of the token."""
    ce_log_sum_exp: Tensor
    """ln q at T = 1 is z - top - ce_log_sum_exp."""
    ce: Tensor | None
    """See `GradCoeffs`, as for `label`."""
    label: Tensor | None
    topk_max: Tensor
    """The largest logit of the top columns of this shard."""
    topk_log_norm: Tensor
    """ln q of a top column is (z - topk_max) / T - topk_log_norm."""
    kd: Tensor
    """Coefficient of dlogq - q * dlogq_sum in the top columns; 0 where the KD weight is."""
    dlogq_sum: Tensor
    """Sum of dlogq over top columns and tail, on all shards; 0 where the KD weight is."""
    tail_max: Tensor
    """The largest logit of the tail of this shard."""
    tail_log_norm: Tensor
    """ln of a column's share of the tail is (z - tail_max) / T - tail_log_norm."""
    tail: Tensor
    """Coefficient of a column's share of the tail."""

    @classmethod
    def of(
        cls,
        stats: Statistics,
        sums: Statistics | None,
        tokens: TokenWeights,
        context: KernelContext,
        target: SparseTarget,
    ) -> "SparseGradCoeffs":
        """Computed from merged statistics; the weights of `tokens` may carry the upstream gradient."""
        softmaxes = SparseSoftmaxes.merge(stats, target, context)
        ce_stats, ce_softmaxes = softmaxes.for_cross_entropy(stats)
        without_kd = TokenWeights(tokens.labels, tokens.ce_weight, None)
        ce = GradCoeffs.of(ce_stats, None, ce_softmaxes, without_kd, context.spec)
        rank, spec = context.shard.rank, context.spec
        used = tokens.kd_weight != 0
        kd = tokens.kd_weight * (spec.temperature_factor / spec.temperature)
        dlogq_sum = _divergence_and_dlogq_sum(stats, sums, softmaxes, context, target)[1]
        tail = torch.zeros_like(kd)
        if target.log_tail is not None:
            dlogq = DIVERGENCES[spec.divergence].dlogq(softmaxes.log_q_tail, target.log_tail, spec)
            # ln q of the tail changes with a column's logit in proportion to the column's share of the tail.
            tail = torch.where(used, kd * (dlogq - softmaxes.log_q_tail.exp() * dlogq_sum), 0)
        return cls(
            softmaxes.top.amax(dim=0),
            softmaxes.ce.log_sum_exp,
            ce.ce,
            ce.label,
            stats["topk_max"][rank],
            softmaxes.categories.log_norm(rank),
            kd,
            torch.where(used, dlogq_sum, 0),
            stats["student_max"][rank],
            softmaxes.tail.log_norm(rank),
            tail,
        )
