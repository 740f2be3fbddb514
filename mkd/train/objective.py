"""The objective: from a teacher's signal to the loss of one microbatch and its reported means.

    loss = (1 - R) * CE + R * balance * sum over teachers of share * KD

CE and KD are means over their own tokens of the whole step. Every microbatch contributes sums; the schedule divides
once, by the number of supervised tokens of the step, so each term carries the factor that turns this division into one
by its own count (`TeacherObjective.scale`). `Objective` is computed once per step, `LossContext` once per job.

A teacher that shares the student's tokenizer is compared per token (`SameTokenizerObjective`), one with another
tokenizer per aligned text chunk (`mkd.train.cross_tokenizer`). Per-token losses are computed for supervised tokens only
(`KDBatch.supervised`); their values per token are 0 elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mkd.config.loss_spec import LossSpec
from mkd.data.batch import KDBatch
from mkd.distributed.groups import Groups
from mkd.losses import (
    LinearLogits,
    LogitMap,
    LossOptions,
    LossOutput,
    SparseTeacher,
    TokenWeights,
    VocabLayout,
    loss_from_hidden,
    teacher_top_k,
)
from mkd.losses.sparse.teacher import Tail
from mkd.teacher.interface import EnsembleSignal, HiddenSignal, TeacherSignal, TopKSignal
from mkd.train.step_tokens import StepTokens
from mkd.train.supervised import select_hidden, select_weights, spread_output

WRITTEN_POSITIONS = {"kd_first_64": (0, 64), "kd_next_256": (64, 320), "kd_rest": (320, 1 << 62)}
"""Name of a mean divergence -> positions of the written tokens that it is over, from 0."""


class Mean(NamedTuple):
    """A reported mean: scalars of this rank's microbatch, and the count of the whole step."""

    total: Tensor
    """Sum of the values, each times its weight."""
    count: Tensor
    """Sum of the weights."""
    count_of_step: Tensor | None
    """The count over all microbatches and ranks of the step; None where only this microbatch's is known."""

    @classmethod
    def of(cls, values: Tensor, mask: Tensor, count_of_step: Tensor | None) -> "Mean":
        """The mean of `values` over the tokens of `mask`; both [b, s]."""
        return cls((values * mask).sum(), mask.sum(), count_of_step)


class WrittenDivergence(NamedTuple):
    """The divergence from one teacher on the texts that the student has written, per token or per text chunk."""

    values: Tensor
    """[...] divergence, 0 where this teacher does not teach."""
    index: Tensor
    """[...] int64 index of the token, or of the chunk's first one, among its text's written tokens; -1 elsewhere."""
    is_counted: bool
    """False if another rank counts the same chunks."""

    def means(self, suffix: str) -> dict[str, Mean]:
        """Name with a suffix -> mean over the positions of `WRITTEN_POSITIONS`."""
        means = {}
        for name, (first, end) in WRITTEN_POSITIONS.items():
            inside = (self.index >= first) & (self.index < end)
            total, count = torch.where(inside, self.values, 0.0).sum(), inside.float().sum()
            means[name + suffix] = Mean(total, count * float(self.is_counted), None)
        return means


class OtherTokenizer(Protocol):
    """A teacher's tokenizer that is not the student's (`mkd.train.cross_tokenizer.CrossTokenizer`)."""

    def objective(self, context: "LossContext", batch: KDBatch, signal: HiddenSignal) -> "TeacherObjective":
        """The term of a teacher with this tokenizer."""
        ...


@dataclass(frozen=True)
class LossContext:
    """Everything about the loss that is the same for all microbatches of a job."""

    groups: Groups
    true_vocab: int
    options: LossOptions = LossOptions()  # noqa: RUF009
    top_k: int | None = None
    """The divergence is restricted to the teacher's top-k tokens; None uses all, or those that a cache holds."""
    top_k_tail: Tail = "bucket"
    """Treatment of the other tokens: one more category, or ignored."""
    byte_lengths: Tensor | None = None
    """[V] bytes of each of the student's tokens, for bits per byte; None if unknown."""
    cross: tuple[OtherTokenizer, ...] = ()
    """One entry per view in `KDBatch.teacher_views`."""

    def vocab(self, sequence_parallel: bool) -> VocabLayout:
        """The vocabulary of the student and of teachers with its tokenizer."""
        return VocabLayout(self.true_vocab, self.groups.tp, sequence_parallel)

    def options_for(self, batch: KDBatch) -> LossOptions:
        """The options of a loss over the supervised tokens of a microbatch."""
        return self.options if batch.supervised is None else replace(self.options, share=batch.supervised.share)


