"""Rows of a training step whose answers the student has written (--kd-on-policy).

Which rows of a global batch they are, their prompts and their random numbers are functions of seed and iteration, so a
resumed run needs no state, and every layout trains on the same texts. Where one rollout serves several steps, a
checkpoint holds its texts.
"""

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from torch import nn

from mkd.config.run_state import RunState
from mkd.config.schedules import Schedule
from mkd.data.packing.row_layout import RowLayout
from mkd.data.packing.row_plan import EpochOrder
from mkd.distributed.groups import Groups
from mkd.errors import MkdCheckpointError
from mkd.rollout.early import EarlyMicrobatches
from mkd.rollout.engine.sampler import request_key
from mkd.rollout.facts import RolloutFacts, repeated_share
from mkd.rollout.guard import CollapseGuard
from mkd.rollout.interface import Decoding, Delivery, Engine, Request, TextWriter, WrittenText
from mkd.rollout.rows import WrittenRowOptions, WrittenRows, WrittenViews
from mkd.rollout.step_rows import StepRows
from mkd.rollout.write import write_texts


@dataclass(frozen=True)
class OnPolicy:
    """Lets the student write the answers of a share of each global batch."""

    share: Schedule
    """L by iteration, from 0 to 1."""
    prompts: Sequence[tuple[int, ...]]
    layout: RowLayout
    decoding: Decoding
    engine: Engine
    teachers: Sequence[int] = ()
    """`Request.teacher` of each prompt; empty: -1 for all."""
    samples: int = 1
    """Answers to each prompt, one after the other."""
    steps: int = 1
    """Steps whose texts are written at once, with the weights before the first of them."""
    options: WrittenRowOptions = WrittenRowOptions()  # noqa: RUF009
    views: WrittenViews | None = None
    """None if all teachers have the student's tokenizer."""
    guard: CollapseGuard | None = None
    state: RunState = field(default_factory=RunState)
    """Holds the texts of a rollout for several steps."""
    writer: TextWriter | None = None
    """Writes the texts elsewhere, in the place of `engine`; None: on the training ranks."""

    def count(self, rows: int, iteration: int = 0) -> int:
        """Number of written rows among the first `rows` of a global batch."""
        return _floor(rows, self.share.value(iteration))

    def requests(self, iteration: int, rows: int, rows_before: int | None = None) -> dict[int, Request]:
        """Row of the global batch -> its prompt; written rows are spread evenly.

        Prompts are read in a random order, each once per epoch; while L is below its largest value, some are skipped.
        Only a number of rows is known about the steps before. If their batches had other sizes whose mean is `rows`,
        and L times `rows` is not whole, some prompts of them are read again.

        Args:
            iteration: counted from 0.
            rows: of the global batch.
            rows_before: of all steps before; None: each had as many.
        """
        written = [row for row in range(rows) if self.count(row + 1, iteration) > self.count(row, iteration)]
        order = EpochOrder(len(self.prompts), self.decoding.seed)
        most = max(self.share.start, self.share.end)
        start = iteration * _floor(rows, most)
        if rows_before not in (None, iteration * rows):  # other batches, which have read no more prompts than this
            start = -_floor(-rows_before, most)
        found = {}
        for number, row in enumerate(written, start=start):
            place, sample = divmod(number, self.samples)
            prompt = order.row_at(place)
            sample += place // len(self.prompts) * self.samples
            teacher = self.teachers[prompt] if self.teachers else -1
            found[row] = Request(self.prompts[prompt], sample, teacher, number=prompt)
        return found

    def write(
        self,
        chunks: Sequence[nn.Module],
        groups: Groups,
        step: StepRows,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
        is_stopping: Callable[[], bool] = lambda: False,
        begin: Callable[[int, WrittenRows], None] | None = None,
    ) -> WrittenRows | None:
        """Write the answers of one step, or read them from the rollout of an earlier step. Collective over all ranks.

        Args:
            chunks: the student's model chunks on this rank.
            groups: its layout.
            step: the step and its rows.
            around: the context in which texts are written; not entered where they exist already.
            is_stopping: True if this process has received a signal to stop.
            begin: called with the number of each of this rank's microbatches and its rows as soon as all of its texts
                are written, while others still are; None to wait for all.

        Returns:
            None if L is so small that no row of this step is written.

        Raises:
            MkdDataError: the guard stops the job.
            MkdError: as `TextWriter.write` of the writer elsewhere.
        """
        began = time.monotonic()
        rank, rollout = groups.dp.rank(), _Rollout.of(self, step)
        wanted = rollout.requests_at(step.iteration)
        if not wanted:
            return None
        written_now = 0
        if not rollout.is_written:
            early = None
            if begin is not None:
                early = EarlyMicrobatches(
                    wanted, step, rank, self.decoding.ends, lambda number, rows: begin(number, self._written(rows))
                )
            with around():
                written_now = rollout.write(chunks, groups, step, is_stopping, early)
        texts, rows = rollout.texts_at(step.iteration), {}
        for (row, request), text in zip(wanted.items(), texts, strict=True):
            if step.replica(row) == rank:
                rows[step.own(row)] = (request, text)
        facts = RolloutFacts(
            texts=len(texts),
            tokens=sum(len(text.tokens) for text in texts),
            cut_off=sum(not text.ended for text in texts),
            seconds=max(time.monotonic() - began, 1e-9) if written_now else 0.0,
            repeated=repeated_share(texts),
            age=step.iteration - rollout.weights_at,
            written_now=written_now,
        )
        if written_now and self.guard is not None:
            self.guard.check(facts, step.iteration + 1)
        return self._written(rows, facts)

    def _written(
        self, rows: Mapping[int, tuple[Request, WrittenText]], facts: RolloutFacts | None = None
    ) -> WrittenRows:
        return WrittenRows(rows, self.layout, facts, self.options, self.views)


