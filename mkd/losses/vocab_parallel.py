"""Cross-entropy and divergence from logits that are cut along the vocabulary over the tensor-parallel group."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mkd.config.kd_config import LossSpec
from mkd.losses.chunking import loss_chunks
from mkd.losses.divergences import DIVERGENCES
from mkd.losses.kernels.interface import Kernels, choose
from mkd.losses.logits import Chunk, KernelContext, statistics_dtype
from mkd.losses.rows import Statistics, TokenWeights
from mkd.losses.sparse.passes import TopColumns, terms_of
from mkd.losses.sparse.teacher import SparseTarget
from mkd.losses.vocab_shard import VocabShard


class LossOutput(NamedTuple):
    """The sum that is minimized, and the terms of each token for reports."""

    loss: Tensor
    """Scalar, fp32 (float64 for float64 inputs), differentiable: sum of ce_weight * (ce + z_loss * log_sum^2) +
    kd_weight * kd over rows."""
    ce: Tensor | None
    """[N] detached cross-entropy in nats, unweighted; 0 where its weight is 0; None if there are no CE weights."""
    kd: Tensor | None
    """[N] detached divergence in nats, unweighted, with T^2 if the spec says so; 0 where its weight is 0; None if there
    are no KD weights."""


class _VocabParallelLoss(torch.autograd.Function):
    """Forward: statistics. Backward: gradients from the saved logits and row scalars, without a collective."""

    @staticmethod
    def forward(ctx, student_logits, teacher, rows: TokenWeights, context: KernelContext, kernels: Kernels):
        shard, spec = context.shard, context.spec
        chunks = loss_chunks(student_logits.shape[0], shard.columns, statistics_dtype(student_logits), None)

        def cut(c: slice) -> Chunk:
            return _cut(student_logits, teacher, rows, c, context)

        local = _concatenate([kernels.softmax_stats(cut(c), context) for c in chunks])
        stats = shard.exchange(local).wait()
        sums = None
        if context.with_kd and DIVERGENCES[spec.divergence].single_pass is None:
            parts = [kernels.divergence_stats(cut(c), _slice(stats, c), context) for c in chunks]
            sums = shard.exchange(_concatenate(parts)).wait()
        sparse = teacher if isinstance(teacher, SparseTarget) else None
        terms = terms_of(stats, sums, rows, context, sparse)
        ctx.save_for_backward(student_logits, None if sparse else teacher)
        ctx.saved = sparse, rows, context, kernels, chunks, stats, sums
        ctx.mark_non_differentiable(*(term for term in (terms.ce, terms.kd) if term is not None))
        return rows.weighted_sum(terms, spec), terms.ce, terms.kd

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, *_):
        student_logits, teacher_logits = ctx.saved_tensors
        sparse, rows, context, kernels, chunks, stats, sums = ctx.saved
        gradient = torch.empty_like(student_logits)
        gradient[:, context.shard.columns :] = 0
        # The upstream scalar goes into the weights: fp16 gradients are rounded after the loss scale, not before.
        weighted = rows.times(upstream)
        for c in chunks:
            chunk = _cut(student_logits, sparse or teacher_logits, weighted, c, context)
            out = gradient[c, : context.shard.columns]
            kernels.write_gradient(chunk, _slice(stats, c), _slice(sums, c), context, out)
        return gradient, None, None, None, None


def _cut(
    student: Tensor, teacher: Tensor | SparseTarget | None, rows: TokenWeights, chunk: slice, context: KernelContext
) -> Chunk:
    """The real columns of some rows; a copy beside a sparse teacher, whose columns are taken out of it."""
    columns = slice(0, context.shard.columns)
    student = student[chunk, columns]
    if isinstance(teacher, SparseTarget):
        student = student.clone(memory_format=torch.contiguous_format)
        return Chunk(student, TopColumns.taken_from(student, teacher[chunk], rows[chunk], context), rows[chunk])
    return Chunk(student, None if teacher is None else teacher[chunk, columns], rows[chunk])


def _with_dense_rows(logits: Tensor) -> Tensor:
    """The same with the columns of a row side by side, as kernels read them; a copy only where they are not."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _concatenate(parts: list[Statistics]) -> Statistics:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _slice(stats: Statistics | None, rows: slice) -> Statistics | None:
    """Some rows of statistics of all shards."""
    return None if stats is None else {name: values[:, rows] for name, values in stats.items()}


def vocab_parallel_loss(
    student_logits: Tensor,
    teacher_logits: Tensor | None,
    labels: Tensor,
    ce_weight: Tensor | None,
    kd_weight: Tensor | None,
    *,
    spec: LossSpec,
    true_vocab: int,
    tp_group: ProcessGroup | None = None,
    impl: str = "auto",
) -> LossOutput:
    """Sum of ce_weight * CE + kd_weight * divergence over this rank's tokens, from logits.

    CE and z-loss are at T = 1; `spec.temperature` applies to the divergence alone. Formulas: docs/losses.md.

    Communication over `tp_group`, all in forward (fp32): one all-gather of 12 bytes a row for CE alone, 16 to 28 with
    a divergence, and for jsd, the skewed KLs and tvd a second one of 8. None in backward, and none at all if `tp_group`
    is None or has one rank.

    Args:
        student_logits: [N, V/tp] this rank's columns, floating; rank r holds global ids r * V/tp and up.
        teacher_logits: [N, V/tp] same columns, any float dtype, never differentiated; unread if `kd_weight` is None. On
            one rank its padding may be wider or narrower than the student's.
        labels: [N] int64 global ids; anything where `ce_weight` is 0.
        ce_weight: [N] fp32, not differentiated; None: CE and z-loss are not computed.
        kd_weight: [N] fp32, same; None: the divergence is not computed.
        spec: divergence, temperature and z-loss.
        true_vocab: columns of this global id and above are padding: probability 0, gradient exactly 0.
        tp_group: ranks that hold the other columns of the same rows.
        impl: auto (Triton on a GPU, eager elsewhere), eager or triton.

    Returns:
        LossOutput. The gradient of its loss is that of this rank's columns.

    Raises:
        ValueError: shapes that do not fit, weights that need logits that are not given, or Triton where it cannot run.
    """
    shard = VocabShard.of(student_logits.shape[1], true_vocab, tp_group)
    if kd_weight is not None:
        if teacher_logits is None or teacher_logits.shape[0] != student_logits.shape[0]:
            seen = None if teacher_logits is None else tuple(teacher_logits.shape)
            raise ValueError(f"teacher_logits has shape {seen}; kd_weight needs {student_logits.shape[0]} rows")
        shard.check_teacher(student_logits.shape[1], teacher_logits.shape[1])
    rows = TokenWeights.of(labels, ce_weight, kd_weight, student_logits.shape[0], statistics_dtype(student_logits))
    context = KernelContext(spec, shard, with_kd=kd_weight is not None)
    teacher = None if kd_weight is None else _with_dense_rows(teacher_logits.detach())
    return loss_of_logits(student_logits, teacher, rows, context, choose(impl, student_logits))


def loss_of_logits(
    student_logits: Tensor,
    teacher: Tensor | SparseTarget | None,
    rows: TokenWeights,
    context: KernelContext,
    kernels: Kernels,
) -> LossOutput:
    """The loss of checked inputs.

    Args:
        student_logits: [N, V/tp].
        teacher: logits [N, V/tp] with dense rows, what a sparse teacher says, or None without a divergence.
        rows, context, kernels: of all N rows; the kernels are made for that kind of teacher.
    """
    return LossOutput(*_VocabParallelLoss.apply(_with_dense_rows(student_logits), teacher, rows, context, kernels))
