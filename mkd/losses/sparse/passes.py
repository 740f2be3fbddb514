"""The passes over a chunk of the student's logits beside a sparse teacher.

The student's columns of the head are taken out of the chunk, K numbers a row, and impossible products are left in their
place. The ordinary passes over all columns then see the tail and nothing else. At the end the gradient of the head is
put where its columns are.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mkd.losses.divergences import DIVERGENCES
from mkd.losses.logits import Chunk, KernelContext, TailCoeffs, statistics_dtype
from mkd.losses.rows import Softmaxes, Statistics, TokenTerms, TokenWeights
from mkd.losses.sparse.statistics import SparseGradCoeffs, SparseSoftmaxes, sparse_terms
from mkd.losses.sparse.teacher import SparseTarget

if TYPE_CHECKING:
    from mkd.losses.kernels.interface import Kernels


class TopColumns(NamedTuple):
    """A sparse teacher's part of a chunk, and what stood in the student's at its columns."""

    target: SparseTarget
    columns: Tensor
    """[rows, K] int64 columns of this shard; 0 where a slot has none."""
    owned: Tensor
    """[rows, K] whether it has one."""
    logits: Tensor
    """[rows, K] the student's, in the precision of the statistics; -inf where not owned."""
    label_column: Tensor
    """[rows] int64; 0 where the label is in no column of this shard."""
    label_owned: Tensor
    """[rows] whether it is in one."""
    label_logit: Tensor
    """[rows]; 0 where not owned."""

    @classmethod
    def taken_from(
        cls, products: Tensor, target: SparseTarget, rows: TokenWeights, context: KernelContext
    ) -> "TopColumns":
        """Take the head's columns out of `products` [rows, columns], which then hold impossible ones there."""
        shard, dtype = context.shard, statistics_dtype(products)

        def place(ids: Tensor, used: Tensor | bool) -> tuple[Tensor, Tensor]:
            owned = (ids >= shard.start) & (ids < shard.start + shard.columns) & used
            return torch.where(owned, ids - shard.start, 0), owned

        def logits(columns: Tensor) -> Tensor:
            if not products.shape[1]:
                return products.new_zeros(columns.shape, dtype=dtype)
            return context.maps.student.apply_(products.gather(1, columns).to(dtype, copy=True))

        columns, owned = place(target.ids, True)
        label_column, label_owned = place(rows.labels, False if rows.ce_weight is None else rows.ce_weight != 0)
        label_logit = torch.where(label_owned, logits(label_column[:, None])[:, 0], 0)
        head = logits(columns).masked_fill(~owned, -torch.inf)
        if products.shape[1]:
            # Slots without a column add 0 to column 0, whoever else writes there.
            products.scatter_add_(1, columns, torch.where(owned, -torch.inf, 0.0).to(products.dtype))
        return cls(target, columns, owned, head, label_column, label_owned, label_logit)


def terms_of(
    stats: Statistics, sums: Statistics | None, rows: TokenWeights, context: KernelContext, target: SparseTarget | None
) -> TokenTerms:
    """Values of each row from both rounds, name -> [tp, rows], with a sparse teacher or without."""
    if target is not None:
        return sparse_terms(stats, sums, rows, context, target)
    softmaxes = Softmaxes.merge(stats, context.temperature)
    return TokenTerms.of(stats, sums, softmaxes, rows, context.shard.true_vocab, context.spec)


