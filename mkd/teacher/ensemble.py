"""Several teachers as one."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mkd.checkpoint.source import common_fingerprint
from mkd.data.batch import KDBatch
from mkd.data.lookahead import Lookahead
from mkd.teacher.interface import EnsembleSignal, HiddenSignal, Teacher


@dataclass(frozen=True)
class TeacherEnsemble:
    """Teachers that run one after the other; their divergences are added up with their weights."""

    teachers: tuple[Teacher, ...]
    weights: tuple[float, ...]

    @property
    def runs_before_student(self) -> bool:
        """See `Teacher.runs_before_student`."""
        return any(teacher.runs_before_student for teacher in self.teachers)

    def prepare(self, batches: Sequence[KDBatch], upcoming: Lookahead) -> list[KDBatch]:
        """See `Teacher.prepare`."""
        prepared = list(batches)
        for teacher in self.teachers:
            prepared = teacher.prepare(prepared, upcoming)
        return prepared

    def signals(self, batches: Sequence[KDBatch]) -> list[EnsembleSignal]:
        """See `Teacher.signals`."""
        each = [teacher.signals(batches) for teacher in self.teachers]
        return [EnsembleSignal(together, self.weights) for together in zip(*each, strict=True)]

    def facts(self) -> dict[str, float]:
        """See `Teacher.facts`."""
        return {name: value for teacher in self.teachers for name, value in teacher.facts().items()}

    def fingerprint(self) -> str:
        """See `Teacher.fingerprint`."""
        return common_fingerprint([teacher.fingerprint() for teacher in self.teachers])


@dataclass(frozen=True)
class SelectingTeachers(TeacherEnsemble):
    """Teachers of which each text has one: which, the loss decides from what all of them say of it."""

    def prepare(self, batches: Sequence[KDBatch], upcoming: Lookahead) -> list[KDBatch]:
        """See `Teacher.prepare`; the batches have the numbers of their texts."""
        return [batch.with_texts() for batch in super().prepare(batches, upcoming)]

    def signals(self, batches: Sequence[KDBatch]) -> list[EnsembleSignal]:
        """See `Teacher.signals`."""
        return [replace(several, selecting=True) for several in super().signals(batches)]


@dataclass(frozen=True)
class AveragedTeachers(TeacherEnsemble):
    """Teachers of one vocabulary whose logits are averaged with their weights, which are taken to add up to 1.

    Averaged logits are the product of the teachers' hidden states, side by side, with their LM heads, side by side.
    """

    _head: list[Tensor] = field(default_factory=list)
    """Of all teachers, once it is made: frozen as they are."""

    def signals(self, batches: Sequence[KDBatch]) -> list[HiddenSignal]:
        """See `Teacher.signals`."""
        several = super().signals(batches)
        if several and not self._head:
            shares = [w / sum(self.weights) for w in self.weights]
            heads = [x * s.logit_scale * s.head for x, s in zip(shares, several[0].signals, strict=True)]
            self._head.append(torch.cat(heads, dim=1))
        return [HiddenSignal(torch.cat([s.hidden for s in one.signals], dim=-1), self._head[0]) for one in several]
