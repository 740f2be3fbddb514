"""The Teacher protocol and the signals that a teacher returns.

A teacher passes through five types on its way from a flag to the loss:

    TeacherSource      a folder on disk, opened and checked: architecture, vocabulary, tokenizer hash, fingerprint
                       (mkd.checkpoint.source; a cache is its own source, mkd.teacher.cache.store; teachers in
                       another process: mkd.job.teachers)
    TeacherSpec        the source fitted to the flags of the job, before weights or process groups exist: the run
                       summary, the memory estimate and the doctor read it; `build` makes the teacher (mkd.job.teachers)
    Teacher            the object that runs on this rank: weights, or an open cache
    TeacherSignal      its output for one microbatch
    TeacherObjective   signal and student output -> loss terms and metrics (mkd.train.objective)

| teacher                         | source            | spec                   | Teacher            | signal           |
|---------------------------------|-------------------|------------------------|--------------------|------------------|
| a model, the student's layout   | `ModelSource`     | `ModelTeacherSpec`     | `OnlineTeacher`    | `HiddenSignal`   |
| a model, a layout of its own    | `ModelSource`     | `ModelTeacherSpec`     | `ReshardedTeacher` | `HiddenSignal`   |
| a model, a job of its own       | `ServedSource`    | `ServedTeacherSpec`    | `ServedTeacher`    | `HiddenSignal`   |
| its top-k targets               | `ServedSource`    | `ServedTeacherSpec`    | `ServedTeacher`    | `TopKSignal`     |
| a model of vLLM or SGLang       | `InferenceSource` | `InferenceTeacherSpec` | `InferenceTeacher` | `TopKSignal`     |
| hidden states of vLLM           | `StatesSource`    | `StatesTeacherSpec`    | `StatesTeacher`    | `HiddenSignal`   |
| cached targets                  | `TeacherStore`    | `CachedTeacherSpec`    | `CachedTeacher`    | `TopKSignal`     |
| several models                  | `EnsembleSource`  | `EnsembleTeacherSpec`  | `TeacherEnsemble`  | `EnsembleSignal` |
| several models, averaged logits | `EnsembleSource`  | `EnsembleTeacherSpec`  | `AveragedTeachers` | `HiddenSignal`   |
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from mkd.data.batch import KDBatch
from mkd.data.lookahead import Lookahead
from mkd.losses import LogitMap, SparseTeacher


@dataclass(frozen=True)
class HiddenSignal:
    """Teacher outputs for one microbatch as final hidden states: H numbers per token instead of V logits.

    The loss multiplies them by `head` one loss chunk of tokens at a time, so the teacher's logits never exist for the
    whole microbatch.
    """

    hidden: Tensor
    """[s, b, Ht], or [s/tp, b, Ht] under sequence parallelism; in the teacher's dtype, after its final norm. With
    `selected`, [m, Ht] of those of its tokens that are in `KDBatch.supervised`."""
    head: Tensor
    """[V/tp, Ht] weights of the teacher's LM head for this rank's shard of the student's padded vocabulary."""
    logit_map: LogitMap = field(default_factory=LogitMap)
    """From hidden @ head^T to the teacher's logits: scale and softcap."""
    view: int | None = None
    """Index in `KDBatch.teacher_views` for a teacher with another tokenizer: [s, b] is then the shape of that view, and
    `head` has this rank's columns in the order of its `CrossVocabulary`. None: the student's tokens."""
    selected: bool = False
    """True if `hidden` has supervised tokens only."""


@dataclass(frozen=True)
class TopKSignal:
    """Teacher outputs for one microbatch as some of its logits: those of its top-k tokens, or of sampled targets.

    Whole on every tensor-parallel rank, and not sliced under sequence parallelism.
    """

    targets: SparseTeacher
    """Its tensors are [b, s/cp, K] and [b, s/cp]: ids and counts int32, sums fp32. `flatten_tokens` converts them to
    the shape that losses take."""
    label_log_prob: Tensor | None = None
    """[b, s/cp] fp32 log-probability of the label at temperature 1, where the KD mask is not 0; None: not known."""


@dataclass(frozen=True)
class EnsembleSignal:
    """Signals of several teachers for one microbatch."""

    signals: tuple[HiddenSignal | TopKSignal, ...]
    weights: tuple[float, ...]
    """Weight of each teacher's divergence in the sum."""
    selecting: bool = False
    """True if each text uses only the teacher that predicts it best."""

    @classmethod
    def of(cls, signal: "TeacherSignal | None") -> "EnsembleSignal":
        """Wraps the signal of one teacher, or of none, as an ensemble."""
        if isinstance(signal, EnsembleSignal):
            return signal
        return cls(() if signal is None else (signal,), () if signal is None else (1.0,))


TeacherSignal = HiddenSignal | TopKSignal | EnsembleSignal


class Teacher(Protocol):
    """Computes or reads one signal per microbatch. It uses no random numbers, so a repeated call returns the same."""

    @property
    def runs_before_student(self) -> bool:
        """True if `signals` must get all microbatches of a step in one call, before the student's schedule starts."""
        ...

    @property
    def begins_early(self) -> bool:
        """True if `begin` saves time: the teacher runs elsewhere."""
        ...

    def begin(self, batch: KDBatch) -> None:
        """Called for microbatches of a training step before `prepare`, each as soon as it exists, whole and on the
        host; in any order, not for all of them, and not by all ranks at once. Changes no number."""
        ...

    def prepare(self, batches: Sequence[KDBatch], upcoming: Lookahead) -> list[KDBatch]:
        """Called once per step, before `signals`, with all microbatches of the step, whole and on the host.

        Collective over all ranks.

        Args:
            batches: the microbatches of the step.
            upcoming: the microbatches after them, for prefetching.

        Returns:
            The microbatches with a KD mask of 0 on tokens for which this teacher has no targets.
        """
        ...

    def signals(self, batches: Sequence[KDBatch]) -> Iterable[TeacherSignal]:
        """One signal per microbatch on the student's last pipeline stage, none on other stages.

        The teacher has run when this returns. Signals that wait in host memory are copied to the device when the
        iterable is advanced, so it is read once, and each signal is dropped after its use. Collective over the ranks of
        a model replica, which pass the same microbatches; so is advancing the iterable over those of the last stage.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Metrics of the step that was prepared last, by name; the same on all ranks."""
        ...

    def fingerprint(self) -> str:
        """128 bits in hexadecimal that change with the teacher's architecture or weights."""
        ...

    def close(self) -> None:
        """End the teacher's threads and connections, if it has any. Called once at the end of the job, also after an
        error, on each rank by itself."""
        ...
