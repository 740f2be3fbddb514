"""What travels between the ranks of a student and those of a teacher in another layout."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.data.batch import KDBatch
from mkd.distributed.groups import Groups, OwnLayout
from mkd.teacher.resharded.plan import Cut, ExchangeGroup, Job, RankCoords, Route, Share, islands, last_stage

HEAD_ROWS = 4096
"""Rows of an LM head that a rank gets at one time."""


class Exchange:
    """Between the ranks of this rank's island: its methods are collective over them.

    Token ids travel on the host, so that nobody waits for a device. Hidden states and the LM head go from device to
    device: from a rank that has them to one that needs them, and no more than it needs.
    """

    def __init__(self, student: Groups, teacher: OwnLayout, student_cut: Cut, teacher_cut: Cut) -> None:
        """Collective over all ranks.

        Args:
            student, teacher: the two layouts.
            student_cut, teacher_cut: how they cut a row.
        """
        self.student_cut, self.teacher_cut = student_cut, teacher_cut
        self.rank = dist.get_rank()
        self._islands = islands(_seats(student), _seats(teacher.groups))
        for island in self._islands:
            on_device, on_host = (dist.new_group(island.ranks, teacher.timeout, backend) for backend in (None, "gloo"))
            if self.rank in island.ranks:
                self.island: ExchangeGroup = island
                self.student, self.teacher = island.students[self.rank], island.teachers[self.rank]
                self._on_device, self._on_host = on_device, on_host
        # Ranks that share experts work together across islands.
        self._equal_passes = teacher.groups.collection.ep.size() > 1

    def head(self, own: Tensor | None, columns: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """[n, Ht] rows of the teacher's LM head.

        Args:
            own: [V/tp, Ht] the teacher's rows on this rank; None off its last stage.
            columns: [n] int64 ids whose rows this rank wants.
            width, dtype: Ht, and of the rows.
        """
        known: list = [None] * len(self.island.ranks)
        dist.all_gather_object(known, (0 if own is None else len(own), columns.cpu()), group=self._on_host)
        held, wanted = {}, {}
        for rank, (rows, ids) in zip(self.island.ranks, known, strict=True):
            if rows:
                first = self.island.teachers[rank].tp * rows
                held[rank] = torch.arange(first, first + rows)
            wanted[rank] = ids
        head = torch.empty(len(columns), width, dtype=dtype, device="cuda")
        for start in range(0, max(map(len, wanted.values())), HEAD_ROWS):
            route = Route(held, {rank: ids[start : start + HEAD_ROWS] for rank, ids in wanted.items()})
            places = [start + route.received(sender, self.rank) for sender in self.island.ranks]
            received = self.swap(own, route, [len(place) for place in places], (width,), dtype)
            for place, rows in zip(places, received, strict=True):
                head[place.to(head.device)] = rows
        return head

    def step(self, own: Sequence[KDBatch]) -> "StepExchange":
        """Tell every replica of the teacher what it has to look at.

        Args:
            own: the whole microbatches of this rank's replica of the student, on the host; those of all replicas are
                as many.
        """
        passes = max(island.passes(len(own)) for island in self._islands) if self._equal_passes else 0
        shares, sizes = self.island.deal(len(own), passes), self._sizes(own)

        def told(sender: int, receiver: int) -> list[Job]:
            jobs = dict.fromkeys(shares[self.island.teachers[receiver].dp].jobs)
            return [job for job in jobs if self.island.sender(job.student, receiver) == sender]

        words = [[_encoded(own[job.microbatch]) for job in told(self.rank, receiver)] for receiver in self.island.ranks]
        jobs = [job for sender in self.island.ranks for job in told(sender, self.rank)]
        lengths = [sum(_words(sizes[job]) for job in told(sender, self.rank)) for sender in self.island.ranks]
        sent = torch.cat([torch.empty(0, dtype=torch.int64), *itertools.chain(*words)])
        received = sent.new_empty(sum(lengths))
        dist.all_to_all_single(received, sent, lengths, [sum(map(len, part)) for part in words], group=self._on_host)
        each = received.split([_words(sizes[job]) for job in jobs])
        batches = {job: _decoded(one, sizes[job]) for job, one in zip(jobs, each, strict=True)}
        mine = shares[self.teacher.dp]
        return StepExchange(self, shares, tuple(batches[job] for job in mine.jobs), tuple(own))

    def _sizes(self, own: Sequence[KDBatch]) -> dict[Job, "_Size"]:
        """Of all microbatches of the island."""
        mine = torch.tensor([[*b.tokens.shape, 0 if b.packed is None else len(b.bounds)] for b in own])
        every = [torch.empty_like(mine) for _ in self.island.ranks]
        dist.all_gather(every, mine, group=self._on_host)
        return {
            Job(self.island.students[rank].dp, number): tuple(size)
            for rank, sizes in zip(self.island.ranks, every, strict=True)
            for number, size in enumerate(sizes.tolist())
        }

    def swap(
        self, own: Tensor | None, route: Route, counts: Sequence[int], shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Rows of tensors on the device.

        Args:
            own: [n, *shape] the rows that this rank has; None: it has none.
            route: where they go.
            counts: how many rows come from each rank of the island.
            shape, dtype: of a row.

        Returns:
            [count, *shape] from each rank of the island.
        """
        sent = [route.sent(self.rank, receiver) for receiver in self.island.ranks]
        if own is None:
            rows = torch.empty(0, *shape, dtype=dtype, device="cuda")
        else:
            rows = own.index_select(0, torch.cat(sent).to(own.device)).to(dtype)
        received = rows.new_empty(sum(counts), *shape)
        dist.all_to_all_single(received, rows, list(counts), list(map(len, sent)), group=self._on_device)
        return received.split(list(counts))


