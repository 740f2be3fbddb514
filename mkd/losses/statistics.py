"""Statistics per token that the vocabulary shards exchange, and what follows from them once they are merged.

With z, u the logits of student and teacher, shard r sums over s = (z - max_r z) / T and t = (u - max_r u) / T of its
own real columns. Everything stays relative to the maximum of the shard until the shards are merged, so that large
logits cost no precision. Every rank merges the same numbers in the same order: values are bit-equal on all ranks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mkd.config.loss_spec import LossSpec
from mkd.losses.divergences import DIVERGENCES
from mkd.losses.inputs import KernelContext, TokenWeights
from mkd.losses.output import LossOutput

Statistics = dict[str, Tensor]
"""Name -> numbers per token: [N] of one shard, or [tp, N] of all."""


def as_one_shard(stats: Statistics | None) -> Statistics | None:
    """[N] -> [1, N]: the statistics of a rank that holds the whole vocabulary are merged already."""
    return None if stats is None else {name: values[None] for name, values in stats.items()}


def concatenate(parts: list[Statistics | None]) -> Statistics | None:
    """Statistics of consecutive loss chunks as one, along the tokens; None if the parts are."""
    if parts[0] is None:
        return None
    return {name: torch.cat([part[name] for part in parts], dim=-1) for name in parts[0]}


class Softmax(NamedTuple):
    """One model's softmax normalizer, by shard and merged."""

    shift: Tensor
    """[tp, N] (max of the shard - max of the token) / T, <= 0."""
    sum_exp: Tensor
    """[tp, N] sum of e^s over the shard, relative to the shard's own maximum."""
    log_sum_exp: Tensor
    """[N] ln of the sum over all shards, relative to the token's maximum."""

    @classmethod
    def merge(cls, top: Tensor, sum_exp: Tensor, temperature: float) -> "Softmax":
        """Merge the maxima [tp, N] and sums of exponentials [tp, N] of all shards."""
        # A shard without a finite logit has a very low maximum and a sum of 0. Its shift must stay finite at any
        # temperature: 0 * inf would be NaN.
        shift = ((top - top.amax(dim=0)) / temperature).clamp_min(torch.finfo(top.dtype).min / 4)
        return cls(shift, sum_exp, (shift.exp() * sum_exp).sum(dim=0).log())

    def log_norm(self, rank: int) -> Tensor:
        """[N] the number to subtract from the shard's s for log-probabilities."""
        return self.log_sum_exp - self.shift[rank]


class Softmaxes(NamedTuple):
    """The softmaxes of both models, merged over the shards."""

    student: Softmax
    ce: Softmax
    """The student's at T = 1."""
    teacher: Softmax | None

    @classmethod
    def merge(cls, stats: Statistics, temperature: float) -> "Softmaxes":
        """Merge the statistics of the softmax pass, name -> [tp, N]; the temperature is 1 without a divergence."""
        student = Softmax.merge(stats["student_max"], stats["student_sum_exp"], temperature)
        tempered_ce = "ce_sum_exp" in stats
        ce = Softmax.merge(stats["student_max"], stats["ce_sum_exp"], 1.0) if tempered_ce else student
        has_teacher = "teacher_max" in stats
        teacher = Softmax.merge(stats["teacher_max"], stats["teacher_sum_exp"], temperature) if has_teacher else None
        return cls(student, ce, teacher)


class TokenTerms(NamedTuple):
    """Values per token."""

    ce: Tensor | None
    """[N] cross-entropy in nats; 0 where its weight is 0, NaN where the label is not an id of the vocabulary."""
    kd: Tensor | None
    """[N] divergence in nats, with T^2 if the spec sets it; 0 where its weight is 0."""
    log_sum: Tensor | None
    """[N] ln sum_j exp z_j, 0 where the CE weight is 0; None without CE."""

    @classmethod
    def of(
        cls,
        stats: Statistics,
        sums: Statistics | None,
        softmaxes: Softmaxes,
        tokens: TokenWeights,
        true_vocab: int,
        spec: LossSpec,
    ) -> "TokenTerms":
        """Compute the values from the statistics of both passes, each name -> [tp, N]."""
        ce = log_sum = kd = None
        if tokens.ce_weight is not None:
            supervised = tokens.ce_weight != 0
            top = stats["student_max"].amax(dim=0)
            log_sum = torch.where(supervised, softmaxes.ce.log_sum_exp + top, 0)
            ce = softmaxes.ce.log_sum_exp + (top - stats["label_logit"].sum(dim=0))
            out_of_vocab = supervised & ((tokens.labels < 0) | (tokens.labels >= true_vocab))
            ce = torch.where(supervised, ce, 0).masked_fill(out_of_vocab, torch.nan)
        if tokens.kd_weight is not None:
            value = divergence(stats, sums, softmaxes, spec)
            kd = torch.where(tokens.kd_weight != 0, value * spec.temperature_factor, 0)
        return cls(ce, kd, log_sum)

    def output(self, tokens: TokenWeights, spec: LossSpec) -> LossOutput:
        """The result of the loss, in the dtype of the weights."""
        weight = tokens.kd_weight if tokens.ce_weight is None else tokens.ce_weight
        ce, kd = (None if values is None else values.to(weight.dtype) for values in (self.ce, self.kd))
        return LossOutput(self._weighted_sum(tokens, spec).to(weight.dtype), ce, kd)

    def _weighted_sum(self, tokens: TokenWeights, spec: LossSpec) -> Tensor:
        """Scalar: the sum that is minimized."""
        parts = []
        if self.ce is not None:
            parts.append((tokens.ce_weight * self.ce).sum())
            if spec.z_loss:
                parts.append(spec.z_loss * (tokens.ce_weight * self.log_sum.square()).sum())
        if self.kd is not None:
            parts.append((tokens.kd_weight * self.kd).sum())
        return torch.stack(parts).sum()


