"""A divergence over outcomes that both models define: slots (common tokens) of all vocabulary shards, and extras."""

from typing import NamedTuple

import torch
from torch import Tensor

from mkd.config.loss_spec import LossSpec
from mkd.losses.divergences import DIVERGENCES
from mkd.losses.vocab_shard import VocabShard
from mkd.xtoken.loss.shards import gather_all


class OutcomeLogProbs(NamedTuple):
    """One model's log-probabilities."""

    slots: Tensor
    """[n, slots of this shard]; -inf for an excluded slot."""
    extras: Tensor
    """[n, k] outcomes beside the slots, the same on all shards."""

    @classmethod
    def normalized(cls, slots: Tensor, log_slots: Tensor, extras: Tensor) -> "OutcomeLogProbs":
        """Normalize log-masses with any common offset per item.

        Args:
            slots: [n, slots of this shard].
            log_slots: [n] of all slots together, over all shards.
            extras: [n, k].
        """
        log_norm = torch.logsumexp(torch.cat([log_slots[:, None], extras], dim=1), dim=1, keepdim=True)
        return cls(slots - log_norm, extras - log_norm)


class OutcomeDivergence(NamedTuple):
    """Values, and gradients by the student's log-masses."""

    value: Tensor
    """[n] in nats, without T^2."""
    by_slots: Tensor
    """[n, slots of this shard]"""
    by_extras: Tensor
    """[n, k]"""


def outcome_divergence(
    student: OutcomeLogProbs, teacher: OutcomeLogProbs, shard: VocabShard, spec: LossSpec
) -> OutcomeDivergence:
    """The divergence of `spec`, and its gradient dlogq_j - q_j sum dlogq (`mkd.losses.divergences`).

    Communication: one all-gather of 8 bytes per item.
    """
    entry = DIVERGENCES[spec.divergence]
    dlogq = entry.dlogq(student.slots, teacher.slots, spec)
    sums = gather_all(shard, entry.pointwise(student.slots, teacher.slots, spec).sum(dim=1), dlogq.sum(dim=1))
    value, dlogq_sum = (x.sum(dim=0) for x in sums)
    value = value + entry.pointwise(student.extras, teacher.extras, spec).sum(dim=1)
    dlogq_of_extras = entry.dlogq(student.extras, teacher.extras, spec)
    dlogq_sum = dlogq_sum + dlogq_of_extras.sum(dim=1)
    if entry.single_pass is not None:  # exact, so that the gradient of equal distributions is 0
        dlogq_sum = entry.single_pass.dlogq_sum(value)
    dlogq_sum = dlogq_sum[:, None]
    return OutcomeDivergence(
        value,
        dlogq.sub_(student.slots.exp().mul_(dlogq_sum)),
        dlogq_of_extras - student.extras.exp() * dlogq_sum,
    )


def drop_unmatched(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Log-masses of an outcome in chunks [...], -inf for both models where one of them has no mass in it."""
    matched = (student > -torch.inf) & (teacher > -torch.inf)
    return torch.where(matched, student, -torch.inf), torch.where(matched, teacher, -torch.inf)
