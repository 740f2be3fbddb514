"""GOLD on vocabulary shards: a divergence over common tokens, and the distance of the others' sorted probabilities."""

from typing import NamedTuple

import torch
from torch import Tensor

from mkd.config.loss_spec import LossSpec
from mkd.losses.vocab_shard import VocabShard
from mkd.xtoken.loss.chunks import ChunkGroup, GroupTokens
from mkd.xtoken.loss.outcomes import OutcomeLogProbs, drop_unmatched, outcome_divergence
from mkd.xtoken.loss.shards import ShardSoftmax, gather_all, merged_log_sum_exp
from mkd.xtoken.vocabulary.cross_vocabulary import CrossVocabulary


class VocabularyMasses(NamedTuple):
    """One model's log-masses over all shards, [chunks] each."""

    zero: Tensor
    """The largest logit / T; the other fields are relative to it."""
    slots: Tensor
    """All common tokens."""
    rest: Tensor
    """All other tokens."""
    everything: Tensor
    """All tokens."""

    @classmethod
    def merge(cls, slots_top: Tensor, slots_sum: Tensor, rest_top: Tensor, rest_sum: Tensor) -> "VocabularyMasses":
        """Merge the `ShardSoftmax` [tp, chunks] of slots and of the rest."""
        zero = torch.maximum(slots_top, rest_top).amax(dim=0)
        slots, rest = merged_log_sum_exp(slots_top, slots_sum, zero), merged_log_sum_exp(rest_top, rest_sum, zero)
        return cls(zero, slots, rest, torch.logaddexp(slots, rest))


def gold(
    student: Tensor,
    teacher: Tensor,
    group: ChunkGroup,
    weight: Tensor,
    gradient: Tensor | None,
    *,
    vocabulary: CrossVocabulary,
    shard: VocabShard,
    spec: LossSpec,
    uncommon_top_k: int,
) -> Tensor:
    """Values of the group's chunks, and the gradient.

    Communication: three all-gathers per chunk, of 32 bytes, of 8, and of 8 times `uncommon_top_k` (or the
    greatest number of uncommon columns on a rank, if that is less).

    Args:
        student, teacher, group, weight, gradient: see `mkd.xtoken.loss.chunk_groups.Divergence`.
        vocabulary, shard, spec: see `xtoken_loss`.
        uncommon_top_k: number of sorted probabilities that are compared.

    Returns:
        [chunks] in nats, with T^2 if the spec sets it.
    """
    s, t = _means(student.div_(spec.temperature), group.student), _means(teacher.div_(spec.temperature), group.teacher)
    s_slots, s_rest = (s.index_select(1, columns) for columns in (vocabulary.slots, vocabulary.uncommon))
    t_slots, t_rest = t.tensor_split([len(vocabulary.slots)], dim=1)
    merged = gather_all(
        shard, *ShardSoftmax.of(s_slots), *ShardSoftmax.of(s_rest), *ShardSoftmax.of(t_slots), *ShardSoftmax.of(t_rest)
    )
    q, p = VocabularyMasses.merge(*merged[:4]), VocabularyMasses.merge(*merged[4:])
    rest, teacher_rest = drop_unmatched(q.rest, p.rest)
    common = outcome_divergence(
        OutcomeLogProbs.normalized(s_slots - q.zero[:, None], q.slots, rest[:, None]),
        OutcomeLogProbs.normalized(t_slots - p.zero[:, None], p.slots, teacher_rest[:, None]),
        shard,
        spec,
    )
    uncommon = _probabilities(s_rest, q), _probabilities(t_rest, p)
    (own, where), (own_teacher, _) = (
        largest(x, min(uncommon_top_k, width)) for x, width in zip(uncommon, vocabulary.max_uncommon, strict=True)
    )
    distance = compare_sorted((own, where), own_teacher, s_rest.shape[1], shard, uncommon_top_k)
    if gradient is not None:
        factor = (weight * (spec.temperature_factor / spec.temperature))[:, None]
        by_distance = distance.sign.mul_(uncommon[0])
        total = shard.exchange({"sum": by_distance.sum(dim=1)}).wait()["sum"].sum(dim=0)[:, None]
        # The distance also has a gradient by slots: they are in the softmax of the sorted probabilities.
        by_slots = common.by_slots - total * _probabilities(s_slots, q)
        share = _exp_or_zero(s_rest - q.zero[:, None], rest)
        by_rest = common.by_extras * share + by_distance - total * uncommon[0]
        by_mean = torch.empty_like(s)
        by_mean[:, vocabulary.slots], by_mean[:, vocabulary.uncommon] = by_slots * factor, by_rest * factor
        by_mean /= group.student.count[:, None]
        gradient += by_mean[group.student.chunks]
    return (common.value + distance.value) * spec.temperature_factor


def _means(values: Tensor, tokens: GroupTokens) -> Tensor:
    """[n, columns] per token -> [chunks, columns] means."""
    return tokens.totals(values) / tokens.count[:, None]


def _probabilities(logits: Tensor, masses: VocabularyMasses) -> Tensor:
    return (logits - (masses.zero + masses.everything)[:, None]).exp()


def _exp_or_zero(logits: Tensor, log_norm: Tensor) -> Tensor:
    """exp(logits - log_norm), 0 where log_norm is -inf."""
    return (logits - torch.where(log_norm > -torch.inf, log_norm, torch.inf)[:, None]).exp()


class SortedDistance(NamedTuple):
    """The distance of sorted probabilities."""

    value: Tensor
    """[n] sum over r of |u_r - v_r|."""
    sign: Tensor
    """[n, columns] its derivative by each of the student's probabilities on this shard."""
    sum: Tensor
    """[n] sum over all shards of the derivatives times the probabilities."""


def compare_sorted(
    student: tuple[Tensor, Tensor], teacher: Tensor, columns: int, shard: VocabShard, most: int
) -> SortedDistance:
    """The distance of the largest probabilities of both models.

    Args:
        student: `largest` probabilities of this shard.
        teacher: likewise, without their columns.
        columns: number of the student's columns.
        shard: see `xtoken_loss`.
        most: number of sorted probabilities.
    """
    (own, where), count, width = student, len(teacher), student[0].shape[1]
    both = [
        x.view(shard.size, count, -1).transpose(0, 1).flatten(1)
        for x in gather_all(shard, own.reshape(-1), teacher.reshape(-1))
    ]
    values, order = both[0].sort(dim=1, descending=True, stable=True)
    length = min(most, max(x.shape[1] for x in both))
    values, order = values[:, :length], order[:, :length]
    difference = padded(values, length) - padded(both[1].sort(dim=1, descending=True).values[:, :length], length)
    sorted_sign = difference.sign()[:, : values.shape[1]]
    sign = torch.zeros_like(both[0]).scatter_(1, order, sorted_sign)
    own_sign = sign[:, shard.rank * width : (shard.rank + 1) * width][:, : where.shape[1]]
    return SortedDistance(
        difference.abs().sum(dim=1),
        own.new_zeros((count, columns)).scatter_(1, where, own_sign),
        (sorted_sign * values).sum(dim=1),
    )


def largest(values: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """([n, width] the largest values of each item, padded with zeros; [n, up to width] their columns)."""
    top, where = values.topk(min(width, values.shape[1]), dim=1)
    return padded(top, width), where


def padded(values: Tensor, width: int) -> Tensor:
    """[n, up to width] -> [n, width], with zeros."""
    return torch.nn.functional.pad(values, (0, width - values.shape[1]))
