"""The same loss from hidden states: LM heads and loss together, a chunk of rows at a time, logits never kept."""

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mkd.config import LossSpec
from mkd.losses.divergences import local_statistics, merge_statistics, write_gradient_
from mkd.losses.vocab_parallel import LossOutput, Rows, VocabShard, row_chunks, statistics_dtype

FP16_HEADROOM = 1024.0
"""Where the largest possible logit gradient is put before it is rounded to fp16, whose range is 6e-8 to 65504."""


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b, accumulated and returned in `dtype`: half-precision factors do not round the result."""
    return a @ b if a.dtype == dtype else torch.mm(a, b, out_dtype=dtype)


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b in the precision of `total`."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def _factor(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A GEMM input: as it came, or in `dtype` where torch has no GEMM from that to `dtype` (half precision on CPU)."""
    has_mixed_gemm = tensor.device.type != "cpu" and dtype == torch.float32
    return tensor.detach() if has_mixed_gemm else tensor.detach().to(dtype)


def _fp16_scale(rows: Rows, spec: LossSpec) -> Tensor:
    """A power of two (scalar, fp32) that brings the largest weight of a logit gradient to about `FP16_HEADROOM`.

    The gradient is formed before the loss scale of mixed-precision training is known, and most q_j of a large
    vocabulary lie under fp16's smallest number.
    """
    weights = [(rows.ce_weight, 1.0), (rows.kd_weight, spec.scale / spec.temperature)]
    bound = torch.stack([w.abs().amax() * factor for w, factor in weights if w is not None]).sum()
    return torch.ldexp(torch.full_like(bound, FP16_HEADROOM), -torch.frexp(bound).exponent)