@dataclass(frozen=True)
class Objective:
    """The objective of one step, computed once before its forward passes."""

    ratio: float
    """R."""
    spec: LossSpec
    tokens: StepTokens | None
    """Token counts of the whole step; None in a run that never uses the teacher (R = 0 throughout), which is Megatron's
    own pretraining to the last bit."""
    evaluating: bool = False
    """An evaluation computes CE, KD, the teacher's own CE and the comparison of both models at any R."""
    comparing: bool = False
    """This training step also measures entropies and top-1 agreement."""
    balance: float = 1.0
    """Factor of KD beside R (--kd-balance)."""
    pretraining_scale: Tensor | float = 1.0
    """`StepTokens.ce_scale` in a run that never uses the teacher."""

    def divisor(self, batch: KDBatch) -> Tensor:
        """One microbatch's share of the divisor of the step's gradient, a scalar: its tokens with cross-entropy, or
        those with a divergence in a step where no token has cross-entropy. An evaluation has no gradient: there it is
        the sum of their weights, by which its means over several steps are divided."""
        weights = batch.ce_mask, batch.kd_mask
        if not self.evaluating:
            weights = [(weight != 0).float() for weight in weights]
        ce, kd = (weight.sum() for weight in weights)
        return ce if self.tokens is None else torch.where(self.tokens.ce > 0, ce, kd)

    @property
    def with_ce(self) -> bool:
        return self.evaluating or self.ratio < 1.0

    @property
    def with_kd(self) -> bool:
        return self.evaluating or self.ratio > 0.0


@dataclass(frozen=True)
class Student:
    """The student's final hidden states and LM head in one microbatch."""

    hidden: Tensor
    """[N, H], or [N/tp, H] under sequence parallelism; N = s * b, sequence first as in Megatron."""
    weight: Tensor
    """[V/tp, H] of the LM head."""
    logit_map: LogitMap
    sequence_parallel: bool
    upstream: Tensor | float
    """The gradient that the backward pass will give to the loss."""

    @property
    def logits(self) -> LinearLogits:
        return LinearLogits(self.hidden, self.weight, self.logit_map)

    def supervised(self, batch: KDBatch, groups: Groups) -> "Student":
        """The student with the supervised tokens [M, H] of the microbatch, whole on each tensor-parallel rank.

        It is unchanged if all tokens are used.
        """
        if batch.supervised is None:
            return self
        hidden = select_hidden(self.hidden, batch.supervised, groups.tp, self.sequence_parallel)
        return replace(self, hidden=hidden, sequence_parallel=False)


class TeacherCE(NamedTuple):
    """A teacher's own cross-entropy on the supervised tokens of a microbatch."""

    values: Tensor
    """[b, s] nats."""
    batch: KDBatch
    """The microbatch in the teacher's tokens; its CE mask is 0 where the teacher's probability is unknown."""
    byte_lengths: Tensor | None
    """[V] bytes of the tokens in `batch`; None if unknown."""


class TeacherObjective(Protocol):
    """One teacher's term in the loss of one microbatch."""

    def scale(self, tokens: StepTokens) -> Tensor:
        """Scalar factor that turns the step's division by supervised tokens into one by this term's own count."""
        ...

    def loss(self, student: Student, ce_weight: Tensor | None, factor: Tensor | float, spec: LossSpec) -> LossOutput:
        """CE with weights `ce_weight` ([N] or None), plus `factor` times the sum of the divergence."""
        ...

    def divergence(self, output: LossOutput, tokens: StepTokens) -> Mean:
        """The divergence in what `loss` returned, without its factor."""
        ...

    def cross_entropy(self, sequence_parallel: bool) -> TeacherCE | None:
        """The teacher's own CE, on `KDBatch.scored_mask`; None if the cached targets do not hold it."""
        ...

    def finite_sum(self) -> Tensor:
        """Scalar that is not finite if the signal of a distilled token of this rank is not."""
        ...

    def by_position(self, output: LossOutput, share: float) -> WrittenDivergence:
        """The divergence in what `loss` returned on written texts, times `share`."""
        ...

    def aligned_share(self) -> Mean | None:
        """The share of the written tokens that have a divergence; None: all."""
        ...

    def routed_to(self, number: int, weights: Sequence[float]) -> "TeacherObjective":
        """The term of teacher `number` of those with these weights, where some written texts have a teacher of their
        own (`KDBatch.teacher`): it alone teaches its texts, with the weight of all teachers."""
        ...

    def restricted_to(self, texts: Tensor) -> "TeacherObjective":
        """The term on some texts only ([texts] fp32, 1 or 0); the normalizing count is unchanged."""
        ...


