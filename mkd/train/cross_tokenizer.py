"""The term of a teacher with another tokenizer: it is compared with the student per aligned text chunk.

The chunks are those of the teacher's view of the microbatch (`KDBatch.teacher_views`); the losses are in
`mkd.xtoken.loss`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mkd.config.loss_spec import LossSpec
from mkd.data.batch import KDBatch, TeacherTokens, to_device
from mkd.losses import LinearLogits, LossOutput, TokenWeights, VocabLayout
from mkd.teacher.interface import HiddenSignal
from mkd.train.objective import (
    LossContext,
    Mean,
    Student,
    TeacherCE,
    WrittenDivergence,
    finite_sum,
    flatten_tokens,
    routed_factor,
    unflatten_tokens,
)
from mkd.train.step_tokens import StepTokens
from mkd.xtoken.loss.chunks import HostTokens, TokenChunks
from mkd.xtoken.loss.teacher_ce import teacher_cross_entropy
from mkd.xtoken.loss.xtoken_loss import xtoken_loss
from mkd.xtoken.vocabulary.cross_vocabulary import CrossVocabulary


@dataclass(frozen=True)
class CrossTokenizer:
    """The vocabulary of a teacher with another tokenizer."""

    vocabulary: CrossVocabulary
    byte_lengths: Tensor | None = None
    """[V] bytes of each of the teacher's tokens; None if unknown."""

    def objective(self, context: LossContext, batch: KDBatch, signal: HiddenSignal) -> "CrossTokenizerObjective":
        """The term of a teacher with this tokenizer."""
        return CrossTokenizerObjective(self, context, batch, signal)


@dataclass(frozen=True)
class CrossTokenizerObjective:
    """A teacher that reads the same texts in its own tokens; it is compared with the student per text chunk.

    The methods are those of `TeacherObjective`.
    """

    tokenizer: CrossTokenizer
    context: LossContext
    batch: KDBatch
    signal: HiddenSignal
    texts: Tensor | None = None
    """[texts] fp32, 1 for texts that this teacher teaches and 0 for others; None for all."""
    routed: Tensor | None = None
    """[chunks] fp32 factor of each chunk's divergence, on the host; None: 1."""

    @property
    def _view(self) -> TeacherTokens:
        return self.batch.teacher_views[self.signal.view]

    def scale(self, tokens: StepTokens) -> Tensor:
        return tokens.scale(tokens.chunks[self.signal.view])

    def loss(self, student: Student, ce_weight: Tensor | None, factor: Tensor | float, spec: LossSpec) -> LossOutput:
        view, vocabulary, groups = self._view, self.tokenizer.vocabulary, self.context.groups
        numbers = (view.student_chunk, view.student_first, view.chunk, view.first, view.batch.labels)
        return xtoken_loss(
            student.logits,
            self._teacher_logits(student.sequence_parallel),
            TokenWeights(flatten_tokens(self.batch.labels), ce_weight, None),
            TokenChunks(
                *map(flatten_tokens, numbers),
                weight=factor * self._taught_chunks,
                cp_group=groups.cp,
                on_host=self._on_host(),
            ),
            vocabulary=vocabulary,
            spec=spec,
            vocab=VocabLayout(vocabulary.student_vocab, groups.tp, student.sequence_parallel),
            options=self.context.options,
            upstream=student.upstream,
        )

    def _on_host(self) -> HostTokens | None:
        """Labels and weights as they are on the device; None if they are known there only."""
        view = self._view
        if self.texts is not None or view.student_labels is None:
            return None
        labels, teacher_labels, with_ce = map(flatten_tokens, (view.student_labels, view.labels, view.student_ce))
        weight = self._host_weight
        with_kd = torch.ones(view.chunks, dtype=torch.bool) if weight is None else weight != 0
        return HostTokens(labels, teacher_labels, with_ce, with_kd)

    def _teacher_logits(self, sequence_parallel: bool) -> LinearLogits:
        """The logits of all tokens; tokens that are not selected belong to no chunk, and their hidden states are 0."""
        signal, tp = self.signal, self.context.groups.tp
        if signal.selected:
            part = (tp.rank(), tp.size()) if sequence_parallel else (0, 1)
            hidden = self._view.batch.supervised.spread(signal.hidden, *part)
        else:
            hidden = signal.hidden.flatten(0, 1)
        return LinearLogits(hidden, signal.head, signal.logit_map)

    def divergence(self, output: LossOutput, tokens: StepTokens) -> Mean:
        # One of the context-parallel ranks that share a chunk has its divergence; each of them has the count.
        count = self._view.weight_of_chunks if self._counts_chunks else 0
        total = (output.kd * self._taught_chunks).sum()
        return Mean(total, torch.full_like(total, count), tokens.chunks[self.signal.view])

    @property
    def _counts_chunks(self) -> bool:
        return self.context.groups.cp.rank() == 0

    @property
    def _host_weight(self) -> Tensor | None:
        """[chunks] fp32 weights of the chunks that this teacher teaches, on the host; None: 1 everywhere."""
        weight = self._view.chunk_weight
        if weight is None or self.routed is None:
            return weight
        return weight * self.routed

    @property
    def _taught_chunks(self) -> Tensor:
        """[chunks] fp32 weights, 0 for chunks that this teacher does not teach."""
        return self._taught(self._host_weight)

    def _taught(self, factor: Tensor | None) -> Tensor:
        """[chunks] fp32: a factor on the host (None: 1) in the texts that this teacher teaches, 0 in others."""
        view, device = self._view, self.signal.hidden.device
        factor = torch.ones(view.chunks, device=device) if factor is None else to_device(factor)
        return factor if self.texts is None else factor * self.texts[to_device(view.chunk_text)]

    def by_position(self, output: LossOutput, share: float) -> WrittenDivergence:
        index = to_device(self._view.chunk_written)
        return WrittenDivergence(share * output.kd * self._taught(self.routed), index, self._counts_chunks)

    def aligned_share(self) -> Mean:
        """The share of the written tokens that are in a text chunk."""
        written = self.batch.written >= 0
        return Mean.of(to_device(self._view.student_chunk >= 0).float(), written.float(), None)

    def routed_to(self, number: int, weights: Sequence[float]) -> "CrossTokenizerObjective":
        return replace(self, routed=routed_factor(self._view.chunk_teacher, number, weights))

    def restricted_to(self, texts: Tensor) -> "CrossTokenizerObjective":
        return replace(self, texts=texts)

    def cross_entropy(self, sequence_parallel: bool) -> TeacherCE:
        batch = self._view.batch
        ce = teacher_cross_entropy(
            self._teacher_logits(sequence_parallel),
            flatten_tokens(batch.labels),
            flatten_tokens(batch.ce_mask),
            vocabulary=self.tokenizer.vocabulary,
            tp_group=self.context.groups.tp,
            sequence_parallel=sequence_parallel,
            chunk_rows=self.context.options.chunk_rows,
        )
        return TeacherCE(unflatten_tokens(ce, batch), batch, self.tokenizer.byte_lengths)

    def finite_sum(self) -> Tensor:
        counted = to_device(self._view.chunk >= 0).t()
        return finite_sum(self.signal, counted, self._view.batch, self.context.groups)
