"""The passes over a chunk of logits in plain torch operations: any device, any float dtype."""

import torch
from torch import Tensor

from mkd.losses.divergences import DIVERGENCES
from mkd.losses.logits import Chunk, Setting, TailFactors, statistics_dtype
from mkd.losses.rows import Factors, Normalizers, Rows, ShardScalars, Statistics


def first_round(chunk: Chunk, setting: Setting) -> Statistics:
    """All sums of one shard that need no other shard, at most 7 numbers a row.

    Returns:
        name -> [rows] in the precision of the statistics: student_max, student_mass; label_logit with CE, ce_mass if
        besides T is not 1; teacher_max, teacher_mass with a divergence, log_ratio if it needs one round only.
    """
    z, u = _logits(chunk, setting)
    top = _row_max(z)
    s = (z - top[:, None]) / setting.temperature
    stats = {"student_max": top, "student_mass": s.exp().sum(dim=1)}
    if chunk.rows.ce_weight is not None:
        stats["label_logit"] = torch.zeros_like(top)
        if z.shape[1]:
            column, owned = _label_columns(chunk, setting)
            stats["label_logit"] = torch.where(owned, z.gather(1, column[:, None]).squeeze(1), 0)
        if setting.temperature != 1.0:
            stats["ce_mass"] = (z - top[:, None]).exp().sum(dim=1)
    if u is not None:
        top = _row_max(u)
        t = (u - top[:, None]) / setting.temperature
        stats |= {"teacher_max": top, "teacher_mass": t.exp().sum(dim=1)}
        shortcut = DIVERGENCES[setting.spec.divergence].one_round
        if shortcut is not None:
            a, b = (s, t) if shortcut.under == "student" else (t, s)
            weight = a.exp()
            stats["log_ratio"] = torch.where(weight > 0, weight * (a - b), 0).sum(dim=1)
    return stats


def second_round(chunk: Chunk, stats: Statistics, setting: Setting) -> Statistics:
    """Sums of density and slope over one shard, name -> [rows].

    Args:
        chunk, setting: as in the first round.
        stats: of the first round and all shards, name -> [tp, rows].
    """
    z, u = _logits(chunk, setting)
    scalars = ShardScalars.of(stats, Normalizers.merge(stats, setting.temperature), setting.shard.rank)
    log_q, log_p = _log_probabilities(z, u, scalars, setting)
    entry = DIVERGENCES[setting.spec.divergence]
    return {
        "density": entry.density(log_q, log_p, setting.spec).sum(dim=1),
        "slope": entry.slope(log_q, log_p, setting.spec).sum(dim=1),
    }


def write_gradient(chunk: Chunk, stats: Statistics, sums: Statistics | None, setting: Setting, out: Tensor) -> None:
    """d loss / d products of this shard into `out` [rows, columns], which may be the student's products themselves.

    Args:
        chunk: of the first round; its weights may be multiplied by the upstream gradient.
        stats, sums: of both rounds and all shards, name -> [tp, rows].
        setting: as in the first round.
        out: any float dtype.
    """
    z, u = _logits(chunk, setting)
    normalizers = Normalizers.merge(stats, setting.temperature)
    scalars = ShardScalars.of(stats, normalizers, setting.shard.rank)
    factors = Factors.of(stats, sums, normalizers, chunk.rows, setting.spec)
    gradient = torch.zeros_like(z)
    if factors.ce is not None:
        log_q = z - scalars.student_max[:, None] - scalars.ce_log_norm[:, None]
        gradient += log_q.exp() * factors.ce[:, None]
        column, owned = _label_columns(chunk, setting)
        rows = owned.nonzero().squeeze(1)
        gradient[rows, column[rows]] -= factors.label[rows]
    if u is not None:
        log_q, log_p = _log_probabilities(z, u, scalars, setting)
        slope = DIVERGENCES[setting.spec.divergence].slope(log_q, log_p, setting.spec)
        gradient += factors.kd[:, None] * (slope - log_q.exp() * factors.slope_sum[:, None])
    if not setting.maps.student.is_identity:
        gradient *= setting.maps.student.derivative(z)
    out.copy_(gradient)