@dataclass(frozen=True)
class SameTokenizerObjective:
    """A teacher that reads the student's own tokens; its signal is hidden states or top-k logits.

    The methods are those of `TeacherObjective`.
    """

    context: LossContext
    batch: KDBatch
    signal: HiddenSignal | TopKSignal
    texts: Tensor | None = None
    """[texts] fp32, 1 for texts that this teacher teaches and 0 for others; None for all."""
    routed: Tensor | None = None
    """[b, s] fp32 factor of each token's divergence; None: 1."""

    def scale(self, tokens: StepTokens) -> Tensor:
        return tokens.kd_scale

    def loss(self, student: Student, ce_weight: Tensor | None, factor: Tensor | float, spec: LossSpec) -> LossOutput:
        context, teacher = self.context, self.teacher(student.sequence_parallel)
        student = student.supervised(self.batch, context.groups)
        vocab = context.vocab(student.sequence_parallel)
        weights = TokenWeights(flatten_tokens(self.batch.labels), ce_weight, factor * flatten_tokens(self._kd_mask))
        if context.top_k is not None and isinstance(teacher, LinearLogits):
            how = dict(vocab=vocab, chunk_rows=context.options.chunk_rows)
            (teacher,) = teacher_top_k(teacher, context.top_k, temperatures=(spec.temperature,), **how)
        output = loss_from_hidden(
            student.logits,
            teacher,
            weights if self.batch.supervised is None else select_weights(weights, self.batch),
            spec=spec,
            vocab=vocab,
            options=context.options_for(self.batch),
            tail=context.top_k_tail,
            upstream=student.upstream,
        )
        return output if self.batch.supervised is None else spread_output(output, self.batch)

    def teacher(self, sequence_parallel: bool) -> LinearLogits | SparseTeacher:
        """The signal's logits as the losses take them: of tokens [s * b] (cut under sequence parallelism), or of the
        supervised tokens [M], whole on each tensor-parallel rank."""
        signal, tokens, tp = self.signal, self.batch.supervised, self.context.groups.tp
        if isinstance(signal, TopKSignal):
            targets = signal.targets.flatten_tokens()
            return targets if tokens is None else targets.select(tokens.index)
        hidden = signal.hidden if signal.selected else signal.hidden.flatten(0, 1)
        if tokens is not None:
            is_cut = sequence_parallel and tp.size() > 1
            if not signal.selected:
                hidden = tokens.take(hidden, *((tp.rank(), tp.size()) if is_cut else (0, 1)))
            if is_cut:
                hidden = tokens.gather(hidden, tp)
        return LinearLogits(hidden, signal.head, signal.logit_map)

    def divergence(self, output: LossOutput, tokens: StepTokens) -> Mean:
        total = (unflatten_tokens(output.kd, self.batch) * self._kd_mask).sum()
        return Mean(total, self.batch.kd_mask.sum(), tokens.kd)

    @property
    def _kd_mask(self) -> Tensor:
        """[b, s] of the tokens that this teacher teaches."""
        mask = self.batch.kd_mask if self.routed is None else self.batch.kd_mask * self.routed
        return self._within_texts(mask)

    def _within_texts(self, values: Tensor) -> Tensor:
        """[b, s] values, 0 in texts that other teachers teach."""
        return values if self.texts is None else values * self.texts[self.batch.text.clamp(min=0)]

    def by_position(self, output: LossOutput, share: float) -> WrittenDivergence:
        factor = share if self.routed is None else share * self.routed
        values = self._within_texts(factor * unflatten_tokens(output.kd, self.batch))
        return WrittenDivergence(values, self.batch.written, is_counted=True)

    def aligned_share(self) -> None:
        return None

    def routed_to(self, number: int, weights: Sequence[float]) -> "SameTokenizerObjective":
        return replace(self, routed=routed_factor(self.batch.teacher, number, weights))

    def restricted_to(self, texts: Tensor) -> "SameTokenizerObjective":
        return replace(self, texts=texts)

    def cross_entropy(self, sequence_parallel: bool) -> TeacherCE | None:
        signal, context = self.signal, self.context
        batch = replace(self.batch, ce_mask=self.batch.scored_mask)
        if isinstance(signal, TopKSignal):
            if signal.label_log_prob is None:
                return None
            # Cached targets exist for tokens of the KD mask only.
            batch = replace(batch, ce_mask=batch.ce_mask * (batch.kd_mask != 0))
            ce = torch.where(batch.ce_mask != 0, -signal.label_log_prob, 0.0)
            return TeacherCE(ce, batch, context.byte_lengths)
        tokens = TokenWeights(flatten_tokens(batch.labels), flatten_tokens(batch.ce_mask), None)
        output = loss_from_hidden(
            self.teacher(sequence_parallel),
            None,
            select_weights(tokens, batch),
            spec=LossSpec(),
            vocab=context.vocab(sequence_parallel and batch.supervised is None),
            options=context.options_for(batch),
        )
        return TeacherCE(unflatten_tokens(spread_output(output, batch).ce, batch), batch, context.byte_lengths)

    def finite_sum(self) -> Tensor:
        mask, signal = self.batch.kd_mask.t(), self.signal
        if isinstance(signal, TopKSignal):
            targets = signal.targets
            logits = torch.where(targets.ids >= 0, targets.logits, 0).sum(dim=-1, dtype=torch.float32)
            return torch.where(mask != 0, (logits + targets.lse).t(), 0).sum()
        return finite_sum(signal, mask, self.batch, self.context.groups)


