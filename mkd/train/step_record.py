"""Sizes of one step on this rank, and its times by cause."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from mkd.data.text_size import TextSize
from mkd.rollout.facts import RolloutFacts
from mkd.train.objective import Objective


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
