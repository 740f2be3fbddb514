"""The numbers of each token (row) that the vocabulary shards exchange, and what follows from them once merged.

With z, u the logits of student and teacher, shard r sums over s = (z - max_r z) / T and t = (u - max_r u) / T of its
own real columns. Everything stays relative to the maximum of the shard until the shards are merged, so that large
logits cost no precision. Every rank merges the same numbers in the same order: values are bit-equal on all ranks.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mkd.config.kd_config import LossSpec
from mkd.losses.divergences import DIVERGENCES

Statistics = dict[str, Tensor]
"""Numbers of each row by name, [rows] of one shard or [tp, rows] of all."""


@dataclass(frozen=True)
class TokenWeights:
    """Labels and weights of some tokens; None for the weights of a term that is not computed."""

    labels: Tensor
    ce_weight: Tensor | None
    kd_weight: Tensor | None

    @classmethod
    def of(
        cls, labels: Tensor, ce_weight: Tensor | None, kd_weight: Tensor | None, count: int, dtype: torch.dtype
    ) -> "TokenWeights":
        """Labels and weights of `count` tokens, the weights in the dtype of the statistics.

        Raises:
            ValueError: no weights at all, or labels or weights that are not [count].
        """
        if ce_weight is None and kd_weight is None:
            raise ValueError("ce_weight and kd_weight are both None: there is nothing to compute")
        for name, tensor in (("labels", labels), ("ce_weight", ce_weight), ("kd_weight", kd_weight)):
            if tensor is not None and tensor.shape != (count,):
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}; the student has {count} rows")
        weights = (None if w is None else w.detach().to(dtype).contiguous() for w in (ce_weight, kd_weight))
        return cls(labels.contiguous(), *weights)

    def __getitem__(self, rows: slice) -> "TokenWeights":
        return TokenWeights(
            self.labels[rows], *(None if w is None else w[rows] for w in (self.ce_weight, self.kd_weight))
        )

    def times(self, factor: Tensor | float) -> "TokenWeights":
        """The same with all weights multiplied by a scalar."""
        return TokenWeights(self.labels, *(None if w is None else w * factor for w in (self.ce_weight, self.kd_weight)))

    def unused_by_student(self) -> Tensor:
        """[rows, 1] bool: all weights are 0. What such a row holds, NaN included, must have no effect."""
        return torch.stack([w == 0 for w in (self.ce_weight, self.kd_weight) if w is not None]).all(dim=0)[:, None]

    def unused_by_teacher(self) -> Tensor:
        """[rows, 1] bool: the KD weight is 0."""
        return (self.kd_weight == 0)[:, None]

    def weighted_sum(self, terms: "TokenTerms", spec: LossSpec) -> Tensor:
        """Scalar: the sum that is minimized, of the terms of these rows."""
        parts = []
        if terms.ce is not None:
            parts.append((self.ce_weight * terms.ce).sum())
            if spec.z_loss:
                parts.append(spec.z_loss * (self.ce_weight * terms.log_sum.square()).sum())
        if terms.kd is not None:
            parts.append((self.kd_weight * terms.kd).sum())
        return torch.stack(parts).sum()


class Softmax(NamedTuple):
    """One model's softmax normalizer, by shard and merged."""

    shift: Tensor
    """[tp, rows] (max of the shard - max of the row) / T, <= 0."""
    mass: Tensor
    """[tp, rows] sum of e^s over the shard, relative to the shard's own maximum."""
    log_sum_exp: Tensor
    """[rows] ln of the row's whole mass, relative to the row's maximum."""

    @classmethod
    def merge(cls, top: Tensor, mass: Tensor, temperature: float) -> "Softmax":
        """Merge the maxima [tp, rows] and masses [tp, rows] of all shards."""
        # A shard without a finite logit has a very low maximum and mass 0. Its shift must stay finite at any
        # temperature: 0 * inf would be NaN.
        shift = ((top - top.amax(dim=0)) / temperature).clamp_min(torch.finfo(top.dtype).min / 4)
        return cls(shift, mass, (shift.exp() * mass).sum(dim=0).log())

    def log_norm(self, rank: int) -> Tensor:
        """[rows] what to subtract from the shard's s to get log-probabilities."""
        return self.log_sum_exp - self.shift[rank]


class Softmaxes(NamedTuple):
    """The softmaxes of both models after the first round."""

    student: Softmax
    ce: Softmax
    """The student's at T = 1."""
    teacher: Softmax | None

    @classmethod
    def merge(cls, stats: Statistics, temperature: float) -> "Softmaxes":
        """From first-round statistics, name -> [tp, rows]; the temperature is 1 if there is no divergence."""
        student = Softmax.merge(stats["student_max"], stats["student_sum_exp"], temperature)
        tempered_ce = "ce_sum_exp" in stats
        ce = Softmax.merge(stats["student_max"], stats["ce_sum_exp"], 1.0) if tempered_ce else student
        has_teacher = "teacher_max" in stats
        teacher = Softmax.merge(stats["teacher_max"], stats["teacher_sum_exp"], temperature) if has_teacher else None
        return cls(student, ce, teacher)


