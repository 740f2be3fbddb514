"""The work behind `fused_linear_loss`: chunk by chunk from hidden states to values and gradients."""

from collections.abc import Generator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mkd.losses.chunking import interleave
from mkd.losses.divergences import DIVERGENCES
from mkd.losses.kernels import Kernels
from mkd.losses.lm_head import LMHead, add_product, factor, product
from mkd.losses.logits import Chunk, Setting, statistics_dtype
from mkd.losses.rows import Normalisers, Rows, Statistics, Terms


@dataclass
class FusedPass:
    """One evaluation of the loss, and with it of the gradients of hidden states, LM head and bias."""

    hidden: Tensor
    head: LMHead
    teacher_hidden: Tensor | None
    teacher_head: LMHead | None
    rows: Rows
    setting: Setting
    kernels: Kernels
    chunks: list[slice]
    logits_dtype: torch.dtype
    gradient_rows: Rows | None
    """With weights as the gradients need them; None: no gradients."""
    d_hidden: Tensor | None
    d_weight: Tensor | None
    """[columns, H] fp32, over the real columns."""
    d_bias: Tensor | None
    adds_to_d_weight: bool
    """Whether `d_weight` holds something to add to from the start."""
    _merged: list[tuple] = field(default_factory=list)

    def run(self) -> Terms:
        """Fill the gradients, return the values of all rows."""
        columns, size = self.setting.shard.columns, self.chunks[0].stop
        # Over several ranks two chunks are under way, so that one computes while the other waits for the exchange. On
        # one rank there is nothing to wait for; there the weight's gradient is added up from two chunks at a time.
        slots = min(2, len(self.chunks))
        at_a_time = slots if self.setting.shard.size > 1 else 1

        def buffer(count: int, dtype: torch.dtype) -> Tensor:
            return self.hidden.new_empty((count * size, columns), dtype=dtype)

        in_place = self.logits_dtype == self.head.weight.dtype
        self._gradients = buffer(slots, self.head.weight.dtype) if self.gradient_rows is not None or in_place else None
        self._student = self._gradients if in_place else buffer(at_a_time, self.logits_dtype)
        self._teacher = None
        if self.teacher_head is not None:
            teacher = self.teacher_head.weight
            # A GEMM rounds its result to the dtype of its factors or not at all.
            rounded = self.logits_dtype == teacher.dtype or teacher.device.type == "cpu"
            self._teacher = buffer(at_a_time, self.logits_dtype if rounded else statistics_dtype(teacher))
        self._merged = [()] * len(self.chunks)
        interleave((self._chunk(i) for i in range(len(self.chunks))), at_a_time)
        stats, sums = ([part[kind] for part in self._merged] for kind in (0, 1))
        stats = _concatenate(stats)
        sums = None if sums[0] is None else _concatenate(sums)
        normalisers = Normalisers.merge(stats, self.setting.temperature)
        return Terms.of(stats, sums, normalisers, self.rows, self.setting.shard.true_vocab, self.setting.spec)

    def _chunk(self, index: int) -> Generator[None, None, None]:
        """The work on one chunk; yields where it would wait for the other ranks."""
        span, setting, kernels = self.chunks[index], self.setting, self.kernels
        chunk = Chunk(
            self.head.logits(self.hidden[span], _slot(self._student, index, span, self.chunks)),
            None
            if self.teacher_head is None
            else self.teacher_head.logits(self.teacher_hidden[span], _slot(self._teacher, index, span, self.chunks)),
            self.rows[span],
        )
        exchange = setting.shard.exchange(kernels.first_round(chunk, setting))
        yield
        stats, sums = exchange.wait(), None
        if setting.with_kd and DIVERGENCES[setting.spec.divergence].one_round is None:
            exchange = setting.shard.exchange(kernels.second_round(chunk, stats, setting))
            yield
            sums = exchange.wait()
        self._merged[index] = (stats, sums)
        if self.gradient_rows is not None:
            out = _slot(self._gradients, index, span, self.chunks)
            kernels.write_gradient(chunk._replace(rows=self.gradient_rows[span]), stats, sums, setting, out)
            self._use_gradient(index, out)

    def _use_gradient(self, index: int, d_logits: Tensor) -> None:
        """From a chunk's logit gradient to those of hidden states, weight and bias."""
        if self.d_hidden is not None:
            product(d_logits, self.head.weight, out=self.d_hidden[self.chunks[index]])
        if self.d_bias is not None:
            self.d_bias += d_logits.sum(dim=0, dtype=self.d_bias.dtype)
        if self.d_weight is None:
            return
        first = index
        if self.setting.shard.size == 1:
            first = index - index % 2
            if first == index and index + 1 < len(self.chunks):
                return  # together with the next
        span = slice(self.chunks[first].start, self.chunks[index].stop)
        if first != index:
            d_logits = self._gradients[: span.stop - span.start]
        # What an unused row holds, NaN included, must have no effect; its logit gradient is 0.
        hidden = factor(self.hidden[span].masked_fill(self.rows[span].unused_by_student(), 0), self.d_weight.dtype)
        add_product(self.d_weight, d_logits.t(), hidden, fresh=first == 0 and not self.adds_to_d_weight)


def _slot(buffer: Tensor, index: int, span: slice, chunks: list[slice]) -> Tensor:
    """The chunk's part of a buffer that has room for one or two chunks."""
    size = chunks[0].stop
    first = size * (index % (buffer.shape[0] // size)) if size else 0
    return buffer[first : first + span.stop - span.start]


def _concatenate(parts: list[Statistics]) -> Statistics:
    return {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}
