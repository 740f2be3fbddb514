"""Plans for a teacher whose parallel layout differs from the student's, on the same ranks; no collectives.

A replica is a whole copy of a model; all its ranks have the same data-parallel rank. The ranks fall into exchange
groups, the smallest sets in which all replicas of student and teacher are whole. Inside a group, the microbatches of
the student's replicas are assigned to the teacher's replicas, and hidden states are sent from the ranks that hold them
to those that need them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from mkd.distributed.context_parallel import dual_chunk_positions


class RankCoords(NamedTuple):
    """Rank coordinates: the position of a rank in one layout."""

    tp: int
    cp: int
    dp: int
    """Number of the replica."""
    is_last_stage: bool


class TeacherForward(NamedTuple):
    """One forward pass of a teacher replica, named by the microbatch that it reads."""

    student: int
    """The student's replica that the microbatch belongs to."""
    microbatch: int
    """Index in that replica's step."""


class Assignment(NamedTuple):
    """The forward passes of one teacher replica in a step."""

    forwards: tuple[TeacherForward, ...]
    needed: int
    """Number of leading `forwards` whose output is used; the others make the number of passes equal on all ranks."""

    def needed_at(self, index: int) -> TeacherForward | None:
        """The forward pass at an index, or None if there is none or its output is not used."""
        return self.forwards[index] if index < self.needed else None


@dataclass(frozen=True)
class RowSharding:
    """Split of a row's tokens over the ranks of a pipeline stage."""

    tp: int
    cp: int
    sequence_parallel: bool

    def positions(self, bounds: Sequence[int], coords: RankCoords) -> Tensor:
        """[n] int64 positions in the whole row of a rank's tokens, in its order.

        Args:
            bounds: bounds of the row's segments.
            coords: the rank.
        """
        positions = dual_chunk_positions(bounds, coords.cp, self.cp)
        return positions.chunk(self.tp)[coords.tp] if self.sequence_parallel else positions


@dataclass(frozen=True)
class ExchangeGroup:
    """Ranks that contain whole replicas of both models only."""

    ranks: tuple[int, ...]
    """Ascending."""
    students: dict[int, RankCoords]
    """Rank -> coordinates in the student's layout."""
    teachers: dict[int, RankCoords]
    """Rank -> coordinates in the teacher's layout."""

    def ranks_of_student(self, replica: int) -> list[int]:
        """Ranks of one of the student's replicas."""
        return [rank for rank in self.ranks if self.students[rank].dp == replica]

    def passes(self, microbatches: int) -> int:
        """Largest number of forward passes of a teacher replica, given the microbatches per student replica."""
        return -(-microbatches * len(_replicas(self.students)) // len(_replicas(self.teachers)))

    def assign(self, microbatches: int, passes: int = 0) -> dict[int, Assignment]:
        """Teacher replica -> its forward passes.

        All microbatches, in the order of the student's replicas, are cut into one contiguous run per teacher replica.
        The lengths of the runs differ by at most 1, and replicas that are neighbors in both layouts work together.

        Args:
            microbatches: number per student replica.
            passes: minimum number of forward passes per teacher replica.
        """
        forwards = [
            TeacherForward(student, index) for student in _replicas(self.students) for index in range(microbatches)
        ]
        replicas = _replicas(self.teachers)
        assignments = {}
        for number, replica in enumerate(replicas):
            start, end = (len(forwards) * part // len(replicas) for part in (number, number + 1))
            own = forwards[start:end]
            idle = [(own or forwards)[0]] * (passes - len(own))
            assignments[replica] = Assignment((*own, *idle), len(own))
        return assignments

    def batch_sender(self, student: int, receiver: int) -> int:
        """Rank that sends the batches of a student replica to a rank: itself if it has them, else one of the replica's
        ranks, chosen so that they share the sending."""
        ranks = self.ranks_of_student(student)
        return receiver if receiver in ranks else ranks[self.ranks.index(receiver) % len(ranks)]


def last_stage(coords: Mapping[int, RankCoords], replica: int) -> dict[int, RankCoords]:
    """Rank -> coordinates of the ranks of a replica's last pipeline stage."""
    return {rank: own for rank, own in coords.items() if own.dp == replica and own.is_last_stage}


def _replicas(coords: Mapping[int, RankCoords]) -> list[int]:
    """Numbers of the replicas, in the order of their first ranks."""
    return list(dict.fromkeys(coords[rank].dp for rank in sorted(coords)))


def exchange_groups(students: Sequence[RankCoords], teachers: Sequence[RankCoords]) -> list[ExchangeGroup]:
    """All exchange groups, from the coordinates of every rank in both layouts."""
    group_of = list(range(len(students)))
    for layout in (students, teachers):
        first: dict[int, int] = {}
        for rank, coords in enumerate(layout):
            kept, merged = sorted((group_of[rank], group_of[first.setdefault(coords.dp, rank)]))
            group_of = [kept if own == merged else own for own in group_of]
    found = []
    for group in dict.fromkeys(group_of):
        ranks = tuple(rank for rank, own in enumerate(group_of) if own == group)
        found.append(ExchangeGroup(ranks, {r: students[r] for r in ranks}, {r: teachers[r] for r in ranks}))
    return found


@dataclass(frozen=True)
class TransferPlan:
    """Numbered items, such as positions of a row, from ranks that hold them to ranks that need them.

    A rank that needs an item and holds it takes its own. Otherwise one of the holders sends it, another one for another
    receiver, so that holders of the same items share the sending.
    """

    held: Mapping[int, Tensor]
    """Rank -> [n] int64 numbers of the items that it holds, in its order."""
    needed: Mapping[int, Tensor]
    """Rank -> [m] int64 numbers of the items that it needs."""

    @cached_property
    def _senders(self) -> dict[int, Tensor]:
        """Rank -> [m] int64 sender of each item that it needs.

        Raises:
            ValueError: no rank holds a needed item.
        """
        return {receiver: self._senders_to(receiver, numbers) for receiver, numbers in self.needed.items()}

    def _senders_to(self, receiver: int, needed: Tensor) -> Tensor:
        ranks = sorted(self.held)
        start = receiver % len(ranks)
        preferred = [rank for rank in (receiver,) if rank in self.held] + ranks[start:] + ranks[:start]
        size = 1 + max(int(numbers.max()) for numbers in (needed, *self.held.values()) if len(numbers))
        sender = torch.full((size,), -1)
        for rank in reversed(preferred):
            sender[self.held[rank]] = rank
        found = sender[needed]
        if (found < 0).any():
            raise ValueError(f"no rank has {needed[found < 0].tolist()}")
        return found

    def sent(self, sender: int, receiver: int) -> Tensor:
        """[k] indices into `held[sender]` of the items that the sender sends to a receiver."""
        if sender not in self.held or receiver not in self.needed:
            return torch.empty(0, dtype=torch.int64)
        held = self.held[sender]
        index = torch.empty(int(held.max()) + 1, dtype=torch.int64)
        index[held] = torch.arange(len(held))
        return index[self.needed[receiver][self._senders[receiver] == sender]]

    def received(self, sender: int, receiver: int) -> Tensor:
        """[k] indices into `needed[receiver]` of the same items, in the same order."""
        if receiver not in self.needed:
            return torch.empty(0, dtype=torch.int64)
        return (self._senders[receiver] == sender).nonzero().flatten()