class TokenTerms(NamedTuple):
    """Values of each row."""

    ce: Tensor | None
    """[rows] cross-entropy in nats; 0 where its weight is 0, NaN where the label is no column of the vocabulary."""
    kd: Tensor | None
    """[rows] divergence in nats, with T^2 if the spec says so; 0 where its weight is 0."""
    log_sum: Tensor | None
    """[rows] ln sum_j exp z_j, 0 where the CE weight is 0; None without CE."""

    @classmethod
    def of(
        cls,
        stats: Statistics,
        sums: Statistics | None,
        softmaxes: Softmaxes,
        rows: TokenWeights,
        true_vocab: int,
        spec: LossSpec,
    ) -> "TokenTerms":
        """From the statistics of the first round and the sums of the second, each name -> [tp, rows]."""
        ce = log_sum = kd = None
        if rows.ce_weight is not None:
            supervised = rows.ce_weight != 0
            top = stats["student_max"].amax(dim=0)
            log_sum = torch.where(supervised, softmaxes.ce.log_sum_exp + top, 0)
            ce = softmaxes.ce.log_sum_exp + (top - stats["label_logit"].sum(dim=0))
            out_of_vocab = supervised & ((rows.labels < 0) | (rows.labels >= true_vocab))
            ce = torch.where(supervised, ce, 0).masked_fill(out_of_vocab, torch.nan)
        if rows.kd_weight is not None:
            value, _ = divergence_and_dlogq_sum(stats, sums, softmaxes, spec)
            kd = torch.where(rows.kd_weight != 0, value * spec.scale, 0)
        return cls(ce, kd, log_sum)


def divergence_and_dlogq_sum(
    stats: Statistics, sums: Statistics | None, softmaxes: Softmaxes, spec: LossSpec
) -> tuple[Tensor, Tensor]:
    """([rows] divergence in nats without T^2, [rows] sum of its dlogq terms over the vocabulary)."""
    shortcut = DIVERGENCES[spec.divergence].single_pass
    if shortcut is None:
        return sums["pointwise"].sum(dim=0), sums["dlogq"].sum(dim=0)
    a, b = softmaxes.student, softmaxes.teacher
    if shortcut.under == "teacher":
        a, b = b, a
    value = _kl(a, b, stats["log_ratio"])
    return value, shortcut.dlogq_sum(value)


def _kl(a: Softmax, b: Softmax, sums: Tensor) -> Tensor:
    """KL(a || b) = E_a[ln a - ln b] from each shard's sum of e^{a_j} (a_j - b_j), [tp, rows].

    Both maxima cancel; only each shard's distance from them remains, so that no difference of large numbers is taken.
    """
    relative = sums + a.mass * (a.shift - b.shift)
    weight = a.shift.exp()
    # A shard of weight 0 may hold an infinite ratio.
    expected = torch.where(weight > 0, weight * relative, 0).sum(dim=0) / a.log_sum_exp.exp()
    return b.log_sum_exp - a.log_sum_exp + expected


class ShardScalars(NamedTuple):
    """What one shard needs of each row to turn logits into log-probabilities; each [rows]."""

    student_max: Tensor
    student_log_norm: Tensor
    """ln q = (z - student_max) / T - student_log_norm."""
    ce_log_norm: Tensor
    """ln q at T = 1 = z - student_max - ce_log_norm."""
    teacher_max: Tensor | None
    teacher_log_norm: Tensor | None

    @classmethod
    def of(cls, stats: Statistics, softmaxes: Softmaxes, rank: int) -> "ShardScalars":
        """For the shard `rank`, from the first round's statistics, name -> [tp, rows]."""
        teacher = softmaxes.teacher
        return cls(
            stats["student_max"][rank],
            softmaxes.student.log_norm(rank),
            softmaxes.ce.log_norm(rank),
            None if teacher is None else stats["teacher_max"][rank],
            None if teacher is None else teacher.log_norm(rank),
        )


class GradCoeffs(NamedTuple):
    """What multiplies the parts of each row's gradient; each [rows], None for a term that is not computed."""

    ce: Tensor | None
    """Of q at T = 1: ce_weight * (1 + 2 z_loss ln sum_j exp z_j)."""
    label: Tensor | None
    """Taken from the label's column: ce_weight."""
    kd: Tensor | None
    """Of dlogq - q * dlogq_sum: kd_weight, T^2 if the spec says so, and 1 / T."""
    dlogq_sum: Tensor | None

    @classmethod
    def of(
        cls,
        stats: Statistics,
        sums: Statistics | None,
        softmaxes: Softmaxes,
        rows: TokenWeights,
        spec: LossSpec,
    ) -> "GradCoeffs":
        """From merged statistics; the weights of `rows` may carry the upstream gradient."""
        ce = kd = dlogq_sum = None
        if rows.ce_weight is not None:
            ce = rows.ce_weight
            if spec.z_loss:
                log_sum = softmaxes.ce.log_sum_exp + stats["student_max"].amax(dim=0)
                ce = torch.where(ce != 0, ce * (1.0 + 2.0 * spec.z_loss * log_sum), 0)
        if rows.kd_weight is not None:
            kd = rows.kd_weight * (spec.scale / spec.temperature)
            dlogq_sum = divergence_and_dlogq_sum(stats, sums, softmaxes, spec)[1]
        return cls(ce, rows.ce_weight, kd, dlogq_sum)
