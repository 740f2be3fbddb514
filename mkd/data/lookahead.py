"""The microbatches that follow those of a step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mkd.compat.data_iterator import peek
from mkd.data.batch import KDBatch
from mkd.data.microbatches import next_microbatches


@dataclass(frozen=True)
class Lookahead:
    """Microbatches that megatron's iterator will return next; reading them here does not advance it."""

    iterator: Any
    """Megatron's, over collated samples; None for an empty lookahead."""
    count: int
    """Microbatches to read."""
    true_vocab: int
    length_multiple: int | None
    """See `next_microbatches`."""
    evaluating: bool
    """True if they belong to an evaluation."""
    is_stopping: Callable[[], bool] = lambda: False
    """True if this process has received a signal to stop: a wait before the present step may then end without it."""

    @classmethod
    def empty(cls) -> "Lookahead":
        """A lookahead without microbatches: the following ones are unknown."""
        return cls(None, 0, 0, None, evaluating=True)

    def fetch(self, skip: int = 0) -> Callable[[], list[KDBatch]]:
        """Wait for the samples now, and return a function that makes the batches, whole and on the host, in any thread.

        There are fewer than `count` at the end of the data, and none if the iterator cannot be peeked.

        Args:
            skip: leave out this number of the first batches.
        """
        samples = peek(self.iterator, self.count)[skip:]
        return lambda: next_microbatches(iter(samples), len(samples), self.true_vocab, None, self.length_multiple)
