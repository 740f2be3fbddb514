"""The forward step: microbatch -> teacher signal -> student -> losses -> (loss, count, report)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from mkd.compat import padding_of_stage
from mkd.config.kd_config import LossSpec
from mkd.data.batch import KDBatch
from mkd.data.token_counts import StepTokens
from mkd.distributed.groups import Groups
from mkd.losses import LossOptions
from mkd.losses.sparse.teacher import Tail
from mkd.models.gpt import finish_parameter_sync, logit_scale
from mkd.teacher.interface import EnsembleSignal, HiddenSignal, TeacherSignal
from mkd.train.evaluation import CALIBRATION, Mean, bits_per_byte, rows_of
from mkd.train.hidden_layers import LayersOfMicrobatch
from mkd.train.nan_check import CE, KD, TEACHER, FiniteCheck
from mkd.train.objective import (
    CrossSetting,
    CrossTokenizerObjective,
    SameTokenizerObjective,
    Setting,
    Student,
    TeacherObjective,
    cross_entropy,
)
from mkd.train.selection import Selection

_SOURCES = {"ce": CE, "kd": KD}
"""What the means are called in an error message."""


@dataclass(frozen=True)
class Objective:
    """What one step minimizes: (1 - ratio) * CE + ratio * KD, each the mean over its own supervised tokens."""

    ratio: float
    spec: LossSpec
    evaluating: bool
    """Whether CE, KD, the teacher's own CE and the comparison are all wanted, whatever the ratio."""
    plain: bool
    """Whether the run never looks at the teacher, and is megatron's own pretraining to the last bit."""
    comparing: bool = False
    """Whether a training step also measures entropies and top-1 agreement."""
    balance: float = 1.0
    """Factor of KD, beside the ratio."""


@dataclass(frozen=True)
class StepInput:
    """All that a forward step needs; the same object goes to every virtual stage."""

    batch: KDBatch
    objective: Objective
    tokens: StepTokens | None
    """Of the whole step; None when the objective is plain."""
    signal: Callable[[], TeacherSignal]
    """The teacher's signal for this batch; called on the last stage only, or on every rank without pipeline stages."""
    layers: LayersOfMicrobatch | None = None
    """What the student's intermediate layers are compared with; None when they are not."""


