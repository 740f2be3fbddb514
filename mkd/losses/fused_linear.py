"""The loss from hidden states: LM-head GEMMs and loss together, one loss chunk at a time; logits are never kept.

The gradient is computed in forward, while a chunk's logits exist. `keep_gradients` saves it for backward; `MainGrad` is
the fp32 buffer of Megatron's optimizer, to which the LM head's gradient can be added at once.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mkd.config.loss_spec import LossSpec
from mkd.losses.divergences import DIVERGENCES
from mkd.losses.inputs import (
    MIN_CHUNK_TOKENS,
    KernelContext,
    LinearLogits,
    LMHead,
    LogitMaps,
    TokenWeights,
    add_gemm,
    gemm,
    gemm_operand,
    interleave,
    loss_chunks,
    resolve_logits_dtype,
    statistics_dtype,
    tempered_dtype,
)
from mkd.losses.kernels.interface import Chunk, Kernels
from mkd.losses.kernels.select import choose, sparse_kernels
from mkd.losses.kernels.sparse import with_top_columns
from mkd.losses.options import LossOptions
from mkd.losses.output import LossOutput
from mkd.losses.reference.linear import dense_divergence, linear_loss, sparse_divergence
from mkd.losses.sparse.statistics import sparse_terms
from mkd.losses.sparse.teacher import SparseTarget, SparseTeacher, Tail
from mkd.losses.statistics import Statistics, TokenTerms, as_one_shard, concatenate, dense_terms
from mkd.losses.vocab_shard import VocabLayout

FP16_HEADROOM = 1024.0
"""The largest possible logit gradient is scaled to about this before it is rounded to fp16, whose range is 6e-8 to
65504."""


def loss_from_hidden(
    student: LinearLogits,
    teacher: LinearLogits | SparseTeacher | None,
    tokens: TokenWeights,
    *,
    spec: LossSpec,
    vocab: VocabLayout,
    options: LossOptions = LossOptions(),  # noqa: B008
    tail: Tail = "bucket",
    upstream: Tensor | float | None = None,
) -> LossOutput:
    """Sum of ce_weight * CE + kd_weight * divergence over this rank's tokens, from final hidden states and LM heads.

    The gradient is computed together with the forward pass, one loss chunk at a time and over the chunk's own logits,
    so that logits of one or two chunks exist at one time. Kept for backward: the gradient of the hidden states, and
    unless `upstream` is given those of weight and bias, in the precision of the statistics (fp32, or float64).

    Communication over the tensor-parallel group: per loss chunk, in forward, one all-gather of 12 bytes per token for
    CE alone, 16 to 28 with a dense teacher or 24 to 32 with a sparse one, and for jsd, the skewed KLs and tvd a second
    one of 8 (fp32); the GEMMs of the next chunk run meanwhile. For the hidden states as any column-parallel layer:
    nothing in forward and one all-reduce in backward, or under sequence parallelism one all-gather per model in forward
    and one reduce-scatter in backward. None at all on one rank.

    Args:
        student: differentiable.
        teacher: read only if there are KD weights, never differentiated. A dense one covers the same tokens as the
            student, in any float dtype; on one rank the padding of its LM head may differ. A sparse one holds all N
            tokens, also under sequence parallelism, and is the same on all ranks.
        tokens: labels and weights of all N tokens.
        spec: divergence, temperature and z-loss.
        vocab: true vocabulary, tensor-parallel group and sequence parallelism.
        options: memory, precision and implementation.
        tail: treatment of the columns that a sparse teacher does not list.
        upstream: scalar, the gradient that backward will pass to the loss, if it is known. If the weight has an fp32
            `main_grad`, its gradient is then added to that while the loss is computed, with nothing kept. If backward
            passes another value, the gradient of the hidden states is NaN.

    Returns:
        LossOutput. The gradient of the student's hidden states is complete (summed over the vocabulary shards), those
        of its weight and bias are this shard's. An id of a sparse teacher beyond the vocabulary makes the token's `kd`,
        and so the loss, NaN.

    Raises:
        ValueError: shapes or dtypes that do not fit, KD weights without a teacher, targets of a sparse teacher at
            another temperature than the spec's, or Triton where it cannot run.
    """
    if tokens.kd_weight is None:
        teacher = None
    elif teacher is None:
        raise ValueError("kd_weight is given and teacher is None")
    _check(student, teacher)
    shard, maps = vocab.shard(student.weight.shape[0]), LogitMaps(student.logit_map)
    if isinstance(teacher, LinearLogits):
        shard.check_teacher(student.weight.shape[0], teacher.weight.shape[0])
    student = replace(student, hidden=vocab.gather_trained_hidden(student.hidden))
    if isinstance(teacher, LinearLogits):
        teacher = replace(teacher, hidden=vocab.gather_hidden(teacher.hidden.detach()))
        maps = LogitMaps(student.logit_map, teacher.logit_map)
    tokens = tokens.checked(student.hidden.shape[0], statistics_dtype(student.hidden))
    context = KernelContext(spec, shard, maps, with_kd=teacher is not None)
    if options.impl == "reference":
        return _reference(student, teacher, tail, tokens, context)
    kernels = choose(options.impl, student.hidden.device, student.hidden.dtype, context.needs_float64)
    if isinstance(teacher, SparseTeacher):
        target, tokens = SparseTarget.of(teacher, tokens, tail, spec, vocab.true_vocab)
        return _fused(student, target, tokens, context, sparse_kernels(kernels), options, upstream)
    return _fused(student, teacher, tokens, context, kernels, options, upstream)


def _check(student: LinearLogits, teacher: LinearLogits | SparseTeacher | None) -> None:
    """Raise ValueError on shapes, dtypes or logit maps that do not fit."""
    student.check("student")
    if isinstance(teacher, LinearLogits):
        teacher.check("teacher")
        if teacher.hidden.shape[0] != student.hidden.shape[0]:
            raise ValueError(
                f"teacher has {teacher.hidden.shape[0]} tokens, student {student.hidden.shape[0]}: both must be equal"
            )
    elif teacher is not None and student.logit_map.scale <= 0:
        raise ValueError(f"the student's logit scale is {student.logit_map.scale}; a sparse teacher needs it above 0")


def _reference(
    student: LinearLogits,
    teacher: LinearLogits | SparseTeacher | None,
    tail: Tail,
    tokens: TokenWeights,
    context: KernelContext,
) -> LossOutput:
    divergence = None
    if isinstance(teacher, SparseTeacher):
        SparseTarget.of(teacher, tokens, tail, context.spec, context.shard.true_vocab)  # raises on bad inputs
        divergence = sparse_divergence(teacher, tail, tokens, context)
    elif teacher is not None:
        divergence = dense_divergence(teacher, tokens, context)
    return LossOutput(*linear_loss(student, divergence, tokens, context))


@dataclass(frozen=True)
class MainGrad:
    """The buffer in which the LM head's gradient is accumulated while the loss is computed, before backward."""

    buffer: Tensor
    """fp32, in the shape of the weight."""
    upstream: Tensor | float
    """Scalar: the gradient that backward will pass, by which the sums are multiplied in advance. A number is not moved
    to the device: the copy would synchronize."""

    @classmethod
    def of(cls, weight: Tensor, upstream: Tensor | float | None) -> "MainGrad | None":
        """The weight's `main_grad`; None if the upstream gradient is not known or there is no such fp32 buffer.

        fp16 is excluded: its logit gradients are scaled into range by a factor that only backward divides out.
        """
        buffer = getattr(weight, "main_grad", None)
        if upstream is None or buffer is None or buffer.dtype != torch.float32 or weight.dtype == torch.float16:
            return None
        return cls(buffer, upstream)

    def check(self, upstream: Tensor) -> Tensor:
        """Scalar 1, or NaN if backward passes another gradient than announced: such gradients must not be used."""
        return torch.where(upstream == self.upstream, 1.0, torch.nan)

    @staticmethod
    def placeholder(weight: Tensor) -> Tensor | None:
        """The weight's gradient for autograd: without meaning, or None, by the protocol of Megatron's fused layers."""
        if getattr(weight, "zero_out_wgrad", False) or not hasattr(weight, "grad_added_to_main_grad"):
            # Also a tied embedding, whose own gradient comes by autograd and is added by Megatron's hook later.
            return None
        weight.grad_added_to_main_grad = True  # the hook then ignores the placeholder
        return torch.empty_like(weight)


