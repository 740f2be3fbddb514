"""The work behind `fused_linear_loss`: chunk by chunk from hidden states to values and gradients."""

from collections.abc import Generator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mkd.losses.chunking import interleave
from mkd.losses.divergences import DIVERGENCES
from mkd.losses.kernels.interface import Kernels
from mkd.losses.lm_head import LMHead, add_gemm, gemm, gemm_operand
from mkd.losses.logits import Chunk, KernelContext, statistics_dtype
from mkd.losses.rows import Statistics, TokenTerms, TokenWeights
from mkd.losses.sparse.passes import TopColumns, terms_of
from mkd.losses.sparse.teacher import SparseTarget


@dataclass
class FusedPass:
    """One evaluation of the loss, and with it of the gradients of hidden states, LM head and bias."""

    hidden: Tensor
    head: LMHead
    teacher_hidden: Tensor | None
    teacher_head: LMHead | None
    sparse: SparseTarget | None
    """What a sparse teacher says of all rows, in place of hidden states."""
    rows: TokenWeights
    context: KernelContext
    kernels: Kernels
    chunks: list[slice]
    logits_dtype: torch.dtype
    gradient_rows: TokenWeights | None
    """With weights as the gradients need them; None: no gradients."""
    d_hidden: Tensor | None
    d_weight: Tensor | None
    """[columns, H] fp32, over the real columns."""
    d_bias: Tensor | None
    adds_to_d_weight: bool
    """Whether `d_weight` holds something to add to from the start."""
    _merged: list[tuple] = field(default_factory=list)

    def run(self) -> TokenTerms:
        """Fill the gradients, return the values of all rows."""
        columns, size = self.context.shard.columns, self.chunks[0].stop
        with_gradient = self.gradient_rows is not None
        alone = self.context.shard.size == 1
        # Over several ranks two chunks are under way, so that one computes while the other waits for the exchange. On
        # one rank there is nothing to wait for; there the student's products take two chunks at a time, since each
        # reads or writes the whole LM head.
        slots = min(2, len(self.chunks))
        at_a_time = 1 if alone else slots

        def buffer(count: int, dtype: torch.dtype) -> Tensor:
            return self.hidden.new_empty((count * size, columns), dtype=dtype)

        self._in_place = self.logits_dtype == self.head.weight.dtype
        self._gradients = buffer(slots, self.head.weight.dtype) if with_gradient or self._in_place else None
        self._student = self._gradients if self._in_place else buffer(at_a_time, self.logits_dtype)
        self._teacher = None
        if self.teacher_head is not None:
            teacher = self.teacher_head.weight
            # A GEMM rounds its result to the dtype of its coeffs or not at all.
            rounded = self.logits_dtype == teacher.dtype or teacher.device.type == "cpu"
            self._teacher = buffer(at_a_time, self.logits_dtype if rounded else statistics_dtype(teacher))
        self._merged = [()] * len(self.chunks)
        if alone and with_gradient:
            for first in range(0, len(self.chunks), 2):
                self._pair(range(first, min(first + 2, len(self.chunks))))
        else:
            interleave((self._chunk(i) for i in range(len(self.chunks))), at_a_time)
        stats, sums = ([part[kind] for part in self._merged] for kind in (0, 1))
        stats = _concatenate(stats)
        sums = None if sums[0] is None else _concatenate(sums)
        return terms_of(stats, sums, self.rows, self.context, self.sparse)

    def _pair(self, indices: range) -> None:
        """The work on two neighboring chunks where no other rank is to be asked."""
        first = self.chunks[indices[0]].start
        whole = slice(first, self.chunks[indices[-1]].stop)
        gradients = self._gradients[: whole.stop - first]
        if self._in_place:
            self.head.logits(self.hidden[whole], gradients)
        for index in indices:
            span = self.chunks[index]
            out = gradients[span.start - first : span.stop - first]
            student = out if self._in_place else self._student_logits(index)
            chunk = self._beside_teacher(student, index)
            stats, sums = self.kernels.all_passes(chunk, self.context, self.gradient_rows[span], out)
            self._merged[index] = (_of_one_shard(stats), None if sums is None else _of_one_shard(sums))
        self._use_gradient(whole, gradients)

    def _chunk(self, index: int) -> Generator[None, None, None]:
        """The work on one chunk; yields where it would wait for the other ranks."""
        span, context, kernels = self.chunks[index], self.context, self.kernels
        chunk = self._beside_teacher(self._student_logits(index), index)
        exchange = context.shard.exchange(kernels.softmax_stats(chunk, context))
        yield
        stats, sums = exchange.wait(), None
        if context.with_kd and DIVERGENCES[context.spec.divergence].single_pass is None:
            exchange = context.shard.exchange(kernels.divergence_stats(chunk, stats, context))
            yield
            sums = exchange.wait()
        self._merged[index] = (stats, sums)
        if self.gradient_rows is not None:
            out = self._slot(self._gradients, index)
            kernels.write_gradient(chunk._replace(rows=self.gradient_rows[span]), stats, sums, context, out)
            self._use_gradient(span, out)

    def _student_logits(self, index: int) -> Tensor:
        return self.head.logits(self.hidden[self.chunks[index]], self._slot(self._student, index))

    def _beside_teacher(self, student: Tensor, index: int) -> Chunk:
        span, teacher = self.chunks[index], None
        if self.sparse is not None:
            teacher = TopColumns.taken_from(student, self.sparse[span], self.rows[span], self.context)
        elif self.teacher_head is not None:
            teacher = self._teacher_logits(index)
        return Chunk(student, teacher, self.rows[span])

    def _teacher_logits(self, index: int) -> Tensor:
        return self.teacher_head.logits(self.teacher_hidden[self.chunks[index]], self._slot(self._teacher, index))

    def _slot(self, buffer: Tensor, index: int) -> Tensor:
        """The chunk's part of a buffer that has room for one or two chunks."""
        size, span = self.chunks[0].stop, self.chunks[index]
        first = size * (index % (buffer.shape[0] // size)) if size else 0
        return buffer[first : first + span.stop - span.start]

    def _use_gradient(self, span: slice, d_logits: Tensor) -> None:
        """From the logit gradient of some rows to those of hidden states, weight and bias."""
        if self.d_hidden is not None:
            gemm(d_logits, self.head.weight, out=self.d_hidden[span])
        if self.d_bias is not None:
            self.d_bias += d_logits.sum(dim=0, dtype=self.d_bias.dtype)
        if self.d_weight is None:
            return
        # What an unused row holds, NaN included, must have no effect; its logit gradient is 0.
        hidden = gemm_operand(
            self.hidden[span].masked_fill(self.rows[span].unused_by_student(), 0), self.d_weight.dtype
        )
        add_gemm(self.d_weight, d_logits.t(), hidden, fresh=span.start == 0 and not self.adds_to_d_weight)


def _concatenate(parts: list[Statistics]) -> Statistics:
    return {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}


def _of_one_shard(stats: Statistics) -> Statistics:
    """[rows] -> [1, rows]"""
    return {name: values[None] for name, values in stats.items()}