@dataclass(frozen=True)
class ForwardStep:
    """The `forward_step_func` of megatron's schedules."""

    groups: Groups
    true_vocab: int
    finite: FiniteCheck | None = None
    """Is told what must be finite; None: nothing must."""
    options: LossOptions = LossOptions()  # noqa: RUF009
    """How the losses are computed."""
    top_k: int | None = None
    """How many of the teacher's most probable tokens the divergence looks at; None: all, or those that are known."""
    top_k_tail: Tail = "bucket"
    """What becomes of the others."""
    byte_lengths: Tensor | None = None
    """[V] bytes of each token's text, for the bits per byte of evaluations; None: they are not known."""
    cross: tuple[CrossSetting, ...] = ()
    """For each teacher with another tokenizer."""

    def __call__(self, steps: Iterator[StepInput], model: nn.Module) -> tuple[Tensor, Callable]:
        """Run one microbatch through one model chunk.

        Returns:
            The chunk's output, and the function that megatron calls with it on the last stage.
        """
        step = next(steps)
        batch = step.batch
        inputs = (batch.tokens, batch.position_ids, None)
        rows = {"packed_seq_params": batch.packed, "padding_mask": padding_of_stage(unwrap_model(model), batch.padding)}
        if step.objective.plain:
            output = model(*inputs, labels=batch.labels, **rows)
            return output, lambda losses: self._report_plain(step, losses.float())
        head = _HeadLoss(self, step)
        if step.layers is not None:
            step.layers.begin()
        output = model(*inputs, output_processor=head, **rows)
        return output, head.report

    @property
    def setting(self) -> Setting:
        """What the terms of all teachers share."""
        return Setting(
            groups=self.groups,
            true_vocab=self.true_vocab,
            options=self.options,
            top_k=self.top_k,
            top_k_tail=self.top_k_tail,
            byte_lengths=self.byte_lengths,
            cross=self.cross,
        )

    def term(self, batch: KDBatch, signal: TeacherSignal) -> TeacherObjective:
        """What a teacher adds to the loss."""
        if isinstance(signal, HiddenSignal) and signal.side is not None:
            return CrossTokenizerObjective(self.setting, batch, signal)
        return SameTokenizerObjective(self.setting, batch, signal)

    def _report_plain(self, step: StepInput, ce: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        mean = Mean.of(ce, step.batch.ce_mask, None)
        means = {"ce": mean}
        if step.objective.evaluating:
            means |= bits_per_byte("", ce, step.batch, self.byte_lengths)
        return self.report(step, means, mean.total, mean.total)

    def report(
        self, step: StepInput, means: dict[str, Mean], loss: Tensor, total: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Megatron's (loss sum, token count, {name: [sum, count]}); `total` is what is reported as the loss."""
        batch = step.batch
        if self.finite is not None:
            for name, mean in means.items():
                self.finite.note(_SOURCES.get(name, name), mean.total, batch)
            self.finite.note("the loss", total, batch)
        divisor = batch.ce_mask.sum() if step.tokens is None else step.tokens.divisor(batch)
        report = {"loss": torch.stack([total.detach(), divisor])}
        for name, mean in means.items():
            count = mean.count
            if not (step.objective.evaluating or mean.everywhere is None):
                # A term without a token in the whole step reports 0; an evaluation's means are over many steps.
                count = torch.where(mean.everywhere > 0, count, 1.0)
            report[name] = torch.stack([mean.total.detach(), count])
        return loss, divisor.int(), report


class _HeadLoss:
    """The output processor of one microbatch: from the student's final hidden states to the loss."""

    def __init__(self, owner: ForwardStep, step: StepInput) -> None:
        self._owner, self._step = owner, step
        objective = step.objective
        self._with_ce = objective.evaluating or objective.ratio < 1.0
        self._with_kd = objective.evaluating or objective.ratio > 0.0
        # Before the student's activations exist. Without pipeline stages this is where the teacher runs.
        signal = step.signal() if self._with_kd and owner.groups.is_last_stage else None
        signals = EnsembleSignal.of(signal)
        self._terms = [owner.term(step.batch, one) for one in signals.signals]
        self._shares = signals.weights
        self._selecting = signals.selecting
        self._means: dict[str, Mean] = {}
        self._total: Tensor | None = None
        self._calibration: Tensor | None = None

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        output_layer: nn.Module,
        output_weight: Tensor | None,
        config: Any,
        **unused: Any,
    ) -> Tensor:
        """The sum of the objective over this microbatch's tokens, differentiable.

        Args:
            hidden_states: [s, b, H], or [s/tp, b, H] under sequence parallelism.
            output_layer: the LM head's module.
            output_weight: [V/tp, H], where the LM head is the embedding.
            config: the student's TransformerConfig.
        """
        finish_parameter_sync(output_layer)
        student = Student(
            hidden=hidden_states.flatten(0, 1),
            weight=output_layer.weight if output_weight is None else output_weight,
            logit_scale=logit_scale(config),
            sequence_parallel=config.sequence_parallel,
            upstream=_loss_scale(config, hidden_states.device),
        )
        if self._selecting:
            self._select(student.sequence_parallel)
        loss = self._losses(student)
        objective = self._step.objective
        self._total = self._evaluated() if objective.evaluating else loss
        for number, term in enumerate(self._terms):
            suffix = self._suffix(number)
            if objective.evaluating:
                self._add(suffix, term.teacher(student.sequence_parallel))
            if objective.evaluating or objective.comparing:
                calibrates = objective.evaluating and len(self._terms) == 1
                means, calibration = term.comparison(student, self._step.tokens, calibrates)
                self._add(suffix, means)
                self._calibration = calibration
        return loss

    def _select(self, sequence_parallel: bool) -> None:
        """Leave each text to one teacher."""
        groups = self._owner.groups
        selection = Selection.of(self._terms, self._step.batch, groups, sequence_parallel)
        self._terms = [term.teaching(selection.taught_by(number)) for number, term in enumerate(self._terms)]
        self._means |= selection.shares(self._step.tokens, groups)

    def _losses(self, student: Student) -> Tensor:
        """The sum over all teachers, CE with the first; its parts go to the means."""
        batch, objective, tokens = self._step.batch, self._step.objective, self._step.tokens
        # A weight of 0 takes a token out of its term, so an evaluation at R = 0 or 1 must not weigh with R.
        ce_scale = 1.0 if objective.evaluating else 1.0 - objective.ratio
        ce_weight = ce_scale * rows_of(batch.ce_mask) if self._with_ce else None
        if not self._terms:
            outputs = [cross_entropy(student, batch, ce_weight, objective.spec, self._owner.setting)]
        else:
            outputs = [
                term.loss(
                    student,
                    ce_weight if number == 0 else None,
                    1.0 if objective.evaluating else self._factor(number),
                    objective.spec,
                )
                for number, term in enumerate(self._terms)
            ]
        if outputs[0].ce is not None:
            ce = outputs[0].ce.view(batch.tokens.shape[::-1]).t()
            self._means["ce"] = Mean.of(ce, batch.ce_mask, tokens.ce)
            if objective.evaluating:
                self._means |= bits_per_byte("", ce, batch, self._owner.byte_lengths)
        for number, (term, output) in enumerate(zip(self._terms, outputs, strict=False)):
            self._add(self._suffix(number), {"kd": term.divergence(output, tokens)})
        if len(self._terms) > 1:
            self._means["kd"] = self._sum_of_divergences()
        return sum((output.loss for output in outputs[1:]), start=outputs[0].loss)

    def _factor(self, number: int) -> Tensor | float:
        """In front of the sum over a teacher's divergences."""
        objective = self._step.objective
        return objective.ratio * objective.balance * self._shares[number] * self._terms[number].scale(self._step.tokens)

    def _evaluated(self) -> Tensor:
        """The objective, where the terms' own weights are not in the sums."""
        kd = sum(
            self._factor(number) * self._means["kd" + self._suffix(number)].total for number in range(len(self._terms))
        )
        return (1.0 - self._step.objective.ratio) * self._means["ce"].total + kd

    def _sum_of_divergences(self) -> Mean:
        """Of several teachers, each by its own count and with its share, as a mean over the tokens of the divisor."""
        tokens = self._step.tokens
        parts = [
            share * term.scale(tokens) * self._means["kd" + self._suffix(number)].total
            for number, (share, term) in enumerate(zip(self._shares, self._terms, strict=True))
        ]
        return Mean(sum(parts), tokens.divisor(self._step.batch), tokens.ce + tokens.kd)

    def _suffix(self, number: int) -> str:
        """Of the names of one teacher's means: none for a single one, else _1, _2 and so on."""
        return f"_{number + 1}" if len(self._terms) > 1 else ""

    def _add(self, suffix: str, means: dict[str, Mean]) -> None:
        self._means |= {name + suffix: mean for name, mean in means.items()}

    def report(self, loss: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """What the schedule asks for after the last stage's forward pass."""
        if self._owner.finite is not None:
            for number, term in enumerate(self._terms):
                which = f" (teacher {number + 1})" if len(self._terms) > 1 else ""
                self._owner.finite.note(TEACHER + which, term.sum_of_teacher(), self._step.batch)
        total = loss if self._total is None else self._total
        loss, divisor, report = self._owner.report(self._step, self._means, loss, total)
        if self._calibration is not None:
            report[CALIBRATION] = self._calibration
        return loss, divisor, report


def _loss_scale(config: Any, device: torch.device) -> Tensor | float:
    """The gradient that megatron's backward pass gives to the loss of a microbatch."""
    return 1.0 if config.grad_scale_func is None else config.grad_scale_func(torch.ones((), device=device)).reshape(())