def fp16_scale(tokens: TokenWeights, spec: LossSpec) -> Tensor:
    """A power of two (scalar, fp32) that brings the largest weight of a logit gradient to about `FP16_HEADROOM`.

    The gradient is computed before the loss scale of mixed-precision training is known, and most q_j of a large
    vocabulary are below fp16's smallest number.
    """
    weights = [(tokens.ce_weight, 1.0), (tokens.kd_weight, spec.temperature_factor / spec.temperature)]
    bound = torch.stack([w.abs().amax() * times for w, times in weights if w is not None]).sum()
    return torch.ldexp(torch.full_like(bound, FP16_HEADROOM), -torch.frexp(bound).exponent)


def keep_gradients(
    ctx: Any,
    gradients: Sequence[Tensor | None],
    scale: Tensor | None,
    inputs: Sequence[Tensor | None],
    main_grad: MainGrad | None,
) -> None:
    """Save the gradients that an autograd function's forward has computed for its backward.

    Args:
        ctx: context of the function.
        gradients: one per input, None where none is needed. The second is the LM head's, and None with `main_grad`.
        scale: factor that they carry and that backward divides out; None for 1.
        inputs: the differentiable inputs; their dtypes are those of the results.
        main_grad: holds the LM head's gradient; None if it is among the others.
    """
    ctx.save_for_backward(*gradients, scale)
    ctx.dtypes = [None if x is None else x.dtype for x in inputs]
    ctx.main_grad, ctx.weight = main_grad, inputs[1] if main_grad else None


