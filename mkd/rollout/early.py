"""Microbatches that are used as soon as their own texts are written, while others still are."""

from collections.abc import Callable, Mapping, Sequence

from mkd.rollout.interface import Request, WrittenText
from mkd.rollout.step_rows import StepRows


class EarlyMicrobatches:
    """Delivers each of this rank's microbatches when the last of its texts is written."""

    def __init__(
        self,
        wanted: Mapping[int, Request],
        step: StepRows,
        rank: int,
        ends: Callable[[Sequence[int]], bool],
        deliver: Callable[[int, Mapping[int, tuple[Request, WrittenText]]], None],
    ) -> None:
        """Microbatches without written rows are delivered at once.

        Args:
            wanted: row of the global batch -> prompt, of this step.
            step: its rows.
            rank: the data-parallel rank.
            ends: see `Decoding.ends`.
            deliver: called with the number of a microbatch and its texts; see `WrittenRows.rows`.
        """
        self._ends, self._deliver, self._size = ends, deliver, step.micro_batch_size
        self._own = {
            index: (step.own(row), request)
            for index, (row, request) in enumerate(wanted.items())
            if step.replica(row) == rank
        }
        self._rows: list[dict[int, tuple[Request, WrittenText]]] = [{} for _ in range(step.microbatches)]
        self._missing = [0] * step.microbatches
        for row, _ in self._own.values():
            self._missing[row // self._size] += 1
        for number, missing in enumerate(self._missing):
            if missing == 0:
                deliver(number, self._rows[number])

    def done(self, index: int, tokens: Sequence[int]) -> None:
        """A text is written, `index` counted from the first one of this step."""
        if index not in self._own:
            return
        row, request = self._own[index]
        number = row // self._size
        self._rows[number][row] = (request, WrittenText(tuple(tokens), self._ends(tokens)))
        self._missing[number] -= 1
        if self._missing[number] == 0:
            self._deliver(number, self._rows[number])
