"""The loss from logits that are split along the vocabulary over the tensor-parallel group."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mkd.config.loss_spec import LossSpec
from mkd.losses.divergences import DIVERGENCES
from mkd.losses.inputs import KernelContext, TokenWeights, loss_chunks, statistics_dtype
from mkd.losses.kernels.interface import Chunk, Kernels
from mkd.losses.kernels.select import choose, sparse_kernels
from mkd.losses.kernels.sparse import with_top_columns
from mkd.losses.output import LossOutput
from mkd.losses.sparse.statistics import sparse_terms
from mkd.losses.sparse.teacher import SparseTarget, SparseTeacher, Tail
from mkd.losses.statistics import Statistics, concatenate, dense_terms
from mkd.losses.vocab_shard import VocabLayout


def loss_from_logits(
    student_logits: Tensor,
    teacher: Tensor | SparseTeacher | None,
    tokens: TokenWeights,
    *,
    spec: LossSpec,
    vocab: VocabLayout,
    tail: Tail = "bucket",
    impl: str = "auto",
) -> LossOutput:
    """Sum of ce_weight * CE + kd_weight * divergence over this rank's tokens, from logits.

    CE and z-loss are at T = 1; `spec.temperature` applies to the divergence alone. Formulas: docs/losses.md.

    Communication over the tensor-parallel group, all in forward (fp32): one all-gather of 12 bytes per token for CE
    alone, 16 to 28 with a dense teacher or 24 to 32 with a sparse one, and for jsd, the skewed KLs and tvd a second one
    of 8. None in backward, and none at all on one rank.

    Args:
        student_logits: [N, V/tp] this rank's columns, floating.
        teacher: read only if there are KD weights, never differentiated: logits [N, V/tp] of the same columns, any
            float dtype (on one rank the padding may differ), or a sparse teacher of the N tokens.
        tokens: labels and weights.
        spec: divergence, temperature and z-loss.
        vocab: true vocabulary and tensor-parallel group; all ranks hold the same tokens.
        tail: treatment of the columns that a sparse teacher does not list.
        impl: auto (Triton on a GPU, eager elsewhere), eager or triton.

    Returns:
        LossOutput. The gradient of its loss is that of this rank's columns. An id of a sparse teacher beyond the
        vocabulary makes the token's `kd`, and so the loss, NaN.

    Raises:
        ValueError: shapes that do not fit, KD weights without a teacher, targets of a sparse teacher at another
            temperature than the spec's, or Triton where it cannot run.
    """
    shard = vocab.shard(student_logits.shape[1])
    if tokens.kd_weight is None:
        teacher = None
    elif not isinstance(teacher, SparseTeacher):
        if teacher is None or teacher.shape[0] != student_logits.shape[0]:
            seen = None if teacher is None else tuple(teacher.shape)
            raise ValueError(f"teacher_logits has shape {seen}; kd_weight needs {student_logits.shape[0]} tokens")
        shard.check_teacher(student_logits.shape[1], teacher.shape[1])
        teacher = _with_dense_columns(teacher.detach())
    tokens = tokens.checked(student_logits.shape[0], statistics_dtype(student_logits))
    context = KernelContext(spec, shard, with_kd=teacher is not None)
    kernels = choose(impl, student_logits.device, student_logits.dtype, context.needs_float64)
    if isinstance(teacher, SparseTeacher):
        teacher, tokens = SparseTarget.of(teacher, tokens, tail, spec, vocab.true_vocab)
        kernels = sparse_kernels(kernels)
    job = _Job(tokens, context, kernels, teacher if isinstance(teacher, SparseTarget) else None)
    dense = teacher if isinstance(teacher, Tensor) else None
    return LossOutput(*_VocabParallelLoss.apply(_with_dense_columns(student_logits), dense, job))


@dataclass(frozen=True)
class _Job:
    """Checked inputs of a loss other than logits."""

    tokens: TokenWeights
    context: KernelContext
    kernels: Kernels
    target: SparseTarget | None
    """A sparse teacher's; `kernels` are then `SparseKernels`."""

    def chunk(self, student: Tensor, teacher: Tensor | None, tokens: TokenWeights, span: slice) -> Chunk:
        """The real columns of some tokens; a copy beside a sparse teacher, whose columns are taken out of it."""
        columns = slice(0, self.context.shard.columns)
        student = student[span, columns]
        if self.target is None:
            return Chunk(student, None if teacher is None else teacher[span, columns], tokens[span])
        student = student.clone(memory_format=torch.contiguous_format)
        return with_top_columns(Chunk(student, self.target[span], tokens[span]), self.context)


class _VocabParallelLoss(torch.autograd.Function):
    """Forward: statistics. Backward: gradients from the saved logits and numbers per token, without a collective."""

    @staticmethod
    def forward(ctx, student_logits, teacher_logits, job: _Job):
        context, kernels, tokens = job.context, job.kernels, job.tokens
        dtype = context.statistics_dtype(student_logits)
        chunks = loss_chunks(student_logits.shape[0], context.shard.columns, dtype, None)

        def cut(c: slice) -> Chunk:
            return job.chunk(student_logits, teacher_logits, tokens, c)

        local = concatenate([kernels.softmax_stats(cut(c), context) for c in chunks])
        stats = context.shard.exchange(local).wait()
        sums = None
        if context.with_kd and DIVERGENCES[context.spec.divergence].single_pass is None:
            parts = [kernels.divergence_stats(cut(c), _slice(stats, c), context) for c in chunks]
            sums = context.shard.exchange(concatenate(parts)).wait()
        if job.target is None:
            terms = dense_terms(stats, sums, tokens, context)
        else:
            terms = sparse_terms(stats, sums, tokens, context, job.target)
        ctx.save_for_backward(student_logits, teacher_logits)
        ctx.saved = job, chunks, stats, sums
        output = terms.output(tokens, context.spec)
        ctx.mark_non_differentiable(*(term for term in (output.ce, output.kd) if term is not None))
        return tuple(output)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, *_):
        student_logits, teacher_logits = ctx.saved_tensors
        job, chunks, stats, sums = ctx.saved
        columns = job.context.shard.columns
        gradient = torch.empty_like(student_logits)
        gradient[:, columns:] = 0
        # The upstream scalar multiplies the weights: fp16 gradients are rounded after the loss scale, not before.
        weighted = job.tokens.times(upstream)
        for c in chunks:
            chunk = job.chunk(student_logits, teacher_logits, weighted, c)
            job.kernels.write_gradient(chunk, _slice(stats, c), _slice(sums, c), job.context, gradient[c, :columns])
        return gradient, None, None


def _with_dense_columns(logits: Tensor) -> Tensor:
    """The logits with each token's columns contiguous, as the kernels read them; copied only if they are not."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _slice(stats: Statistics | None, tokens: slice) -> Statistics | None:
    """Some tokens of the statistics of all shards."""
    return None if stats is None else {name: values[:, tokens] for name, values in stats.items()}
