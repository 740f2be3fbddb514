"""Row statistics and gradients over one shard of the vocabulary: the mathematics of every loss, without any collective.

A row is a token. With z, u the logits of student and teacher, shard r holds s = (z - max_r z) / T and
t = (u - max_r u) / T over its own real columns. Everything stays relative to the maximum of the shard until the shards
are merged, so that large logits cost no precision. One pass gives a few sums a row and shard; merged over shards they
give the loss, and the gradient of every column without another sum.

To add a divergence: one entry in `DIVERGENCES` here, and its definition in `reference.DIVERGENCES`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mkd.config import LossSpec


class Softmax(NamedTuple):
    """One model's softmax normaliser, by shard and merged."""

    shift: Tensor
    """[tp, rows] (max of the shard - max of the row) / T, <= 0."""
    mass: Tensor
    """[tp, rows] sum of e^s over the shard, relative to the shard's own maximum."""
    log_mass: Tensor
    """[rows] ln of the row's whole mass, relative to the row's maximum."""

    @classmethod
    def merge(cls, top: Tensor, mass: Tensor, temperature: float) -> "Softmax":
        """Merge the maxima [tp, rows] and masses [tp, rows] of all shards."""
        # A shard of padding alone has the least finite maximum and mass 0. Its shift must stay finite at any
        # temperature: 0 * inf would be NaN.
        shift = ((top - top.amax(dim=0)) / temperature).clamp_min(torch.finfo(top.dtype).min / 4)
        return cls(shift, mass, (shift.exp() * mass).sum(dim=0).log())

    def log_norm(self, rank: int) -> Tensor:
        """[rows] what to subtract from the shard's s to get log-probabilities."""
        return self.log_mass - self.shift[rank]


@dataclass(frozen=True)
class RowDivergence:
    """A divergence whose row sums need one round over the shards."""

    local_sum: Callable[[Tensor, Tensor], Tensor]
    """(s, t), each [rows, columns] -> [rows]: this shard's sum. Neither input may be written to."""

    value: Callable[[Softmax, Softmax, Tensor], Tensor]
    """(student, teacher, sums [tp, rows]) -> [rows] divergence in nats, without T^2."""

    gradient_: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(ln q, ln p, value), [rows, columns] twice and [rows] -> d value / ds, written over ln q; ln p is scratch."""


def _forward_kl_sum(s: Tensor, t: Tensor) -> Tensor:
    """A = sum_j e^{t_j} (t_j - s_j)."""
    return (t - s).mul_(t.exp()).sum(dim=1)


def _forward_kl_value(student: Softmax, teacher: Softmax, sums: Tensor) -> Tensor:
    """KL(p || q) = lse_s - lse_t + A / R with R the teacher's mass.

    Both maxima cancel out of lse_s - lse_t + A / R; only each shard's distance from them remains, so that no difference
    of large numbers is taken.
    """
    relative = sums + teacher.mass * (teacher.shift - student.shift)
    cross = (teacher.shift.exp() * relative).sum(dim=0) / teacher.log_mass.exp()
    return student.log_mass - teacher.log_mass + cross


def _forward_kl_gradient_(log_q: Tensor, log_p: Tensor, value: Tensor) -> Tensor:
    """d KL(p || q) / ds_j = q_j - p_j."""
    return log_q.exp_().sub_(log_p.exp_())


DIVERGENCES: dict[str, RowDivergence] = {
    "forward_kl": RowDivergence(_forward_kl_sum, _forward_kl_value, _forward_kl_gradient_),
}
"""`LossSpec.divergence` -> its sums, value and gradient."""


class Targets(NamedTuple):
    """Where a chunk's labels lie in this shard; a label is never used as an index before it is known to be in range."""

    column: Tensor
    """[rows] int64 column of the label in this shard; 0 where the shard does not own it."""
    owned: Tensor
    """[rows] bool: the label is supervised and one of this shard's real columns."""
    supervised: Tensor
    """[rows] bool: the CE weight is not 0."""
    illegal: Tensor
    """[rows] bool: supervised, and no column of the true vocabulary."""

    @classmethod
    def of(cls, labels: Tensor, ce_weight: Tensor, start: int, columns: int, true_vocab: int) -> "Targets":
        """Find labels [rows] among the shard's `columns` real columns, of global ids `start` and up."""
        supervised = ce_weight != 0
        owned = supervised & (labels >= start) & (labels < start + columns)
        illegal = supervised & ((labels < 0) | (labels >= true_vocab))
        return cls(torch.where(owned, labels - start, 0), owned, supervised, illegal)


def row_max(logits: Tensor) -> Tensor:
    """[rows] maximum over the shard's real columns [rows, columns]; the least finite number if there are none."""
    if logits.shape[1] == 0:
        return logits.new_full((logits.shape[0],), torch.finfo(logits.dtype).min)
    return logits.amax(dim=1)


def shift_(logits: Tensor, top: Tensor, temperature: float) -> Tensor:
    """Turn logits [rows, columns] into (logits - top) / T, in place."""
    logits.sub_(top[:, None])
    return logits if temperature == 1.0 else logits.div_(temperature)