def kept_gradients(ctx: Any, upstream: Tensor) -> list[Tensor | None]:
    """The gradients that `keep_gradients` has saved times the upstream scalar, each in the dtype of its input."""
    *gradients, scale = ctx.saved_tensors
    rest = upstream if scale is None else upstream / scale
    if ctx.main_grad:
        rest = ctx.main_grad.check(upstream)
    gradients = [
        # directly into the parameter's dtype: no second fp32 copy of the LM head
        None if g is None else torch.mul(g, rest, out=torch.empty_like(g, dtype=dtype))
        for g, dtype in zip(gradients, ctx.dtypes, strict=True)
    ]
    if ctx.weight is not None:
        gradients[1] = MainGrad.placeholder(ctx.weight)
    return gradients


class _DenseTeacher(NamedTuple):
    """A teacher that forms its logits one loss chunk at a time."""

    hidden: Tensor
    """[N, H]"""
    head: LMHead


@dataclass(frozen=True)
class _Job:
    """Checked inputs of a loss that do not take part in autograd."""

    head: LMHead
    """The student's."""
    teacher: _DenseTeacher | SparseTarget | None
    tokens: TokenWeights
    context: KernelContext
    kernels: Kernels
    chunks: list[slice]
    logits_dtype: torch.dtype
    needed: tuple[bool, bool, bool]
    """Gradients that are needed: of hidden states, weight and bias."""
    main_grad: MainGrad | None


def _fused(
    student: LinearLogits,
    teacher: LinearLogits | SparseTarget | None,
    tokens: TokenWeights,
    context: KernelContext,
    kernels: Kernels,
    options: LossOptions,
    upstream: Tensor | float | None,
) -> LossOutput:
    """The loss of checked inputs of all tokens; `kernels` are those for this kind of teacher."""
    inputs = student.hidden, student.weight, student.bias
    grad, columns = torch.is_grad_enabled(), context.shard.columns
    needed = tuple([grad and x is not None and x.requires_grad for x in inputs])
    dtype = resolve_logits_dtype(options.logits_dtype, student.hidden)
    least = MIN_CHUNK_TOKENS if student.hidden.is_cuda and not context.needs_float64 else 1
    if isinstance(teacher, LinearLogits):
        teacher = _DenseTeacher(teacher.hidden, LMHead.of_columns(teacher, columns))
    job = _Job(
        head=LMHead.of_columns(student, columns),
        teacher=teacher,
        tokens=tokens,
        context=context,
        kernels=kernels,
        chunks=loss_chunks(
            len(student.hidden),
            columns,
            tempered_dtype(dtype, context.temperature),
            options.chunk_rows,
            least,
            options.share,
        ),
        logits_dtype=dtype,
        needed=needed,
        main_grad=MainGrad.of(student.weight, upstream) if needed[1] else None,
    )
    return LossOutput(*_FusedLinearLoss.apply(*inputs, job))


