"""What the ranks of a vocabulary tell each other, and single columns that are taken out of a shard and put back."""

from typing import NamedTuple

import torch
from torch import Tensor

from mkd.losses.statistics import Statistics
from mkd.losses.vocab_shard import VocabShard


def gather_all(shard: VocabShard, *parts: Tensor) -> list[Tensor]:
    """[n] each of this rank -> [tp, n] each of all ranks, in one all-gather."""
    gathered = shard.exchange({"all": torch.cat(parts)}).wait()["all"]
    return list(gathered.split([len(p) for p in parts], dim=1))


def gather_parts(shard: VocabShard, parts: dict[str, Statistics]) -> dict[str, Statistics]:
    """The same for statistics of different rows, part -> name -> [rows]."""
    gathered = iter(gather_all(shard, *(x for stats in parts.values() for x in stats.values())))
    return {part: {name: next(gathered) for name in stats} for part, stats in parts.items()}


def log_mass(top: Tensor, mass: Tensor, zero: Tensor, temperature: float = 1.0) -> Tensor:
    """[rows] ln sum_j exp((z_j - zero) / T) over all shards; -inf of nothing.

    Args:
        top: [tp, rows] the largest z of each shard, or a very low number.
        mass: [tp, rows] sum_j exp((z_j - top) / T) of each.
        zero: [rows].
    """
    # Of a shard without a column: 0 * inf would be NaN.
    shift = ((top - zero) / temperature).clamp_min(torch.finfo(top.dtype).min / 4)
    return torch.logsumexp(shift + mass.log(), dim=0)


class Mass(NamedTuple):
    """Of some columns of some rows: the largest logit, and the sum of exp of all relative to it; [rows] each."""

    top: Tensor
    """The least finite number where no column is possible."""
    mass: Tensor

    @classmethod
    def of(cls, logits: Tensor) -> "Mass":
        """Of [rows, columns]."""
        least = torch.finfo(logits.dtype).min
        if logits.shape[1] == 0:
            return cls(logits.new_full(logits.shape[:1], least), logits.new_zeros(logits.shape[:1]))
        top = logits.amax(dim=1).clamp_min(least)
        return cls(top, (logits - top[:, None]).exp_().sum(dim=1))


def take_columns(logits: Tensor, columns: Tensor, owned: Tensor) -> Tensor:
    """[rows] what stands in one column of each row, -inf where not owned; an impossible logit is left in its place."""
    if logits.shape[1] == 0:
        return logits.new_full(columns.shape, -torch.inf)
    columns = torch.where(owned, columns, 0)[:, None]
    there = logits.gather(1, columns)
    logits.scatter_(1, columns, torch.where(owned[:, None], -torch.inf, there))
    return torch.where(owned, there[:, 0], -torch.inf)


def put_columns(gradient: Tensor, columns: Tensor, owned: Tensor, values: Tensor) -> None:
    """Add a number of each row to one of its columns, where owned."""
    if gradient.shape[1]:
        columns = torch.where(owned, columns, 0)[:, None]
        gradient.scatter_add_(1, columns, torch.where(owned, values, 0).to(gradient.dtype)[:, None])
