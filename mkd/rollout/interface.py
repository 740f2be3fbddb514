"""The interface of rollouts: prompts and options in, written tokens out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import nn

from mkd.distributed.groups import Groups
from mkd.rollout.stop_strings import StopStrings

Engine = Literal["cached", "uncached"]
"""Method of writing. cached: keys and values of earlier tokens are kept, and each token costs a forward pass over one
token. uncached: the whole text is read again for each token; works under every layout."""


@dataclass(frozen=True)
class Decoding:
    """Options of a rollout."""

    tokens: int
    """Tokens that are written per prompt at most."""
    end_tokens: frozenset[int]
    """Each of them ends a text and is its last token."""
    true_vocab: int
    """Tokens that exist; ids from here up are never written."""
    rows: int
    """Rows of `longest` tokens per microbatch; bounds the memory."""
    longest: int
    """Length of a row at most: no prompt has more tokens without those that are written."""
    length_multiple: int = 1
    """Divisor of every row length that the layout needs."""
    temperature: float = 0.0
    """Divisor of the logits before sampling; 0 writes the most probable token."""
    seed: int = 0
    """Seed of sampling; see `mkd.rollout.engine.sampler`."""
    top_p: float = 1.0
    """Tokens are sampled from the most probable ones whose probabilities sum to at least this."""
    cache_tokens: int | None = None
    """Tokens whose keys and values are cached at one time at most, on each rank; None: those of `rows` rows of
    `longest` tokens for each pipeline stage."""
    stops: StopStrings | None = None
    """Strings that end a text like an end token; None for none."""

    def ends(self, new: Sequence[int]) -> bool:
        """True if the last of the written tokens ends the text."""
        if not new:
            return False
        return new[-1] in self.end_tokens or (self.stops is not None and self.stops.end(new))

    def may_be_written(self, new: Any) -> bool:
        """True for a list that can be the tokens of a text; for files, whose content is not trusted."""
        is_list = isinstance(new, list) and 1 <= len(new) <= self.tokens
        return is_list and all(type(token) is int and 0 <= token < self.true_vocab for token in new)

    def first_end(self, before: Sequence[int], new: Sequence[int]) -> int | None:
        """The number of new tokens up to the first one that ends the text `before` + `new`; None if none does."""
        end = next((count for count, token in enumerate(new, start=1) if token in self.end_tokens), None)
        stop = None if self.stops is None else self.stops.first_end(before, new[:end])
        return end if stop is None else stop

    def up_to_end(self, new: Sequence[int]) -> list[int]:
        """The written tokens up to the first that ends the text, or all of them."""
        return list(new[: self.first_end((), new)])


@dataclass(frozen=True)
class Request:
    """A prompt to continue."""

    prompt: tuple[int, ...]
    """Token ids, not empty."""
    sample: int = 0
    """Index among the samples of the same prompt; samples with different indices are independent."""
    teacher: int = -1
    """Index of the teacher that the text is distilled from; -1 for the teachers of all texts."""
    number: int = field(default=-1, compare=False)
    """Index of the prompt among those of its file; -1 where it is not used."""


@dataclass(frozen=True)
class WrittenText:
    """The tokens that the student has written after a prompt."""

    tokens: tuple[int, ...]
    ended: bool
    """True if the last token ends the text; False if the text was cut off after `Decoding.tokens`."""


class TextWriter(Protocol):
    """Writes texts with the student's weights elsewhere."""

    def write(
        self,
        chunks: Sequence[nn.Module],
        groups: Groups,
        requests: Sequence[Request],
        options: Decoding,
        iteration: int,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> tuple[list[list[int]], int]:
        """Continue each prompt. Collective over all ranks.

        Args:
            chunks: the student's model chunks on this rank.
            groups: its layout.
            requests: the prompts, the same on all ranks; none may be empty.
            options: see `Decoding`.
            iteration: steps that the student has taken.
            is_stopping: True if this process has received a signal to stop.

        Returns:
            The written tokens of each request, the same on all ranks, and the steps that the student had taken when it
            had the weights that wrote them.
        """
        ...


@dataclass(frozen=True)
class Delivery:
    """Delivers texts one by one, while others are still being written."""

    replicas: Sequence[int]
    """Data-parallel rank that needs each text."""
    done: Callable[[int, Sequence[int]], None]
    """Called with the index of a text and its tokens on the ranks of the replica that has written it."""

    def parts(self, size: int) -> list[list[int]]:
        """Indices of the texts that each of `size` replicas writes, in the order of the requests: its own ones as far
        as all write equally many."""
        most = -(-len(self.replicas) // size)
        parts: list[list[int]] = [[] for _ in range(size)]
        left = []
        for index, replica in enumerate(self.replicas):
            (parts[replica] if len(parts[replica]) < most else left).append(index)
        for index in left:
            next(part for part in parts if len(part) < most).append(index)
        return [sorted(part) for part in parts]