class _FusedLinearLoss(torch.autograd.Function):
    """Loss and, with it, the gradients of hidden states and LM head; backward only applies the upstream scalar."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, job: _Job):
        tokens, spec = job.tokens, job.context.spec
        scale = fp16_scale(tokens, spec) if hidden.dtype == torch.float16 and tokens.labels.numel() else None
        gradients = _Gradients.allocate(hidden, weight, job, scale) if any(job.needed) else None
        output = _FusedPass(hidden.detach(), job, gradients).run().output(tokens, spec)
        results = (None, None, None)
        if gradients is not None:
            results = gradients.hidden, None if job.main_grad else gradients.weight, gradients.bias
        keep_gradients(ctx, results, scale, (hidden, weight, bias), job.main_grad)
        ctx.mark_non_differentiable(*[term for term in (output.ce, output.kd) if term is not None])
        return tuple(output)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, *_):
        return *kept_gradients(ctx, upstream), None


@dataclass(frozen=True)
class _Gradients:
    """Buffers that the loss fills with its gradients; None for one that is not needed."""

    tokens: TokenWeights
    """Weights times the factor that the gradients carry already: the upstream gradient, or fp16's scale."""
    hidden: Tensor | None
    weight: Tensor | None
    """[V/tp, H]"""
    bias: Tensor | None
    adds_to_weight: bool
    """`weight` holds a gradient to add to."""

    @classmethod
    def allocate(cls, hidden: Tensor, weight: Tensor, job: _Job, scale: Tensor | None) -> "_Gradients":
        dtype, main_grad = torch.promote_types(hidden.dtype, torch.float32), job.main_grad
        factor = scale if main_grad is None else main_grad.upstream
        d_weight = None
        if job.needed[1]:
            d_weight = main_grad.buffer if main_grad else torch.empty(weight.shape, dtype=dtype, device=weight.device)
            if not main_grad:
                # Padding columns may hold anything; their gradient is exactly 0.
                d_weight[job.context.shard.columns :] = 0
        kept = hidden.dtype if main_grad else dtype
        return cls(
            tokens=job.tokens if factor is None else job.tokens.times(factor),
            hidden=torch.empty(hidden.shape, dtype=kept, device=hidden.device) if job.needed[0] else None,
            weight=d_weight,
            bias=torch.zeros(weight.shape[0], dtype=dtype, device=weight.device) if job.needed[2] else None,
            adds_to_weight=main_grad is not None,
        )


