"""The microbatches that come after those of a step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mkd import compat
from mkd.data.batch import KDBatch, draw


@dataclass(frozen=True)
class Lookahead:
    """Microbatches that megatron's iterator will give next; looking at them draws none."""

    iterator: Any
    """Megatron's, over collated samples; None when nothing is known to come."""
    count: int
    """How many to look at."""
    true_vocab: int
    length_multiple: int | None
    """See `draw`."""
    evaluating: bool
    """Whether they are of an evaluation."""

    def fetch(self) -> Callable[[], list[KDBatch]]:
        """Wait for the samples now; the batches, whole and on the host, are made by calling the result, in any thread.

        There are fewer than `count` where the data ends, and none of an iterator that cannot be looked into.
        """
        samples = compat.peek(self.iterator, self.count)
        return lambda: draw(iter(samples), len(samples), self.true_vocab, None, self.length_multiple)


NOTHING = Lookahead(None, 0, 0, None, evaluating=True)
"""Where it is not known what comes."""
