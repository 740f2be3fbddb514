"""The loss from hidden states by its definition and autograd, all logits at once: `--kd-loss-impl reference`."""

from collections.abc import Callable

import torch
from torch import Tensor

from mkd.losses import reference
from mkd.losses.logits import KernelContext, LogitMap, statistics_dtype
from mkd.losses.reference import topk as reference_topk
from mkd.losses.rows import TokenWeights
from mkd.losses.sparse.teacher import SparseTeacher, Tail


def linear_loss(
    student: tuple[Tensor, Tensor, Tensor | None],
    kd_of: Callable[[Tensor], Tensor] | None,
    rows: TokenWeights,
    context: KernelContext,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(loss, ce, kd) as `LossOutput` has them, differentiable in the student's tensors.

    Args:
        student: (hidden states [N, H], LM head [V, H], bias [V] or None).
        kd_of: the student's logits [N, V] -> divergence of each row; anything finite where its weight is 0. None
            without a divergence.
        rows: labels and weights of the N tokens.
        context: one shard, which is the whole vocabulary.

    Raises:
        ValueError: several shards.
    """
    if context.shard.size > 1:
        raise ValueError(f"the reference runs on one rank, the vocabulary is cut over {context.shard.size}")
    z = _logits(*student, rows.unused_by_student(), context, context.maps.student)
    loss, ce, kd = z.sum() * 0.0, None, None
    if rows.ce_weight is not None:
        used = rows.ce_weight != 0
        legal = (rows.labels >= 0) & (rows.labels < context.shard.true_vocab)
        ce = torch.where(used, reference.cross_entropy(z, torch.where(used & legal, rows.labels, 0)), 0)
        ce = ce.masked_fill(used & ~legal, torch.nan)
        loss = loss + (rows.ce_weight * ce).sum()
        if context.spec.z_loss:
            loss = loss + context.spec.z_loss * (rows.ce_weight * reference.z_loss(z)).sum()
        ce = ce.detach()
    if kd_of is not None:
        kd = torch.where(rows.kd_weight != 0, kd_of(z), 0)
        loss = loss + (rows.kd_weight * kd).sum()
        kd = kd.detach()
    return loss, ce, kd


def dense_divergence(
    teacher: tuple[Tensor, Tensor, Tensor | None], rows: TokenWeights, context: KernelContext
) -> Callable[[Tensor], Tensor]:
    """For `linear_loss`: from the teacher's (hidden states [N, H], LM head [V, H], bias [V] or None)."""
    u = _logits(*teacher, rows.unused_by_teacher(), context, context.maps.teacher).detach()
    return lambda z: reference.DIVERGENCES[context.spec.divergence](z, u, context.spec)


def sparse_divergence(
    teacher: SparseTeacher, tail: Tail, rows: TokenWeights, context: KernelContext
) -> Callable[[Tensor], Tensor]:
    """For `linear_loss`: from a sparse teacher; NaN of a row with an id beyond the vocabulary."""
    used, dtype = ~rows.unused_by_teacher(), rows.kd_weight.dtype
    out_of_vocab = used & (teacher.ids >= context.shard.true_vocab)
    ids = torch.where(used & ~out_of_vocab, teacher.ids, -1)
    lse, tail_lse = (
        None if x is None else torch.where(used[:, 0], x.to(dtype), 0) for x in (teacher.lse, teacher.tail_lse)
    )
    logits = torch.where(ids >= 0, teacher.logits.to(dtype), 0)

    def divergence(z: Tensor) -> Tensor:
        known = {"spec": context.spec, "lse_temperature": teacher.temperature}
        if teacher.counts is not None:
            values = reference_topk.sampled(z, ids, teacher.counts, logits, lse, **known)
        else:
            values = reference_topk.top_k(z, ids, logits, lse, tail=tail, teacher_tail_lse=tail_lse, **known)
        return values.masked_fill(out_of_vocab.any(dim=1), torch.nan)

    return divergence


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, unused: Tensor, context: KernelContext, logit_map: LogitMap
) -> Tensor:
    """[N, true vocabulary] in the precision of the statistics; 0 where unused."""
    dtype, columns = statistics_dtype(hidden), context.shard.columns
    products = hidden.to(dtype).masked_fill(unused, 0) @ weight[:columns].to(dtype).t()
    if bias is not None:
        products = products + bias[:columns].to(dtype)
    logits = products * logit_map.scale
    if logit_map.softcap is not None:
        logits = logit_map.softcap * torch.tanh(logits / logit_map.softcap)
    return logits
