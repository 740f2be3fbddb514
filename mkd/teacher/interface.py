"""What a teacher is to the rest of mkd."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mkd.data.batch import KDBatch
from mkd.data.lookahead import Lookahead


@dataclass(frozen=True)
class HiddenSignal:
    """The teacher's opinion on one microbatch as final hidden states: H numbers a token instead of a vocabulary's
    worth.

    The loss multiplies them by `head` a chunk of tokens at a time, so the teacher's logits never exist as a whole.
    """

    hidden: Tensor
    """[s, b, Ht], or [s/tp, b, Ht] under sequence parallelism; in the teacher's dtype, after its final norm."""
    head: Tensor
    """[V/tp, Ht], the rows of the teacher's LM head for this rank's shard of the student's padded vocabulary."""
    logit_scale: float = 1.0
    """The teacher's logits are this times hidden times head."""
    view: int | None = None
    """Index in `KDBatch.teacher_views` for a teacher with another tokenizer: [s, b] is then the shape of that view, and
    `head` has this rank's columns in the order of its `CrossVocabulary`. None: the student's tokens."""


@dataclass(frozen=True)
class TopKSignal:
    """The teacher's opinion on one microbatch as some of its logits: those of its most probable tokens, or of tokens
    that were drawn from it.

    Whole on every tensor-parallel rank, and not cut under sequence parallelism.
    """

    ids: Tensor
    """[b, s/cp, K] int32 global ids. A negative one is an empty slot; of equal ones in a token only the first counts
    (with `counts` they are added)."""
    logits: Tensor
    """[b, s/cp, K], any float dtype: the teacher's logits, at no temperature and not normalized."""
    lse: Tensor
    """[b, s/cp] fp32 ln sum_j exp(u_j / temperature) over the true vocabulary."""
    tail_lse: Tensor | None = None
    """[b, s/cp] fp32, the same sum over the columns that are not in `ids` alone. Without it the tail's probability is
    1 - that of the head, which is known to no more than rounding."""
    temperature: float = 1.0
    """Of `lse` and `tail_lse`, and at which `counts` were drawn."""
    counts: Tensor | None = None
    """[b, s/cp, K] int32: how often each id was drawn from softmax(u / temperature); None for the most probable."""
    label_log_prob: Tensor | None = None
    """[b, s/cp] fp32 ln of the label's probability at temperature 1, where the KD mask is not 0; None: not known."""


@dataclass(frozen=True)
class EnsembleSignal:
    """The opinions of several teachers on one microbatch."""

    signals: tuple[HiddenSignal | TopKSignal, ...]
    weights: tuple[float, ...]
    """Of each teacher's divergence in the sum."""
    selecting: bool = False
    """Whether each text is taught by the teacher alone that predicts it best."""

    @classmethod
    def of(cls, signal: "TeacherSignal | None") -> "EnsembleSignal":
        """The same for one teacher, or for none."""
        if isinstance(signal, EnsembleSignal):
            return signal
        return cls(() if signal is None else (signal,), () if signal is None else (1.0,))


TeacherSignal = HiddenSignal | TopKSignal | EnsembleSignal
"""What the loss gets."""


class Teacher(Protocol):
    """A source of signals. It draws no random numbers, so asking twice gives the same."""

    @property
    def runs_before_student(self) -> bool:
        """Whether it wants to be asked about all microbatches of a step in one call, before the student begins."""
        ...

    def prepare(self, batches: Sequence[KDBatch], upcoming: Lookahead) -> list[KDBatch]:
        """Look at all microbatches of a step, whole and on the host, before it begins.

        All ranks call it together; `upcoming` is what comes after them.

        Returns:
            The same, with a KD mask of 0 where this teacher has nothing to say.
        """
        ...

    def signals(self, batches: Sequence[KDBatch]) -> list[TeacherSignal]:
        """One signal for each microbatch on the student's last pipeline stage, none elsewhere.

        All ranks of a model replica call it together, with the same microbatches.
        """
        ...

    def facts(self) -> dict[str, float]:
        """Name -> number: what is reported of the step that was prepared last, the same on all ranks."""
        ...

    def fingerprint(self) -> str:
        """128 bits in hexadecimal that change with the teacher's architecture or weights."""
        ...
