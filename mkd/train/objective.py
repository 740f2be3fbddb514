"""What one teacher adds to the loss of a microbatch: a class for each kind of signal."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from mkd.config.kd_config import LossSpec
from mkd.data.batch import KDBatch, TeacherTokens
from mkd.data.token_counts import StepTokens
from mkd.distributed.groups import Groups
from mkd.losses import (
    LogitMap,
    LogitMaps,
    LogitSource,
    LossOptions,
    LossOutput,
    SparseTeacher,
    fused_linear_loss,
    fused_linear_topk_loss,
    teacher_top_k,
)
from mkd.losses.sparse.teacher import Tail
from mkd.teacher.interface import HiddenSignal, TeacherSignal, TopKSignal
from mkd.train.evaluation import (
    Mean,
    bits_per_byte,
    calibration_sums,
    compare,
    comparison_terms,
    mask_unknown_labels,
    rows_of,
    sparse_rows,
    sums_of_texts,
    teacher_cross_entropy,
)
from mkd.xtoken.loss.chunks import ChunkRows
from mkd.xtoken.loss.teacher_ce import teacher_cross_entropy as cross_entropy_in_columns
from mkd.xtoken.loss.xtoken_loss import xtoken_loss
from mkd.xtoken.vocabulary.cross_vocabulary import CrossVocabulary


@dataclass(frozen=True)
class CrossSetting:
    """What is the same for all microbatches of a teacher with another tokenizer."""

    vocabulary: CrossVocabulary
    byte_lengths: Tensor | None = None
    """[V] bytes of each of the teacher's tokens; None: they are not known."""


@dataclass(frozen=True)
class Setting:
    """What is the same for all microbatches of a run."""

    groups: Groups
    true_vocab: int
    options: LossOptions
    """How the losses are computed."""
    top_k: int | None
    """How many of the teacher's most probable tokens the divergence looks at; None: all, or those that are known."""
    top_k_tail: Tail
    """What becomes of the others."""
    byte_lengths: Tensor | None = None
    """[V] bytes of each of the student's tokens; None: they are not known."""
    cross: tuple[CrossSetting, ...] = ()
    """Of each side in `KDBatch.others`."""


@dataclass(frozen=True)
class Student:
    """The student's side of a microbatch."""

    hidden: Tensor
    """[N, H], or [N/tp, H] under sequence parallelism, rows in megatron's order (sequence first)."""
    weight: Tensor
    """[V/tp, H] of the LM head."""
    logit_scale: float
    sequence_parallel: bool
    upstream: Tensor | float
    """The gradient that the loss will get."""


class TeacherObjective(Protocol):
    """One teacher and one microbatch."""

    def scale(self, tokens: StepTokens) -> Tensor:
        """What makes the step's one division that of this term by its own count, scalar."""
        ...

    def loss(self, student: Student, ce_weight: Tensor | None, factor: Tensor | float, spec: LossSpec) -> LossOutput:
        """CE with these weights ([N] or None) and `factor` times the sum of the divergence."""
        ...

    def divergence(self, output: LossOutput, tokens: StepTokens) -> Mean:
        """The divergence of what `loss` returned, without its factor."""
        ...

    def teacher(self, sequence_parallel: bool) -> dict[str, Mean]:
        """The teacher's own CE; for evaluations."""
        ...

    def comparison(
        self, student: Student, tokens: StepTokens, calibrates: bool
    ) -> tuple[dict[str, Mean], Tensor | None]:
        """How alike both models are, as far as it is defined, and the sums of `calibration_sums`."""
        ...

    def sum_of_teacher(self) -> Tensor:
        """Scalar that is not finite if what the teacher says of a distilled token of this rank is not."""
        ...

    def sums_of_texts(self, texts: int, sequence_parallel: bool) -> Tensor:
        """[2, texts] float64 of this rank's supervised tokens in each text: the teacher's CE in nats, and their number.

        Where a teacher of the run has another tokenizer: of those tokens that are text, and their bytes.
        """
        ...

    def teaching(self, taught: Tensor) -> "TeacherObjective":
        """The term with no divergence but on some texts ([texts] fp32, 1 or 0); what it is a mean over stays."""
        ...


