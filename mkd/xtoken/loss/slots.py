"""A divergence over the slots (common tokens) of all vocabulary shards and over extra outcomes, by the loss kernels.

The kernels of `mkd.losses` take the extras as one more vocabulary shard, the last: the divergences are those of models
with one tokenizer.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from mkd.losses.divergences import DIVERGENCES
from mkd.losses.inputs import KernelContext, TokenWeights, statistics_dtype
from mkd.losses.kernels.interface import Chunk, Kernels
from mkd.losses.statistics import Softmaxes, Statistics, divergence, sum_dlogq


class Extras(NamedTuple):
    """One model's outcomes beside the slots, the same on all shards."""

    zero: Tensor
    """[chunks] reference logit, at least the largest of the slots."""
    masses: Tensor
    """[k, chunks] log-masses relative to `zero`; -inf is an outcome that is left out."""


class SlotStatistics(NamedTuple):
    """Softmax statistics of the outcomes, merged over all shards."""

    stats: Statistics
    """name -> [tp + 1, chunks] of `softmax_stats` over the slots; the last shard is the extras."""
    softmaxes: Softmaxes
    student: Extras
    teacher: Extras

    @classmethod
    def of(
        cls,
        slots: Statistics,
        student: Extras,
        teacher: Extras,
        context: KernelContext,
        ce_sum_exp: Tensor | None = None,
    ) -> "SlotStatistics":
        """Append the extras to the statistics of the slots.

        Args:
            slots: name -> [tp, chunks] of `softmax_stats` over the slots.
            student, teacher: extras of both models.
            context: divergence and temperature.
            ce_sum_exp: [chunks] mass at T = 1 of everything but the slots, relative to the student's `zero`; only for
                slots that have this statistic.
        """
        shard = {"student_max": student.zero, "student_sum_exp": student.masses.exp().sum(dim=0)}
        shard |= {"teacher_max": teacher.zero, "teacher_sum_exp": teacher.masses.exp().sum(dim=0)}
        if "ce_sum_exp" in slots:
            shard["ce_sum_exp"] = ce_sum_exp
        shortcut = DIVERGENCES[context.spec.divergence].single_pass
        if shortcut is not None:
            a, b = (student, teacher) if shortcut.under == "student" else (teacher, student)
            terms = torch.where(a.masses > -torch.inf, a.masses.exp() * (a.masses - b.masses), 0)
            shard["log_ratio"] = terms.sum(dim=0)
        stats = {name: torch.cat([slots[name], values[None]]) for name, values in shard.items()}
        return cls(stats, Softmaxes.merge(stats, context.temperature), student, teacher)


class SlotDivergence(NamedTuple):
    """The divergence, and what its gradient needs."""

    value: Tensor
    """[chunks] in nats, without T^2."""
    sums: Statistics | None
    by_extras: Tensor
    """[k, chunks] gradient by the student's log-masses of the extras."""

    @classmethod
    def of(
        cls, student: Tensor, teacher: Tensor, outcomes: SlotStatistics, context: KernelContext, kernels: Kernels
    ) -> "SlotDivergence":
        """Compute it from the slots' products [chunks, slots] and the statistics of all outcomes.

        Communication: for jsd, the skewed KLs and tvd an all-gather of 8 bytes per chunk.
        """
        spec, softmaxes = context.spec, outcomes.softmaxes
        entry, sums = DIVERGENCES[spec.divergence], None
        log_q = outcomes.student.masses - softmaxes.student.log_sum_exp
        log_p = outcomes.teacher.masses - softmaxes.teacher.log_sum_exp
        if entry.single_pass is None:
            chunk = used_chunk(student, teacher)
            local = kernels.divergence_stats(chunk, outcomes.stats, slots_context(context))
            extras = {"pointwise": entry.pointwise(log_q, log_p, spec), "dlogq": entry.dlogq(log_q, log_p, spec)}
            gathered = context.shard.exchange(local).wait()
            sums = {name: torch.cat([gathered[name], extras[name].sum(dim=0)[None]]) for name in extras}
        value = divergence(outcomes.stats, sums, softmaxes, spec)
        dlogq_sum = sum_dlogq(outcomes.stats, sums, softmaxes, spec)
        return cls(value, sums, entry.dlogq(log_q, log_p, spec) - log_q.exp() * dlogq_sum)


def slots_context(context: KernelContext) -> KernelContext:
    """Context with one more shard (the extras), and without z-loss, which is in the weights."""
    shard = replace(context.shard, size=context.shard.size + 1)
    return replace(context, spec=replace(context.spec, z_loss=0.0), shard=shard)


def no_labels(tokens: Tensor) -> Tensor:
    """[n] int64, -1: none of the columns is a label."""
    return torch.full(tokens.shape, -1, dtype=torch.int64, device=tokens.device)


def used_chunk(products: Tensor, teacher: Tensor | None = None, with_ce: bool = True) -> Chunk:
    """A loss chunk in which all tokens are used; without a teacher, for the statistics of one model."""
    used = products.new_ones(len(products), dtype=statistics_dtype(products))
    ce_weight = used if with_ce or teacher is None else None
    return Chunk(products, teacher, TokenWeights(no_labels(used), ce_weight, None if teacher is None else used))
