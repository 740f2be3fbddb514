"""GOLD on vocabulary shards: common tokens by a divergence, the others by their sorted probabilities."""

from typing import NamedTuple

import torch
from torch import Tensor

from mkd.config.kd_config import LossSpec
from mkd.losses.vocab_shard import VocabShard
from mkd.xtoken.loss.chunks import Group, Side
from mkd.xtoken.loss.outcomes import Outcomes, compare, drop_one_sided
from mkd.xtoken.loss.shards import Mass, gather_all, log_mass
from mkd.xtoken.vocabulary.cross_vocabulary import CrossVocabulary


class _Masses(NamedTuple):
    """One model's log-masses over all shards; each [chunks]."""

    zero: Tensor
    """The largest logit / T; the others are relative to it."""
    slots: Tensor
    rest: Tensor
    everything: Tensor

    @classmethod
    def merge(cls, slots_top: Tensor, slots_sum: Tensor, rest_top: Tensor, rest_sum: Tensor) -> "_Masses":
        """From `Mass` [tp, chunks] of slots and of the rest."""
        zero = torch.maximum(slots_top, rest_top).amax(dim=0)
        slots, rest = log_mass(slots_top, slots_sum, zero), log_mass(rest_top, rest_sum, zero)
        return cls(zero, slots, rest, torch.logaddexp(slots, rest))


def gold(
    student: Tensor,
    teacher: Tensor,
    group: Group,
    weight: Tensor,
    gradient: Tensor | None,
    *,
    vocabulary: CrossVocabulary,
    shard: VocabShard,
    spec: LossSpec,
    uncommon_top_k: int,
) -> Tensor:
    """Values of the group's chunks, and the gradient.

    Communication: three all-gathers, of 32 bytes a chunk, of 8, and of 8 times `uncommon_top_k` (or the greatest number
    of such columns on a rank, if that is less).

    Args:
        student, teacher, group, weight, gradient: see `group_terms.Divergence`.
        vocabulary, shard, spec: of the loss.
        uncommon_top_k: places of the sorted probabilities that are compared.

    Returns:
        [chunks] in nats, with T^2 if the spec says so.
    """
    s, t = _means(student.div_(spec.temperature), group.student), _means(teacher.div_(spec.temperature), group.teacher)
    s_slots, s_rest = (s.index_select(1, columns) for columns in (vocabulary.slots, vocabulary.others))
    t_slots, t_rest = t.tensor_split([len(vocabulary.slots)], dim=1)
    merged = gather_all(shard, *Mass.of(s_slots), *Mass.of(s_rest), *Mass.of(t_slots), *Mass.of(t_rest))
    q, p = _Masses.merge(*merged[:4]), _Masses.merge(*merged[4:])
    rest, teacher_rest = drop_one_sided(q.rest, p.rest)
    compared = compare(
        Outcomes.normalized(s_slots - q.zero[:, None], q.slots, rest[:, None]),
        Outcomes.normalized(t_slots - p.zero[:, None], p.slots, teacher_rest[:, None]),
        shard,
        spec,
    )
    uncommon = _probabilities(s_rest, q), _probabilities(t_rest, p)
    distance, sign = _sorted_distance(*uncommon, shard, vocabulary, uncommon_top_k)
    if gradient is not None:
        factor = (weight * (spec.scale / spec.temperature))[:, None]
        by_distance = sign.mul_(uncommon[0])
        total = shard.exchange({"sum": by_distance.sum(dim=1)}).wait()["sum"].sum(dim=0)[:, None]
        # Of the distance: every column lies under the softmax that the sorted probabilities come from.
        by_slots = compared.by_slots - total * _probabilities(s_slots, q)
        share = _exp_or_zero(s_rest - q.zero[:, None], rest)
        by_rest = compared.by_others * share + by_distance - total * uncommon[0]
        by_mean = torch.empty_like(s)
        by_mean[:, vocabulary.slots], by_mean[:, vocabulary.others] = by_slots * factor, by_rest * factor
        by_mean /= group.student.count[:, None]
        gradient += by_mean[group.student.chunks]
    return (compared.value + distance) * spec.scale


def _means(values: Tensor, side: Side) -> Tensor:
    """[n, columns] of rows -> [chunks, columns]"""
    return side.totals(values) / side.count[:, None]


def _probabilities(logits: Tensor, masses: _Masses) -> Tensor:
    return (logits - (masses.zero + masses.everything)[:, None]).exp()


def _exp_or_zero(logits: Tensor, log_norm: Tensor) -> Tensor:
    """exp(logits - log_norm), 0 where the norm is that of nothing."""
    return (logits - torch.where(log_norm > -torch.inf, log_norm, torch.inf)[:, None]).exp()


def _sorted_distance(
    student: Tensor, teacher: Tensor, shard: VocabShard, vocabulary: CrossVocabulary, most: int
) -> tuple[Tensor, Tensor]:
    """([rows] sum of |u_r - v_r| over places, [rows, student columns] its derivative by each probability).

    Args:
        student, teacher: [rows, columns] probabilities on this shard.
        shard, vocabulary: of the loss.
        most: places.
    """
    widths = [min(most, width) for width in vocabulary.most_others]
    (mine, where), (theirs, _) = (_largest(x, width) for x, width in zip((student, teacher), widths, strict=True))
    rows = len(student)
    both = [
        x.view(shard.size, rows, -1).transpose(0, 1).flatten(1)
        for x in gather_all(shard, mine.reshape(-1), theirs.reshape(-1))
    ]
    values, order = both[0].sort(dim=1, descending=True, stable=True)
    places = min(most, max(x.shape[1] for x in both))
    values, order = values[:, :places], order[:, :places]
    others = both[1].sort(dim=1, descending=True).values[:, :places]
    pad = torch.nn.functional.pad
    difference = pad(values, (0, places - values.shape[1])) - pad(others, (0, places - others.shape[1]))
    sign = torch.zeros_like(both[0]).scatter_(1, order, difference.sign()[:, : values.shape[1]])
    mine_sign = sign[:, shard.rank * widths[0] : (shard.rank + 1) * widths[0]][:, : where.shape[1]]
    return difference.abs().sum(dim=1), torch.zeros_like(student).scatter_(1, where, mine_sign)


def _largest(values: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """([rows, width] the largest of each row and then zeros, [rows, up to width] their columns)."""
    top, where = values.topk(min(width, values.shape[1]), dim=1)
    return torch.nn.functional.pad(top, (0, width - top.shape[1])), where
