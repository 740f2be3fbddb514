"""Who does what where the teacher has a parallel layout of its own on the student's ranks: plans, without collectives.

A replica is a whole copy of a model; its ranks have one data-parallel number. Ranks fall into islands, the smallest
sets in which all replicas of student and teacher are whole. In each, the microbatches of the student's replicas are
dealt out to the teacher's, and the answers go from the ranks that have them to those that need them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from mkd.distributed.context_parallel import dual_chunk_positions


class RankCoords(NamedTuple):
    """Where a rank is in a layout."""

    tp: int
    cp: int
    dp: int
    """Which replica."""
    is_last_stage: bool


class Job(NamedTuple):
    """A microbatch that a replica of the teacher looks at."""

    student: int
    """Replica whose microbatch it is."""
    microbatch: int
    """Of that replica's step."""


class Share(NamedTuple):
    """What one replica of the teacher does in a step."""

    jobs: tuple[Job, ...]
    """Its forward passes, in order."""
    wanted: int
    """So many of the first ones are for somebody; the others only make the number of passes equal everywhere."""

    def wanted_at(self, step: int) -> Job | None:
        """The job number `step`, if there is one and it is wanted."""
        return self.jobs[step] if step < self.wanted else None


@dataclass(frozen=True)
class Cut:
    """How the tokens of a row are cut over the ranks of a stage."""

    tp: int
    cp: int
    sequence_parallel: bool

    def places(self, bounds: Sequence[int], seat: RankCoords) -> Tensor:
        """[n] int64 places in the whole row that a rank has, in its order; `bounds` are of the row's segments."""
        places = dual_chunk_positions(bounds, seat.cp, self.cp)
        return places.chunk(self.tp)[seat.tp] if self.sequence_parallel else places


@dataclass(frozen=True)
class ExchangeGroup:
    """Ranks that are closed under both layouts."""

    ranks: tuple[int, ...]
    """Ascending."""
    students: dict[int, RankCoords]
    """Rank -> where it is in the student's layout."""
    teachers: dict[int, RankCoords]
    """Rank -> where it is in the teacher's."""

    def students_of(self, replica: int) -> list[int]:
        """The ranks of a replica of the student."""
        return [rank for rank in self.ranks if self.students[rank].dp == replica]

    def passes(self, microbatches: int) -> int:
        """Most forward passes of a replica of the teacher, where each of the student's has so many microbatches."""
        return -(-microbatches * len(_replicas(self.students)) // len(_replicas(self.teachers)))

    def deal(self, microbatches: int, passes: int = 0) -> dict[int, Share]:
        """Replica of the teacher -> what it does.

        All microbatches in the order of the student's replicas, in as many runs as the teacher has replicas, whose
        lengths differ by 1 at most: neighbors in both layouts are together.

        Args:
            microbatches: of each of the student's replicas.
            passes: how many each replica makes at least.
        """
        jobs = [Job(student, number) for student in _replicas(self.students) for number in range(microbatches)]
        replicas = _replicas(self.teachers)
        shares = {}
        for number, replica in enumerate(replicas):
            start, end = (len(jobs) * part // len(replicas) for part in (number, number + 1))
            own = jobs[start:end]
            idle = [(own or jobs)[0]] * (passes - len(own))
            shares[replica] = Share((*own, *idle), len(own))
        return shares

    def sender(self, student: int, receiver: int) -> int:
        """Rank of a replica of the student that tells a rank its batches: itself, or one for some of the others."""
        ranks = self.students_of(student)
        return receiver if receiver in ranks else ranks[self.ranks.index(receiver) % len(ranks)]


def last_stage(seats: Mapping[int, RankCoords], replica: int) -> dict[int, RankCoords]:
    """Rank -> seat of those ranks of a replica that have final hidden states, or need them."""
    return {rank: seat for rank, seat in seats.items() if seat.dp == replica and seat.is_last_stage}


def _replicas(seats: Mapping[int, RankCoords]) -> list[int]:
    """In the order of their first ranks."""
    return list(dict.fromkeys(seats[rank].dp for rank in sorted(seats)))


def islands(students: Sequence[RankCoords], teachers: Sequence[RankCoords]) -> list[ExchangeGroup]:
    """All islands, from the seat of every rank in both layouts."""
    number = list(range(len(students)))  # of the island that a rank is in
    for seats in (students, teachers):
        first: dict[int, int] = {}
        for rank, seat in enumerate(seats):
            kept, gone = sorted((number[rank], number[first.setdefault(seat.dp, rank)]))
            number = [kept if own == gone else own for own in number]
    found = []
    for name in dict.fromkeys(number):
        ranks = tuple(rank for rank, own in enumerate(number) if own == name)
        found.append(ExchangeGroup(ranks, {r: students[r] for r in ranks}, {r: teachers[r] for r in ranks}))
    return found


@dataclass(frozen=True)
class Route:
    """Numbered things, such as places in a row, from ranks that have them to ranks that want them.

    Raises:
        ValueError: nobody has one of them.
    """

    held: Mapping[int, Tensor]
    """Rank -> [n] int64 numbers of the things that it has, in its order."""
    wanted: Mapping[int, Tensor]
    """Rank -> [m] int64 numbers of the things that it wants."""
    _senders: dict[int, Tensor] = field(default_factory=dict)
    """Rank -> [m] int64 who gives it each of what it wants."""

    def __post_init__(self) -> None:
        for receiver, numbers in self.wanted.items():
            self._senders[receiver] = self._senders_to(receiver, numbers)

    def _senders_to(self, receiver: int, wanted: Tensor) -> Tensor:
        """Itself where it can; else one of those that can, another one for another receiver."""
        ranks = sorted(self.held)
        start = receiver % len(ranks)
        preferred = [rank for rank in (receiver,) if rank in self.held] + ranks[start:] + ranks[:start]
        size = 1 + max(int(numbers.max()) for numbers in (wanted, *self.held.values()) if len(numbers))
        sender = torch.full((size,), -1)
        for rank in reversed(preferred):
            sender[self.held[rank]] = rank
        found = sender[wanted]
        if (found < 0).any():
            raise ValueError(f"no rank has {wanted[found < 0].tolist()}")
        return found

    def sent(self, sender: int, receiver: int) -> Tensor:
        """[k] which of the sender's things go to a receiver, as indices of `held[sender]`."""
        if sender not in self.held or receiver not in self.wanted:
            return torch.empty(0, dtype=torch.int64)
        held = self.held[sender]
        index = torch.empty(int(held.max()) + 1, dtype=torch.int64)
        index[held] = torch.arange(len(held))
        return index[self.wanted[receiver][self._senders[receiver] == sender]]

    def received(self, sender: int, receiver: int) -> Tensor:
        """[k] where the same stand in `wanted[receiver]`."""
        if receiver not in self.wanted:
            return torch.empty(0, dtype=torch.int64)
        return (self._senders[receiver] == sender).nonzero().flatten()
