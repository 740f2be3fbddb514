"""The divergence over a partition of what may follow: `mkd.xtoken.reference.partition_kl` on vocabulary shards.

With s = logits / T, at the first row of a chunk, everything relative to that row's largest s:

    slots   s_j of a common token, but for those that the chunk begins with on either side
    E       s_y - L, with y the chunk's first token and L = sum over its further rows of -ln q(token)
    REST    the other columns, and beside them s_y + ln(1 - e^-L): the chunk is begun and left

-ln q = ln(1 + r) of the odds r that another token comes, whose masses are summed themselves: neither L nor 1 - e^-L is
a difference of nearly equal numbers. Tokens that a chunk begins with are taken out of the logits of its row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mkd.config import LossSpec
from mkd.losses.vocab_shard import VocabShard
from mkd.xtoken.chunks import Group, Side
from mkd.xtoken.outcomes import Outcomes, compare, drop_one_sided
from mkd.xtoken.shards import Mass, gather_all, put_columns, take_columns
from mkd.xtoken.vocabulary import CrossVocabulary


class _Statistics(NamedTuple):
    """One model's numbers of one shard, or of all with [tp, ...] in place of [...]."""

    label: Tensor
    """[n] s of each row's token; -inf where another shard has it."""
    other: Tensor
    """[chunks] at first rows, s of the token that the other model's chunk begins with; -inf where there is none."""
    slots_top: Tensor
    """[chunks] `Mass` of the slots, then of the other columns."""
    slots_sum: Tensor
    columns_top: Tensor
    columns_sum: Tensor
    then_top: Tensor
    """[n - chunks] `Mass` of all columns but the token's, of further rows."""
    then_sum: Tensor

    @classmethod
    def of(cls, label: Tensor, other: Tensor, slots: Tensor, columns: Tensor, then: Tensor) -> "_Statistics":
        return cls(label, other, *Mass.of(slots), *Mass.of(columns), *Mass.of(then))


class _Masses(NamedTuple):
    """One model's log-masses over all shards; [chunks] are relative to `zero`."""

    zero: Tensor
    """[chunks] the largest s of the first row."""
    slots: Tensor
    """[chunks] of all slots together."""
    label: Tensor
    """[chunks] of the first token."""
    other: Tensor
    chain: Tensor
    """[chunks] L."""
    begun: Tensor
    """[chunks] of the first token if the chunk is then left; -inf of a chunk of one token."""
    rest: Tensor
    then_label: Tensor
    """[n - chunks] s of each further row's token."""
    then_loss: Tensor
    """[n - chunks] -ln q of it."""

    @classmethod
    def merge(cls, stats: _Statistics, side: Side) -> "_Masses":
        """From all shards."""
        chunks = len(side.count)
        label, other = stats.label.amax(dim=0), stats.other.amax(dim=0)
        first, further = label[:chunks], label[chunks:]
        zero = torch.stack([first, other, stats.slots_top.amax(dim=0), stats.columns_top.amax(dim=0)]).amax(dim=0)
        slots = Mass(stats.slots_top, stats.slots_sum).log(zero)
        columns = Mass(stats.columns_top, stats.columns_sum).log(zero)
        loss = _log_one_plus_exp(Mass(stats.then_top, stats.then_sum).log(further))
        chain = side.totals(torch.cat([torch.zeros_like(first), loss]))
        begun = (first - zero) + (-torch.expm1(-chain)).log()
        rest = torch.logsumexp(torch.stack([columns, other - zero, begun]), dim=0)
        return cls(zero, slots, first - zero, other - zero, chain, begun, rest, further, loss)

    def outcomes(self, slots: Tensor, rest: Tensor) -> Outcomes:
        """From s of this shard's slots [chunks, slots], and the log-mass [chunks] that is to count as REST."""
        others = torch.stack([self.label - self.chain, rest], dim=1)
        return Outcomes.normalised(slots - self.zero[:, None], self.slots, others)


