"""What follows from the statistics of a sparse teacher's rows once the vocabulary shards have exchanged them.

With z the student's logits, shard r sums over its own columns of the head and, apart from them, over its own columns of
the tail, each relative to its own maximum. The tail is never formed as 1 - head: its probability may be far smaller
than the rounding error of the head's.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mkd.losses.divergences import DIVERGENCES
from mkd.losses.logits import Setting
from mkd.losses.rows import Factors, Normalizers, Rows, Softmax, Statistics, Terms
from mkd.losses.sparse.teacher import SparseTarget


class SparseNormalizers(NamedTuple):
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
    def merge(cls, stats: Statistics, target: SparseTarget, setting: Setting) -> "SparseNormalizers":
        """From first-round statistics, name -> [tp, rows]."""
        temperature, tops = setting.temperature, (stats["head_max"], stats["student_max"])
        masses = stats["head_mass"], stats["student_mass"]
        top = torch.maximum(*tops)
        everything = Softmax.merge(torch.cat(tops), torch.cat(masses), temperature)
        ce = Softmax.merge(top, stats["ce_mass"], 1.0) if "ce_mass" in stats else everything
        tail = Softmax.merge(tops[1], masses[1], temperature)
        if target.log_tail is None:
            head = Softmax.merge(tops[0], masses[0], temperature)
            return cls(ce, top, head, tail, torch.full_like(tail.log_mass, -torch.inf))
        distance = (tops[1].amax(dim=0) - top.amax(dim=0)) / temperature
        return cls(ce, top, everything, tail, tail.log_mass + distance - everything.log_mass)

    def of_cross_entropy(self, stats: Statistics) -> tuple[Statistics, Normalizers]:
        """What `Terms` and `Factors` need for CE."""
        return {"student_max": self.top, "label_logit": stats.get("label_logit")}, Normalizers(self.ce, self.ce, None)


def sparse_terms(
    stats: Statistics, sums: Statistics | None, rows: Rows, setting: Setting, target: SparseTarget
) -> Terms:
    """Values of each row from the statistics of the first round and the sums of the second, name -> [tp, rows]."""
    normalizers = SparseNormalizers.merge(stats, target, setting)
    without_kd = Rows(rows.labels, rows.ce_weight, None)
    ce_stats, ce_normalizers = normalizers.of_cross_entropy(stats)
    terms = Terms.of(ce_stats, None, ce_normalizers, without_kd, setting.shard.true_vocab, setting.spec)
    value, _ = _divergence_and_slope_sum(stats, sums, normalizers, setting, target)
    used = rows.kd_weight != 0
    kd = torch.where(used, value * setting.spec.scale, 0).masked_fill(used & target.illegal, torch.nan)
    return terms._replace(kd=kd)


def _divergence_and_slope_sum(
    stats: Statistics,
    sums: Statistics | None,
    normalizers: SparseNormalizers,
    setting: Setting,
    target: SparseTarget,
) -> tuple[Tensor, Tensor]:
    """([rows] divergence in nats without T^2, [rows] sum of its slopes over the categories)."""
    entry, spec = DIVERGENCES[setting.spec.divergence], setting.spec
    categories, shards = normalizers.categories, setting.shard.size
    of_tail = slope_of_tail = torch.zeros_like(categories.log_mass)
    if target.log_tail is not None:
        pair = normalizers.log_q_tail, target.log_tail
        of_tail, slope_of_tail = entry.density(*pair, spec), entry.slope(*pair, spec)
    if entry.one_round is None:
        return sums["density"].sum(dim=0) + of_tail, sums["slope"].sum(dim=0) + slope_of_tail
    shift = categories.shift[:shards]
    if entry.one_round.under == "teacher":
        # sum of p (ln p - ln q), where ln q is shift - log_mass more than the shard took it for
        parts = stats["log_ratio"] + _times(stats["head_share"], categories.log_mass - shift)
        value = parts.sum(dim=0) + of_tail
    else:
        relative = stats["log_ratio"] + _times(stats["head_mass"], shift - categories.log_mass)
        # A shard of weight 0 may hold an infinite ratio.
        weight = (shift - categories.log_mass).exp()
        value = torch.where(weight > 0, weight * relative, 0).sum(dim=0) + of_tail
    return value, entry.one_round.slope_sum(value)


def _times(weight: Tensor, number: Tensor) -> Tensor:
    """The product, 0 where the weight is."""
    return torch.where(weight == 0, 0, weight * number)


class SparseFactors(NamedTuple):
    """What one shard needs for the gradient of its columns; each [rows]."""

    top: Tensor
    """The largest logit of the row."""
    ce_log_mass: Tensor
    """ln q at T = 1 is z - top - ce_log_mass."""
    ce: Tensor | None
    """See `Factors`; as `label`."""
    label: Tensor | None
    head_max: Tensor
    head_log_norm: Tensor
    """ln q of a category of the head = (z - head_max) / T - head_log_norm."""
    kd: Tensor
    """Of slope - q * slope_sum in the head; 0 where the KD weight is."""
    slope_sum: Tensor
    tail_max: Tensor
    tail_log_norm: Tensor
    """ln of a column's share of the tail = (z - tail_max) / T - tail_log_norm."""
    tail: Tensor
    """Of a column's share of the tail."""

    @classmethod
    def of(
        cls, stats: Statistics, sums: Statistics | None, rows: Rows, setting: Setting, target: SparseTarget
    ) -> "SparseFactors":
        """From merged statistics; the weights of `rows` may carry the upstream gradient."""
        normalizers = SparseNormalizers.merge(stats, target, setting)
        ce_stats, ce_normalizers = normalizers.of_cross_entropy(stats)
        ce = Factors.of(ce_stats, None, ce_normalizers, Rows(rows.labels, rows.ce_weight, None), setting.spec)
        rank, spec = setting.shard.rank, setting.spec
        used = rows.kd_weight != 0
        kd = rows.kd_weight * (spec.scale / spec.temperature)
        slope_sum = _divergence_and_slope_sum(stats, sums, normalizers, setting, target)[1]
        tail = torch.zeros_like(kd)
        if target.log_tail is not None:
            slope = DIVERGENCES[spec.divergence].slope(normalizers.log_q_tail, target.log_tail, spec)
            # ln q of every column of the tail rises by its share as the tail does.
            tail = torch.where(used, kd * (slope - normalizers.log_q_tail.exp() * slope_sum), 0)
        return cls(
            normalizers.top.amax(dim=0),
            normalizers.ce.log_mass,
            ce.ce,
            ce.label,
            stats["head_max"][rank],
            normalizers.categories.log_norm(rank),
            kd,
            torch.where(used, slope_sum, 0),
            stats["student_max"][rank],
            normalizers.tail.log_norm(rank),
            tail,
        )
