"""Teacher first, then student: wraps Megatron's forward-backward schedules."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import batched, repeat
from typing import Any

import torch
from torch import nn

from mkd.config.kd_config import KDConfig
from mkd.data.batch import KDBatch
from mkd.data.lookahead import Lookahead
from mkd.data.microbatches import check_same_batch, next_microbatches
from mkd.data.text_size import TextSize
from mkd.distributed.groups import Groups
from mkd.errors import MkdDataError
from mkd.models.parameter_sync import gather_parameters
from mkd.rollout.facts import RolloutFacts
from mkd.rollout.offload import StateOffload
from mkd.rollout.on_policy import OnPolicy
from mkd.rollout.rows import WrittenRows
from mkd.rollout.step_rows import StepRows
from mkd.teacher.interface import Teacher, TeacherSignal
from mkd.train.hidden_layers import HiddenLayers, LayersOfMicrobatch
from mkd.train.objective import Objective
from mkd.train.router_losses import scale_router_losses
from mkd.train.step import StepInput
from mkd.train.step_tokens import StepTokens


@dataclass
class StepRecord:
    """Sizes and waiting times of one step on this rank."""

    objective: Objective
    """R, T and the balance factor; its tokens are not counted."""
    text: TextSize
    data_s: float
    """Seconds spent reading its microbatches."""
    cache_s: float | None = None
    """Seconds spent waiting for cached targets (about 0 for a teacher that runs); None in a step without a teacher."""
    rollout: RolloutFacts | None = None
    """Measurements of the texts that the student has written for it; None if it has written none."""
    _teacher: list["_Span"] = field(default_factory=list)
    _student: "_Span | None" = None
    _teacher_before: int = 0
    """Number of the teacher's spans that end before the student's begins."""

    def time_teacher(self, compute: Callable[[], Any]) -> Any:
        """Call `compute` between two events of the device."""
        span = _Span.begin()
        result = compute()
        span.end.record()
        self._teacher.append(span)
        return result

    def time_student(self, compute: Callable[[], Any]) -> Any:
        """Call `compute`, in which the teacher may run too, between two events of the device."""
        self._teacher_before = len(self._teacher)
        self._student = _Span.begin()
        result = compute()
        self._student.end.record()
        return result

    def seconds(self) -> dict[str, float]:
        """Seconds of the step by cause, after the optimizer's step. Waits for the device.

        `teacher` is device time in its forward passes or in decoding cached targets, `student` in the schedule without
        the teacher, and `optimizer` from there to now.
        """
        optimizer = _Span(self._student.end)
        optimizer.end.record()
        optimizer.end.synchronize()
        teacher = [span.seconds() for span in self._teacher]
        seconds = {
            "data": self.data_s,
            "teacher": sum(teacher) if teacher else None,
            "student": self._student.seconds() - sum(teacher[self._teacher_before :]),
            "optimizer": optimizer.seconds(),
            "cache": self.cache_s,
            "rollout": None if self.rollout is None else self.rollout.seconds,
        }
        return {name: value for name, value in seconds.items() if value is not None}


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


@dataclass
class _Span:
    """Work of the device between two events."""

    start: torch.cuda.Event = field(default_factory=_event)
    end: torch.cuda.Event = field(default_factory=_event)

    @classmethod
    def begin(cls) -> "_Span":
        """A span that begins now."""
        span = cls()
        span.start.record()
        return span

    def seconds(self) -> float:
        """Its length; both events have completed."""
        return self.start.elapsed_time(self.end) / 1000.0


@dataclass
class TeacherThenStudent:
    """Reads a step's microbatches once, runs the teacher on them, and runs the student's own schedule over both.

    Without pipeline parallelism the teacher runs inside each microbatch's forward step, so one microbatch's hidden
    states exist at a time (with --kd-teacher-micro-batch-size those of one pass of the teacher). With it, when its
    weights are offloaded, or when it has a layout of its own, it runs over all microbatches of the step first.
    """

    kd: KDConfig
    groups: Groups
    teacher: Teacher | None
    """None in a run that never uses it (`KDConfig.is_plain_pretraining`)."""
    true_vocab: int
    current_iteration: Callable[[], int]
    hidden_layers: HiddenLayers | None = None
    """None without --kd-hidden-loss."""
    length_multiple: int | None = None
    """The length of a trimmed microbatch is rounded up to a multiple of this; None leaves microbatches whole."""
    balance: Callable[[], float] = lambda: 1.0
    """Factor of KD in the present step (`mkd.train.balance`)."""
    on_policy: OnPolicy | None = None
    """None without --kd-on-policy."""
    rows_before: Callable[[], int | None] = lambda: None
    """See `StepRows.before`."""
    offload: StateOffload | None = None
    """Set when the optimizer exists; None without --kd-rollout-offload."""
    is_stopping: Callable[[], bool] = lambda: False
    """See `Lookahead.is_stopping`."""
    _checked: set[bool] = field(default_factory=set)
    """Phases (evaluation or not) whose first batch was compared between ranks."""
    record: StepRecord | None = None
    """The record of the last step."""

    def around(self, schedule: Callable) -> Callable:
        """Wrap `schedule`, a forward-backward function of Megatron."""

        def run(*, data_iterator: Any, num_microbatches: int, forward_only: bool = False, **options: Any) -> list[dict]:
            options |= {"num_microbatches": num_microbatches, "forward_only": forward_only}
            try:
                return self._run(schedule, data_iterator, options)
            finally:
                if self.offload is not None:
                    self.offload.arrive()

        return run

    def _run(self, schedule: Callable, data_iterator: Any, options: dict[str, Any]) -> list[dict]:
        """Run a step or an evaluation of `schedule`."""
        forward_only = options["forward_only"]
        source = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
        written, data_s = None, 0.0
        if not forward_only and self.on_policy is not None:
            written, source, data_s = self._write(source, options)
        batches = self._read(source, options["num_microbatches"], options["micro_batch_size"], forward_only)
        self.record.data_s += data_s
        self.record.rollout = None if written is None else written.facts
        # Packed rows follow each other in one row; Megatron's pipeline stages expect that shape.
        rows = options["micro_batch_size"]
        options["micro_batch_size"], options["seq_length"] = batches[0].tokens.shape
        if self.teacher is not None:
            batches = [batch.with_supervised() for batch in batches]
        batches = [batch.on_rank(self.groups.cp) for batch in batches]
        objective = self._with_counts(self.record.objective, batches)
        if not forward_only:
            scale_router_losses(options["model"], batches, self.groups.dp_cp, plain=self.teacher is None)
        teaches = self._teaches(objective)
        first = teaches and (self.groups.pp.size() > 1 or self.teacher.runs_before_student)
        signals = self._signals(batches, first, rows) if teaches else repeat(None)
        layers = self._layer_targets(batches, objective, teacher_is_done=first)
        inputs = map(StepInput, batches, repeat(objective), signals, layers)
        inputs = _per_model_chunk(inputs, data_iterator)
        reports = self.record.time_student(lambda: schedule(data_iterator=inputs, **options))
        if self.hidden_layers is not None:
            self.hidden_layers.add_to(reports, layers)
        if teaches:
            _add_to(reports, self.teacher.metrics())
        return reports

    def _write(self, source: Any, options: Mapping[str, Any]) -> tuple[WrittenRows | None, Any, float]:
        """Let the student write its part of a training step; None if it has none. Also returns the samples with it, and
        the seconds in which they were read."""
        model, count, rows = options["model"], options["num_microbatches"], options["micro_batch_size"]
        chunks = model if isinstance(model, list) else [model]
        step = StepRows(self.current_iteration(), count, rows, self.groups.dp.size(), self.rows_before())
        begin, began = None, time.monotonic()
        if self._begins_early(step):
            samples = [next(source) for _ in range(count)]
            source, begin = iter(samples), partial(self._begin, samples, rows)
        data_s = time.monotonic() - began
        around = partial(self._writing, chunks)
        written = self.on_policy.write(chunks, self.groups, step, around, self.is_stopping, begin)
        return written, source if written is None else written.replace_in(source), data_s

    @contextmanager
    def _writing(self, chunks: Sequence[nn.Module]) -> Iterator[None]:
        """The state in which the student writes: its parameters are up to date, the optimizer's state may be away."""
        gather_parameters(chunks)
        layers = nullcontext() if self.hidden_layers is None else self.hidden_layers.paused()
        with layers, nullcontext() if self.offload is None else self.offload.away():
            yield

    def _begins_early(self, step: StepRows) -> bool:
        """True if a teacher elsewhere can compute microbatches while the student writes others."""
        writes = self.on_policy.count(step.count, step.iteration) > 0
        return writes and self._teaches(self._objective(False)) and self.teacher.begins_early

    def _begin(self, samples: Sequence[Any], rows: int, number: int, written: WrittenRows) -> None:
        """Send a microbatch to the teacher, on the rank that sends."""
        if self.groups.leads_replica:
            sample = written.sample(number * rows, samples[number])
            (batch,) = next_microbatches(iter([sample]), 1, self.true_vocab, rows, self.length_multiple)
            self.teacher.begin(replace(batch, number=number))

    def _read(self, source: Any, count: int, micro_batch_size: int, evaluating: bool) -> list[KDBatch]:
        """The step's microbatches, whole and on the host, without KD where the teacher has no target."""
        began = time.monotonic()
        batches = next_microbatches(source, count, self.true_vocab, micro_batch_size, self.length_multiple)
        objective = self._objective(evaluating)
        self.record = StepRecord(objective, TextSize.of(batches), time.monotonic() - began)
        self._check(batches, evaluating)
        if not self._teaches(objective):
            return batches
        upcoming = Lookahead(source, len(batches), self.true_vocab, self.length_multiple, evaluating, self.is_stopping)
        began = time.monotonic()
        batches = self.teacher.prepare(batches, upcoming)
        self.record.cache_s = time.monotonic() - began
        return batches

    def _objective(self, evaluating: bool) -> Objective:
        """R, T and what is measured in the present step; its tokens are not counted yet."""
        iteration = self.current_iteration()
        return Objective(
            ratio=self.kd.ratio_over_time.value(iteration),
            spec=self.kd.loss_spec(iteration),
            tokens=None,
            evaluating=evaluating,
            comparing=self.kd.compares(iteration),
            balance=self.balance(),
        )

    def _with_counts(self, objective: Objective, batches: list[KDBatch]) -> Objective:
        """Count the step's tokens. Collective over the data- and context-parallel ranks."""
        tokens = StepTokens.of(batches, self.groups.dp_cp, self.groups.cp.rank())
        if self.teacher is None:
            return replace(objective, pretraining_scale=tokens.ce_scale)
        return replace(objective, tokens=tokens)

    def _teaches(self, objective: Objective) -> bool:
        """True if the present step uses the teacher."""
        return self.teacher is not None and objective.with_kd

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

    def _signals(self, batches: list[KDBatch], first: bool, rows: int) -> Iterable[TeacherSignal | None]:
        """One signal per microbatch: computed now, or when the iterator is advanced, in each forward step.

        Args:
            batches: the step's microbatches.
            first: the teacher runs on all of them now.
            rows: rows of each.
        """
        if first:
            signals = self._run_teacher(batches)
            return signals if self.groups.is_last_stage else repeat(None)
        together = max(1, (self.kd.teacher_micro_batch_size or rows) // rows)
        return (signal for some in batched(batches, together) for signal in self._run_teacher(list(some)))

    def _run_teacher(self, batches: list[KDBatch]) -> Iterable[TeacherSignal]:
        return self.record.time_teacher(lambda: self.teacher.signals(batches))

    def _layer_targets(
        self, batches: list[KDBatch], objective: Objective, teacher_is_done: bool
    ) -> Sequence[LayersOfMicrobatch | None]:
        if self.hidden_layers is None:
            return [None] * len(batches)
        return self.hidden_layers.microbatches(
            batches, objective.ratio, objective.evaluating, teacher_is_done, kd_scale=objective.tokens.kd_scale
        )


def _per_model_chunk(inputs: Iterator[StepInput], data_iterator: Any) -> Any:
    """The inputs in the shape of Megatron's data iterators: a list of iterators with virtual pipeline stages."""
    if not isinstance(data_iterator, list):
        return inputs
    # An input exists from its first use by a virtual stage to that by the last one; itertools.tee drops 57 at a time.
    waiting: list[deque[StepInput]] = [deque() for _ in data_iterator]

    def read(own: deque[StepInput]) -> Iterator[StepInput]:
        while own or _append_to_all(waiting, inputs):
            yield own.popleft()

    return list(map(read, waiting))


def _append_to_all(waiting: Sequence[deque[StepInput]], inputs: Iterator[StepInput]) -> bool:
    """Append the next input to each queue; False if there is none."""
    for one in inputs:
        for queue in waiting:
            queue.append(one)
        return True
    return False


def _add_to(reports: list[dict], facts: Mapping[str, float]) -> None:
    """Add numbers that are equal on all ranks, in the form of Megatron's means."""
    for report in reports:
        report |= {name: torch.tensor([value, 1.0], device="cuda") for name, value in facts.items()}
