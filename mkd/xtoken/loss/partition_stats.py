"""What follows from the statistics of a partition once the vocabulary shards have exchanged them.

-ln q = ln(1 + r) of the odds r that another token comes, and r is the sum of the other columns' masses: neither the
loss of a chain of tokens nor 1 less its probability is a difference of nearly equal numbers.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mkd.losses.statistics import Statistics
from mkd.xtoken.loss.chunks import Side
from mkd.xtoken.loss.shards import log_mass


class Masses(NamedTuple):
    """Log-masses of one model at T; those of [chunks] are relative to `zero`."""

    zero: Tensor
    """[chunks] the largest logit of the first row."""
    chunk: Tensor
    """[chunks] of the whole chunk, token by token."""
    begun: Tensor
    """[chunks] of its first token if the chunk is then left; -inf of a chunk of one token."""
    other: Tensor
    """[chunks] of the token that the other model's chunk begins with; -inf where there is none."""
    rest: Tensor
    """[chunks] of all that is neither a slot nor the chunk."""
    then_label: Tensor
    """[n - chunks] logit of each further row's token."""
    then_loss: Tensor
    """[n - chunks] -ln q of it."""

    @classmethod
    def of(
        cls,
        tokens: Statistics,
        slots_top: Tensor,
        columns: Statistics,
        then: Statistics,
        side: Side,
        temperature: float,
    ) -> "Masses":
        """Merge all shards.

        Args:
            tokens: label [tp, n] and other [tp, chunks]: logits, -inf on shards that do not have the token.
            slots_top: [tp, chunks] the largest logit of the slots.
            columns, then: of `softmax_stats`, of the other columns of first rows and of further rows.
            side: of the group.
            temperature: T.
        """
        chunks = len(side.count)
        label, other = tokens["label"].amax(dim=0), tokens["other"].amax(dim=0)
        first, further = label[:chunks], label[chunks:]
        zero = torch.stack([first, other, slots_top.amax(dim=0), columns["student_max"].amax(dim=0)]).amax(dim=0)
        loss = _log_one_plus_exp(log_mass(then["student_max"], then["student_sum_exp"], further, temperature))
        chain = side.totals(torch.cat([torch.zeros_like(first), loss]))
        first, other = (first - zero) / temperature, (other - zero) / temperature
        begun = first + (-torch.expm1(-chain)).log()
        tail = log_mass(columns["student_max"], columns["student_sum_exp"], zero, temperature)
        rest = torch.logsumexp(torch.stack([tail, other, begun]), dim=0)
        return cls(zero, first - chain, begun, other, rest, further, loss)


class CrossEntropies(NamedTuple):
    """Of all rows of a group, at T = 1, whatever their weights."""

    values: Tensor
    """[n]"""
    log_sum: Tensor
    """[n] ln sum_j exp z_j."""
    first_others: Tensor
    """[chunks] the log-mass of all but the slots in first rows, relative to `Masses.zero`."""

    @classmethod
    def of(cls, tokens: Statistics, parts: tuple[Statistics, Statistics, Statistics], zero: Tensor) -> "CrossEntropies":
        """Merge all shards; `parts`: statistics of slots, other columns and further rows."""
        chunks = len(zero)
        label, other = tokens["label"].amax(dim=0), tokens["other"].amax(dim=0)
        first, further = label[:chunks], label[chunks:]
        slots, columns, then = (
            (part["student_max"], part.get("ce_sum_exp", part["student_sum_exp"])) for part in parts
        )
        odds = torch.stack([log_mass(*slots, first), log_mass(*columns, first), other - first])
        others = torch.stack([log_mass(*columns, zero), other - zero, first - zero])
        values = _log_one_plus_exp(torch.cat([torch.logsumexp(odds, dim=0), log_mass(*then, further)]))
        return cls(values, label + values, torch.logsumexp(others, dim=0))


def _log_one_plus_exp(x: Tensor) -> Tensor:
    """ln(1 + e^x), with all digits where x is far below 0."""
    return torch.where(x < 0, x.exp().log1p(), x + (-x).exp().log1p())
