"""The forward step: one microbatch and the teacher's signal -> the student -> (loss, token count, report)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from mkd.data.batch import KDBatch
from mkd.losses import LogitMap
from mkd.models.gpt import output_head, router_padding_mask
from mkd.teacher.interface import TeacherSignal
from mkd.train.evaluation import CALIBRATION, bits_per_byte, measure
from mkd.train.hidden_layers import LayersOfMicrobatch
from mkd.train.nan_check import CE, KD, TEACHER, FiniteCheck
from mkd.train.objective import LossContext, Mean, MicrobatchObjective, Objective, Student
from mkd.train.selection import Selection

_SOURCES = {"ce": CE, "kd": KD}
"""Names of the means in an error message."""

Report = tuple[Tensor, Tensor, dict[str, Tensor]]
"""Results of a microbatch as Megatron's schedules expect them: sum of the loss, token count, {name: [sum, count]}."""


@dataclass(frozen=True)
class StepInput:
    """The input of a forward step; all virtual stages receive the same object."""

    batch: KDBatch
    objective: Objective
    signal: TeacherSignal | None
    """None in a step without KD, and off the last pipeline stage."""
    layers: LayersOfMicrobatch | None = None
    """Targets of the student's intermediate layers; None without --kd-hidden-loss."""


@dataclass(frozen=True)
class ForwardStep:
    """The `forward_step_func` of Megatron's schedules."""

    context: LossContext
    finite: FiniteCheck | None = None
    """Collects tensors for the NaN/Inf check; None disables it."""

    def __call__(self, inputs: Iterator[StepInput], model: nn.Module) -> tuple[Tensor, Callable[[Tensor], Report]]:
        """Run one microbatch through one model chunk.

        Without pipeline parallelism, advancing `inputs` runs the teacher on the microbatch (`mkd.train.schedule`).

        Returns:
            The chunk's output, and the function that Megatron calls with it on the last stage.
        """
        step = next(inputs)
        batch = step.batch
        tokens = (batch.tokens, batch.position_ids, None)
        options = {
            "packed_seq_params": batch.packed,
            "padding_mask": router_padding_mask(unwrap_model(model), batch.padding),
        }
        if step.objective.tokens is None:
            output = model(*tokens, labels=batch.labels, **options)
            return output, lambda losses: self._report_pretraining(step, losses.float())
        loss = MicrobatchLoss(MicrobatchObjective.of(self.context, batch, step.objective, step.signal), self.finite)
        if step.layers is not None:
            step.layers.begin()
        output = model(*tokens, output_processor=loss, **options)
        return output, loss.report

    def _report_pretraining(self, step: StepInput, ce: Tensor) -> Report:
        """The report of a run that never uses the teacher; `ce` [b, s] is Megatron's own."""
        batch = step.batch
        mean = Mean.of(ce, batch.ce_mask, None)
        total = mean.total if step.objective.evaluating else step.objective.pretraining_scale * mean.total
        means = {"ce": mean}
        if step.objective.evaluating:
            means |= bits_per_byte("", ce, batch, self.context.byte_lengths)
        if self.finite is not None:
            sums = {_SOURCES.get(name, name): value.total for name, value in means.items()}
            self.finite.note(sums | {"the loss": total}, batch)
        found = report(means, total, batch, step.objective)
        return total, found["loss"][1].int(), found


@dataclass
class MicrobatchLoss:
    """The output processor of one microbatch: from the student's final hidden states to the loss.

    Megatron calls it inside the student's forward pass, and `report` afterward.
    """

    microbatch: MicrobatchObjective
    finite: FiniteCheck | None = None
    _means: dict[str, Mean] = field(default_factory=dict)
    _total: Tensor | None = None
    """The objective that is reported, where it is not the loss."""
    _calibration: Tensor | None = None
    """See `calibration_sums`; None unless one teacher is evaluated."""

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
        upstream = _loss_scale(config, hidden_states.device)
        weight, scale = output_head(output_layer, output_weight, config)
        student = Student(hidden_states.flatten(0, 1), weight, LogitMap(*scale), config.sequence_parallel, upstream)
        microbatch, shares = self.microbatch, {}
        if microbatch.selecting:
            microbatch, shares = Selection.of(microbatch, student.sequence_parallel).apply(microbatch)
        loss, means, ce = microbatch.loss(student)
        objective = microbatch.objective
        if objective.evaluating:
            self._total = microbatch.evaluated(means)
        if objective.evaluating or objective.comparing:
            measured, self._calibration = measure(microbatch, student, ce)
            means |= measured
        self._means = shares | means
        return loss

    def report(self, loss: Tensor) -> Report:
        """The report of the microbatch, after the last stage's forward pass."""
        microbatch = self.microbatch
        total = loss if self._total is None else self._total
        if self.finite is not None:
            sums = microbatch.finite_sums()
            numbers = [f" (teacher {number + 1})" for number in range(len(sums))] if len(sums) > 1 else [""]
            teachers = {TEACHER + number: value for number, value in zip(numbers, sums, strict=False)}
            means = {_SOURCES.get(name, name): mean.total for name, mean in self._means.items()}
            self.finite.note(teachers | means | {"the loss": total}, microbatch.batch)
        found = report(self._means, total, microbatch.batch, microbatch.objective)
        if self._calibration is not None:
            found[CALIBRATION] = self._calibration
        return loss, found["loss"][1].int(), found


def report(means: dict[str, Mean], total: Tensor, batch: KDBatch, objective: Objective) -> dict[str, Tensor]:
    """{name: [sum, count]} of a microbatch; `total` is the sum reported as the loss, with its part of the divisor."""
    divisor = objective.divisor(batch)
    if not objective.evaluating and objective.tokens is not None:
        # A step without a supervised token has the loss 0: all of its written texts may be left out.
        divisor = torch.where(objective.tokens.divisor > 0, divisor, 1.0)
    found = {"loss": torch.stack([total.detach(), divisor])}
    for name, mean in means.items():
        count = mean.count
        if not (objective.evaluating or mean.count_of_step is None):
            # A term without a token in the whole step reports 0; an evaluation's means are over many steps.
            count = torch.where(mean.count_of_step > 0, count, 1.0)
        found[name] = torch.stack([mean.total.detach(), count])
    return found


def _loss_scale(config: Any, device: torch.device) -> Tensor | float:
    """The gradient that Megatron's backward pass gives to the loss of a microbatch."""
    return 1.0 if config.grad_scale_func is None else config.grad_scale_func(torch.ones((), device=device)).reshape(())
