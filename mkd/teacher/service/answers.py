"""Answers of a teacher service as signals: one rank of a student's replica receives them for whole rows, and each rank
gets its part."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.data.batch import KDBatch
from mkd.distributed.context_parallel import dual_chunk_positions
from mkd.distributed.groups import Groups
from mkd.losses import LogitMap
from mkd.teacher.interface import HiddenSignal, TopKSignal
from mkd.teacher.service.facts import TeacherFacts
from mkd.teacher.service.messages import Kind
from mkd.teacher.service.targets import Targets

Received = tuple[Tensor, Tensor]
"""[k] int64 indices of the wanted tokens among the b * s of a microbatch, and the [k, columns] tensor of the answer."""


class _Upload(NamedTuple):
    """A copy to the device."""

    received: Received
    """On the device."""
    done: torch.cuda.Event


class Uploads:
    """Copies the answers for the microbatches of a step to the device, on a stream of its own: each while the
    student computes the microbatch before it."""

    def __init__(self) -> None:
        """There is no step yet."""
        self._stream = torch.cuda.Stream()
        self._coming: dict[int, _Upload] = {}
        self._count = 0
        self._received: Callable[[int], Received]

    def begin(self, count: int, received: Callable[[int], Received]) -> None:
        """Begin a step.

        Args:
            count: its microbatches on this rank.
            received: from the number of a microbatch to its answer, on the host.
        """
        if self._coming:  # uploads of a step that was not computed to its end
            torch.cuda.current_stream().wait_stream(self._stream)
            self._coming.clear()
        self._count, self._received = count, received

    def take(self, number: int) -> Received:
        """The answer for a microbatch, on the device; starts the copy of the next one."""
        for one in range(number, min(number + 2, self._count)):
            if one not in self._coming:
                self._coming[one] = self._start(one)
        upload = self._coming.pop(number)
        torch.cuda.current_stream().wait_event(upload.done)
        return upload.received

    def _start(self, number: int) -> _Upload:
        # Allocated by the computing stream, whose later work may reuse the memory: each stream waits for the other.
        wanted, found = (one.pin_memory() for one in self._received(number))
        targets = tuple(torch.empty(one.shape, dtype=one.dtype, device="cuda") for one in (wanted, found))
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for target, source in zip(targets, (wanted, found), strict=True):
                target.copy_(source, non_blocking=True)
            return _Upload(targets, self._stream.record_event())


@dataclass(frozen=True)
class HiddenAnswers:
    """Answers with final hidden states."""

    columns: int
    """Numbers per token."""
    dtype: torch.dtype
    """Dtype of the numbers."""
    logit_map: LogitMap
    """See `HiddenSignal.logit_map`."""
    groups: Groups
    head: Tensor | None
    """[columns, Ht] this rank's rows of the LM head; None off the last stage."""
    sequence_parallel: bool
    view: int | None = None
    """See `HiddenSignal.view`."""
    norm: Callable[[Tensor], Tensor] | None = None
    """From an answer, on the device, to final hidden states of `dtype`; None if the answer has those."""

    kind, name = Kind.HIDDEN, "hidden states"

    @property
    def bytes_per_token(self) -> int:
        """Host memory of an answer, per wanted token."""
        return self.columns * self.dtype.itemsize

    def is_finite(self, answer: Tensor) -> bool:
        """True if all numbers of an answer are finite."""
        # The sum is not finite if a number is not, and takes a hundredth of the time on a CPU; it may also overflow.
        return bool(answer.sum().isfinite()) or bool(answer.isfinite().all())

    def signal(self, whole: KDBatch, received: Received | None) -> HiddenSignal:
        """The signal of this rank's part of a microbatch. Collective over the replica's ranks of the last stage.

        Args:
            whole: the microbatch in the teacher's tokens, on the host.
            received: on the device of the rank that leads the replica, else None.
        """
        return HiddenSignal(self._hidden(whole, received), self.head, self.logit_map, self.view)

    def _hidden(self, whole: KDBatch, received: Received | None) -> Tensor:
        """This rank's slice of the hidden states of a microbatch: [s/cp, b, Ht], or [s/cp/tp, b, Ht]."""
        rows, length = whole.tokens.shape
        cp, tp = self.groups.cp, self.groups.tp
        parts, shape = None, (length // cp.size(), rows, self.columns)
        if received is not None:
            parts = _cut(_spread(received, whole, self.norm).transpose(0, 1).contiguous(), 0, whole, cp)
        own = _scatter(parts, shape, self.dtype, cp) if tp.rank() == 0 else None
        if tp.size() == 1:
            return own
        if not self.sequence_parallel:
            return _broadcast(own, shape, self.dtype, tp)
        parts = None if own is None else [one.contiguous() for one in own.chunk(tp.size())]
        return _scatter(parts, (shape[0] // tp.size(), *shape[1:]), self.dtype, tp)


@dataclass(frozen=True)
class TargetAnswers:
    """Answers with targets. The methods are those of `HiddenAnswers`."""

    facts: TeacherFacts
    groups: Groups
    targets: Targets

    kind, dtype = Kind.TARGETS, torch.int32

    @property
    def name(self) -> str:
        return self.targets.name

    @property
    def columns(self) -> int:
        return self.targets.columns

    @property
    def bytes_per_token(self) -> int:
        return self.targets.bytes_per_token

    def is_finite(self, answer: Tensor) -> bool:
        return self.targets.is_finite(answer)

    def signal(self, whole: KDBatch, received: Received | None) -> TopKSignal:
        words = None if received is None else _spread(received, whole)
        return self.targets.signal(distribute_words(words, whole, self.columns, self.groups))


def distribute_words(words: Tensor | None, whole: KDBatch, columns: int, groups: Groups) -> Tensor:
    """[b, s/cp, columns] int32 words of this rank's part of a microbatch. Collective over the replica's ranks of the
    last stage.

    Args:
        words: [b, s, columns] int32 on the device of the rank that leads the replica, else None.
        whole: the microbatch, on the host.
        columns: words per token.
        groups: the student's layout.
    """
    rows, length = whole.tokens.shape
    cp, tp = groups.cp, groups.tp
    shape = (rows, length // cp.size(), columns)
    parts = None if words is None else _cut(words, 1, whole, cp)
    own = _scatter(parts, shape, torch.int32, cp) if tp.rank() == 0 else None
    return _broadcast(own, shape, torch.int32, tp)


def _spread(received: Received, whole: KDBatch, change: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """[b, s, columns] on the device, of values that `change` returns; 0 for tokens that are not wanted."""
    wanted, found = received
    found = found if change is None else change(found)
    spread = torch.zeros(whole.tokens.numel(), found.shape[1], dtype=found.dtype, device="cuda")
    return spread.index_copy_(0, wanted, found).view(*whole.tokens.shape, -1)


def _cut(values: Tensor, dim: int, whole: KDBatch, cp: dist.ProcessGroup) -> list[Tensor]:
    """The part of each context-parallel rank; `dim` is the dimension of a row's tokens."""
    if cp.size() == 1:
        return [values]
    orders = (dual_chunk_positions(whole.bounds, rank, cp.size()).to(values.device) for rank in range(cp.size()))
    return [values.index_select(dim, order) for order in orders]


def _scatter(
    parts: Sequence[Tensor] | None, shape: tuple[int, ...], dtype: torch.dtype, group: dist.ProcessGroup
) -> Tensor:
    """Rank 0 of a group has one part per rank; returns this rank's."""
    if group.size() == 1:
        return parts[0]
    own = torch.empty(shape, dtype=dtype, device="cuda")
    # As bytes, because gloo does not scatter every dtype.
    parts = None if parts is None else [one.view(torch.uint8) for one in parts]
    dist.scatter(own.view(torch.uint8), parts, group=group, group_src=0)
    return own


def _broadcast(own: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, group: dist.ProcessGroup) -> Tensor:
    """The values of rank 0 of a group, on all of its ranks."""
    if group.size() > 1:
        own = torch.empty(shape, dtype=dtype, device="cuda") if own is None else own
        dist.broadcast(own.view(torch.uint8), group=group, group_src=0)
    return own