def dense_terms(stats: Statistics, sums: Statistics | None, tokens: TokenWeights, context: KernelContext) -> TokenTerms:
    """Values per token with a dense teacher or none, from the statistics of both passes, name -> [tp, N]."""
    softmaxes = Softmaxes.merge(stats, context.temperature)
    return TokenTerms.of(stats, sums, softmaxes, tokens, context.shard.true_vocab, context.spec)


def divergence(stats: Statistics, sums: Statistics | None, softmaxes: Softmaxes, spec: LossSpec) -> Tensor:
    """[N] divergence in nats without T^2, from the statistics of both passes."""
    shortcut = DIVERGENCES[spec.divergence].single_pass
    if shortcut is None:
        return sums["pointwise"].sum(dim=0)
    a, b = softmaxes.student, softmaxes.teacher
    if shortcut.under == "teacher":
        a, b = b, a
    return _kl(a, b, stats["log_ratio"])


def sum_dlogq(stats: Statistics, sums: Statistics | None, softmaxes: Softmaxes, spec: LossSpec) -> Tensor:
    """[N] sum over the vocabulary of the divergence's derivatives by ln q."""
    shortcut = DIVERGENCES[spec.divergence].single_pass
    if shortcut is None:
        return sums["dlogq"].sum(dim=0)
    return shortcut.dlogq_sum(divergence(stats, sums, softmaxes, spec))


def _kl(a: Softmax, b: Softmax, sums: Tensor) -> Tensor:
    """KL(a || b) = E_a[ln a - ln b] from each shard's sum of e^{a_j} (a_j - b_j), [tp, N].

    Both maxima cancel; only each shard's distance from them remains, so that no difference of large numbers is taken.
    """
    relative = sums + a.sum_exp * (a.shift - b.shift)
    weight = a.shift.exp()
    # A shard of weight 0 may hold an infinite ratio.
    expected = torch.where(weight > 0, weight * relative, 0).sum(dim=0) / a.log_sum_exp.exp()
    return b.log_sum_exp - a.log_sum_exp + expected


class ShardScalars(NamedTuple):
    """The numbers per token that turn a shard's logits into log-probabilities; each [N]."""

    student_max: Tensor
    """The largest logit of the shard."""
    student_log_norm: Tensor
    """ln q = (z - student_max) / T - student_log_norm."""
    ce_log_norm: Tensor
    """ln q at T = 1 = z - student_max - ce_log_norm."""
    teacher_max: Tensor | None
    """As the student's; None without a divergence."""
    teacher_log_norm: Tensor | None
    """ln p = (u - teacher_max) / T - teacher_log_norm."""

    @classmethod
    def of(cls, stats: Statistics, softmaxes: Softmaxes, rank: int) -> "ShardScalars":
        """Scalars of the shard `rank`, from the statistics of the softmax pass, name -> [tp, N]."""
        teacher = softmaxes.teacher
        return cls(
            stats["student_max"][rank],
            softmaxes.student.log_norm(rank),
            softmaxes.ce.log_norm(rank),
            None if teacher is None else stats["teacher_max"][rank],
            None if teacher is None else teacher.log_norm(rank),
        )


class GradCoeffs(NamedTuple):
    """Coefficients of each token's gradient by the logits; each [N], None for a term that is not computed.

    d loss / d z_j = ce * q_j(T = 1) - label * [j = label] + kd * (dlogq_j - q_j * dlogq_sum)
    """

    ce: Tensor | None
    """ce_weight * (1 + 2 z_loss ln sum_j exp z_j)."""
    label: Tensor | None
    """ce_weight."""
    kd: Tensor | None
    """kd_weight / T, times T^2 if the spec sets it."""
    dlogq_sum: Tensor | None
    """Sum of dlogq over the whole vocabulary."""

    @classmethod
    def of(
        cls,
        stats: Statistics,
        sums: Statistics | None,
        softmaxes: Softmaxes,
        tokens: TokenWeights,
        spec: LossSpec,
    ) -> "GradCoeffs":
        """Computed from merged statistics; the weights of `tokens` may carry the upstream gradient."""
        ce = kd = total_dlogq = None
        if tokens.ce_weight is not None:
            ce = tokens.ce_weight
            if spec.z_loss:
                log_sum = softmaxes.ce.log_sum_exp + stats["student_max"].amax(dim=0)
                ce = torch.where(ce != 0, ce * (1.0 + 2.0 * spec.z_loss * log_sum), 0)
        if tokens.kd_weight is not None:
            kd = tokens.kd_weight * (spec.temperature_factor / spec.temperature)
            total_dlogq = sum_dlogq(stats, sums, softmaxes, spec)
        return cls(ce, tokens.ce_weight, kd, total_dlogq)