def teacher_objective(context: LossContext, batch: KDBatch, signal: HiddenSignal | TopKSignal) -> TeacherObjective:
    """The term of one teacher."""
    if isinstance(signal, HiddenSignal) and signal.view is not None:
        return context.cross[signal.view].objective(context, batch, signal)
    return SameTokenizerObjective(context, batch, signal)


@dataclass(frozen=True)
class MicrobatchObjective:
    """The loss of one microbatch: CE, and the terms of all teachers with their shares."""

    context: LossContext
    batch: KDBatch
    objective: Objective
    teachers: tuple[TeacherObjective, ...]
    shares: tuple[float, ...]
    """Factor of each teacher's divergence in their sum."""
    selecting: bool = False
    """Each text has one teacher, the one with the lowest cross-entropy on it (`mkd.train.selection`)."""

    @classmethod
    def of(
        cls, context: LossContext, batch: KDBatch, objective: Objective, signal: TeacherSignal | None
    ) -> "MicrobatchObjective":
        """The loss for a teacher's signal, which is None in a step without KD."""
        if isinstance(signal, EnsembleSignal):
            teachers = tuple(teacher_objective(context, batch, one) for one in signal.signals)
            if batch.teacher is not None and not signal.selecting:  # `Selection` reads the names itself
                teachers = tuple(one.routed_to(number, signal.weights) for number, one in enumerate(teachers))
            return cls(context, batch, objective, teachers, signal.weights, signal.selecting)
        teachers = () if signal is None else (teacher_objective(context, batch, signal),)
        return cls(context, batch, objective, teachers, (1.0,) * len(teachers))

    def loss(self, student: Student) -> tuple[Tensor, dict[str, Mean], Tensor | None]:
        """The sum over this microbatch's tokens.

        Returns:
            The differentiable sum; the means `ce` and `kd` (for several teachers `kd_1`, `kd_2`, ... and their sum);
            and CE per token ([b, s]; None in a step without CE).
        """
        batch, objective, tokens = self.batch, self.objective, self.objective.tokens
        # A weight of 0 removes a token from its term, so an evaluation at R = 0 or 1 must not weigh with R.
        ce_scale = 1.0 if objective.evaluating else (1.0 - objective.ratio) * tokens.ce_scale
        ce_weight = ce_scale * flatten_tokens(batch.ce_mask) if objective.with_ce else None
        outputs = self._outputs(student, ce_weight)
        means: dict[str, Mean] = {}
        ce = None if outputs[0].ce is None else unflatten_tokens(outputs[0].ce, batch)
        if ce is not None:
            means["ce"] = Mean.of(ce, batch.ce_mask, tokens.ce)
        for number, (teacher, output) in enumerate(zip(self.teachers, outputs, strict=False)):
            means["kd" + self.suffix(number)] = teacher.divergence(output, tokens)
        if batch.written is not None and self.teachers and not objective.evaluating:
            means |= self._by_position(outputs)
        if len(self.teachers) > 1:
            means["kd"] = self._sum_of_divergences(means)
        return sum((output.loss for output in outputs[1:]), start=outputs[0].loss), means, ce

    def _by_position(self, outputs: Sequence[LossOutput]) -> dict[str, Mean]:
        """Name -> mean divergence of written tokens or text chunks, by their position in the text.

        Over tokens it is that of all teachers. Where one of several teachers has another tokenizer, each teacher has
        means of its own.
        """
        aligned = {f"written_aligned{self.suffix(n)}": one.aligned_share() for n, one in enumerate(self.teachers)}
        aligned = {name: share for name, share in aligned.items() if share is not None}
        is_one = all(isinstance(teacher, SameTokenizerObjective) for teacher in self.teachers)
        shares = self.shares if is_one else (1.0,) * len(self.shares)
        every = zip(self.teachers, outputs, shares, strict=False)
        found = [teacher.by_position(output, share) for teacher, output, share in every]
        if is_one:
            return found[0]._replace(values=sum(one.values for one in found)).means("")
        return aligned | {name: mean for n, one in enumerate(found) for name, mean in one.means(self.suffix(n)).items()}

    def _outputs(self, student: Student, ce_weight: Tensor | None) -> list[LossOutput]:
        """One output per teacher, CE with the first; CE alone without a teacher."""
        spec = self.objective.spec
        if not self.teachers:
            return [_cross_entropy(student, self.batch, ce_weight, spec, self.context)]
        return [
            teacher.loss(
                student,
                ce_weight if number == 0 else None,
                1.0 if self.objective.evaluating else self._factor(number),
                spec,
            )
            for number, teacher in enumerate(self.teachers)
        ]

    def _factor(self, number: int) -> Tensor | float:
        """The factor of a teacher's sum of divergences."""
        objective = self.objective
        scale = self.teachers[number].scale(objective.tokens)
        return objective.ratio * objective.balance * self.shares[number] * scale

    def evaluated(self, means: dict[str, Mean]) -> Tensor:
        """The objective of an evaluation, whose sums do not carry R."""
        kd = sum(self._factor(number) * means["kd" + self.suffix(number)].total for number in range(len(self.teachers)))
        # The factors of the divergences are for a division by the number of tokens, see `Objective.divisor`.
        return (1.0 - self.objective.ratio) * means["ce"].total + kd / self.objective.tokens.ce_scale

    def _sum_of_divergences(self, means: dict[str, Mean]) -> Mean:
        """The teachers' divergences, each by its own count and with its share, as a mean over the step's divisor."""
        tokens = self.objective.tokens
        parts = [
            share * teacher.scale(tokens) * means["kd" + self.suffix(number)].total
            for number, (share, teacher) in enumerate(zip(self.shares, self.teachers, strict=True))
        ]
        total = sum(parts) / tokens.ce_scale if self.objective.evaluating else sum(parts)
        return Mean(total, self.objective.divisor(self.batch), tokens.ce + tokens.kd)

    def finite_sums(self) -> list[Tensor]:
        """`TeacherObjective.finite_sum` of each teacher."""
        return [teacher.finite_sum() for teacher in self.teachers]

    def suffix(self, number: int) -> str:
        """Suffix of the names of one teacher's means: none for a single teacher, else _1, _2, ..."""
        return f"_{number + 1}" if len(self.teachers) > 1 else ""


