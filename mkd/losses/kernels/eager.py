"""The passes over a loss chunk in plain torch operations: any device, any float dtype."""

import torch
from torch import Tensor

from mkd.losses.divergences import DIVERGENCES
from mkd.losses.inputs import PLAIN_LOGITS, KernelContext, TokenWeights
from mkd.losses.kernels.interface import Chunk, TailCoeffs
from mkd.losses.statistics import GradCoeffs, ShardScalars, Softmaxes, Statistics, as_one_shard


def softmax_stats(chunk: Chunk, context: KernelContext) -> Statistics:
    """All sums of one shard that need no other shard, at most 7 numbers per token.

    Returns:
        name -> [N] in the precision of the statistics: student_max, student_sum_exp; with CE label_logit, and
        ce_sum_exp if T is not 1; with a divergence teacher_max, teacher_sum_exp, and log_ratio if it needs no second
        pass.
    """
    return _softmax_stats(*_logits(chunk, context), chunk, context)


def _softmax_stats(z: Tensor, u: Tensor | None, chunk: Chunk, context: KernelContext) -> Statistics:
    temperature, top = context.temperature, _max_logit(z)
    s = (z - top[:, None]) / temperature
    stats = {"student_max": top, "student_sum_exp": s.exp().sum(dim=1)}
    if chunk.tokens.ce_weight is not None:
        stats["label_logit"] = torch.zeros_like(top)
        if z.shape[1]:
            column, owned = _label_columns(chunk, context)
            stats["label_logit"] = torch.where(owned, z.gather(1, column[:, None]).squeeze(1), 0)
        if temperature != 1.0:
            stats["ce_sum_exp"] = (z - top[:, None]).exp().sum(dim=1)
    if u is not None:
        top = _max_logit(u)
        t = (u - top[:, None]) / temperature
        stats |= {"teacher_max": top, "teacher_sum_exp": t.exp().sum(dim=1)}
        shortcut = DIVERGENCES[context.spec.divergence].single_pass
        if shortcut is not None:
            a, b = (s, t) if shortcut.under == "student" else (t, s)
            weight = a.exp()
            stats["log_ratio"] = torch.where(weight > 0, weight * (a - b), 0).sum(dim=1)
    return stats


def divergence_stats(chunk: Chunk, stats: Statistics, context: KernelContext) -> Statistics:
    """Sums of the divergence's terms and of their derivatives by ln q over one shard: pointwise, dlogq -> [N].

    Args:
        chunk, context: as in `softmax_stats`.
        stats: its results on all shards, name -> [tp, N].
    """
    scalars = ShardScalars.of(stats, Softmaxes.merge(stats, context.temperature), context.shard.rank)
    return _divergence_stats(*_logits(chunk, context), scalars, context)


def _divergence_stats(z: Tensor, u: Tensor, scalars: ShardScalars, context: KernelContext) -> Statistics:
    log_q, log_p = _log_probabilities(z, u, scalars, context)
    entry = DIVERGENCES[context.spec.divergence]
    return {
        "pointwise": entry.pointwise(log_q, log_p, context.spec).sum(dim=1),
        "dlogq": entry.dlogq(log_q, log_p, context.spec).sum(dim=1),
    }


def write_gradient(
    chunk: Chunk, stats: Statistics, sums: Statistics | None, context: KernelContext, out: Tensor
) -> None:
    """Write d loss / d products of this shard into `out` [N, columns], which may be the student's products themselves.

    Args:
        chunk: as in `softmax_stats`; its weights may be multiplied by the upstream gradient.
        stats, sums: results of `softmax_stats` and `divergence_stats` on all shards, name -> [tp, N].
        context: as in `softmax_stats`.
        out: any float dtype.
    """
    softmaxes = Softmaxes.merge(stats, context.temperature)
    scalars = ShardScalars.of(stats, softmaxes, context.shard.rank)
    coeffs = GradCoeffs.of(stats, sums, softmaxes, chunk.tokens, context.spec)
    _write_gradient(*_logits(chunk, context), chunk, scalars, coeffs, context, out)


def _write_gradient(
    z: Tensor,
    u: Tensor | None,
    chunk: Chunk,
    scalars: ShardScalars,
    coeffs: GradCoeffs,
    context: KernelContext,
    out: Tensor,
) -> None:
    gradient = torch.zeros_like(z)
    if coeffs.ce is not None:
        log_q = z - scalars.student_max[:, None] - scalars.ce_log_norm[:, None]
        gradient += log_q.exp() * coeffs.ce[:, None]
        column, owned = _label_columns(chunk, context)
        tokens = owned.nonzero().squeeze(1)
        gradient[tokens, column[tokens]] -= coeffs.label[tokens]
    if u is not None:
        log_q, log_p = _log_probabilities(z, u, scalars, context)
        dlogq = DIVERGENCES[context.spec.divergence].dlogq(log_q, log_p, context.spec)
        gradient += coeffs.kd[:, None] * (dlogq - log_q.exp() * coeffs.dlogq_sum[:, None])
    if context.maps.student != PLAIN_LOGITS.student:
        gradient *= context.maps.student.derivative(z)
    out.copy_(gradient)


