"""The passes over a chunk of logits in plain torch operations: any device, any float dtype."""

import torch
from torch import Tensor

from mkd.losses.divergences import DIVERGENCES
from mkd.losses.logits import Chunk, KernelContext, TailCoeffs, statistics_dtype
from mkd.losses.rows import GradCoeffs, ShardScalars, Softmaxes, Statistics, TokenWeights


def softmax_stats(chunk: Chunk, context: KernelContext) -> Statistics:
    """All sums of one shard that need no other shard, at most 7 numbers a row.

    Returns:
        name -> [N] in the precision of the statistics: student_max, student_sum_exp; with CE label_logit, and
        ce_sum_exp if T is not 1; with a divergence teacher_max, teacher_sum_exp, and log_ratio if it needs no second
        pass.
    """
    z, u = _logits(chunk, context)
    top = _row_max(z)
    s = (z - top[:, None]) / context.temperature
    stats = {"student_max": top, "student_sum_exp": s.exp().sum(dim=1)}
    if chunk.rows.ce_weight is not None:
        stats["label_logit"] = torch.zeros_like(top)
        if z.shape[1]:
            column, owned = _label_columns(chunk, context)
            stats["label_logit"] = torch.where(owned, z.gather(1, column[:, None]).squeeze(1), 0)
        if context.temperature != 1.0:
            stats["ce_sum_exp"] = (z - top[:, None]).exp().sum(dim=1)
    if u is not None:
        top = _row_max(u)
        t = (u - top[:, None]) / context.temperature
        stats |= {"teacher_max": top, "teacher_sum_exp": t.exp().sum(dim=1)}
        shortcut = DIVERGENCES[context.spec.divergence].single_pass
        if shortcut is not None:
            a, b = (s, t) if shortcut.under == "student" else (t, s)
            weight = a.exp()
            stats["log_ratio"] = torch.where(weight > 0, weight * (a - b), 0).sum(dim=1)
    return stats


def divergence_stats(chunk: Chunk, stats: Statistics, context: KernelContext) -> Statistics:
    """Sums of pointwise and dlogq over one shard, name -> [rows].

    Args:
        chunk, context: as in the first round.
        stats: of the first round and all shards, name -> [tp, rows].
    """
    z, u = _logits(chunk, context)
    scalars = ShardScalars.of(stats, Softmaxes.merge(stats, context.temperature), context.shard.rank)
    log_q, log_p = _log_probabilities(z, u, scalars, context)
    entry = DIVERGENCES[context.spec.divergence]
    return {
        "pointwise": entry.pointwise(log_q, log_p, context.spec).sum(dim=1),
        "dlogq": entry.dlogq(log_q, log_p, context.spec).sum(dim=1),
    }


def write_gradient(
    chunk: Chunk, stats: Statistics, sums: Statistics | None, context: KernelContext, out: Tensor
) -> None:
    """d loss / d products of this shard into `out` [rows, columns], which may be the student's products themselves.

    Args:
        chunk: of the first round; its weights may be multiplied by the upstream gradient.
        stats, sums: of both rounds and all shards, name -> [tp, rows].
        context: as in the first round.
        out: any float dtype.
    """
    z, u = _logits(chunk, context)
    softmaxes = Softmaxes.merge(stats, context.temperature)
    scalars = ShardScalars.of(stats, softmaxes, context.shard.rank)
    coeffs = GradCoeffs.of(stats, sums, softmaxes, chunk.rows, context.spec)
    gradient = torch.zeros_like(z)
    if coeffs.ce is not None:
        log_q = z - scalars.student_max[:, None] - scalars.ce_log_norm[:, None]
        gradient += log_q.exp() * coeffs.ce[:, None]
        column, owned = _label_columns(chunk, context)
        rows = owned.nonzero().squeeze(1)
        gradient[rows, column[rows]] -= coeffs.label[rows]
    if u is not None:
        log_q, log_p = _log_probabilities(z, u, scalars, context)
        dlogq = DIVERGENCES[context.spec.divergence].dlogq(log_q, log_p, context.spec)
        gradient += coeffs.kd[:, None] * (dlogq - log_q.exp() * coeffs.dlogq_sum[:, None])
    if not context.maps.student.is_identity:
        gradient *= context.maps.student.derivative(z)
    out.copy_(gradient)