@dataclass(frozen=True)
class StepExchange:
    """Of the microbatches that the teacher is asked about at one time."""

    exchange: Exchange
    shares: dict[int, Share]
    """Replica of the teacher -> what it does."""
    batches: tuple[KDBatch, ...]
    """What this rank's replica of the teacher looks at, whole and on the host."""
    own: tuple[KDBatch, ...]
    """The microbatches of this rank's replica of the student, likewise."""

    def answers(self, hidden: Iterator[Tensor], width: int, dtype: torch.dtype) -> list[Tensor]:
        """The teacher's final hidden states for the student, cut as the student cuts its own.

        Args:
            hidden: of each of `batches`, [s/cp, b, Ht] (of the teacher's sequence-parallel slice) on its last stage;
                nothing on others. They are taken one at a time and handed over before the next.
            width, dtype: Ht, and of the hidden states.

        Returns:
            One for each of `own` on the student's last stage; an empty list on other stages.
        """
        found: dict[int, Tensor] = {}
        for number in range(max(len(share.jobs) for share in self.shares.values())):
            self._hand_over(number, next(hidden, None), found, width, dtype)
        return [found[number] for number in sorted(found)]

    def _hand_over(
        self, number: int, answer: Tensor | None, found: dict[int, Tensor], width: int, dtype: torch.dtype
    ) -> None:
        """What all replicas say in the forward pass of a number; this rank's part of it is put into `found`."""
        exchange, rank = self.exchange, self.exchange.rank
        routes = {replica: self._route(replica, number) for replica in self.shares}
        senders = [(sender, exchange.island.teachers[sender].dp) for sender in exchange.island.ranks]
        places = [routes[replica].received(sender, rank) for sender, replica in senders]
        shape = (self.own[0].tokens.shape[0], width)
        counts, route = [len(place) for place in places], routes[exchange.teacher.dp]
        parts = exchange.swap(answer, route, counts, shape, dtype)
        for (_, replica), place, part in zip(senders, places, parts, strict=True):
            if len(place):
                microbatch, rows = self.shares[replica].jobs[number].microbatch, len(routes[replica].wanted[rank])
                if microbatch not in found:
                    found[microbatch] = part.new_empty(rows, *shape)
                found[microbatch][place.to(part.device)] = part

    def _route(self, replica: int, number: int) -> Route:
        """Of the places in the row of a forward pass; without any, where this rank neither sends nor receives."""
        exchange, job = self.exchange, self.shares[replica].wanted_at(number)
        if job is not None and replica == exchange.teacher.dp:
            bounds = self.batches[number].bounds
        elif job is not None and job.student == exchange.student.dp:
            bounds = self.own[job.microbatch].bounds
        else:
            return Route({}, {})
        held = last_stage(exchange.island.teachers, replica)
        wanted = last_stage(exchange.island.students, job.student)
        return Route(
            {rank: exchange.teacher_cut.places(bounds, seat) for rank, seat in held.items()},
            {rank: exchange.student_cut.places(bounds, seat) for rank, seat in wanted.items()},
        )


_Size = tuple[int, int, int]
"""Rows, tokens of a row, and bounds of its segments (0: not packed)."""


def _words(size: _Size) -> int:
    """Of `_encoded`."""
    rows, tokens, bounds = size
    return 2 * rows * tokens + bounds


def _encoded(batch: KDBatch) -> Tensor:
    """[n] int64, what a model reads of a whole microbatch."""
    bounds = () if batch.packed is None else batch.bounds
    return torch.cat([batch.tokens.flatten(), batch.position_ids.flatten(), torch.tensor(bounds, dtype=torch.int64)])


def _decoded(words: Tensor, size: _Size) -> KDBatch:
    rows, tokens, bounds = size
    ids, positions, ends = words.split([rows * tokens, rows * tokens, bounds])
    return KDBatch.of_tokens(ids.view(rows, tokens), positions.view(rows, tokens), ends.tolist() if bounds else None)


def _seats(groups: Groups) -> list[RankCoords]:
    """Of every rank. Collective over all of them."""
    own = torch.tensor(
        [groups.tp.rank(), groups.cp.rank(), groups.dp.rank(), groups.is_last_stage], dtype=torch.int64, device="cuda"
    )
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    return [RankCoords(tp, cp, dp, bool(last)) for tp, cp, dp, last in (seat.tolist() for seat in every)]
