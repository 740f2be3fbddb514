"""The top-k tokens of a teacher whose vocabulary is split over the tensor-parallel group."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mkd.losses.inputs import LinearLogits, LMHead, loss_chunks, statistics_dtype, tempered_dtype
from mkd.losses.sparse.teacher import SparseTeacher
from mkd.losses.vocab_shard import VocabLayout


@torch.no_grad()
def teacher_top_k(
    teacher: LinearLogits,
    k: int,
    *,
    temperatures: Sequence[float],
    vocab: VocabLayout,
    chunk_rows: int | None = None,
) -> list[SparseTeacher]:
    """The K largest logits of every token, from the teacher's final hidden states, one loss chunk at a time.

    Every shard finds its own K, and one all-gather of 4 (2 K + 2 temperatures) bytes per token merges them. Logits are
    fp32: rounding them to bf16 would make many equal.

    Args:
        teacher: final hidden states and LM head.
        k: number of columns per token, at most the true vocabulary.
        temperatures: temperatures of the sums.
        vocab: see `VocabLayout`.
        chunk_rows: tokens per loss chunk.

    Returns:
        One `SparseTeacher` of all N tokens per temperature, with the same ids and logits, equal on all ranks: ids
        [N, K] int32 from the most probable down (of equal logits the lowest id comes first), logits [N, K] fp32
        (float64 for float64), `lse`, and `tail_lse`, which is summed over the other columns (-inf if there are none).
        Both sums are float64 if one of the temperatures needs it (`tempered_dtype`).

    Raises:
        ValueError: k is below 1 or above the true vocabulary.
    """
    if not 1 <= k <= vocab.true_vocab:
        raise ValueError(
            f"k is {k}; a vocabulary of {vocab.true_vocab} has 1 to {vocab.true_vocab} most probable tokens"
        )
    shard = vocab.shard(teacher.weight.shape[0])
    hidden = vocab.gather_hidden(teacher.hidden)
    head, dtype = LMHead.of_columns(teacher, shard.columns), statistics_dtype(hidden)
    # 64-bit keys exist beside the logits.
    chunks = loss_chunks(hidden.shape[0], 3 * shard.columns, dtype, chunk_rows)
    parts = []
    for span in chunks:
        buffer = hidden.new_empty((span.stop - span.start, shard.columns), dtype=dtype)
        logits = teacher.logit_map.apply_(head.logits(hidden[span], buffer))
        local = _top_of_shard(logits, k, temperatures, shard.start)
        gathered = shard.exchange({"all": local.flatten()}).wait()["all"].view(shard.size, *local.shape)
        ids, logits, *sums = _merge(gathered, k, temperatures)
        parts.append((ids, logits.to(dtype), *sums))
    ids, logits, lse, tail_lse = zip(*parts, strict=True)
    ids, logits, lse, tail_lse = torch.cat(ids), torch.cat(logits), torch.cat(lse, 1), torch.cat(tail_lse, 1)
    return [SparseTeacher(ids, logits, *sums) for sums in zip(lse, tail_lse, temperatures, strict=True)]


def _top_of_shard(logits: Tensor, k: int, temperatures: Sequence[float], start: int) -> Tensor:
    """[N, 2 k + temperatures] the k largest logits, their ids, and the sums over the others; overwrites `logits`.

    Ids are floats, of which fp32 represents those up to 2^24. With fewer columns than k, the rest is -inf and -1.
    """
    count = min(k, logits.shape[1])
    columns = _largest(logits, count)
    values = logits.gather(1, columns)
    logits.scatter_(1, columns, -torch.inf)
    if not logits.shape[1]:  # logsumexp needs a column
        logits = logits.new_full((logits.shape[0], 1), -torch.inf)
    rest = [torch.logsumexp(logits.to(tempered_dtype(logits.dtype, t)) / t, dim=1, keepdim=True) for t in temperatures]
    ids = (columns + start).to(logits.dtype)
    pad = torch.nn.functional.pad
    return torch.cat(
        [pad(values, (0, k - count), value=-torch.inf), pad(ids, (0, k - count), value=-1.0), *rest], dim=1
    )


def _largest(logits: Tensor, count: int) -> Tensor:
    """[N, count] columns of the largest logits in order; of equal ones the lowest column comes first."""
    if logits.dtype == torch.float64 or not logits.shape[1]:
        return logits.sort(dim=1, descending=True, stable=True).indices[:, :count]
    # topk does not specify the order of equal values. The bits of floats order like integers once those of negative
    # ones are inverted; the column, the lower the better, fills the lower half of a 64-bit key.
    bits = (logits + 0.0).view(torch.int32)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    keys += torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)
    return keys.topk(count, dim=1).indices


def _merge(gathered: Tensor, k: int, temperatures: Sequence[float]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(ids, logits, lse, tail_lse) of a loss chunk from all shards, [tp, N, 2 k + temperatures]."""
    values, ids, rest = gathered.split([k, k, len(temperatures)], dim=2)
    values, ids = (x.transpose(0, 1).flatten(1) for x in (values, ids))  # ids grow with the shard
    order = values.sort(dim=1, descending=True, stable=True).indices
    values, ids = values.gather(1, order), ids.gather(1, order)
    tails = []
    for index, temperature in enumerate(temperatures):
        others = torch.cat((values[:, k:] / temperature, rest[:, :, index].t()), dim=1)
        tails.append(torch.logsumexp(others, dim=1))
    top, tail_lse = values[:, :k], torch.stack(tails)
    top_lse = torch.stack([torch.logsumexp(top / t, dim=1) for t in temperatures])
    return ids[:, :k].int(), top, torch.logaddexp(top_lse, tail_lse), tail_lse
