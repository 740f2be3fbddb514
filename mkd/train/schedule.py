"""Teacher first, then student: wraps megatron's forward-backward schedules."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mkd.config.kd_config import KDConfig
from mkd.data.batch import KDBatch, check_same_batch, draw
from mkd.data.lookahead import Lookahead
from mkd.data.token_counts import StepTokens, TextSize
from mkd.distributed.groups import Groups
from mkd.errors import MkdDataError
from mkd.teacher.interface import Teacher, TeacherSignal
from mkd.train.hidden_layers import HiddenLayers
from mkd.train.step import Objective, StepInput


@dataclass
class StepRecord:
    """What a step has read and waited for on this rank."""

    text: TextSize
    data_s: float
    """Seconds until its microbatches were there."""
    cache_s: float | None = None
    """Seconds until a teacher's stored answers were there (at once, if it runs itself); None without one."""
    _teacher: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def time(self, call: Callable[[], Any]) -> Any:
        """Call the teacher."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = call()
        end.record()
        self._teacher.append((begin, end))
        return result

    def waits(self) -> dict[str, float]:
        """Seconds by what they went to; of the teacher those of the device, in its forward passes or in unpacking its
        answers. Waits for the device."""
        for _, end in self._teacher:
            end.synchronize()
        teacher_s = sum(begin.elapsed_time(end) for begin, end in self._teacher) / 1000.0
        known = {"data": self.data_s, "teacher": teacher_s if self._teacher else None, "cache": self.cache_s}
        return {name: seconds for name, seconds in known.items() if seconds is not None}


@dataclass
class TeacherThenStudent:
    """Draws a step's microbatches once, has the teacher look at them, and runs the student's own schedule over both.

    Without pipeline parallelism the teacher runs inside each microbatch's forward step, so one microbatch's hidden
    states exist at a time. With it, when its weights are offloaded, or when it has a layout of its own, it runs over
    all microbatches of the step first.
    """

    kd: KDConfig
    groups: Groups
    teacher: Teacher | None
    """None when nothing is learned from it (`KDConfig.is_plain_pretraining`)."""
    true_vocab: int
    current_iteration: Callable[[], int]
    hidden_layers: HiddenLayers | None = None
    """None when no layers are paired."""
    length_multiple: int | None = None
    """What the length of a microbatch is rounded up to when padding is cut off (`draw`); None when it is not."""
    balance: Callable[[], float] = lambda: 1.0
    """Factor of KD in the present step (`mkd.train.balance`)."""
    _checked: set[bool] = field(default_factory=set)
    """Phases (evaluating or not) whose first batch was compared between ranks."""
    record: StepRecord | None = None
    """Of the last step."""

    def around(self, schedule: Callable) -> Callable:
        """`schedule`, a forward-backward function of megatron, with the teacher before it."""

        def run(*, data_iterator: Any, num_microbatches: int, forward_only: bool = False, **options: Any) -> list[dict]:
            source = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
            began = time.monotonic()
            whole = draw(source, num_microbatches, self.true_vocab, options["micro_batch_size"], self.length_multiple)
            self.record = StepRecord(TextSize.of(whole), time.monotonic() - began)
            self._check(whole, forward_only)
            whole = self._prepared(whole, source, forward_only)
            # Packed rows follow each other in one row; megatron's pipeline stages are to expect that shape.
            options["micro_batch_size"], options["seq_length"] = whole[0].tokens.shape
            inputs = self._inputs([batch.on_rank(self.groups.cp) for batch in whole], forward_only)
            if isinstance(data_iterator, list):
                iterators: Any = [iter(inputs) for _ in data_iterator]
            else:
                iterators = iter(inputs)
            reports = schedule(
                data_iterator=iterators, num_microbatches=num_microbatches, forward_only=forward_only, **options
            )
            if self.hidden_layers is not None:
                self.hidden_layers.add_to(reports, [step.layers for step in inputs])
            if self._wants_teacher(forward_only):
                _add_to(reports, self.teacher.facts())
            return reports

        return run

    def _check(self, batches: list[KDBatch], evaluating: bool) -> None:
        shapes = {tuple(batch.tokens.shape) for batch in batches}
        if len(shapes) > 1 and self.length_multiple is None and self.groups.pp.size() > 1:
            raise MkdDataError(
                f"microbatches of one step have the shapes {sorted(shapes)}, but pipeline stages expect one: give "
                "--kd-variable-seq-lengths"
            )
        if evaluating not in self._checked:
            check_same_batch(batches[0], self.groups.mp, self.groups.cp)
            self._checked.add(evaluating)

    def _wants_teacher(self, evaluating: bool) -> bool:
        """Whether the present step learns from the teacher, or is compared with it."""
        if self.teacher is None:
            return False
        return evaluating or self.kd.ratio_over_time.value(self.current_iteration()) > 0.0

    def _prepared(self, batches: list[KDBatch], source: Any, evaluating: bool) -> list[KDBatch]:
        """The batches as the teacher can serve them."""
        if not self._wants_teacher(evaluating):
            return batches
        upcoming = Lookahead(source, len(batches), self.true_vocab, self.length_multiple, evaluating)
        began = time.monotonic()
        prepared = self.teacher.prepare(batches, upcoming)
        self.record.cache_s = time.monotonic() - began
        return prepared

    def _inputs(self, batches: list[KDBatch], evaluating: bool) -> list[StepInput]:
        iteration = self.current_iteration()
        objective = Objective(
            ratio=self.kd.ratio_over_time.value(iteration),
            spec=self.kd.loss_spec(iteration),
            evaluating=evaluating,
            plain=self.teacher is None,
            comparing=self.kd.compares(iteration),
            balance=self.balance(),
        )
        tokens = None if objective.plain else StepTokens.of(batches, self.groups.dp_cp, self.groups.cp.rank())
        runs_before_student = self._wants_teacher(evaluating) and (
            self.groups.pp.size() > 1 or self.teacher.runs_before_student
        )
        if runs_before_student:
            stored = iter(self._ask(batches))
            signals = (
                [_constant(next(stored)) for _ in batches] if self.groups.is_last_stage else [_unused] * len(batches)
            )
        else:
            signals = [self._lazily(batch) for batch in batches]
        layers: list = [None] * len(batches)
        if self.hidden_layers is not None:
            layers = self.hidden_layers.microbatches(
                batches, objective.ratio, evaluating, teacher_is_done=runs_before_student, kd_scale=tokens.kd_scale
            )
        return [
            StepInput(batch, objective, tokens, signal, layer)
            for batch, signal, layer in zip(batches, signals, layers, strict=True)
        ]

    def _lazily(self, batch: KDBatch) -> Callable[[], TeacherSignal]:
        return lambda: self._ask([batch])[0]

    def _ask(self, batches: list[KDBatch]) -> list[TeacherSignal]:
        return self.record.time(lambda: self.teacher.signals(batches))


def _add_to(reports: list[dict], facts: Mapping[str, float]) -> None:
    """Numbers that are the same on all ranks, as means that megatron takes."""
    for report in reports:
        report |= {name: torch.tensor([value, 1.0], device="cuda") for name, value in facts.items()}


def _constant(signal: TeacherSignal) -> Callable[[], TeacherSignal]:
    return lambda: signal


def _unused() -> TeacherSignal:
    raise AssertionError("only the last stage looks at the teacher's signal")