def write_tail_gradient(products: Tensor, tail: TailFactors, setting: Setting, out: Tensor) -> None:
    """d loss / d products where the teacher is sparse, 0 in the columns that it names.

    Args:
        products: [rows, columns] of the student, -inf in the columns that the teacher names.
        tail: see there.
        setting: as in the first round.
        out: [rows, columns], any float dtype; it may be `products` itself.
    """
    z = setting.maps.student.apply_(products.to(statistics_dtype(products), copy=True))
    relative = z - tail.top[:, None]
    gradient = tail.ce[:, None] * (relative - tail.ce_log_norm[:, None]).exp()
    gradient += tail.kd[:, None] * (relative / setting.temperature - tail.kd_log_norm[:, None]).exp()
    rows = (tail.label_column >= 0).nonzero().squeeze(1)
    gradient[rows, tail.label_column[rows]] -= tail.label[rows]
    if not setting.maps.student.is_identity:
        gradient *= setting.maps.student.derivative(z)
    out.copy_(gradient.masked_fill_((z == -torch.inf) | ~tail.used[:, None], 0))


def all_rounds(chunk: Chunk, setting: Setting, weighted: Rows, out: Tensor) -> tuple[Statistics, Statistics | None]:
    """Both rounds and the gradient, where this rank holds the whole vocabulary.

    Args:
        chunk, setting: as in the first round.
        weighted: the chunk's rows with weights as the gradient needs them.
        out: as `write_gradient`'s.

    Returns:
        Statistics of the first round and, if the divergence needs them, sums of the second, name -> [rows].
    """
    stats = first_round(chunk, setting)
    merged, sums = _of_one_shard(stats), None
    if setting.with_kd and DIVERGENCES[setting.spec.divergence].one_round is None:
        sums = second_round(chunk, merged, setting)
    write_gradient(chunk._replace(rows=weighted), merged, None if sums is None else _of_one_shard(sums), setting, out)
    return stats, sums


def _of_one_shard(stats: Statistics) -> Statistics:
    """[rows] -> [1, rows]"""
    return {name: values[None] for name, values in stats.items()}


def _logits(chunk: Chunk, setting: Setting) -> tuple[Tensor, Tensor | None]:
    """Copies in the precision of the statistics, with unused rows set to 0."""
    dtype = statistics_dtype(chunk.student)
    z = setting.maps.student.apply_(chunk.student.to(dtype, copy=True))
    z.masked_fill_(chunk.rows.unused_by_student(), 0)
    if chunk.teacher is None:
        return z, None
    u = setting.maps.teacher.apply_(chunk.teacher.to(dtype, copy=True))
    return z, u.masked_fill_(chunk.rows.unused_by_teacher(), 0)


def _row_max(logits: Tensor) -> Tensor:
    """[rows] maximum over [rows, columns]; the least finite number if there is none above it."""
    least = torch.finfo(logits.dtype).min
    if logits.shape[1] == 0:
        return logits.new_full((logits.shape[0],), least)
    return logits.amax(dim=1).clamp_min(least)


def _label_columns(chunk: Chunk, setting: Setting) -> tuple[Tensor, Tensor]:
    """([rows] column of the label in this shard, [rows] whether there is one); the column is 0 where there is none."""
    labels, shard = chunk.rows.labels, setting.shard
    owned = (chunk.rows.ce_weight != 0) & (labels >= shard.start) & (labels < shard.start + shard.columns)
    return torch.where(owned, labels - shard.start, 0), owned


def _log_probabilities(z: Tensor, u: Tensor, scalars: ShardScalars, setting: Setting) -> tuple[Tensor, Tensor]:
    """(ln q, ln p) at T, each [rows, columns]."""
    s = (z - scalars.student_max[:, None]) / setting.spec.temperature - scalars.student_log_norm[:, None]
    t = (u - scalars.teacher_max[:, None]) / setting.spec.temperature - scalars.teacher_log_norm[:, None]
    return s, t
