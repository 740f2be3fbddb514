"""What a teacher is to the rest of mkd."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mkd.data.batch import KDBatch


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


class Teacher(Protocol):
    """A source of signals. It draws no random numbers, so asking twice gives the same."""

    def signals(self, batches: Sequence[KDBatch]) -> list[HiddenSignal]:
        """One signal for each microbatch on the student's last pipeline stage, none elsewhere.

        All ranks of a model replica call it together, with the same microbatches.
        """
        ...

    def fingerprint(self) -> str:
        """128 bits in hexadecimal that change with the teacher's architecture or weights."""
        ...
