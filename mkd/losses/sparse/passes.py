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
from mkd.losses.logits import Chunk, Setting, TailFactors, statistics_dtype
from mkd.losses.rows import Normalizers, Rows, Statistics, Terms
from mkd.losses.sparse.statistics import SparseFactors, SparseNormalizers, sparse_terms
from mkd.losses.sparse.teacher import SparseTarget

if TYPE_CHECKING:
    from mkd.losses.kernels.interface import Kernels


class Head(NamedTuple):
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
    def taken_from(cls, products: Tensor, target: SparseTarget, rows: Rows, setting: Setting) -> "Head":
        """Take the head's columns out of `products` [rows, columns], which then hold impossible ones there."""
        shard, dtype = setting.shard, statistics_dtype(products)

        def place(ids: Tensor, used: Tensor | bool) -> tuple[Tensor, Tensor]:
            owned = (ids >= shard.start) & (ids < shard.start + shard.columns) & used
            return torch.where(owned, ids - shard.start, 0), owned

        def logits(columns: Tensor) -> Tensor:
            if not products.shape[1]:
                return products.new_zeros(columns.shape, dtype=dtype)
            return setting.maps.student.apply_(products.gather(1, columns).to(dtype, copy=True))

        columns, owned = place(target.ids, True)
        label_column, label_owned = place(rows.labels, False if rows.ce_weight is None else rows.ce_weight != 0)
        label_logit = torch.where(label_owned, logits(label_column[:, None])[:, 0], 0)
        head = logits(columns).masked_fill(~owned, -torch.inf)
        if products.shape[1]:
            # Slots without a column add 0 to column 0, whoever else writes there.
            products.scatter_add_(1, columns, torch.where(owned, -torch.inf, 0.0).to(products.dtype))
        return cls(target, columns, owned, head, label_column, label_owned, label_logit)


def terms_of(
    stats: Statistics, sums: Statistics | None, rows: Rows, setting: Setting, target: SparseTarget | None
) -> Terms:
    """Values of each row from both rounds, name -> [tp, rows], with a sparse teacher or without."""
    if target is not None:
        return sparse_terms(stats, sums, rows, setting, target)
    normalizers = Normalizers.merge(stats, setting.temperature)
    return Terms.of(stats, sums, normalizers, rows, setting.shard.true_vocab, setting.spec)