def write_tail_gradient(products: Tensor, tail: TailCoeffs, context: KernelContext, out: Tensor) -> None:
    """Write d loss / d products beside a sparse teacher, 0 in the columns that it lists.

    Args:
        products: [N, columns] of the student, -inf in the columns that the teacher lists.
        tail: coefficients of the other columns.
        context: as in `softmax_stats`.
        out: [N, columns], any float dtype; it may be `products` itself.
    """
    z = context.maps.student.apply_(products.to(context.statistics_dtype(products), copy=True))
    relative = z - tail.top[:, None]
    gradient = tail.ce[:, None] * (relative - tail.ce_log_norm[:, None]).exp()
    gradient += tail.kd[:, None] * (relative / context.temperature - tail.kd_log_norm[:, None]).exp()
    tokens = (tail.label_column >= 0).nonzero().squeeze(1)
    gradient[tokens, tail.label_column[tokens]] -= tail.label[tokens]
    if context.maps.student != PLAIN_LOGITS.student:
        gradient *= context.maps.student.derivative(z)
    out.copy_(gradient.masked_fill_((z == -torch.inf) | ~tail.used[:, None], 0))


def all_passes(
    chunk: Chunk, context: KernelContext, weighted: TokenWeights, out: Tensor
) -> tuple[Statistics, Statistics | None]:
    """Both statistics passes and the gradient, where this rank holds the whole vocabulary.

    Args:
        chunk, context: as in `softmax_stats`.
        weighted: the chunk's tokens with weights as the gradient needs them.
        out: as in `write_gradient`.

    Returns:
        The results of `softmax_stats` and, if the divergence needs it, `divergence_stats`, name -> [N].
    """
    z, u = _logits(chunk, context)
    stats, sums = _softmax_stats(z, u, chunk, context), None
    merged = as_one_shard(stats)
    softmaxes = Softmaxes.merge(merged, context.temperature)
    scalars = ShardScalars.of(merged, softmaxes, context.shard.rank)
    if context.with_kd and DIVERGENCES[context.spec.divergence].single_pass is None:
        sums = _divergence_stats(z, u, scalars, context)
    coeffs = GradCoeffs.of(merged, as_one_shard(sums), softmaxes, weighted, context.spec)
    _write_gradient(z, u, chunk._replace(tokens=weighted), scalars, coeffs, context, out)
    return stats, sums


def _logits(chunk: Chunk, context: KernelContext) -> tuple[Tensor, Tensor | None]:
    """Copies in the precision of the statistics, 0 for unused tokens."""
    dtype = context.statistics_dtype(chunk.student)
    z = context.maps.student.apply_(chunk.student.to(dtype, copy=True))
    z.masked_fill_(chunk.tokens.unused_by_student(), 0)
    if chunk.teacher is None:
        return z, None
    u = context.maps.teacher.apply_(chunk.teacher.to(dtype, copy=True))
    return z, u.masked_fill_(chunk.tokens.unused_by_teacher(), 0)


def _max_logit(logits: Tensor) -> Tensor:
    """[N] maximum over [N, columns]; the least finite number if none is above it."""
    least = torch.finfo(logits.dtype).min
    if logits.shape[1] == 0:
        return logits.new_full((logits.shape[0],), least)
    return logits.amax(dim=1).clamp_min(least)


def _label_columns(chunk: Chunk, context: KernelContext) -> tuple[Tensor, Tensor]:
    """([N] column of the label in this shard, [N] True if the shard has it); the column is 0 where it does not."""
    labels, shard = chunk.tokens.labels, context.shard
    owned = (chunk.tokens.ce_weight != 0) & (labels >= shard.start) & (labels < shard.start + shard.columns)
    return torch.where(owned, labels - shard.start, 0), owned


def _log_probabilities(z: Tensor, u: Tensor, scalars: ShardScalars, context: KernelContext) -> tuple[Tensor, Tensor]:
    """(ln q, ln p) at T, each [N, columns]."""
    s = (z - scalars.student_max[:, None]) / context.spec.temperature - scalars.student_log_norm[:, None]
    t = (u - scalars.teacher_max[:, None]) / context.spec.temperature - scalars.teacher_log_norm[:, None]
    return s, t