class _FusedLinearLoss(torch.autograd.Function):
    """Loss and, with it, the gradients of hidden states and weight; backward only multiplies by the upstream scalar."""

    @staticmethod
    def forward(ctx, hidden, weight, teacher_hidden, teacher_weight, rows, spec, shard, chunk_rows, wanted):
        dtype = statistics_dtype(hidden)
        # Weights of padding columns take part in nothing: they may hold anything, and their gradient is exactly 0.
        head = _factor(weight[: shard.columns], dtype)
        teacher_head = None if rows.kd_weight is None else _factor(teacher_weight[: shard.columns], dtype)
        d_hidden = torch.empty(hidden.shape, dtype=dtype, device=hidden.device) if wanted[0] else None
        d_weight = torch.zeros(weight.shape, dtype=dtype, device=weight.device) if wanted[1] else None
        scale = _fp16_scale(rows, spec) if hidden.dtype == torch.float16 and rows.labels.numel() else None
        scaled = rows if scale is None else rows.times(scale)
        terms = []
        for chunk in row_chunks(hidden.shape[0], shard.columns, dtype, chunk_rows):
            part, targets = rows[chunk], rows[chunk].targets(shard)
            h = _factor(hidden[chunk].masked_fill(part.unused_by_student(), 0), dtype)
            z, u = _product(h, head.t(), dtype), None
            if teacher_head is not None:
                teacher_h = _factor(teacher_hidden[chunk].masked_fill(part.unused_by_teacher(), 0), dtype)
                u = _product(teacher_h, teacher_head.t(), dtype)
            local = local_statistics(z, u, targets, spec)
            scalars = merge_statistics(shard.gather(local), shard.rank, u is not None, targets, spec)
            terms.append(part.terms(scalars, spec))
            if not any(wanted):
                continue
            w = scaled[chunk]
            d_logits = write_gradient_(z, u, scalars, targets, w.ce_weight, w.kd_weight, spec).to(head.dtype)
            if d_hidden is not None:
                d_hidden[chunk] = _product(d_logits, head, dtype)
            if d_weight is not None:
                _add_product_(d_weight[: shard.columns], d_logits.t(), h)
        ce, kd = (None if column[0] is None else torch.cat(column) for column in zip(*terms, strict=True))
        ctx.save_for_backward(d_hidden, d_weight, scale)
        ctx.dtypes = hidden.dtype, weight.dtype
        ctx.mark_non_differentiable(*(term for term in (ce, kd) if term is not None))
        return rows.loss(ce, kd), ce, kd

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, *_):
        *gradients, scale = ctx.saved_tensors
        factor = upstream if scale is None else upstream / scale
        products = [
            # straight into the parameter's dtype: no second fp32 copy of the LM head
            None if g is None else torch.mul(g, factor, out=torch.empty_like(g, dtype=dtype))
            for g, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        return *products, *[None] * 7


def _check_heads(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor | None, teacher_weight: Tensor | None) -> None:
    """Raise ValueError on shapes or dtypes that do not fit."""
    pairs = [("student", hidden, weight)]
    if teacher_hidden is not None or teacher_weight is not None:
        if teacher_hidden is None or teacher_weight is None:
            raise ValueError("teacher_hidden and teacher_weight must be given together")
        pairs.append(("teacher", teacher_hidden, teacher_weight))
        if (teacher_hidden.shape[0], teacher_weight.shape[0]) != (hidden.shape[0], weight.shape[0]):
            raise ValueError(
                f"teacher has {teacher_hidden.shape[0]} rows and {teacher_weight.shape[0]} vocabulary columns, "
                f"student {hidden.shape[0]} and {weight.shape[0]}: both must be equal"
            )
    for name, h, w in pairs:
        if h.dim() != 2 or w.dim() != 2 or h.shape[1] != w.shape[1] or h.dtype != w.dtype:
            raise ValueError(
                f"{name}_hidden is {tuple(h.shape)} {h.dtype} and {name}_weight {tuple(w.shape)} {w.dtype}; "
                "needed: [N, H] and [V/tp, H] of one dtype"
            )


def fused_linear_loss(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor | None,
    teacher_weight: Tensor | None,
    labels: Tensor,
    ce_weight: Tensor | None,
    kd_weight: Tensor | None,
    *,
    spec: LossSpec,
    true_vocab: int,
    tp_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    chunk_rows: int | None = None,
) -> LossOutput:
    """Sum of ce_weight * CE + kd_weight * divergence over this rank's tokens, from final hidden states and LM heads.

    The gradient is computed together with the forward pass, a chunk of rows at a time and over the chunk's own logits,
    so that logits of one chunk exist at one time. Kept for backward: the gradients of hidden states and weight, in the
    precision of the statistics (fp32, or float64 for float64 inputs). GEMMs take the input dtype and give fp32 logits.

    Communication over `tp_group`: one all-gather a chunk in forward, of 12 bytes a row for CE alone and 20 to 28 with a
    divergence (fp32). For the hidden states, as any column-parallel layer: nothing in forward and one all-reduce in
    backward, or with `sequence_parallel` one all-gather a model in forward and one reduce-scatter in backward. None at
    all if `tp_group` is None or has one rank.

    Args:
        student_hidden: [N, Hs], the same on all ranks of `tp_group`; with `sequence_parallel` [N/tp, Hs], this rank's
            rows in rank order.
        student_weight: [V/tp, Hs] rows of the LM head of global ids rank * V/tp and up.
        teacher_hidden: [N, Ht] or [N/tp, Ht], as the student's; any float dtype; never differentiated; read only if
            `kd_weight` is given.
        teacher_weight: [V/tp, Ht] in the dtype of `teacher_hidden`.
        labels: [N] int64 global ids; anything where `ce_weight` is 0.
        ce_weight: [N] fp32, not differentiated; None: CE is not computed.
        kd_weight: [N] fp32, same; None: the divergence is not computed.
        spec: divergence and temperature.
        true_vocab: columns of this global id and above are padding: probability 0, gradient exactly 0.
        tp_group: ranks that hold the other columns.
        sequence_parallel: hidden states are cut along rows over `tp_group`.
        chunk_rows: rows whose logits exist at one time; default: 256 MiB of one model's logits.

    Returns:
        LossOutput. The gradient of `student_hidden` is complete (summed over the vocabulary shards), that of
        `student_weight` is this shard's.

    Raises:
        ValueError: shapes or dtypes that do not fit, or weights that need a teacher that is not given.
    """
    if kd_weight is None:
        teacher_hidden = teacher_weight = None
    elif teacher_hidden is None:
        raise ValueError("kd_weight is given and teacher_hidden is None")
    _check_heads(student_hidden, student_weight, teacher_hidden, teacher_weight)
    shard = VocabShard.of(student_weight.shape[0], true_vocab, tp_group)
    wanted = [torch.is_grad_enabled() and x.requires_grad for x in (student_hidden, student_weight)]
    if teacher_hidden is not None:
        teacher_hidden, teacher_weight = teacher_hidden.detach(), teacher_weight.detach()
    if shard.size > 1 and sequence_parallel:
        student_hidden = gather_from_sequence_parallel_region(
            student_hidden, tensor_parallel_output_grad=True, group=tp_group
        )
        if teacher_hidden is not None:
            teacher_hidden = gather_from_sequence_parallel_region(teacher_hidden, group=tp_group)
    elif shard.size > 1:
        student_hidden = copy_to_tensor_model_parallel_region(student_hidden, group=tp_group)
    rows = Rows.of(labels, ce_weight, kd_weight, student_hidden.shape[0], statistics_dtype(student_hidden))
    return LossOutput(
        *_FusedLinearLoss.apply(
            student_hidden, student_weight, teacher_hidden, teacher_weight, rows, spec, shard, chunk_rows, wanted
        )
    )