def _floor(rows: int, share: float) -> int:
    return math.floor(rows * Fraction(repr(share)))


@dataclass
class _Rollout:
    """The texts of consecutive steps that are written at once."""

    policy: OnPolicy
    first: int
    """The first of the steps."""
    requests: list[dict[int, Request]]
    """Row -> prompt, for each step."""
    texts: list[tuple[int, ...]]
    """Written tokens of each request, step after step; empty where nothing was written."""
    written_at: int = -1
    """The step before which they were written; -1: not yet."""
    weights_at: int = -1
    """The step with whose weights they were written: an earlier one where a server has the weights for several."""

    @classmethod
    def of(cls, policy: OnPolicy, step: StepRows) -> "_Rollout":
        """The rollout that a step belongs to, with the texts that exist already. Its steps have as many rows each."""
        now, rows = step.iteration, step.count
        first, before = now - now % policy.steps, now * rows if step.before is None else step.before
        iterations = range(first, first + policy.steps)
        requests = [policy.requests(other, rows, max(0, before + (other - now) * rows)) for other in iterations]
        rollout = cls(policy, first, requests, [() for wanted in requests for _ in wanted])
        rollout._restore()
        return rollout

    @property
    def key(self) -> str:
        """Hash of everything that the texts depend on beside the weights."""
        decoding, digest = self.policy.decoding, hashlib.blake2b(digest_size=16)
        stops = () if decoding.stops is None else decoding.stops.strings
        options = (self.first, decoding.tokens, decoding.temperature, decoding.top_p, decoding.true_vocab)
        digest.update(repr((options, sorted(decoding.end_tokens), stops)).encode())
        for step in self.requests:
            for request in step.values():
                digest.update(request_key(request, decoding.seed).to_bytes(8, "little"))
        return digest.hexdigest()

    def requests_at(self, iteration: int) -> dict[int, Request]:
        """The prompts of a step, by row."""
        return self.requests[iteration - self.first]

    def texts_at(self, iteration: int) -> list[WrittenText]:
        """The texts of a step, in the order of its requests."""
        start = self._start(iteration)
        tokens = self.texts[start : start + len(self.requests_at(iteration))]
        return [WrittenText(new, self.policy.decoding.ends(new)) for new in tokens]

    @property
    def is_written(self) -> bool:
        """True if the texts exist."""
        return self.written_at >= 0

    def write(
        self,
        chunks: Sequence[nn.Module],
        groups: Groups,
        step: StepRows,
        is_stopping: Callable[[], bool],
        early: EarlyMicrobatches | None,
    ) -> int:
        """Write the texts of this step and later ones. Returns the number of tokens written."""
        policy, iteration = self.policy, step.iteration
        start, steps = self._start(iteration), self.requests[iteration - self.first :]
        wanted = [request for rows in steps for request in rows.values()]
        if policy.writer is None:
            delivery = None
            if early is not None:
                delivery = Delivery([step.replica(row) for rows in steps for row in rows], early.done)
            texts = write_texts(chunks, groups, wanted, policy.decoding, policy.engine, delivery)
            self.texts[start:], self.weights_at = [text.tokens for text in texts], iteration
        else:
            found, self.weights_at = policy.writer.write(
                chunks, groups, wanted, policy.decoding, iteration, is_stopping
            )
            self.texts[start:] = map(tuple, found)
        self.written_at = iteration
        if policy.steps > 1:
            stored = {"key": self.key, "written_at": iteration, "texts": [list(text) for text in self.texts]}
            if self.weights_at != iteration:
                stored["weights_at"] = self.weights_at
            policy.state.rollout = stored
        return sum(map(len, self.texts))

    def _start(self, iteration: int) -> int:
        return sum(len(step) for step in self.requests[: iteration - self.first])

    def _restore(self) -> None:
        """Read the texts from the run's state, if it has them.

        Raises:
            MkdCheckpointError: they are damaged.
        """
        stored: Any = self.policy.state.rollout
        if self.policy.steps == 1 or stored is None or stored.get("key") != self.key:
            return
        written_at, texts = stored.get("written_at"), stored.get("texts")
        is_whole = isinstance(written_at, int) and self.first <= written_at < self.first + self.policy.steps
        is_whole = is_whole and isinstance(texts, list) and len(texts) == len(self.texts)
        weights_at = stored.get("weights_at", written_at)
        is_whole = is_whole and isinstance(weights_at, int) and 0 <= weights_at <= written_at
        start = self._start(written_at) if is_whole else 0
        if not is_whole or not all(map(self.policy.decoding.may_be_written, texts[start:])):
            raise MkdCheckpointError("the checkpoint's texts of --kd-on-policy are damaged: resume from an earlier one")
        self.texts, self.written_at, self.weights_at = [tuple(new) for new in texts], written_at, weights_at
