"""The loss from hidden states by its definition and autograd, all logits at once: `--kd-loss-impl reference`."""

from collections.abc import Callable

import torch
from torch import Tensor

from mkd.losses import reference
from mkd.losses.inputs import KernelContext, LinearLogits, TokenWeights, tempered_dtype
from mkd.losses.reference import topk as reference_topk
from mkd.losses.sparse.teacher import SparseTeacher, Tail


def linear_loss(
    student: LinearLogits,
    divergence: Callable[[Tensor], Tensor] | None,
    tokens: TokenWeights,
    context: KernelContext,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(loss, ce, kd) of `LossOutput`, differentiable in the student's tensors.

    Args:
        student: hidden states of all N tokens and the whole LM head.
        divergence: the student's logits [N, V] -> divergence per token; anything finite where its weight is 0. None
            without a teacher.
        tokens: labels and weights of the N tokens.
        context: one shard, which is the whole vocabulary.

    Raises:
        ValueError: several shards.
    """
    if context.shard.size > 1:
        raise ValueError(f"the reference runs on one rank, the vocabulary is cut over {context.shard.size}")
    z = _logits(student, tokens.unused_by_student(), context)
    loss, ce, kd = z.sum() * 0.0, None, None
    if tokens.ce_weight is not None:
        used = tokens.ce_weight != 0
        in_vocab = (tokens.labels >= 0) & (tokens.labels < context.shard.true_vocab)
        ce = torch.where(used, reference.cross_entropy(z, torch.where(used & in_vocab, tokens.labels, 0)), 0)
        ce = ce.masked_fill(used & ~in_vocab, torch.nan)
        loss = loss + (tokens.ce_weight * ce).sum()
        if context.spec.z_loss:
            loss = loss + context.spec.z_loss * (tokens.ce_weight * reference.z_loss(z)).sum()
        ce = ce.detach()
    if divergence is not None:
        kd = torch.where(tokens.kd_weight != 0, divergence(z), 0)
        loss = loss + (tokens.kd_weight * kd).sum()
        kd = kd.detach()
    weight = tokens.kd_weight if tokens.ce_weight is None else tokens.ce_weight
    ce, kd = (None if values is None else values.to(weight.dtype) for values in (ce, kd))
    return loss.to(weight.dtype), ce, kd


def dense_divergence(teacher: LinearLogits, tokens: TokenWeights, context: KernelContext) -> Callable[[Tensor], Tensor]:
    """The `divergence` of `linear_loss` from a teacher with a whole LM head."""
    u = _logits(teacher, tokens.unused_by_teacher(), context).detach()
    return lambda z: reference.DIVERGENCES[context.spec.divergence](z, u, context.spec)


def sparse_divergence(
    teacher: SparseTeacher, tail: Tail, tokens: TokenWeights, context: KernelContext
) -> Callable[[Tensor], Tensor]:
    """The `divergence` of `linear_loss` from a sparse teacher; NaN for a token with an id beyond the vocabulary."""
    used = ~tokens.unused_by_teacher()
    dtype = tempered_dtype(tokens.kd_weight.dtype, context.temperature)
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


def _logits(model: LinearLogits, unused: Tensor, context: KernelContext) -> Tensor:
    """[N, true vocabulary] in the precision of the statistics; 0 where unused."""
    dtype, columns = context.statistics_dtype(model.hidden), context.shard.columns
    products = model.hidden.to(dtype).masked_fill(unused, 0) @ model.weight[:columns].to(dtype).t()
    if model.bias is not None:
        products = products + model.bias[:columns].to(dtype)
    logits = products * model.logit_map.scale
    if model.logit_map.softcap is not None:
        logits = model.logit_map.softcap * torch.tanh(logits / model.logit_map.softcap)
    return logits
