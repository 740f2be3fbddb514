"""Tokens drawn from a teacher whose vocabulary is cut over the tensor-parallel group, without gathering a column."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mkd.losses.chunking import loss_chunks
from mkd.losses.lm_head import LMHead
from mkd.losses.logits import LogitMap, statistics_dtype
from mkd.losses.vocab_shard import VocabShard


class Draws(NamedTuple):
    """Of N rows, the same on all ranks."""

    ids: Tensor
    """[N, draws] int32: of each number in `uniforms` the id whose interval it is in."""
    lse: Tensor
    """[temperatures, N] fp32 ln sum_j exp(u_j / T) over the true vocabulary."""


@torch.no_grad()
def teacher_draws(
    hidden: Tensor,
    weight: Tensor,
    uniforms: Tensor,
    temperature: float,
    *,
    temperatures: Sequence[float],
    true_vocab: int,
    tp_group: ProcessGroup | None = None,
    chunk_rows: int | None = None,
    logit_map: LogitMap = LogitMap(),  # noqa: B008
) -> Draws:
    """Draw from softmax(u / temperature) by its inverse distribution function, over the ids in their order.

    A shard's columns are an interval of [0, 1), so one all-gather of the shards' masses says whose a draw is, and one
    all-reduce of the ids spreads what their owners found. All of it is float64: the same numbers give the same ids
    however the vocabulary is cut, but for rounding of the logits themselves.

    Args:
        hidden: [N, H] final hidden states of the teacher.
        weight: [V/tp, H] this rank's rows of its LM head.
        uniforms: [N, draws] float64 in [0, 1), ascending in each row.
        temperature: of the draws.
        temperatures: at which the sums are wanted.
        true_vocab, tp_group, chunk_rows: as in `fused_linear_loss`.
        logit_map: scale and softcap of the teacher's logits.
    """
    shard = VocabShard.of(weight.shape[0], true_vocab, tp_group)
    head, dtype = LMHead.of(weight[: shard.columns], None), statistics_dtype(hidden)
    # The distribution function is float64 and stands beside the logits.
    parts = []
    for span in loss_chunks(hidden.shape[0], 4 * shard.columns, dtype, chunk_rows):
        buffer = hidden.new_empty((span.stop - span.start, shard.columns), dtype=dtype)
        logits = logit_map.apply_(head.logits(hidden[span], buffer))
        everywhere = _sums(logits, (temperature, *temperatures), shard)
        ids = _find(logits, everywhere[:, 0], uniforms[span].contiguous(), temperature, shard)
        parts.append((ids, torch.logsumexp(everywhere[:, 1:], dim=0).float()))
    ids, lse = zip(*parts, strict=True)
    return Draws(torch.cat(ids), torch.cat(lse, dim=1))


def _sums(logits: Tensor, temperatures: Sequence[float], shard: VocabShard) -> Tensor:
    """[tp, temperatures, rows] float64: every shard's ln sum_j exp(u_j / T); -inf of a shard without columns."""
    if shard.columns:
        own = torch.stack([torch.logsumexp(logits.double() / t, dim=1) for t in temperatures])
    else:
        own = logits.new_full((len(temperatures), len(logits)), -torch.inf, dtype=torch.float64)
    return shard.exchange({"all": own.flatten()}).wait()["all"].view(shard.size, *own.shape)


def _find(logits: Tensor, sums: Tensor, uniforms: Tensor, temperature: float, shard: VocabShard) -> Tensor:
    """[rows, draws] int32 ids of the draws in one chunk; `sums` [tp, rows] are the shards' at the temperature."""
    total = torch.logsumexp(sums, dim=0)
    ends = torch.cumsum(torch.exp(sums - total), dim=0)  # of the shards' intervals
    # The last shard that has any mass also has what rounding leaves below 1.
    last = len(sums) - 1 - torch.isfinite(sums).flip(0).int().argmax(dim=0)
    owner = (uniforms[None] >= ends[:, :, None]).sum(dim=0).minimum(last[:, None])
    ids = torch.zeros_like(uniforms, dtype=torch.int32)
    if shard.columns:
        start = ends[shard.rank - 1] if shard.rank else torch.zeros_like(total)
        inside = torch.cumsum(torch.exp(logits.double() / temperature - total[:, None]), dim=1).add_(start[:, None])
        columns = torch.searchsorted(inside, uniforms, right=True).clamp_max_(shard.columns - 1)
        ids = torch.where(owner == shard.rank, columns + shard.start, 0).int()
    if shard.size > 1:
        torch.distributed.all_reduce(ids, group=shard.group)
    return ids


@torch.no_grad()
def label_logits(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    true_vocab: int,
    tp_group: ProcessGroup | None = None,
    logit_map: LogitMap = LogitMap(),  # noqa: B008
) -> Tensor:
    """[N] fp32: each row's logit of its label, one product of vectors a row; 0 for a label that is no id.

    Args:
        hidden: [N, H] final hidden states.
        weight: [V/tp, H] this rank's rows of the LM head.
        labels: [N] global ids.
        true_vocab, tp_group: as in `fused_linear_loss`.
        logit_map: scale and softcap of the logits.
    """
    shard = VocabShard.of(weight.shape[0], true_vocab, tp_group)
    own = (labels >= shard.start) & (labels < shard.start + shard.columns)
    columns = torch.where(own, labels - shard.start, 0)
    found = hidden.new_zeros(hidden.shape[0], dtype=torch.float32)
    for span in loss_chunks(hidden.shape[0], 3 * hidden.shape[1], torch.float32, None):
        rows = weight[columns[span]].float()
        found[span] = torch.linalg.vecdot(hidden[span].float(), rows)
    found = torch.where(own, logit_map.apply_(found), 0.0)
    if shard.size > 1:
        torch.distributed.all_reduce(found, group=shard.group)
    return found
