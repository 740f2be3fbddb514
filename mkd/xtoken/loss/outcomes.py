"""A divergence over outcomes that both models know: the slots of all vocabulary shards, and some others beside them."""

from typing import NamedTuple

import torch
from torch import Tensor

from mkd.config.kd_config import LossSpec
from mkd.losses.divergences import DIVERGENCES
from mkd.losses.vocab_shard import VocabShard
from mkd.xtoken.loss.shards import gather_all


class Outcomes(NamedTuple):
    """One model's log-probabilities."""

    slots: Tensor
    """[rows, slots of this shard]; -inf for a slot that takes no part."""
    others: Tensor
    """[rows, k], the same on all shards."""

    @classmethod
    def normalized(cls, slots: Tensor, log_slots: Tensor, others: Tensor) -> "Outcomes":
        """From log-masses in any common unit of the row.

        Args:
            slots: [rows, slots of this shard].
            log_slots: [rows] of all slots together, over all shards.
            others: [rows, k].
        """
        log_norm = torch.logsumexp(torch.cat([log_slots[:, None], others], dim=1), dim=1, keepdim=True)
        return cls(slots - log_norm, others - log_norm)


class Compared(NamedTuple):
    """Values, and gradients by the student's log-masses."""

    value: Tensor
    """[rows] in nats, without T^2."""
    by_slots: Tensor
    """[rows, slots of this shard]"""
    by_others: Tensor
    """[rows, k]"""


def compare(student: Outcomes, teacher: Outcomes, shard: VocabShard, spec: LossSpec) -> Compared:
    """The divergence of `spec` between both, and e_j - q_j sum e with the slopes e (`mkd.losses.divergences`).

    Communication: one all-gather of 8 bytes a row.
    """
    entry = DIVERGENCES[spec.divergence]
    slope = entry.dlogq(student.slots, teacher.slots, spec)
    sums = gather_all(shard, entry.pointwise(student.slots, teacher.slots, spec).sum(dim=1), slope.sum(dim=1))
    value, slope_sum = (x.sum(dim=0) for x in sums)
    value = value + entry.pointwise(student.others, teacher.others, spec).sum(dim=1)
    slope_of_others = entry.dlogq(student.others, teacher.others, spec)
    slope_sum = slope_sum + slope_of_others.sum(dim=1)
    if entry.single_pass is not None:  # exact, so that the gradient of equal distributions is 0
        slope_sum = entry.single_pass.dlogq_sum(value)
    slope_sum = slope_sum[:, None]
    return Compared(
        value,
        slope.sub_(student.slots.exp().mul_(slope_sum)),
        slope_of_others - student.others.exp() * slope_sum,
    )


def drop_one_sided(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Log-masses of an outcome, -inf on both sides where one of them does not know it."""
    known = (student > -torch.inf) & (teacher > -torch.inf)
    return torch.where(known, student, -torch.inf), torch.where(known, teacher, -torch.inf)
