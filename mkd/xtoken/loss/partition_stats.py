"""Statistics of the partition of one model's outcomes, merged over the vocabulary shards.

-ln q = ln(1 + r) with r the odds of any other token, and r is the sum of the other columns' masses: so neither the loss
of a sequence of tokens nor 1 minus its probability is a difference of nearly equal numbers.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mkd.losses.statistics import Statistics
from mkd.xtoken.loss.chunks import GroupTokens
from mkd.xtoken.loss.shards import merged_log_sum_exp


class PartitionStats(NamedTuple):
    """Log-masses of one model's outcomes at T; those of [chunks] are relative to `zero`."""

    zero: Tensor
    """[chunks] largest logit at the chunk's first token."""
    chunk: Tensor
    """[chunks] E: the whole chunk, token by token."""
    started_then_left: Tensor
    """[chunks] the first token followed by another one than in the chunk; -inf for a chunk of one token."""
    other: Tensor
    """[chunks] the token that the other model's chunk begins with; -inf if it is not in the vocabulary."""
    rest: Tensor
    """[chunks] REST: everything that is neither a slot nor the chunk."""
    continuation_label: Tensor
    """[n - chunks] logit of each further token of a chunk."""
    continuation_loss: Tensor
    """[n - chunks] -ln q of each further token."""

    @classmethod
    def of(
        cls,
        labels: Statistics,
        slots_top: Tensor,
        columns: Statistics,
        continuation: Statistics,
        tokens: GroupTokens,
        temperature: float,
    ) -> "PartitionStats":
        """Merge all shards.

        Args:
            labels: "label" [tp, n] and "other" [tp, chunks]: logits, -inf on shards that do not hold the token.
            slots_top: [tp, chunks] the largest logit of the slots.
            columns, continuation: `softmax_stats` of the other columns at first tokens, and at further tokens.
            tokens: the model's tokens in the group.
            temperature: T.
        """
        chunks = len(tokens.count)
        label, other = labels["label"].amax(dim=0), labels["other"].amax(dim=0)
        first, further = label[:chunks], label[chunks:]
        zero = torch.stack([first, other, slots_top.amax(dim=0), columns["student_max"].amax(dim=0)]).amax(dim=0)
        log_odds = merged_log_sum_exp(
            continuation["student_max"], continuation["student_sum_exp"], further, temperature
        )
        loss = _log_one_plus_exp(log_odds)
        total_loss = tokens.totals(torch.cat([torch.zeros_like(first), loss]))
        first, other = (first - zero) / temperature, (other - zero) / temperature
        started_then_left = first + (-torch.expm1(-total_loss)).log()
        tail = merged_log_sum_exp(columns["student_max"], columns["student_sum_exp"], zero, temperature)
        rest = torch.logsumexp(torch.stack([tail, other, started_then_left]), dim=0)
        return cls(zero, first - total_loss, started_then_left, other, rest, further, loss)


class CrossEntropies(NamedTuple):
    """Cross-entropies of all student tokens of a group, at T = 1, whatever their weights."""

    values: Tensor
    """[n]"""
    log_sum: Tensor
    """[n] ln sum_j exp z_j."""
    first_uncommon: Tensor
    """[chunks] log-mass of everything but the slots at first tokens, relative to `PartitionStats.zero`."""

    @classmethod
    def of(cls, labels: Statistics, parts: tuple[Statistics, Statistics, Statistics], zero: Tensor) -> "CrossEntropies":
        """Merge all shards.

        Args:
            labels: see `PartitionStats.of`.
            parts: `softmax_stats` of the slots and of the other columns at first tokens, and at further tokens.
            zero: see `PartitionStats`.
        """
        chunks = len(zero)
        label, other = labels["label"].amax(dim=0), labels["other"].amax(dim=0)
        first, further = label[:chunks], label[chunks:]
        slots, columns, continuation = (
            (part["student_max"], part.get("ce_sum_exp", part["student_sum_exp"])) for part in parts
        )
        odds = torch.stack([merged_log_sum_exp(*slots, first), merged_log_sum_exp(*columns, first), other - first])
        uncommon = torch.stack([merged_log_sum_exp(*columns, zero), other - zero, first - zero])
        log_odds = torch.cat([torch.logsumexp(odds, dim=0), merged_log_sum_exp(*continuation, further)])
        values = _log_one_plus_exp(log_odds)
        return cls(values, label + values, torch.logsumexp(uncommon, dim=0))


def _log_one_plus_exp(x: Tensor) -> Tensor:
    """ln(1 + e^x), with full relative precision for very negative x."""
    return torch.where(x < 0, x.exp().log1p(), x + (-x).exp().log1p())