@dataclass
class _FusedPass:
    """One evaluation of the loss, and with it of the gradients of hidden states, LM head and bias."""

    hidden: Tensor
    job: _Job
    gradients: _Gradients | None
    _merged: list[tuple[Statistics, Statistics | None] | None] = field(default_factory=list)

    def run(self) -> TokenTerms:
        """Fill the gradients and return the values of all tokens."""
        job, chunks = self.job, self.job.chunks
        columns, size = job.context.shard.columns, chunks[0].stop
        one_rank = job.context.shard.size == 1
        # On several ranks two chunks are in flight, so that one computes while the other waits for its exchange. One
        # rank has nothing to wait for; there the student's GEMMs process two chunks at a time, because each reads or
        # writes the whole LM head.
        slots = min(2, len(chunks))
        at_a_time = 1 if one_rank else slots

        def buffer(count: int, dtype: torch.dtype) -> Tensor:
            return self.hidden.new_empty((count * size, columns), dtype=dtype)

        self._in_place = job.logits_dtype == self.job.head.weight.dtype
        needs_buffer = self.gradients is not None or self._in_place
        self._d_logits = buffer(slots, self.job.head.weight.dtype) if needs_buffer else None
        self._student = self._d_logits if self._in_place else buffer(at_a_time, job.logits_dtype)
        self._teacher = None
        if isinstance(job.teacher, _DenseTeacher):
            teacher = job.teacher.head.weight
            # A GEMM rounds its result to the dtype of its operands or not at all.
            rounded = job.logits_dtype == teacher.dtype or teacher.device.type == "cpu"
            self._teacher = buffer(at_a_time, job.logits_dtype if rounded else statistics_dtype(teacher))
        self._merged = [None] * len(chunks)
        with_gradient = one_rank and self.gradients is not None
        if with_gradient:
            for first in range(0, len(chunks), 2):
                self._compute_pair(range(first, min(first + 2, len(chunks))))
        else:
            interleave((self._compute_chunk(i) for i in range(len(chunks))), at_a_time)
        merged = [concatenate([part[kind] for part in self._merged]) for kind in (0, 1)]
        if with_gradient:
            merged = [as_one_shard(part) for part in merged]
        if isinstance(job.teacher, SparseTarget):
            return sparse_terms(*merged, job.tokens, job.context, job.teacher)
        return dense_terms(*merged, job.tokens, job.context)

    def _compute_pair(self, indices: range) -> None:
        """Compute one or two neighboring chunks on one rank, all passes in one kernel call per chunk."""
        job, chunks = self.job, self.job.chunks
        first = chunks[indices[0]].start
        whole = slice(first, chunks[indices[-1]].stop)
        d_logits = self._d_logits[: whole.stop - first]
        if self._in_place:
            self.job.head.logits(self.hidden[whole], d_logits)
        for index in indices:
            span = chunks[index]
            out = d_logits[span.start - first : span.stop - first]
            chunk = self._chunk(out if self._in_place else self._student_logits(index), index)
            self._merged[index] = job.kernels.all_passes(chunk, job.context, self.gradients.tokens[span], out)
        self._backpropagate(whole, d_logits)

    def _compute_chunk(self, index: int) -> Generator[None, None, None]:
        """Compute one chunk; yields where it would wait for the other ranks."""
        span, context, kernels = self.job.chunks[index], self.job.context, self.job.kernels
        chunk = self._chunk(self._student_logits(index), index)
        if isinstance(chunk.teacher, SparseTarget):
            chunk = with_top_columns(chunk, context)
        pending = context.shard.exchange(kernels.softmax_stats(chunk, context))
        yield
        stats, sums = pending.wait(), None
        if context.with_kd and DIVERGENCES[context.spec.divergence].single_pass is None:
            pending = context.shard.exchange(kernels.divergence_stats(chunk, stats, context))
            yield
            sums = pending.wait()
        self._merged[index] = stats, sums
        if self.gradients is not None:
            out = self._slot(self._d_logits, index)
            weighted = chunk._replace(tokens=self.gradients.tokens[span])
            kernels.write_gradient(weighted, stats, sums, context, out)
            self._backpropagate(span, out)

    def _student_logits(self, index: int) -> Tensor:
        return self.job.head.logits(self.hidden[self.job.chunks[index]], self._slot(self._student, index))

    def _chunk(self, student: Tensor, index: int) -> Chunk:
        """The chunk's inputs of the kernels."""
        job, span = self.job, self.job.chunks[index]
        teacher = job.teacher
        if isinstance(teacher, SparseTarget):
            teacher = teacher[span]
        elif teacher is not None:
            teacher = teacher.head.logits(teacher.hidden[span], self._slot(self._teacher, index))
        return Chunk(student, teacher, job.tokens[span])

    def _slot(self, buffer: Tensor, index: int) -> Tensor:
        """The chunk's part of a buffer with room for one or two chunks."""
        size, span = self.job.chunks[0].stop, self.job.chunks[index]
        first = size * (index % (buffer.shape[0] // size)) if size else 0
        return buffer[first : first + span.stop - span.start]

    def _backpropagate(self, span: slice, d_logits: Tensor) -> None:
        """From the logit gradient of some tokens to those of hidden states, weight and bias."""
        gradients, columns = self.gradients, self.job.context.shard.columns
        # The hidden states of an unused token, NaN included, must have no effect; its logit gradient is 0.
        unused = None if gradients.weight is None else self.job.tokens[span].unused_by_student()
        if gradients.hidden is not None:
            gemm(d_logits, self.job.head.weight, out=gradients.hidden[span])
        if gradients.bias is not None:
            gradients.bias[:columns].add_(d_logits.sum(dim=0, dtype=gradients.bias.dtype))
        if gradients.weight is None:
            return
        hidden = gemm_operand(self.hidden[span].masked_fill(unused, 0), gradients.weight.dtype)
        fresh = span.start == 0 and not gradients.adds_to_weight
        add_gemm(gradients.weight[:columns], d_logits.t(), hidden, fresh=fresh)
