"""The passes over a loss chunk beside a sparse teacher.

The student's top columns, those that the teacher lists, are taken out of the chunk, K numbers per token, and replaced
by -inf. The ordinary passes over all columns then see the tail and nothing else. At the end the gradient of the top
columns is added where they are.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mkd.losses.divergences import DIVERGENCES, weighted
from mkd.losses.inputs import KernelContext, TokenWeights
from mkd.losses.kernels.interface import Chunk, Kernels, TailCoeffs
from mkd.losses.sparse.columns import TopColumns
from mkd.losses.sparse.statistics import SparseGradCoeffs, SparseSoftmaxes
from mkd.losses.statistics import Statistics, as_one_shard


@dataclass(frozen=True)
class SparseKernels:
    """`Kernels` for chunks whose teacher is `TopColumns`; `base` computes the passes over the tail."""

    base: Kernels

    def softmax_stats(self, chunk: Chunk, context: KernelContext) -> Statistics:
        """At most 8 numbers per token.

        Returns:
            name -> [N]: student_max, student_sum_exp of the tail; topk_max, topk_sum_exp of the top columns; with CE
            label_logit, and ce_sum_exp (of both, relative to the larger maximum) if T is not 1; log_ratio if the
            divergence needs no second pass, topk_prob (the teacher's probability of the shard's top columns) if that is
            an expectation under the teacher.
        """
        top, ce_weight = chunk.teacher, chunk.tokens.ce_weight
        used = (~chunk.tokens.unused_by_student()[:, 0]).to(top.logits.dtype)
        own = TokenWeights(chunk.tokens.labels, used, None)
        tail = self.base.softmax_stats(chunk._replace(teacher=None, tokens=own), context)
        topk_max = top.logits.amax(dim=1).clamp_min(torch.finfo(top.logits.dtype).min)
        s = (top.logits - topk_max[:, None]) / context.temperature
        stats = {"student_max": tail["student_max"], "student_sum_exp": tail["student_sum_exp"]}
        stats |= {"topk_max": topk_max, "topk_sum_exp": s.exp().sum(dim=1)}
        if ce_weight is not None:
            stats["label_logit"] = top.label_logit
            if context.temperature != 1.0:
                highest = torch.maximum(topk_max, tail["student_max"])
                of_tail = tail["ce_sum_exp"] * (tail["student_max"] - highest).exp()
                stats["ce_sum_exp"] = of_tail + (top.logits - highest[:, None]).exp().sum(dim=1)
        shortcut = DIVERGENCES[context.spec.divergence].single_pass
        if shortcut is not None:
            log_p = top.own_log_p()
            p = log_p.exp()
            if shortcut.under == "teacher":
                stats["log_ratio"] = weighted(p, top.target.log_value - s).sum(dim=1)
                stats["topk_prob"] = p.sum(dim=1)
            else:
                stats["log_ratio"] = weighted(s.exp(), s - log_p).sum(dim=1)
        return stats

    def divergence_stats(self, chunk: Chunk, stats: Statistics, context: KernelContext) -> Statistics:
        """Sums of the divergence's terms and derivatives over the shard's top columns: pointwise, dlogq -> [N]."""
        top, rank, spec = chunk.teacher, context.shard.rank, context.spec
        softmaxes = SparseSoftmaxes.merge(stats, top.target, context)
        log_q = top.log_q(stats["topk_max"][rank], softmaxes.categories.log_norm(rank), spec.temperature)
        log_p = top.own_log_p()
        entry = DIVERGENCES[spec.divergence]
        return {
            "pointwise": entry.pointwise(log_q, log_p, spec).sum(dim=1),
            "dlogq": entry.dlogq(log_q, log_p, spec).sum(dim=1),
        }

    def write_gradient(
        self, chunk: Chunk, stats: Statistics, sums: Statistics | None, context: KernelContext, out: Tensor
    ) -> None:
        """See `eager.write_gradient`."""
        top, tokens = chunk.teacher, chunk.tokens
        coeffs = SparseGradCoeffs.of(stats, sums, tokens, context, top.target)
        of_top = _top_gradient(top, coeffs, tokens, context)
        at_label = top.owned & (top.target.ids == tokens.labels[:, None])
        zero = torch.zeros_like(coeffs.kd)
        label_in_tail = top.label_owned & ~at_label.any(dim=1)
        tail = TailCoeffs(
            used=~tokens.unused_by_student()[:, 0],
            top=coeffs.tail_max,
            ce=zero if coeffs.ce is None else coeffs.ce,
            ce_log_norm=zero if coeffs.ce is None else coeffs.ce_log_sum_exp + (coeffs.top - coeffs.tail_max),
            kd=coeffs.tail,
            kd_log_norm=coeffs.tail_log_norm,
            label=zero if coeffs.label is None else coeffs.label,
            label_column=torch.where(label_in_tail, top.label_column, -1),
        )
        self.base.write_tail_gradient(chunk.student, tail, context, out)
        if out.shape[1]:
            # The top columns hold 0 at this point.
            out.scatter_add_(1, top.columns, of_top.to(out.dtype))

    def write_tail_gradient(self, products: Tensor, tail: TailCoeffs, context: KernelContext, out: Tensor) -> None:
        """See `eager.write_tail_gradient`."""
        self.base.write_tail_gradient(products, tail, context, out)

    def all_passes(
        self, chunk: Chunk, context: KernelContext, weighted: TokenWeights, out: Tensor
    ) -> tuple[Statistics, Statistics | None]:
        """See `eager.all_passes`; the teacher of the chunk is a `SparseTarget`, whose columns are taken out here."""
        chunk = with_top_columns(chunk, context)
        stats, sums = self.softmax_stats(chunk, context), None
        merged = as_one_shard(stats)
        if DIVERGENCES[context.spec.divergence].single_pass is None:
            sums = self.divergence_stats(chunk, merged, context)
        self.write_gradient(chunk._replace(tokens=weighted), merged, as_one_shard(sums), context, out)
        return stats, sums


def with_top_columns(chunk: Chunk, context: KernelContext) -> Chunk:
    """The chunk with its `SparseTarget`'s columns taken out of the student's products."""
    return chunk._replace(teacher=TopColumns.take_from(chunk.student, chunk.teacher, chunk.tokens, context))


def _top_gradient(top: TopColumns, coeffs: SparseGradCoeffs, tokens: TokenWeights, context: KernelContext) -> Tensor:
    """[N, K] d loss / d products of the top columns; 0 where a slot has no column here."""
    log_q = top.log_q(coeffs.topk_max, coeffs.topk_log_norm, context.temperature)
    dlogq = DIVERGENCES[context.spec.divergence].dlogq(log_q, top.target.log_p, context.spec)
    gradient = coeffs.kd[:, None] * (dlogq - log_q.exp() * coeffs.dlogq_sum[:, None])
    if coeffs.ce is not None:
        log_q1 = top.logits - coeffs.top[:, None] - coeffs.ce_log_sum_exp[:, None]
        at_label = top.target.ids == tokens.labels[:, None]
        of_label = torch.where(at_label, coeffs.label[:, None], 0)
        of_ce = log_q1.exp() * coeffs.ce[:, None] - of_label
        gradient = gradient + torch.where(coeffs.label[:, None] != 0, of_ce, 0)
    gradient = gradient * context.maps.student.derivative(top.logits)
    return torch.where(top.owned, gradient, 0)
