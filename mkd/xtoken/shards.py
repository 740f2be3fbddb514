"""What the ranks of a vocabulary tell each other: numbers of each row, and masses that are merged from shards."""

from typing import NamedTuple

import torch
from torch import Tensor

from mkd.losses.vocab_shard import VocabShard


def gather_all(shard: VocabShard, *parts: Tensor) -> list[Tensor]:
    """[n] each of this rank -> [tp, n] each of all ranks, in one all-gather."""
    gathered = shard.exchange({"all": torch.cat(parts)}).wait()["all"]
    return list(gathered.split([len(p) for p in parts], dim=1))


class Mass(NamedTuple):
    """Of some columns of some rows: the largest logit / T, and the sum of exp of all relative to it."""

    top: Tensor
    """[...]; the least finite number where no column is possible."""
    sum: Tensor

    @classmethod
    def of(cls, logits: Tensor) -> "Mass":
        """[rows, columns] -> [rows] each."""
        least = torch.finfo(logits.dtype).min
        if logits.shape[1] == 0:
            return cls(logits.new_full(logits.shape[:1], least), logits.new_zeros(logits.shape[:1]))
        top = logits.amax(dim=1).clamp_min(least)
        return cls(top, (logits - top[:, None]).exp_().sum(dim=1))

    def log(self, zero: Tensor) -> Tensor:
        """[rows] ln of the sum of exp(logit - zero) over all shards, from [tp, rows] of each; -inf of nothing."""
        return torch.logsumexp((self.top - zero).clamp_min(torch.finfo(zero.dtype).min / 4) + self.sum.log(), dim=0)


def take_columns(logits: Tensor, columns: Tensor, owned: Tensor) -> Tensor:
    """[rows] what stands in one column of each row, -inf where not owned; an impossible logit is left in its place."""
    if logits.shape[1] == 0:
        return logits.new_full(columns.shape, -torch.inf)
    columns = torch.where(owned, columns, 0)[:, None]
    there = logits.gather(1, columns)
    taken = torch.where(owned[:, None], there, -torch.inf)
    logits.scatter_(1, columns, torch.where(owned[:, None], -torch.inf, there))
    return taken[:, 0]


def put_columns(gradient: Tensor, columns: Tensor, owned: Tensor, values: Tensor) -> None:
    """Add a number of each row to one of its columns, where owned."""
    if gradient.shape[1]:
        columns = torch.where(owned, columns, 0)[:, None]
        gradient.scatter_add_(1, columns, torch.where(owned, values, 0).to(gradient.dtype)[:, None])