class _Gradient(NamedTuple):
    """By the student's s; each [chunks]."""

    label: Tensor
    """By the first token's column."""
    other: Tensor
    """By the column of the token that the teacher's chunk begins with."""
    chain: Tensor
    """By L."""
    rest: Tensor
    log_rest: Tensor
    """The gradient by another column of log-mass m is rest * exp(m - log_rest)."""

    @classmethod
    def of(cls, q: _Masses, rest: Tensor, by_chunk: Tensor, by_rest: Tensor) -> "_Gradient":
        """From the gradients [chunks] by the log-masses of E and REST; `rest` as in `_Masses.outcomes`."""
        log_rest = torch.where(rest > -torch.inf, rest, torch.inf)

        def share(mass: Tensor) -> Tensor:
            return by_rest * (mass - log_rest).exp()

        chain = share(q.label - q.chain) - by_chunk
        return cls(by_chunk + share(q.begun), share(q.other), chain, by_rest, log_rest)


def partition_kl(
    student: Tensor,
    teacher: Tensor,
    group: Group,
    vocabulary: CrossVocabulary,
    shard: VocabShard,
    spec: LossSpec,
    weight: Tensor,
    gradient: Tensor | None,
) -> Tensor:
    """Values of the group's chunks, and the gradient.

    Communication: two all-gathers, of 24 bytes a chunk and 12 a further row for each model, then of 8 a chunk.

    Args:
        student, teacher: [n, columns] logits, overwritten.
        group, vocabulary, shard, spec: of the loss; the shard is the student's.
        weight: [chunks] of the values in the gradient.
        gradient: [n, student columns]; the gradient of sum weight * value by the student's logits is added.

    Returns:
        [chunks] divergence in nats, with T^2 if the spec says so.
    """
    chunks = len(group.numbers)
    y, t = group.student.labels, group.teacher.labels
    of_label = vocabulary.student_columns_of(y)
    of_other = vocabulary.student_columns_of(_but(vocabulary.pair_of_teacher[t[:chunks]], y[:chunks]))
    pair_of_label = _but(vocabulary.pair_of_student[y[:chunks]], t[:chunks])

    z, u = student.div_(spec.temperature), teacher.div_(spec.temperature)
    taken = take_columns(z, *of_label), take_columns(z[:chunks], *of_other)
    z_slots, z_columns = (z[:chunks].index_select(1, c) for c in (vocabulary.slots, vocabulary.others))
    mine = _Statistics.of(*taken, z_slots, z_columns, z[chunks:])
    taken = (
        take_columns(u, *vocabulary.teacher_columns_of(t)),
        take_columns(u[:chunks], *vocabulary.teacher_columns_of(pair_of_label)),
    )
    u_slots, u_columns = u[:chunks].tensor_split([len(vocabulary.slots)], dim=1)
    theirs = _Statistics.of(*taken, u_slots, u_columns, u[chunks:])

    merged = gather_all(shard, *mine, *theirs)
    q = _Masses.merge(_Statistics(*merged[: len(mine)]), group.student)
    p = _Masses.merge(_Statistics(*merged[len(mine) :]), group.teacher)
    rest, teacher_rest = drop_one_sided(q.rest, p.rest)
    compared = compare(q.outcomes(z_slots, rest), p.outcomes(u_slots, teacher_rest), shard, spec)
    if gradient is not None:
        factor = (weight * (spec.scale / spec.temperature))[:, None]
        by = _Gradient.of(q, rest, *(compared.by_others * factor).unbind(dim=1))
        of_slots, of_columns = compared.by_slots.mul_(factor), _exp_scaled(z_columns, q.zero + by.log_rest, by.rest)
        gradient[:chunks].index_add_(1, vocabulary.slots, of_slots)
        gradient[:chunks].index_add_(1, vocabulary.others, of_columns)
        put_columns(gradient[:chunks], *of_other, by.other)
        of_further = by.chain[group.student.chunks[chunks:]]
        gradient[chunks:] += _exp_scaled(z[chunks:], q.then_label + q.then_loss, of_further)
        put_columns(gradient, *of_label, torch.cat([by.label, of_further * torch.expm1(-q.then_loss)]))
    return compared.value * spec.scale


def _but(ids: Tensor, excluded: Tensor) -> Tensor:
    """`ids`, and -1 where one is the excluded one."""
    return torch.where(ids == excluded, -1, ids)


def _exp_scaled(logits: Tensor, log_norm: Tensor, factor: Tensor) -> Tensor:
    """factor * exp(logits - log_norm) of [rows, columns], in place."""
    return logits.sub_(log_norm[:, None]).exp_().mul_(factor[:, None])


def _log_one_plus_exp(x: Tensor) -> Tensor:
    """ln(1 + e^x), with all digits where x is far below 0."""
    return torch.where(x < 0, x.exp().log1p(), x + (-x).exp().log1p())