def routed_factor(teacher: Tensor, number: int, weights: Sequence[float]) -> Tensor:
    """[...] fp32 factor of the divergence from teacher `number`: 1 where `teacher` is -1. Elsewhere the teacher with
    this number has the weight of all, and the others have none."""
    alone = torch.where(teacher == number, sum(weights) / weights[number], 0.0)
    return torch.where(teacher < 0, 1.0, alone)


def flatten_tokens(tokens: Tensor) -> Tensor:
    """[b, s] -> [s * b], the order in which Megatron's [s, b, H] activations flatten."""
    return tokens.t().reshape(-1)


def unflatten_tokens(values: Tensor, batch: KDBatch) -> Tensor:
    """[s * b] -> [b, s]"""
    return values.view(batch.tokens.shape[::-1]).t()


def finite_sum(signal: HiddenSignal, mask: Tensor, batch: KDBatch, groups: Groups) -> Tensor:
    """Sum over the hidden states of a signal where the mask [s, b] is not 0.

    Under sequence parallelism they are this tensor-parallel rank's part.
    """
    sums, (rank, parts) = signal.hidden.sum(dim=-1, dtype=torch.float32), (groups.tp.rank(), groups.tp.size())
    if signal.selected:
        mask = mask.reshape(-1).index_select(0, batch.supervised.index)
        if sums.shape != mask.shape:
            mask = mask[batch.supervised.part(rank, parts)[0]]
    elif sums.shape != mask.shape:
        mask = mask.chunk(parts)[rank]
    return torch.where(mask != 0, sums, 0).sum()


def _cross_entropy(
    student: Student, batch: KDBatch, ce_weight: Tensor, spec: LossSpec, context: LossContext
) -> LossOutput:
    student = student.supervised(batch, context.groups)
    output = loss_from_hidden(
        student.logits,
        None,
        select_weights(TokenWeights(flatten_tokens(batch.labels), ce_weight, None), batch),
        spec=spec,
        vocab=context.vocab(student.sequence_parallel),
        options=context.options_for(batch),
        upstream=student.upstream,
    )
    return spread_output(output, batch)