def cross_entropy(student: Student, batch: KDBatch, ce_weight: Tensor, spec: LossSpec, setting: Setting) -> LossOutput:
    """Without a teacher."""
    return fused_linear_loss(
        student.hidden,
        student.weight,
        None,
        None,
        rows_of(batch.labels),
        ce_weight,
        None,
        maps=LogitMaps(student=LogitMap(scale=student.logit_scale)),
        **_common(student, spec, setting),
    )


def _common(student: Student, spec: LossSpec, setting: Setting) -> dict[str, Any]:
    return dict(
        spec=spec,
        true_vocab=setting.true_vocab,
        tp_group=setting.groups.tp,
        sequence_parallel=student.sequence_parallel,
        upstream=student.upstream,
        **asdict(setting.options),
    )


@dataclass(frozen=True)
class SameTokenizerObjective:
    """A teacher that reads the student's own tokens: hidden states, or some of its logits."""

    setting: Setting
    batch: KDBatch
    signal: TeacherSignal
    taught: Tensor | None = None
    """[texts] fp32, 1 for texts that this teacher teaches and 0 for others; None: it teaches all."""

    def scale(self, tokens: StepTokens) -> Tensor:
        """See `TeacherObjective`, as of the methods below."""
        return tokens.kd_scale

    def loss(self, student: Student, ce_weight: Tensor | None, factor: Tensor | float, spec: LossSpec) -> LossOutput:
        signal, common = self.signal, _common(student, spec, self.setting)
        rows = (rows_of(self.batch.labels), ce_weight, factor * rows_of(self._kd_mask))
        student_map = LogitMap(scale=student.logit_scale)
        if isinstance(signal, TopKSignal) or self.setting.top_k is not None:
            teacher = self._sparse(spec.temperature, student.sequence_parallel)
            sparse = dict(tail=self.setting.top_k_tail, student_map=student_map)
            return fused_linear_topk_loss(student.hidden, student.weight, teacher, *rows, **sparse, **common)
        maps = LogitMaps(student=student_map, teacher=LogitMap(scale=signal.logit_scale))
        return fused_linear_loss(
            student.hidden, student.weight, signal.hidden.flatten(0, 1), signal.head, *rows, maps=maps, **common
        )

    def _sparse(self, temperature: float, sequence_parallel: bool) -> SparseTeacher:
        """Rows of the teacher's most probable tokens, found among its logits or as they came."""
        signal = self.signal
        if isinstance(signal, TopKSignal):
            return sparse_rows(signal)
        found = teacher_top_k(
            signal.hidden.flatten(0, 1),
            signal.head,
            self.setting.top_k,
            temperatures=(temperature,),
            true_vocab=self.setting.true_vocab,
            tp_group=self.setting.groups.tp,
            sequence_parallel=sequence_parallel,
            chunk_rows=self.setting.options.chunk_rows,
            logit_map=LogitMap(scale=signal.logit_scale),
        )
        return SparseTeacher(found.ids, found.logits, found.lse[0], found.tail_lse[0], temperature)

    def divergence(self, output: LossOutput, tokens: StepTokens) -> Mean:
        total = (self._by_token(output.kd) * self._kd_mask).sum()
        return Mean(total, self.batch.kd_mask.sum(), tokens.kd)

    @property
    def _kd_mask(self) -> Tensor:
        """[b, s] of the tokens that this teacher teaches."""
        mask = self.batch.kd_mask
        return mask if self.taught is None else mask * self.taught[self.batch.text.clamp(min=0)]

    def teaching(self, taught: Tensor) -> "SameTokenizerObjective":
        return replace(self, taught=taught)

    def sums_of_texts(self, texts: int, sequence_parallel: bool) -> Tensor:
        setting = self.setting
        return _nats_and_units(
            self._cross_entropy(self.batch, sequence_parallel),
            self.batch,
            texts,
            _known(setting.byte_lengths) if setting.cross else None,
        )

    def teacher(self, sequence_parallel: bool) -> dict[str, Mean]:
        if isinstance(self.signal, TopKSignal) and self.signal.label_log_prob is None:
            return {}
        batch = mask_unknown_labels(self.signal, self.batch)
        ce = self._cross_entropy(batch, sequence_parallel)
        bits = bits_per_byte("teacher_", ce, batch, self.setting.byte_lengths)
        return {"teacher_ce": Mean.of(ce, batch.ce_mask, None), **bits}

    def _cross_entropy(self, batch: KDBatch, sequence_parallel: bool) -> Tensor:
        """[b, s] of the teacher."""
        return teacher_cross_entropy(
            self.signal,
            batch,
            true_vocab=self.setting.true_vocab,
            tp_group=self.setting.groups.tp,
            sequence_parallel=sequence_parallel,
            options=self.setting.options,
        )

    def comparison(
        self, student: Student, tokens: StepTokens, calibrates: bool
    ) -> tuple[dict[str, Mean], Tensor | None]:
        found = compare(
            LogitSource(student.hidden, student.weight, LogitMap(scale=student.logit_scale)),
            self.signal,
            true_vocab=self.setting.true_vocab,
            tp_group=self.setting.groups.tp,
            sequence_parallel=student.sequence_parallel,
            chunk_rows=self.setting.options.chunk_rows,
        )
        mask = self.batch.kd_mask
        means = {name: Mean.of(values, mask, tokens.kd) for name, values in comparison_terms(found, mask).items()}
        return means, calibration_sums(found, mask) if calibrates else None

    def sum_of_teacher(self) -> Tensor:
        mask, signal = self.batch.kd_mask.t(), self.signal
        if isinstance(signal, TopKSignal):
            logits = torch.where(signal.ids >= 0, signal.logits, 0).sum(dim=-1, dtype=torch.float32)
            return torch.where(mask != 0, (logits + signal.lse).t(), 0).sum()
        return masked_sum(signal.hidden, mask, self.setting.groups)

    def _by_token(self, values: Tensor) -> Tensor:
        """[s * b] -> [b, s]"""
        return values.view(self.batch.tokens.shape[::-1]).t()


