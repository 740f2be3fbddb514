"""The forward step: microbatch -> teacher signal -> student -> losses -> (loss, count, report)."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from mkd.compat import padding_of_stage
from mkd.config import LossSpec
from mkd.data.batch import KDBatch
from mkd.data.counts import StepTokens
from mkd.evaluation import (
    CALIBRATION,
    COMPARED,
    bits_per_byte,
    calibration_sums,
    compare,
    comparison_terms,
    rows_of,
    sparse_rows,
    teacher_cross_entropy,
)
from mkd.groups import Groups
from mkd.hidden_layers import LayersOfMicrobatch
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
from mkd.losses.sparse import Tail
from mkd.models.gpt import finish_parameter_sync, logit_scale
from mkd.teacher.base import TeacherSignal, TopKSignal

_OF_KD_TOKENS = ("kd", *COMPARED)
"""Reported terms that are means over the tokens of the KD mask; the others are over those of the CE mask."""


@dataclass(frozen=True)
class Objective:
    """What one step minimises: (1 - ratio) * CE + ratio * KD, each the mean over its own supervised tokens."""

    ratio: float
    spec: LossSpec
    evaluating: bool
    """Whether CE, KD, the teacher's own CE and the comparison are all wanted, whatever the ratio."""
    plain: bool
    """Whether the run never looks at the teacher, and is megatron's own pretraining to the last bit."""
    comparing: bool = False
    """Whether a training step also measures entropies and top-1 agreement."""


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
    check_finite: bool
    """Whether a loss that is not finite stops the run before the optimizer step."""
    options: LossOptions = LossOptions()  # noqa: RUF009
    """How the losses are computed."""
    top_k: int | None = None
    """How many of the teacher's most probable tokens the divergence looks at; None: all, or those that are known."""
    top_k_tail: Tail = "bucket"
    """What becomes of the others."""
    byte_lengths: Tensor | None = None
    """[V] bytes of each token's text, for the bits per byte of evaluations; None: they are not known."""

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
            return output, lambda losses: self._report(step, {"ce": losses.float()}, None)
        head = _HeadLoss(self, step)
        if step.layers is not None:
            step.layers.begin()
        output = model(*inputs, output_processor=head, **rows)
        return output, head.report

    def _report(
        self, step: StepInput, terms: dict[str, Tensor], loss: Tensor | None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Megatron's (loss sum, token count, {name: [sum, count]}) from per-token terms [b, s]."""
        batch, objective = step.batch, step.objective
        masks = {name: batch.kd_mask if name in _OF_KD_TOKENS else batch.ce_mask for name in terms}
        sums = {name: (values * masks[name]).sum() for name, values in terms.items()}
        if loss is None:
            loss = sums["ce"]
        if objective.evaluating and "kd" in sums:
            total = (1.0 - objective.ratio) * sums["ce"] + objective.ratio * step.tokens.kd_scale * sums["kd"]
        else:
            total = loss
        if self.check_finite:
            for name, value in {"loss": total, **sums}.items():
                _require_finite(name, value)
        divisor = batch.ce_mask.sum() if step.tokens is None else step.tokens.divisor(batch)
        counts = {"loss": divisor} | {name: self._count(name, mask, step) for name, mask in masks.items()}
        report = {name: torch.stack([value.detach(), counts[name]]) for name, value in {"loss": total, **sums}.items()}
        if objective.evaluating:
            report |= bits_per_byte(terms, batch, self.byte_lengths)
        return loss, divisor.int(), report

    def _count(self, name: str, mask: Tensor, step: StepInput) -> Tensor:
        """What megatron divides the reported sum of a term by; a term without a token in the whole step reports 0."""
        if step.tokens is None or step.objective.evaluating:
            return mask.sum()  # an evaluation's means are over many steps
        everywhere = step.tokens.kd if name in _OF_KD_TOKENS else step.tokens.ce
        return torch.where(everywhere > 0, mask.sum(), 1.0)


class _HeadLoss:
    """The output processor of one microbatch: from the student's final hidden states to the loss."""

    def __init__(self, owner: ForwardStep, step: StepInput) -> None:
        self._owner, self._step = owner, step
        objective = step.objective
        self._with_ce = objective.evaluating or objective.ratio < 1.0
        self._with_kd = objective.evaluating or objective.ratio > 0.0
        # Before the student's activations exist. Without pipeline stages this is where the teacher runs.
        self._signal = step.signal() if self._with_kd and owner.groups.is_last_stage else None
        self._terms: dict[str, Tensor] = {}
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
        weight = output_layer.weight if output_weight is None else output_weight
        batch, objective = self._step.batch, self._step.objective
        ce_weight, kd_weight = self._weights()
        output = self._loss(hidden_states, weight, ce_weight, kd_weight, config)
        self._terms = {
            name: values.view(batch.tokens.shape[::-1]).t()
            for name, values in (("ce", output.ce), ("kd", output.kd))
            if values is not None
        }
        if objective.evaluating:
            self._terms["teacher_ce"] = teacher_cross_entropy(
                self._signal,
                batch,
                true_vocab=self._owner.true_vocab,
                tp_group=self._owner.groups.tp,
                sequence_parallel=config.sequence_parallel,
                options=self._owner.options,
            )
        if objective.evaluating or (objective.comparing and self._with_kd):
            self._compare(hidden_states, weight, config)
        return output.loss

    def _compare(self, hidden: Tensor, weight: Tensor, config: Any) -> None:
        """Measure how alike student and teacher are."""
        found = compare(
            LogitSource(hidden.flatten(0, 1), weight, LogitMap(scale=logit_scale(config))),
            self._signal,
            true_vocab=self._owner.true_vocab,
            tp_group=self._owner.groups.tp,
            sequence_parallel=config.sequence_parallel,
            chunk_rows=self._owner.options.chunk_rows,
        )
        mask = self._step.batch.kd_mask
        self._terms |= comparison_terms(found, mask)
        if self._step.objective.evaluating:
            self._calibration = calibration_sums(found, mask)

    def _weights(self) -> tuple[Tensor | None, Tensor | None]:
        """CE and KD weights of every token, in the order of the hidden states' rows (sequence first)."""
        batch, objective = self._step.batch, self._step.objective
        # A weight of 0 takes a token out of its term, so an evaluation at R = 0 or 1 must not weigh with R.
        ce_scale = kd_scale = 1.0
        if not objective.evaluating:
            ce_scale, kd_scale = 1.0 - objective.ratio, objective.ratio * self._step.tokens.kd_scale
        ce = ce_scale * rows_of(batch.ce_mask) if self._with_ce else None
        kd = kd_scale * rows_of(batch.kd_mask) if self._with_kd else None
        return ce, kd

    def _loss(
        self,
        hidden: Tensor,
        weight: Tensor,
        ce_weight: Tensor | None,
        kd_weight: Tensor | None,
        config: Any,
    ) -> LossOutput:
        signal = self._signal
        common: dict[str, Any] = dict(
            spec=self._step.objective.spec,
            true_vocab=self._owner.true_vocab,
            tp_group=self._owner.groups.tp,
            sequence_parallel=config.sequence_parallel,
            upstream=_loss_scale(config, hidden.device),
            **asdict(self._owner.options),
        )
        student_map = LogitMap(scale=logit_scale(config))
        if isinstance(signal, TopKSignal) or (signal is not None and self._owner.top_k is not None):
            rows = (rows_of(self._step.batch.labels), ce_weight, kd_weight)
            sparse = dict(tail=self._owner.top_k_tail, student_map=student_map)
            return fused_linear_topk_loss(
                hidden.flatten(0, 1), weight, self._sparse(config.sequence_parallel), *rows, **sparse, **common
            )
        return fused_linear_loss(
            hidden.flatten(0, 1),
            weight,
            None if signal is None else signal.hidden.flatten(0, 1),
            None if signal is None else signal.head,
            rows_of(self._step.batch.labels),
            ce_weight,
            kd_weight,
            maps=LogitMaps(
                student=student_map,
                teacher=LogitMap() if signal is None else LogitMap(scale=signal.logit_scale),
            ),
            **common,
        )

    def _sparse(self, sequence_parallel: bool) -> SparseTeacher:
        """Rows of the teacher's most probable tokens, found among its logits or as they came."""
        signal, temperature = self._signal, self._step.objective.spec.temperature
        if isinstance(signal, TopKSignal):
            return sparse_rows(signal)
        found = teacher_top_k(
            signal.hidden.flatten(0, 1),
            signal.head,
            self._owner.top_k,
            temperatures=(temperature,),
            true_vocab=self._owner.true_vocab,
            tp_group=self._owner.groups.tp,
            sequence_parallel=sequence_parallel,
            chunk_rows=self._owner.options.chunk_rows,
            logit_map=LogitMap(scale=signal.logit_scale),
        )
        return SparseTeacher(found.ids, found.logits, found.lse[0], found.tail_lse[0], temperature)

    def report(self, loss: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """What the schedule asks for after the last stage's forward pass."""
        if self._owner.check_finite and self._signal is not None:
            _require_finite("the teacher's final hidden states", self._sum_of_teacher())
        loss, divisor, report = self._owner._report(self._step, self._terms, loss)
        if self._calibration is not None:
            report[CALIBRATION] = self._calibration
        return loss, divisor, report

    def _sum_of_teacher(self) -> Tensor:
        """Scalar that is not finite if the teacher's hidden states of a distilled token of this rank are not."""
        mask = self._step.batch.kd_mask.t()
        if isinstance(self._signal, TopKSignal):
            logits = torch.where(self._signal.ids >= 0, self._signal.logits, 0).sum(dim=-1, dtype=torch.float32)
            return torch.where(mask != 0, (logits + self._signal.lse).t(), 0).sum()
        sums = self._signal.hidden.sum(dim=-1, dtype=torch.float32)
        if sums.shape != mask.shape:  # sequence parallelism: this rank's part of the sequence
            mask = mask.chunk(self._owner.groups.tp.size())[self._owner.groups.tp.rank()]
        return torch.where(mask != 0, sums, 0).sum()


def _loss_scale(config: Any, device: torch.device) -> Tensor | float:
    """The gradient that megatron's backward pass gives to the loss of a microbatch."""
    return 1.0 if config.grad_scale_func is None else config.grad_scale_func(torch.ones((), device=device)).reshape(())


def _require_finite(name: str, value: Tensor) -> None:
    """Have megatron's rerun machine stop the run, or find the faulty device, when a sum is NaN or infinite."""
    machine = get_rerun_state_machine()
    for reject, what in ((torch.isnan, "NaN"), (torch.isinf, "infinity")):
        machine.validate_result(
            result=value.detach(),
            rejection_func=reject,
            message=f"found {what} in {name}",
            tolerance=0.0,
            fatal=True,
        )
