"""Several teachers as one: divergences summed or selected per text (`TeacherEnsemble`), or averaged logits."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from mkd.checkpoint.source import common_fingerprint
from mkd.data.batch import KDBatch
from mkd.data.lookahead import Lookahead
from mkd.teacher.interface import EnsembleSignal, HiddenSignal, Teacher


@dataclass(frozen=True)
class TeacherEnsemble:
    """Teachers that run one after the other. The loss adds up their divergences with their weights, or, with
    `selecting`, takes that of the best teacher of each text."""

    teachers: tuple[Teacher, ...]
    weights: tuple[float, ...]
    selecting: bool = False
    """See `EnsembleSignal`; the loss selects, because it has the cross-entropy of every teacher."""

    @property
    def runs_before_student(self) -> bool:
        """See `Teacher.runs_before_student`."""
        return any(teacher.runs_before_student for teacher in self.teachers)

    @property
    def begins_early(self) -> bool:
        """See `Teacher.begins_early`."""
        return any(teacher.begins_early for teacher in self.teachers)

    def begin(self, batch: KDBatch) -> None:
        """See `Teacher.begin`."""
        for teacher in self.teachers:
            teacher.begin(batch)

    def prepare(self, batches: Sequence[KDBatch], upcoming: Lookahead) -> list[KDBatch]:
        """See `Teacher.prepare`; with `selecting`, the returned batches number their texts."""
        prepared = list(batches)
        for teacher in self.teachers:
            prepared = teacher.prepare(prepared, upcoming)
        return [batch.with_texts() for batch in prepared] if self.selecting else prepared

    def signals(self, batches: Sequence[KDBatch]) -> Iterator[EnsembleSignal]:
        """See `Teacher.signals`."""
        per_teacher = [teacher.signals(batches) for teacher in self.teachers]
        return (
            EnsembleSignal(of_microbatch, self.weights, self.selecting)
            for of_microbatch in zip(*per_teacher, strict=True)
        )

    def metrics(self) -> dict[str, float]:
        """See `Teacher.metrics`."""
        return {name: value for teacher in self.teachers for name, value in teacher.metrics().items()}

    def fingerprint(self) -> str:
        """See `Teacher.fingerprint`."""
        return common_fingerprint([teacher.fingerprint() for teacher in self.teachers])

    def close(self) -> None:
        """See `Teacher.close`."""
        with ExitStack() as stack:  # the others are closed too if one raises
            for teacher in self.teachers:
                stack.callback(teacher.close)


class AveragedTeachers:
    """An ensemble with one vocabulary whose logits are averaged, as a single teacher.

    Averaged logits are one product: the teachers' hidden states, concatenated, times their LM heads, each scaled by
    the weight of its teacher and concatenated.
    """

    def __init__(self, ensemble: TeacherEnsemble) -> None:
        """Wrap an ensemble; its weights are normalized to a sum of 1."""
        self._ensemble = ensemble
        self._head: Tensor | None = None

    @property
    def runs_before_student(self) -> bool:
        """See `Teacher.runs_before_student`."""
        return self._ensemble.runs_before_student

    @property
    def begins_early(self) -> bool:
        """See `Teacher.begins_early`."""
        return self._ensemble.begins_early

    def begin(self, batch: KDBatch) -> None:
        """See `Teacher.begin`."""
        self._ensemble.begin(batch)

    def prepare(self, batches: Sequence[KDBatch], upcoming: Lookahead) -> list[KDBatch]:
        """See `Teacher.prepare`."""
        return self._ensemble.prepare(batches, upcoming)

    def signals(self, batches: Sequence[KDBatch]) -> Iterator[HiddenSignal]:
        """See `Teacher.signals`."""
        return map(self._average, self._ensemble.signals(batches))

    def _average(self, ensemble: EnsembleSignal) -> HiddenSignal:
        signals = ensemble.signals
        if self._head is None:
            # Made once: the teachers are frozen, so their LM heads never change.
            weights = [w / sum(ensemble.weights) for w in ensemble.weights]
            heads = [w * s.logit_map.scale * s.head for w, s in zip(weights, signals, strict=True)]
            self._head = torch.cat(heads, dim=1)
        return HiddenSignal(torch.cat([s.hidden for s in signals], dim=-1), self._head, selected=signals[0].selected)

    def metrics(self) -> dict[str, float]:
        """See `Teacher.metrics`."""
        return self._ensemble.metrics()

    def fingerprint(self) -> str:
        """See `Teacher.fingerprint`."""
        return self._ensemble.fingerprint()

    def close(self) -> None:
        """See `Teacher.close`."""
        self._ensemble.close()
