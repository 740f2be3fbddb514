"""The most probable columns of a teacher whose vocabulary is cut over the tensor-parallel group."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup

from mkd.losses.chunking import loss_chunks
from mkd.losses.lm_head import LMHead
from mkd.losses.logits import LogitMap, statistics_dtype
from mkd.losses.vocab_shard import VocabShard


class TopK(NamedTuple):
    """Of N rows, the same on all ranks."""

    ids: Tensor
    """[N, K] int32, from the most probable down; of equal logits the lowest id comes first."""
    logits: Tensor
    """[N, K] fp32 (float64 of float64), at no temperature."""
    lse: Tensor
    """[temperatures, N] ln sum_j exp(u_j / T) over the true vocabulary."""
    tail_lse: Tensor
    """[temperatures, N] the same over the columns that are not in `ids`, summed themselves; -inf if there are none."""


@torch.no_grad()
def teacher_top_k(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    temperatures: Sequence[float],
    true_vocab: int,
    tp_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    chunk_rows: int | None = None,
    logit_map: LogitMap = LogitMap(),  # noqa: B008
) -> TopK:
    """The K largest logits of every row, from the teacher's final hidden states, a chunk of rows at a time.

    Every shard finds its own K, and one all-gather of 4 (2 K + 2 temperatures) bytes a row merges them. Logits are
    fp32: rounding them to bf16 would make many equal.

    Args:
        hidden: [N, H] final hidden states of the teacher, or this rank's rows of them under sequence parallelism.
        weight: [V/tp, H] this rank's rows of its LM head.
        k: how many, at most the true vocabulary.
        temperatures: at which the sums are wanted.
        true_vocab, tp_group, sequence_parallel, chunk_rows: as in `fused_linear_loss`.
        logit_map: scale and softcap of the teacher's logits.

    Raises:
        ValueError: k is below 1 or above the true vocabulary.
    """
    if not 1 <= k <= true_vocab:
        raise ValueError(f"k is {k}; a vocabulary of {true_vocab} has 1 to {true_vocab} most probable tokens")
    shard = VocabShard.of(weight.shape[0], true_vocab, tp_group)
    if sequence_parallel and shard.size > 1:
        hidden = gather_from_sequence_parallel_region(hidden, group=shard.group)
    head, dtype = LMHead.of(weight[: shard.columns], None), statistics_dtype(hidden)
    # Keys of 64 bits stand beside the logits.
    chunks = loss_chunks(hidden.shape[0], 3 * shard.columns, dtype, chunk_rows)
    parts = []
    for span in chunks:
        buffer = hidden.new_empty((span.stop - span.start, shard.columns), dtype=dtype)
        local = _of_shard(logit_map.apply_(head.logits(hidden[span], buffer)), k, temperatures, shard.start)
        everywhere = shard.exchange({"all": local.flatten()}).wait()["all"].view(shard.size, *local.shape)
        parts.append(_merge(everywhere, k, temperatures))
    ids, logits, lse, tail_lse = zip(*parts, strict=True)
    return TopK(torch.cat(ids), torch.cat(logits), torch.cat(lse, 1), torch.cat(tail_lse, 1))


def _of_shard(logits: Tensor, k: int, temperatures: Sequence[float], start: int) -> Tensor:
    """[rows, 2 k + temperatures] the k largest logits, their ids, and the sums over the others; overwrites `logits`.

    Ids are floats, of which fp32 holds those up to 2^24. Where there are fewer columns than k, -inf and -1.
    """
    count = min(k, logits.shape[1])
    columns = _largest(logits, count)
    values = logits.gather(1, columns)
    logits.scatter_(1, columns, -torch.inf)
    rest = [torch.logsumexp(_or_one_column(logits) / t, dim=1, keepdim=True) for t in temperatures]
    ids = (columns + start).to(logits.dtype)
    pad = torch.nn.functional.pad
    return torch.cat(
        [pad(values, (0, k - count), value=-torch.inf), pad(ids, (0, k - count), value=-1.0), *rest], dim=1
    )


def _or_one_column(logits: Tensor) -> Tensor:
    """The same, or one impossible column where there is none: a maximum needs one."""
    return logits if logits.shape[1] else logits.new_full((logits.shape[0], 1), -torch.inf)


def _largest(logits: Tensor, count: int) -> Tensor:
    """[rows, count] columns of the largest logits in order; of equal ones the lowest column comes first."""
    if logits.dtype == torch.float64 or not logits.shape[1]:
        return logits.sort(dim=1, descending=True, stable=True).indices[:, :count]
    # topk says nothing of equal values. Bits of floats order like integers once negative ones are turned round; the
    # column, the lower the better, fills the lower half of a 64-bit key.
    bits = (logits + 0.0).view(torch.int32)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    keys += torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)
    return keys.topk(count, dim=1).indices


def _merge(everywhere: Tensor, k: int, temperatures: Sequence[float]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(ids, logits, lse, tail_lse) of some rows from what all shards found, [tp, rows, 2 k + temperatures]."""
    values, ids, rest = everywhere.split([k, k, len(temperatures)], dim=2)
    values, ids = (x.transpose(0, 1).flatten(1) for x in (values, ids))  # ids grow with the shard
    order = values.sort(dim=1, descending=True, stable=True).indices
    values, ids = values.gather(1, order), ids.gather(1, order)
    tails = []
    for index, temperature in enumerate(temperatures):
        others = torch.cat((values[:, k:] / temperature, rest[:, :, index].t()), dim=1)
        tails.append(torch.logsumexp(others, dim=1))
    top, tail_lse = values[:, :k], torch.stack(tails)
    heads = torch.stack([torch.logsumexp(top / t, dim=1) for t in temperatures])
    return ids[:, :k].int(), top, torch.logaddexp(heads, tail_lse), tail_lse