@dataclass(frozen=True)
class SparseKernels:
    """`Kernels` for chunks whose teacher is a `Head`."""

    base: "Kernels"

    def first_round(self, chunk: Chunk, setting: Setting) -> Statistics:
        """At most 8 numbers a row.

        Returns:
            name -> [rows]: student_max, student_mass of the tail; head_max, head_mass of the head; label_logit with
            CE, ce_mass (of both, relative to the larger maximum) if besides T is not 1; log_ratio if the divergence
            needs one round only, head_share (the teacher's probability of this shard's head) if that is the teacher's
            expectation.
        """
        head, ce_weight = chunk.teacher, chunk.rows.ce_weight
        used = (~chunk.rows.unused_by_student()[:, 0]).to(head.logits.dtype)
        tail = self.base.first_round(chunk._replace(teacher=None, rows=Rows(chunk.rows.labels, used, None)), setting)
        top = head.logits.amax(dim=1).clamp_min(torch.finfo(head.logits.dtype).min)
        s = (head.logits - top[:, None]) / setting.temperature
        stats = {"student_max": tail["student_max"], "student_mass": tail["student_mass"]}
        stats |= {"head_max": top, "head_mass": s.exp().sum(dim=1)}
        if ce_weight is not None:
            stats["label_logit"] = head.label_logit
            if setting.temperature != 1.0:
                highest = torch.maximum(top, tail["student_max"])
                of_tail = tail["ce_mass"] * (tail["student_max"] - highest).exp()
                stats["ce_mass"] = of_tail + (head.logits - highest[:, None]).exp().sum(dim=1)
        shortcut = DIVERGENCES[setting.spec.divergence].one_round
        if shortcut is not None:
            log_p = head.target.log_p.masked_fill(~head.owned, -torch.inf)
            p = log_p.exp()
            if shortcut.under == "teacher":
                stats["log_ratio"] = _weighted(p, head.target.log_value - s).sum(dim=1)
                stats["head_share"] = p.sum(dim=1)
            else:
                stats["log_ratio"] = _weighted(s.exp(), s - log_p).sum(dim=1)
        return stats

    def second_round(self, chunk: Chunk, stats: Statistics, setting: Setting) -> Statistics:
        """Sums of density and slope over the shard's columns of the head, name -> [rows]."""
        head, rank, spec = chunk.teacher, setting.shard.rank, setting.spec
        normalizers = SparseNormalizers.merge(stats, head.target, setting)
        log_q = _log_q(head, stats["head_max"][rank], normalizers.categories.log_norm(rank), spec.temperature)
        log_p = head.target.log_p.masked_fill(~head.owned, -torch.inf)
        entry = DIVERGENCES[spec.divergence]
        return {
            "density": entry.density(log_q, log_p, spec).sum(dim=1),
            "slope": entry.slope(log_q, log_p, spec).sum(dim=1),
        }

    def write_gradient(
        self, chunk: Chunk, stats: Statistics, sums: Statistics | None, setting: Setting, out: Tensor
    ) -> None:
        """See `eager.write_gradient`."""
        head, rows = chunk.teacher, chunk.rows
        factors = SparseFactors.of(stats, sums, rows, setting, head.target)
        of_head = self._head_gradient(head, factors, rows, setting)
        at_label = head.owned & (head.target.ids == rows.labels[:, None])
        zero = torch.zeros_like(factors.kd)
        label_in_tail = head.label_owned & ~at_label.any(dim=1)
        tail = TailFactors(
            used=~rows.unused_by_student()[:, 0],
            top=factors.tail_max,
            ce=zero if factors.ce is None else factors.ce,
            ce_log_norm=zero if factors.ce is None else factors.ce_log_mass + (factors.top - factors.tail_max),
            kd=factors.tail,
            kd_log_norm=factors.tail_log_norm,
            label=zero if factors.label is None else factors.label,
            label_column=torch.where(label_in_tail, head.label_column, -1),
        )
        self.base.write_tail_gradient(chunk.student, tail, setting, out)
        if out.shape[1]:
            # The columns of the head hold 0 by now.
            out.scatter_add_(1, head.columns, of_head.to(out.dtype))

    def _head_gradient(self, head: Head, factors: SparseFactors, rows: Rows, setting: Setting) -> Tensor:
        """[rows, K] d loss / d products; 0 where a slot has no column here."""
        log_q = _log_q(head, factors.head_max, factors.head_log_norm, setting.temperature)
        slope = DIVERGENCES[setting.spec.divergence].slope(log_q, head.target.log_p, setting.spec)
        gradient = factors.kd[:, None] * (slope - log_q.exp() * factors.slope_sum[:, None])
        if factors.ce is not None:
            log_q1 = head.logits - factors.top[:, None] - factors.ce_log_mass[:, None]
            at_label = head.target.ids == rows.labels[:, None]
            of_label = torch.where(at_label, factors.label[:, None], 0)
            of_ce = log_q1.exp() * factors.ce[:, None] - of_label
            gradient = gradient + torch.where(factors.label[:, None] != 0, of_ce, 0)
        gradient = gradient * setting.maps.student.derivative(head.logits)
        return torch.where(head.owned, gradient, 0)

    def write_tail_gradient(self, products: Tensor, tail: TailFactors, setting: Setting, out: Tensor) -> None:
        """See `eager.write_tail_gradient`."""
        self.base.write_tail_gradient(products, tail, setting, out)

    def all_rounds(
        self, chunk: Chunk, setting: Setting, weighted: Rows, out: Tensor
    ) -> tuple[Statistics, Statistics | None]:
        """See `eager.all_rounds`."""
        stats, sums = self.first_round(chunk, setting), None
        merged = {name: values[None] for name, values in stats.items()}
        merged_sums = None
        if DIVERGENCES[setting.spec.divergence].one_round is None:
            sums = self.second_round(chunk, merged, setting)
            merged_sums = {name: values[None] for name, values in sums.items()}
        self.write_gradient(chunk._replace(rows=weighted), merged, merged_sums, setting, out)
        return stats, sums


def _log_q(head: Head, top: Tensor, log_norm: Tensor, temperature: float) -> Tensor:
    """[rows, K] ln q of the categories of the head; -inf where not owned."""
    log_q = (head.logits - top[:, None]) / temperature - log_norm[:, None]
    return log_q.masked_fill(~head.owned, -torch.inf)


def _weighted(weight: Tensor, logarithm: Tensor) -> Tensor:
    """The product, 0 where the weight is."""
    return torch.where(weight == 0, 0, weight * logarithm)