@dataclass(frozen=True)
class SparseKernels:
    """`Kernels` for chunks whose teacher is a `TopColumns`."""

    base: "Kernels"

    def softmax_stats(self, chunk: Chunk, context: KernelContext) -> Statistics:
        """At most 8 numbers a row.

        Returns:
            name -> [N]: student_max, student_sum_exp of the tail; topk_max, topk_sum_exp of the top columns;
            with CE label_logit, and ce_sum_exp (of both, relative to the larger maximum) if T is not 1; log_ratio if
            the divergence needs no second pass, topk_prob (the teacher's probability of them) if it is
            an expectation under the teacher.
        """
        head, ce_weight = chunk.teacher, chunk.rows.ce_weight
        used = (~chunk.rows.unused_by_student()[:, 0]).to(head.logits.dtype)
        tail = self.base.softmax_stats(
            chunk._replace(teacher=None, rows=TokenWeights(chunk.rows.labels, used, None)), context
        )
        top = head.logits.amax(dim=1).clamp_min(torch.finfo(head.logits.dtype).min)
        s = (head.logits - top[:, None]) / context.temperature
        stats = {"student_max": tail["student_max"], "student_sum_exp": tail["student_sum_exp"]}
        stats |= {"topk_max": top, "topk_sum_exp": s.exp().sum(dim=1)}
        if ce_weight is not None:
            stats["label_logit"] = head.label_logit
            if context.temperature != 1.0:
                highest = torch.maximum(top, tail["student_max"])
                of_tail = tail["ce_sum_exp"] * (tail["student_max"] - highest).exp()
                stats["ce_sum_exp"] = of_tail + (head.logits - highest[:, None]).exp().sum(dim=1)
        shortcut = DIVERGENCES[context.spec.divergence].single_pass
        if shortcut is not None:
            log_p = head.target.log_p.masked_fill(~head.owned, -torch.inf)
            p = log_p.exp()
            if shortcut.under == "teacher":
                stats["log_ratio"] = _weighted(p, head.target.log_value - s).sum(dim=1)
                stats["topk_prob"] = p.sum(dim=1)
            else:
                stats["log_ratio"] = _weighted(s.exp(), s - log_p).sum(dim=1)
        return stats

    def divergence_stats(self, chunk: Chunk, stats: Statistics, context: KernelContext) -> Statistics:
        """Sums of pointwise and dlogq over the shard's columns of the head, name -> [rows]."""
        head, rank, spec = chunk.teacher, context.shard.rank, context.spec
        softmaxes = SparseSoftmaxes.merge(stats, head.target, context)
        log_q = _log_q(head, stats["topk_max"][rank], softmaxes.categories.log_norm(rank), spec.temperature)
        log_p = head.target.log_p.masked_fill(~head.owned, -torch.inf)
        entry = DIVERGENCES[spec.divergence]
        return {
            "pointwise": entry.pointwise(log_q, log_p, spec).sum(dim=1),
            "dlogq": entry.dlogq(log_q, log_p, spec).sum(dim=1),
        }

    def write_gradient(
        self, chunk: Chunk, stats: Statistics, sums: Statistics | None, context: KernelContext, out: Tensor
    ) -> None:
        """See `eager.write_gradient`."""
        head, rows = chunk.teacher, chunk.rows
        coeffs = SparseGradCoeffs.of(stats, sums, rows, context, head.target)
        of_head = self._head_gradient(head, coeffs, rows, context)
        at_label = head.owned & (head.target.ids == rows.labels[:, None])
        zero = torch.zeros_like(coeffs.kd)
        label_in_tail = head.label_owned & ~at_label.any(dim=1)
        tail = TailCoeffs(
            used=~rows.unused_by_student()[:, 0],
            top=coeffs.tail_max,
            ce=zero if coeffs.ce is None else coeffs.ce,
            ce_log_norm=zero if coeffs.ce is None else coeffs.ce_log_sum_exp + (coeffs.top - coeffs.tail_max),
            kd=coeffs.tail,
            kd_log_norm=coeffs.tail_log_norm,
            label=zero if coeffs.label is None else coeffs.label,
            label_column=torch.where(label_in_tail, head.label_column, -1),
        )
        self.base.write_tail_gradient(chunk.student, tail, context, out)
        if out.shape[1]:
            # The columns of the head hold 0 by now.
            out.scatter_add_(1, head.columns, of_head.to(out.dtype))

    def _head_gradient(
        self, head: TopColumns, coeffs: SparseGradCoeffs, rows: TokenWeights, context: KernelContext
    ) -> Tensor:
        """[rows, K] d loss / d products; 0 where a slot has no column here."""
        log_q = _log_q(head, coeffs.topk_max, coeffs.head_log_norm, context.temperature)
        dlogq = DIVERGENCES[context.spec.divergence].dlogq(log_q, head.target.log_p, context.spec)
        gradient = coeffs.kd[:, None] * (dlogq - log_q.exp() * coeffs.dlogq_sum[:, None])
        if coeffs.ce is not None:
            log_q1 = head.logits - coeffs.top[:, None] - coeffs.ce_log_sum_exp[:, None]
            at_label = head.target.ids == rows.labels[:, None]
            of_label = torch.where(at_label, coeffs.label[:, None], 0)
            of_ce = log_q1.exp() * coeffs.ce[:, None] - of_label
            gradient = gradient + torch.where(coeffs.label[:, None] != 0, of_ce, 0)
        gradient = gradient * context.maps.student.derivative(head.logits)
        return torch.where(head.owned, gradient, 0)

    def write_tail_gradient(self, products: Tensor, tail: TailCoeffs, context: KernelContext, out: Tensor) -> None:
        """See `eager.write_tail_gradient`."""
        self.base.write_tail_gradient(products, tail, context, out)

    def all_passes(
        self, chunk: Chunk, context: KernelContext, weighted: TokenWeights, out: Tensor
    ) -> tuple[Statistics, Statistics | None]:
        """See `eager.all_passes`."""
        stats, sums = self.softmax_stats(chunk, context), None
        merged = {name: values[None] for name, values in stats.items()}
        merged_sums = None
        if DIVERGENCES[context.spec.divergence].single_pass is None:
            sums = self.divergence_stats(chunk, merged, context)
            merged_sums = {name: values[None] for name, values in sums.items()}
        self.write_gradient(chunk._replace(rows=weighted), merged, merged_sums, context, out)
        return stats, sums


def _log_q(head: TopColumns, top: Tensor, log_norm: Tensor, temperature: float) -> Tensor:
    """[rows, K] ln q of the categories of the head; -inf where not owned."""
    log_q = (head.logits - top[:, None]) / temperature - log_norm[:, None]
    return log_q.masked_fill(~head.owned, -torch.inf)


def _weighted(weight: Tensor, logarithm: Tensor) -> Tensor:
    """The product, 0 where the weight is."""
    return torch.where(weight == 0, 0, weight * logarithm)
