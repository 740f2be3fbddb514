"""p_kl on vocabulary shards: the student's probabilities, projected to the teacher's tokens, against the teacher's."""

from itertools import pairwise

import torch
from torch import Tensor

from mkd.config.loss_spec import LossSpec
from mkd.losses.divergences import DIVERGENCES
from mkd.losses.vocab_shard import VocabShard
from mkd.xtoken.loss.chunks import ChunkGroup
from mkd.xtoken.loss.shards import ShardSoftmax, gather_all, merged_log_sum_exp
from mkd.xtoken.vocabulary.cross_vocabulary import CrossVocabulary


def p_kl(
    student: Tensor,
    teacher: Tensor,
    group: ChunkGroup,
    weight: Tensor,
    gradient: Tensor | None,
    *,
    vocabulary: CrossVocabulary,
    shard: VocabShard,
    spec: LossSpec,
) -> Tensor:
    """Values of the group's chunks, and the gradient.

    Communication: the projected probabilities, [chunks, V_t] fp32, are reduce-scattered, and their gradients gathered;
    also four all-gathers of 8 bytes per token or chunk.

    Args:
        student, teacher, group, weight, gradient: see `mkd.xtoken.loss.chunk_groups.Divergence`.
        vocabulary, shard, spec: see `xtoken_loss`.

    Returns:
        [chunks] divergence in nats, with T^2 if the spec sets it.
    """
    z, u = student.div_(spec.temperature), teacher.div_(spec.temperature)
    merged = gather_all(shard, *ShardSoftmax.of(z), *ShardSoftmax.of(u))
    q, p = _softmax(z, ShardSoftmax(*merged[:2])), _softmax(u, ShardSoftmax(*merged[2:]))
    means = group.student.totals(q) / group.student.count[:, None]
    projected = _reduce(
        torch.sparse.mm(vocabulary.projection_t.csr.to(z.dtype), means.t().contiguous()), vocabulary, shard
    ).t()
    target = (group.teacher.totals(p) / group.teacher.count[:, None]) * vocabulary.reached
    # Probabilities that are 0 in this precision have a finite logarithm and no gradient.
    tiny = torch.finfo(projected.dtype).tiny
    possible = vocabulary.reached & (projected > tiny)
    log_q, log_p = (torch.where(vocabulary.reached, x.clamp_min(tiny).log(), -torch.inf) for x in (projected, target))
    total, teacher_total = (x.sum(dim=0) for x in gather_all(shard, projected.sum(dim=1), target.sum(dim=1)))
    log_q, log_p = log_q - total.log()[:, None], log_p - teacher_total.log()[:, None]

    entry = DIVERGENCES[spec.divergence]
    dlogq = entry.dlogq(log_q, log_p, spec)
    sums = gather_all(shard, entry.pointwise(log_q, log_p, spec).sum(dim=1), dlogq.sum(dim=1))
    value, dlogq_sum = (x.sum(dim=0) for x in sums)
    if entry.single_pass is not None:
        dlogq_sum = entry.single_pass.dlogq_sum(value)
    if gradient is not None:
        by_projected = torch.where(possible, dlogq / projected - (dlogq_sum / total)[:, None], 0)
        by_projected *= (weight * (spec.temperature_factor / spec.temperature))[:, None]
        everywhere = _gather(by_projected.t().contiguous(), vocabulary, shard)
        by_mean = torch.sparse.mm(vocabulary.projection.csr.to(z.dtype), everywhere).t() / group.student.count[:, None]
        by_q = by_mean[group.student.chunks]
        inner = shard.exchange({"sum": (q * by_q).sum(dim=1)}).wait()["sum"].sum(dim=0)
        gradient += q * (by_q - inner[:, None])
    return value * spec.temperature_factor


def _softmax(logits: Tensor, stats: ShardSoftmax) -> Tensor:
    """[n, columns] logits / T of this shard -> probabilities, in place."""
    top = stats.top.amax(dim=0)
    return logits.sub_((top + merged_log_sum_exp(*stats, top))[:, None]).exp_()


def _widths(vocabulary: CrossVocabulary) -> list[int]:
    starts = vocabulary.teacher_starts
    return [b - a for a, b in pairwise(starts)]


def _reduce(partial: Tensor, vocabulary: CrossVocabulary, shard: VocabShard) -> Tensor:
    """[teacher columns of all ranks, n] partial sums -> [columns of this rank, n] sums."""
    if shard.size == 1:
        return partial
    widths = _widths(vocabulary)
    padded = partial.new_zeros((shard.size, max(widths), partial.shape[1]))
    for rank, part in enumerate(partial.split(widths)):
        padded[rank, : len(part)] = part
    own = torch.empty_like(padded[0])
    torch.distributed.reduce_scatter_tensor(own, padded.flatten(0, 1), group=shard.group)
    return own[: widths[shard.rank]]


def _gather(own: Tensor, vocabulary: CrossVocabulary, shard: VocabShard) -> Tensor:
    """[columns of this rank, n] -> [teacher columns of all ranks, n]"""
    if shard.size == 1:
        return own
    widths = _widths(vocabulary)
    padded = torch.nn.functional.pad(own, (0, 0, 0, max(widths) - len(own)))
    everywhere = padded.new_empty((shard.size * len(padded), padded.shape[1]))
    torch.distributed.all_gather_into_tensor(everywhere, padded, group=shard.group)
    return torch.cat([part[:width] for part, width in zip(everywhere.chunk(shard.size), widths, strict=True)])