@dataclass(frozen=True)
class CrossTokenizerObjective:
    """A teacher that reads the same texts in its own tokens: it is compared with the student a chunk at a time."""

    setting: Setting
    batch: KDBatch
    signal: HiddenSignal
    taught: Tensor | None = None
    """See `SameTokenizerObjective`."""

    @property
    def _other(self) -> TeacherTokens:
        return self.batch.others[self.signal.side]

    @property
    def _cross(self) -> CrossSetting:
        return self.setting.cross[self.signal.side]

    def scale(self, tokens: StepTokens) -> Tensor:
        """See `TeacherObjective`, as of the methods below."""
        return tokens.scale(tokens.chunks[self.signal.side])

    def loss(self, student: Student, ce_weight: Tensor | None, factor: Tensor | float, spec: LossSpec) -> LossOutput:
        other, vocabulary, groups = self._other, self._cross.vocabulary, self.setting.groups
        rows = map(rows_of, (other.student_chunk, other.student_first, other.chunk, other.first))
        return xtoken_loss(
            student.hidden,
            student.weight,
            self.signal.hidden.flatten(0, 1),
            self.signal.head,
            rows_of(self.batch.labels),
            ce_weight,
            rows_of(other.batch.labels),
            ChunkRows(*rows, weight=factor * self._of_chunks),
            kind=vocabulary.kind,
            vocabulary=vocabulary,
            spec=spec,
            tp_group=groups.tp,
            cp_group=groups.cp,
            sequence_parallel=student.sequence_parallel,
            maps=LogitMaps(LogitMap(scale=student.logit_scale), LogitMap(scale=self.signal.logit_scale)),
            upstream=student.upstream,
            **asdict(self.setting.options),
        )

    def divergence(self, output: LossOutput, tokens: StepTokens) -> Mean:
        # Of a chunk on several context-parallel ranks one has the divergence; all know how many there are.
        count = self._other.chunks if self.setting.groups.cp.rank() == 0 else 0
        total = (output.kd * self._of_chunks).sum()
        return Mean(total, torch.full_like(total, count), tokens.chunks[self.signal.side])

    @property
    def _of_chunks(self) -> Tensor:
        """[chunks] fp32, 1 for those that this teacher teaches and 0 for others."""
        other, device = self._other, self.signal.hidden.device
        if self.taught is None:
            return torch.ones(other.chunks, device=device)
        return self.taught[other.chunk_text.to(device)]

    def teaching(self, taught: Tensor) -> "CrossTokenizerObjective":
        return replace(self, taught=taught)

    def sums_of_texts(self, texts: int, sequence_parallel: bool) -> Tensor:
        lengths = _known(self._cross.byte_lengths)
        return _nats_and_units(self._cross_entropy(sequence_parallel), self._other.batch, texts, lengths)

    def teacher(self, sequence_parallel: bool) -> dict[str, Mean]:
        batch, ce = self._other.batch, self._cross_entropy(sequence_parallel)
        bits = bits_per_byte("teacher_", ce, batch, self._cross.byte_lengths)
        return {"teacher_ce": Mean.of(ce, batch.ce_mask, None), **bits}

    def _cross_entropy(self, sequence_parallel: bool) -> Tensor:
        """[b, t] of the teacher, on its own tokens."""
        batch = self._other.batch
        ce = cross_entropy_in_columns(
            self.signal.hidden.flatten(0, 1),
            self.signal.head,
            rows_of(batch.labels),
            rows_of(batch.ce_mask),
            vocabulary=self._cross.vocabulary,
            tp_group=self.setting.groups.tp,
            sequence_parallel=sequence_parallel,
            chunk_rows=self.setting.options.chunk_rows,
            logit_map=LogitMap(scale=self.signal.logit_scale),
        )
        return ce.view(batch.tokens.shape[::-1]).t()

    def comparison(self, student: Student, tokens: StepTokens, calibrates: bool) -> tuple[dict[str, Mean], None]:
        """Different tokens: none is the same."""
        return {}, None

    def sum_of_teacher(self) -> Tensor:
        counted = (self._other.chunk >= 0).t().to(self.signal.hidden.device)
        return masked_sum(self.signal.hidden, counted, self.setting.groups)


def _known(byte_lengths: Tensor | None) -> Tensor:
    if byte_lengths is None:
        raise ValueError("texts in several tokenizers are compared by their bytes, which are not known")
    return byte_lengths


def _nats_and_units(ce: Tensor, batch: KDBatch, texts: int, byte_lengths: Tensor | None) -> Tensor:
    """See `TeacherObjective.sums_of_texts`; `ce` [b, s] is on the batch's tokens."""
    units = batch.ce_mask != 0
    if byte_lengths is not None:
        units = units * byte_lengths[batch.labels.clamp(0, len(byte_lengths) - 1)]
    return sums_of_texts([torch.where(units > 0, ce, 0), units], batch.text, texts)


def masked_sum(hidden: Tensor, mask: Tensor, groups: Groups) -> Tensor:
    """Sum over [s, b, H] where the mask [s, b] is not 0; the hidden states may be a part of the sequence."""
    sums = hidden.sum(dim=-1, dtype=torch.float32)
    if sums.shape != mask.shape:  # sequence parallelism: this rank's part of the sequence
        mask = mask.chunk(groups.tp.size())[groups.tp.rank()]
    return torch.where(mask != 0, sums, 0).sum()