def write_tail_gradient(products: Tensor, tail: TailCoeffs, context: KernelContext, out: Tensor) -> None:
    """d loss / d products where the teacher is sparse, 0 in the columns that it names.

    Args:
        products: [rows, columns] of the student, -inf in the columns that the teacher names.
        tail: see there.
        context: as in the first round.
        out: [rows, columns], any float dtype; it may be `products` itself.
    """
    z = context.maps.student.apply_(products.to(statistics_dtype(products), copy=True))
    relative = z - tail.top[:, None]
    gradient = tail.ce[:, None] * (relative - tail.ce_log_norm[:, None]).exp()
    gradient += tail.kd[:, None] * (relative / context.temperature - tail.kd_log_norm[:, None]).exp()
    rows = (tail.label_column >= 0).nonzero().squeeze(1)
    gradient[rows, tail.label_column[rows]] -= tail.label[rows]
    if not context.maps.student.is_identity:
        gradient *= context.maps.student.derivative(z)
    out.copy_(gradient.masked_fill_((z == -torch.inf) | ~tail.used[:, None], 0))


def all_passes(
    chunk: Chunk, context: KernelContext, weighted: TokenWeights, out: Tensor
) -> tuple[Statistics, Statistics | None]:
    """Both rounds and the gradient, where this rank holds the whole vocabulary.

    Args:
        chunk, context: as in the first round.
        weighted: the chunk's rows with weights as the gradient needs them.
        out: as `write_gradient`'s.

    Returns:
        Statistics of the first round and, if the divergence needs them, sums of the second, name -> [rows].
    """
    stats = softmax_stats(chunk, context)
    merged, sums = _of_one_shard(stats), None
    if context.with_kd and DIVERGENCES[context.spec.divergence].single_pass is None:
        sums = divergence_stats(chunk, merged, context)
    write_gradient(chunk._replace(rows=weighted), merged, None if sums is None else _of_one_shard(sums), context, out)
    return stats, sums


def _of_one_shard(stats: Statistics) -> Statistics:
    """[rows] -> [1, rows]"""
    return {name: values[None] for name, values in stats.items()}


def _logits(chunk: Chunk, context: KernelContext) -> tuple[Tensor, Tensor | None]:
    """Copies in the precision of the statistics, with unused rows set to 0."""
    dtype = statistics_dtype(chunk.student)
    z = context.maps.student.apply_(chunk.student.to(dtype, copy=True))
    z.masked_fill_(chunk.rows.unused_by_student(), 0)
    if chunk.teacher is None:
        return z, None
    u = context.maps.teacher.apply_(chunk.teacher.to(dtype, copy=True))
    return z, u.masked_fill_(chunk.rows.unused_by_teacher(), 0)


def _row_max(logits: Tensor) -> Tensor:
    """[rows] maximum over [rows, columns]; the least finite number if there is none above it."""
    least = torch.finfo(logits.dtype).min
    if logits.shape[1] == 0:
        return logits.new_full((logits.shape[0],), least)
    return logits.amax(dim=1).clamp_min(least)


def _label_columns(chunk: Chunk, context: KernelContext) -> tuple[Tensor, Tensor]:
    """([rows] column of the label in this shard, [rows] whether there is one); the column is 0 where there is none."""
    labels, shard = chunk.rows.labels, context.shard
    owned = (chunk.rows.ce_weight != 0) & (labels >= shard.start) & (labels < shard.start + shard.columns)
    return torch.where(owned, labels - shard.start, 0), owned


def _log_probabilities(z: Tensor, u: Tensor, scalars: ShardScalars, context: KernelContext) -> tuple[Tensor, Tensor]:
    """(ln q, ln p) at T, each [rows, columns]."""
    s = (z - scalars.student_max[:, None]) / context.spec.temperature - scalars.student_log_norm[:, None]
    t = (u - scalars.teacher_max[:, None]) / context.spec.temperature - scalars.teacher_log_norm[:, None]
    return s, t
