"""Exchange of statistics between vocabulary shards, and access to single columns of a shard."""

from typing import NamedTuple

import torch
from torch import Tensor

from mkd.losses.statistics import Statistics
from mkd.losses.vocab_shard import VocabShard


def gather_all(shard: VocabShard, *parts: Tensor) -> list[Tensor]:
    """[n] tensors of this rank -> [tp, n] tensors of all ranks, in one all-gather."""
    gathered = shard.exchange({"all": torch.cat(parts)}).wait()["all"]
    return list(gathered.split([len(p) for p in parts], dim=1))


def gather_parts(shard: VocabShard, parts: dict[str, Statistics]) -> dict[str, Statistics]:
    """Like `gather_all`, for statistics of different lengths: part -> name -> [n]."""
    gathered = iter(gather_all(shard, *(x for stats in parts.values() for x in stats.values())))
    return {part: {name: next(gathered) for name in stats} for part, stats in parts.items()}


def merged_log_sum_exp(top: Tensor, sum_exp: Tensor, zero: Tensor, temperature: float = 1.0) -> Tensor:
    """[n] ln sum_j exp((z_j - zero) / T) over all shards; -inf for no columns.

    Args:
        top: [tp, n] the largest z of each shard, or a very low number.
        sum_exp: [tp, n] sum_j exp((z_j - top) / T) of each shard.
        zero: [n] reference logit.
        temperature: T.
    """
    # The clamp is for shards without a column: 0 * inf would be NaN.
    shift = ((top - zero) / temperature).clamp_min(torch.finfo(top.dtype).min / 4)
    return torch.logsumexp(shift + sum_exp.log(), dim=0)


class ShardSoftmax(NamedTuple):
    """Softmax statistics of one shard's columns, [n] each."""

    top: Tensor
    """The largest logit; the lowest finite number if no column is possible."""
    sum_exp: Tensor
    """Sum of exp(logit - top)."""

    @classmethod
    def of(cls, logits: Tensor) -> "ShardSoftmax":
        """Compute them from logits [n, columns]."""
        least = torch.finfo(logits.dtype).min
        if logits.shape[1] == 0:
            return cls(logits.new_full(logits.shape[:1], least), logits.new_zeros(logits.shape[:1]))
        top = logits.amax(dim=1).clamp_min(least)
        return cls(top, (logits - top[:, None]).exp_().sum(dim=1))


def take_columns(logits: Tensor, columns: Tensor, owned: Tensor) -> Tensor:
    """[n] the value in one column of each token, -inf where not owned; the logit is replaced by -inf (in place)."""
    if logits.shape[1] == 0:
        return logits.new_full(columns.shape, -torch.inf)
    columns = torch.where(owned, columns, 0)[:, None]
    values = logits.gather(1, columns)
    logits.scatter_(1, columns, torch.where(owned[:, None], -torch.inf, values))
    return torch.where(owned, values[:, 0], -torch.inf)


def put_columns(gradient: Tensor, columns: Tensor, owned: Tensor, values: Tensor) -> None:
    """Add one value per token to one of its columns, where owned."""
    if gradient.shape[1]:
        columns = torch.where(owned, columns, 0)[:, None]
        gradient.scatter_add_(1, columns, torch.where(owned, values, 0).to(gradient.dtype)[:, None])
