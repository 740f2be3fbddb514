"""Tokens sampled from a teacher whose vocabulary is split over the tensor-parallel group; no column is gathered."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mkd.losses.inputs import LinearLogits, LMHead, loss_chunks, statistics_dtype
from mkd.losses.vocab_shard import VocabLayout, VocabShard


class SampledTokens(NamedTuple):
    """Samples of N tokens, the same on all ranks."""

    ids: Tensor
    """[N, samples] int32: for each number in `uniforms` the id whose interval contains it."""
    lse: Tensor
    """[temperatures, N] fp32 ln sum_j exp(u_j / T) over the true vocabulary."""


@torch.no_grad()
def sample_teacher_tokens(
    teacher: LinearLogits,
    uniforms: Tensor,
    temperature: float,
    *,
    temperatures: Sequence[float],
    vocab: VocabLayout,
    chunk_rows: int | None = None,
) -> SampledTokens:
    """Sample from softmax(u / temperature) by its inverse distribution function, over the ids in their order.

    A shard's columns are an interval of [0, 1), so one all-gather of the shards' sums determines the shard of each
    sample, and one all-reduce of the ids distributes them. All of it is float64: the same numbers give the same ids
    however the vocabulary is split, except for rounding of the logits themselves.

    Args:
        teacher: final hidden states [N, H] of all tokens and LM head.
        uniforms: [N, samples] float64 in [0, 1), ascending per token.
        temperature: temperature of the samples.
        temperatures: temperatures of the returned sums.
        vocab: without sequence parallelism.
        chunk_rows: tokens per loss chunk.
    """
    hidden, shard = teacher.hidden, vocab.shard(teacher.weight.shape[0])
    head, dtype = LMHead.of_columns(teacher, shard.columns), statistics_dtype(hidden)
    # The distribution function is float64 and exists beside the logits.
    parts = []
    for span in loss_chunks(hidden.shape[0], 4 * shard.columns, dtype, chunk_rows):
        buffer = hidden.new_empty((span.stop - span.start, shard.columns), dtype=dtype)
        logits = teacher.logit_map.apply_(head.logits(hidden[span], buffer))
        gathered = _log_sums(logits, (temperature, *temperatures), shard)
        ids = _find(logits, gathered[:, 0], uniforms[span].contiguous(), temperature, shard)
        parts.append((ids, torch.logsumexp(gathered[:, 1:], dim=0).float()))
    ids, lse = zip(*parts, strict=True)
    return SampledTokens(torch.cat(ids), torch.cat(lse, dim=1))


def _log_sums(logits: Tensor, temperatures: Sequence[float], shard: VocabShard) -> Tensor:
    """[tp, temperatures, N] float64: ln sum_j exp(u_j / T) of every shard; -inf for a shard without columns."""
    if shard.columns:
        own = torch.stack([torch.logsumexp(logits.double() / t, dim=1) for t in temperatures])
    else:
        own = logits.new_full((len(temperatures), len(logits)), -torch.inf, dtype=torch.float64)
    return shard.exchange({"all": own.flatten()}).wait()["all"].view(shard.size, *own.shape)


def _find(logits: Tensor, log_sums: Tensor, uniforms: Tensor, temperature: float, shard: VocabShard) -> Tensor:
    """[N, samples] int32 ids of the samples in one loss chunk; `log_sums`: [tp, N] of all shards at the temperature."""
    total = torch.logsumexp(log_sums, dim=0)
    ends = torch.cumsum(torch.exp(log_sums - total), dim=0)  # of the shards' intervals
    # The last shard with any probability also covers what rounding leaves below 1.
    last = len(log_sums) - 1 - torch.isfinite(log_sums).flip(0).int().argmax(dim=0)
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
def label_logits(model: LinearLogits, labels: Tensor, *, vocab: VocabLayout) -> Tensor:
    """[N] fp32: each token's logit of its label, one dot product per token; 0 for a label outside the vocabulary.

    Args:
        model: final hidden states [N, H] of all tokens and LM head.
        labels: [N] global ids.
        vocab: without sequence parallelism.
    """
    hidden, shard = model.hidden, vocab.shard(model.weight.shape[0])
    own = (labels >= shard.start) & (labels < shard.start + shard.columns)
    columns = torch.where(own, labels - shard.start, 0)
    found = hidden.new_zeros(hidden.shape[0], dtype=torch.float32)
    for span in loss_chunks(hidden.shape[0], 3 * hidden.shape[1], torch.float32, None):
        label_weights = model.weight[columns[span]].float()
        found[span] = torch.linalg.vecdot(hidden[span].float(), label_weights)
    found = torch.where(own, model.logit_map.apply_(found), 0.0)
    if shard.size > 1:
        torch.distributed.all_reduce(found, group=shard.group)
    return found
