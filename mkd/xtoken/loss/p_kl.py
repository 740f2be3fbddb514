"""The student's probabilities projected to the teacher's tokens, on vocabulary shards."""

from itertools import pairwise

import torch
from torch import Tensor

from mkd.config.kd_config import LossSpec
from mkd.losses.divergences import DIVERGENCES
from mkd.losses.vocab_shard import VocabShard
from mkd.xtoken.loss.chunks import Group
from mkd.xtoken.loss.shards import Mass, gather_all, log_mass
from mkd.xtoken.vocabulary.cross_vocabulary import CrossVocabulary


def p_kl(
    student: Tensor,
    teacher: Tensor,
    group: Group,
    weight: Tensor,
    gradient: Tensor | None,
    *,
    vocabulary: CrossVocabulary,
    shard: VocabShard,
    spec: LossSpec,
) -> Tensor:
    """Values of the group's chunks, and the gradient.

    Communication: the projected probabilities, [chunks, V_t] fp32, are reduce-scattered, and their gradients gathered;
    beside them four all-gathers of 8 bytes a row or chunk.

    Args:
        student, teacher, group, weight, gradient: see `group_terms.Divergence`.
        vocabulary, shard, spec: of the loss.

    Returns:
        [chunks] divergence in nats, with T^2 if the spec says so.
    """
    z, u = student.div_(spec.temperature), teacher.div_(spec.temperature)
    merged = gather_all(shard, *Mass.of(z), *Mass.of(u))
    q, p = _softmax(z, Mass(*merged[:2])), _softmax(u, Mass(*merged[2:]))
    means = group.student.totals(q) / group.student.count[:, None]
    projected = _reduce(
        torch.sparse.mm(vocabulary.projection_t.to(z.dtype), means.t().contiguous()), vocabulary, shard
    ).t()
    wanted = (group.teacher.totals(p) / group.teacher.count[:, None]) * vocabulary.reached
    # Of probabilities that are 0 in this precision: a finite logarithm, and no gradient.
    tiny = torch.finfo(projected.dtype).tiny
    possible = vocabulary.reached & (projected > tiny)
    log_q, log_p = (torch.where(vocabulary.reached, x.clamp_min(tiny).log(), -torch.inf) for x in (projected, wanted))
    mass, teacher_mass = (x.sum(dim=0) for x in gather_all(shard, projected.sum(dim=1), wanted.sum(dim=1)))
    log_q, log_p = log_q - mass.log()[:, None], log_p - teacher_mass.log()[:, None]

    entry = DIVERGENCES[spec.divergence]
    slope = entry.dlogq(log_q, log_p, spec)
    sums = gather_all(shard, entry.pointwise(log_q, log_p, spec).sum(dim=1), slope.sum(dim=1))
    value, slope_sum = (x.sum(dim=0) for x in sums)
    if entry.single_pass is not None:
        slope_sum = entry.single_pass.dlogq_sum(value)
    if gradient is not None:
        by_projected = torch.where(possible, slope / projected - (slope_sum / mass)[:, None], 0)
        by_projected *= (weight * (spec.scale / spec.temperature))[:, None]
        everywhere = _gather(by_projected.t().contiguous(), vocabulary, shard)
        by_mean = torch.sparse.mm(vocabulary.projection.to(z.dtype), everywhere).t() / group.student.count[:, None]
        by_q = by_mean[group.student.chunks]
        inner = shard.exchange({"sum": (q * by_q).sum(dim=1)}).wait()["sum"].sum(dim=0)
        gradient += q * (by_q - inner[:, None])
    return value * spec.scale


def _softmax(logits: Tensor, mass: Mass) -> Tensor:
    """[n, columns] logits / T of this shard -> probabilities, in place."""
    top = mass.top.amax(dim=0)
    return logits.sub_((top + log_mass(*mass, top))[:, None]).exp_()


def _widths(vocabulary: CrossVocabulary) -> list[int]:
    starts = vocabulary.teacher_starts
    return [b - a for a, b in pairwise(starts)]


def _reduce(partial: Tensor, vocabulary: CrossVocabulary, shard: VocabShard) -> Tensor:
    """[teacher columns of all ranks, rows] parts of sums -> [columns of this rank, rows] sums."""
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
    """[columns of this rank, rows] -> [teacher columns of all ranks, rows]"""
    if shard.size == 1:
        return own
    widths = _widths(vocabulary)
    padded = torch.nn.functional.pad(own, (0, 0, 0, max(widths) - len(own)))
    everywhere = padded.new_empty((shard.size * len(padded), padded.shape[1]))
    torch.distributed.all_gather_into_tensor(everywhere, padded, group=shard.group)
    return torch.cat([part[:width] for part, width in zip(everywhere.chunk(shard.size), widths, strict=True)])
