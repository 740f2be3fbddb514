"""What follows from the statistics of a sparse teacher's rows once the vocabulary shards have exchanged them.

With z the student's logits, shard r sums over its own columns of the head and, apart from them, over its own columns of
the tail, each relative to its own maximum. The tail is never formed as 1 - head: its probability may be far smaller
than the rounding error of the head's.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mkd.losses.divergences import DIVERGENCES
from mkd.losses.logits import KernelContext
from mkd.losses.rows import GradCoeffs, Softmax, Softmaxes, Statistics, TokenTerms, TokenWeights
from mkd.losses.sparse.teacher import SparseTarget


class SparseSoftmaxes(NamedTuple):
    """The student's softmaxes after the first round."""

    ce: Softmax
    """At T = 1, over all columns."""
    top: Tensor
    """[tp, rows] the largest logit of a shard, which `ce` is relative to."""
    categories: Softmax
    """Over head and tail at T, or over the head alone; parts are the shards' heads, then their tails."""
    tail: Softmax
    log_q_tail: Tensor
    """[rows] ln of the tail's probability; -inf without a tail."""

    @classmethod
    def merge(cls, stats: Statistics, target: SparseTarget, context: KernelContext) -> "SparseSoftmaxes":
        """From first-round statistics, name -> [tp, rows]."""
        temperature, tops = context.temperature, (stats["topk_max"], stats["student_max"])
        masses = stats["topk_sum_exp"], stats["student_sum_exp"]
        top = torch.maximum(*tops)
        everything = Softmax.merge(torch.cat(tops), torch.cat(masses), temperature)
        ce = Softmax.merge(top, stats["ce_sum_exp"], 1.0) if "ce_sum_exp" in stats else everything
        tail = Softmax.merge(tops[1], masses[1], temperature)
        if target.log_tail is None:
            head = Softmax.merge(tops[0], masses[0], temperature)
            return cls(ce, top, head, tail, torch.full_like(tail.log_sum_exp, -torch.inf))
        distance = (tops[1].amax(dim=0) - top.amax(dim=0)) / temperature
        return cls(ce, top, everything, tail, tail.log_sum_exp + distance - everything.log_sum_exp)

    def of_cross_entropy(self, stats: Statistics) -> tuple[Statistics, Softmaxes]:
        """What `TokenTerms` and `GradCoeffs` need for CE."""
        return {"student_max": self.top, "label_logit": stats.get("label_logit")}, Softmaxes(self.ce, self.ce, None)


def sparse_terms(
    stats: Statistics, sums: Statistics | None, rows: TokenWeights, context: KernelContext, target: SparseTarget
) -> TokenTerms:
    """Values of each row from the statistics of the first round and the sums of the second, name -> [tp, rows]."""
    softmaxes = SparseSoftmaxes.merge(stats, target, context)
    without_kd = TokenWeights(rows.labels, rows.ce_weight, None)
    ce_stats, ce_normalizers = softmaxes.of_cross_entropy(stats)
    terms = TokenTerms.of(ce_stats, None, ce_normalizers, without_kd, context.shard.true_vocab, context.spec)
    value, _ = _divergence_and_dlogq_sum(stats, sums, softmaxes, context, target)
    used = rows.kd_weight != 0
    kd = torch.where(used, value * context.spec.scale, 0).masked_fill(used & target.out_of_vocab, torch.nan)
    return terms._replace(kd=kd)


def _divergence_and_dlogq_sum(
    stats: Statistics,
    sums: Statistics | None,
    softmaxes: SparseSoftmaxes,
    context: KernelContext,
    target: SparseTarget,
) -> tuple[Tensor, Tensor]:
    """([rows] divergence in nats without T^2, [rows] sum of its dlogq terms over the categories)."""
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
        # sum of p (ln p - ln q), where ln q is shift - log_sum_exp more than the shard took it for
        parts = stats["log_ratio"] + _times(stats["topk_prob"], categories.log_sum_exp - shift)
        value = parts.sum(dim=0) + of_tail
    else:
        relative = stats["log_ratio"] + _times(stats["topk_sum_exp"], shift - categories.log_sum_exp)
        # A shard of weight 0 may hold an infinite ratio.
        weight = (shift - categories.log_sum_exp).exp()
        value = torch.where(weight > 0, weight * relative, 0).sum(dim=0) + of_tail
    return value, entry.single_pass.dlogq_sum(value)


def _times(weight: Tensor, number: Tensor) -> Tensor:
    """The product, 0 where the weight is."""
    return torch.where(weight == 0, 0, weight * number)


class SparseGradCoeffs(NamedTuple):
    """What one shard needs for the gradient of its columns; each [rows]."""

    top: Tensor
    """The largest logit of the row."""
    ce_log_sum_exp: Tensor
    """ln q at T = 1 is z - top - ce_log_sum_exp."""
    ce: Tensor | None
    """See `GradCoeffs`; as `label`."""
    label: Tensor | None
    topk_max: Tensor
    head_log_norm: Tensor
    """ln q of a category of the head = (z - topk_max) / T - head_log_norm."""
    kd: Tensor
    """Of dlogq - q * dlogq_sum in the head; 0 where the KD weight is."""
    dlogq_sum: Tensor
    tail_max: Tensor
    tail_log_norm: Tensor
    """ln of a column's share of the tail = (z - tail_max) / T - tail_log_norm."""
    tail: Tensor
    """Of a column's share of the tail."""

    @classmethod
    def of(
        cls,
        stats: Statistics,
        sums: Statistics | None,
        rows: TokenWeights,
        context: KernelContext,
        target: SparseTarget,
    ) -> "SparseGradCoeffs":
        """From merged statistics; the weights of `rows` may carry the upstream gradient."""
        softmaxes = SparseSoftmaxes.merge(stats, target, context)
        ce_stats, ce_normalizers = softmaxes.of_cross_entropy(stats)
        ce = GradCoeffs.of(
            ce_stats, None, ce_normalizers, TokenWeights(rows.labels, rows.ce_weight, None), context.spec
        )
        rank, spec = context.shard.rank, context.spec
        used = rows.kd_weight != 0
        kd = rows.kd_weight * (spec.scale / spec.temperature)
        dlogq_sum = _divergence_and_dlogq_sum(stats, sums, softmaxes, context, target)[1]
        tail = torch.zeros_like(kd)
        if target.log_tail is not None:
            dlogq = DIVERGENCES[spec.divergence].dlogq(softmaxes.log_q_tail, target.log_tail, spec)
            # ln q of every column of the tail rises by its share as the tail does.
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