def local_statistics(z: Tensor, u: Tensor | None, targets: Targets | None, spec: LossSpec) -> dict[str, Tensor]:
    """All sums of one shard, at most 7 numbers a row.

    Args:
        z: [rows, columns] student logits of the shard's real columns; replaced by s (at T = 1 if `u` is None).
        u: [rows, columns] teacher logits, replaced by t; None leaves the divergence out.
        targets: of the labels; None leaves CE out.
        spec: divergence and temperature.

    Returns:
        name -> [rows] in the dtype of z; `merge_statistics` takes the same names.
    """
    temperature = spec.temperature if u is not None else 1.0
    stats = {"student_max": row_max(z)}
    if targets is not None:
        if z.shape[1]:
            label_logit = z.gather(1, targets.column[:, None]).squeeze(1)
            stats["label_logit"] = torch.where(targets.owned, label_logit, 0)
        else:
            stats["label_logit"] = torch.zeros_like(stats["student_max"])
        if temperature != 1.0:
            stats["ce_mass"] = (z - stats["student_max"][:, None]).exp_().sum(dim=1)
    s = shift_(z, stats["student_max"], temperature)
    stats["student_mass"] = s.exp().sum(dim=1)
    if u is not None:
        stats["teacher_max"] = row_max(u)
        t = shift_(u, stats["teacher_max"], temperature)
        stats["teacher_mass"] = t.exp().sum(dim=1)
        stats["divergence"] = DIVERGENCES[spec.divergence].local_sum(s, t)
    return stats


class RowScalars(NamedTuple):
    """What one rank knows of each row once the shards are merged: the values, and all that the gradient needs."""

    ce: Tensor | None
    """[rows] cross-entropy in nats; 0 where unsupervised, NaN where the label is no column of the vocabulary."""
    divergence: Tensor | None
    """[rows] divergence in nats, without T^2."""
    ce_log_norm: Tensor | None
    """[rows] z - max_r z less this is ln q at T = 1."""
    student_log_norm: Tensor
    """[rows] s less this is ln q at T."""
    teacher_log_norm: Tensor | None
    """[rows] t less this is ln p at T."""


def merge_statistics(
    stats: dict[str, Tensor], rank: int, kd: bool, targets: Targets | None, spec: LossSpec
) -> RowScalars:
    """Merge the statistics of all shards, name -> [tp, rows], for the shard `rank`.

    Every rank merges the same numbers in the same order, so the values are bit-equal on all ranks.
    """
    temperature = spec.temperature if kd else 1.0
    top = stats["student_max"]
    student = Softmax.merge(top, stats["student_mass"], temperature)
    ce = ce_log_norm = None
    if targets is not None:
        plain = student if temperature == 1.0 else Softmax.merge(top, stats["ce_mass"], 1.0)
        ce_log_norm = plain.log_norm(rank)
        ce = plain.log_mass + (top.amax(dim=0) - stats["label_logit"].sum(dim=0))
        ce = torch.where(targets.supervised, ce, 0).masked_fill(targets.illegal, torch.nan)
    if not kd:
        return RowScalars(ce, None, ce_log_norm, student.log_norm(rank), None)
    teacher = Softmax.merge(stats["teacher_max"], stats["teacher_mass"], temperature)
    divergence = DIVERGENCES[spec.divergence].value(student, teacher, stats["divergence"])
    return RowScalars(ce, divergence, ce_log_norm, student.log_norm(rank), teacher.log_norm(rank))


def write_gradient_(
    s: Tensor,
    t: Tensor | None,
    scalars: RowScalars,
    targets: Targets | None,
    ce_weight: Tensor | None,
    kd_weight: Tensor | None,
    spec: LossSpec,
) -> Tensor:
    """d (sum of ce_weight * ce + kd_weight * scale * divergence) / dz of this shard, written over s.

    Args:
        s, t: [rows, columns] as `local_statistics` left them; t becomes scratch.
        scalars, targets: of the same rows.
        ce_weight, kd_weight: [rows] in the dtype of s; None leaves that term out.
        spec: divergence and temperature.

    Returns:
        s, [rows, columns].
    """
    if s.shape[1] == 0:
        return s
    ce_gradient = None
    if targets is not None:
        ce_gradient = s if t is None else s.mul(spec.temperature)
        ce_gradient.sub_(scalars.ce_log_norm[:, None]).exp_().mul_(ce_weight[:, None])
        at_label = torch.where(targets.owned, -ce_weight, 0)
        ce_gradient.scatter_add_(1, targets.column[:, None], at_label[:, None])
    if t is None:
        return s
    log_q = s.sub_(scalars.student_log_norm[:, None])
    log_p = t.sub_(scalars.teacher_log_norm[:, None])
    DIVERGENCES[spec.divergence].gradient_(log_q, log_p, scalars.divergence)
    s.mul_((kd_weight * (spec.scale / spec.temperature))[:, None])
    return s if ce_gradient is None else s.add_(ce_gradient)
