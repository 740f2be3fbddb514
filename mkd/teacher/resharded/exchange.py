"""Communication between a student and a teacher in another parallel layout: batches, hidden states, LM head rows."""

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.data.batch import KDBatch
from mkd.distributed.groups import Groups, ParallelLayout
from mkd.teacher.resharded.plan import (
    Assignment,
    ExchangeGroup,
    RankCoords,
    RowSharding,
    TeacherForward,
    TransferPlan,
    exchange_groups,
    last_stage,
)
from mkd.teacher.waiting_states import WaitingStates

HEAD_ROWS = 4096
"""LM head rows that a rank receives at once."""
MOST_ROUTES = 64
"""Routes that are kept for later passes."""


class TeacherExchange:
    """Communication inside this rank's exchange group; all methods are collective over it.

    Token ids are sent on the host, so no rank waits for a device. Hidden states and the LM head are sent between
    devices, from a rank that holds them to each rank that needs them, and nothing else is sent.
    """

    def __init__(
        self,
        student: Groups,
        teacher: ParallelLayout,
        student_sharding: RowSharding,
        teacher_sharding: RowSharding,
    ) -> None:
        """Collective over all ranks.

        Args:
            student, teacher: the two layouts.
            student_sharding, teacher_sharding: their splits of a row.
        """
        self.student_sharding, self.teacher_sharding = student_sharding, teacher_sharding
        self.rank = dist.get_rank()
        self.known_routes: dict[Hashable, PassRoutes] = {}
        self._all_groups = exchange_groups(_coords_of_all_ranks(student), _coords_of_all_ranks(teacher.groups))
        for group in self._all_groups:
            on_device, on_host = (dist.new_group(group.ranks, teacher.timeout, backend) for backend in (None, "gloo"))
            if self.rank in group.ranks:
                self.group: ExchangeGroup = group
                self.student, self.teacher = group.students[self.rank], group.teachers[self.rank]
                self._on_device, self._on_host = on_device, on_host
        # Ranks that share experts may be in several exchange groups, and must run equally many forward passes.
        split = teacher.groups.collection
        self._equal_passes = split.ep.size() > 1 or split.expt_tp.size() > split.tp.size()

    def lm_head_rows(self, own: Tensor | None, columns: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """[n, Ht] rows of the teacher's LM head.

        Args:
            own: [V/tp, Ht] the teacher's rows on this rank; None off its last stage.
            columns: [n] int64 ids whose rows this rank needs.
            width: Ht.
            dtype: dtype of the LM head.
        """
        gathered: list = [None] * len(self.group.ranks)
        dist.all_gather_object(gathered, (0 if own is None else len(own), columns.cpu()), group=self._on_host)
        held, needed = {}, {}
        for rank, (rows, ids) in zip(self.group.ranks, gathered, strict=True):
            if rows:
                first = self.group.teachers[rank].tp * rows
                held[rank] = torch.arange(first, first + rows)
            needed[rank] = ids
        head = torch.empty(len(columns), width, dtype=dtype, device="cuda")
        for start in range(0, max(map(len, needed.values())), HEAD_ROWS):
            plan = TransferPlan(held, {rank: ids[start : start + HEAD_ROWS] for rank, ids in needed.items()})
            targets = [start + plan.received(sender, self.rank) for sender in self.group.ranks]
            received = self.transfer(own, self.route(plan), [len(target) for target in targets], (width,), dtype)
            for target, rows in zip(targets, received, strict=True):
                head[target.to(head.device)] = rows
        return head

    def start_step(self, own: Sequence[KDBatch]) -> "StepExchange":
        """Assign the microbatches of a step to the teacher's replicas, and send them there.

        Args:
            own: the whole microbatches of this rank's student replica, on the host; all replicas have equally many.
                Hidden states of their supervised tokens are sent back, and of no others.
        """
        passes = max(group.passes(len(own)) for group in self._all_groups) if self._equal_passes else 0
        assignments, sizes = self.group.assign(len(own), passes), self._sizes(own)

        def sent(sender: int, receiver: int) -> list[TeacherForward]:
            forwards = dict.fromkeys(assignments[self.group.teachers[receiver].dp].forwards)
            return [one for one in forwards if self.group.batch_sender(one.student, receiver) == sender]

        words = [[_encode(own[one.microbatch]) for one in sent(self.rank, receiver)] for receiver in self.group.ranks]
        forwards = [one for sender in self.group.ranks for one in sent(sender, self.rank)]
        lengths = [sum(_word_count(sizes[one]) for one in sent(sender, self.rank)) for sender in self.group.ranks]
        outgoing = torch.cat([torch.empty(0, dtype=torch.int64), *itertools.chain(*words)])
        incoming = outgoing.new_empty(sum(lengths))
        dist.all_to_all_single(
            incoming, outgoing, lengths, [sum(map(len, part)) for part in words], group=self._on_host
        )
        parts = incoming.split([_word_count(sizes[one]) for one in forwards])
        read = {one: _decode(part, sizes[one]) for one, part in zip(forwards, parts, strict=True)}
        mine = [read[one] for one in assignments[self.teacher.dp].forwards]
        return StepExchange(
            self, assignments, tuple(batch for batch, _ in mine), tuple(needed for _, needed in mine), tuple(own)
        )

    def _sizes(self, own: Sequence[KDBatch]) -> dict[TeacherForward, "_Size"]:
        """Sizes of all microbatches of the exchange group."""
        mine = torch.tensor([[*b.tokens.shape, 0 if b.packed is None else len(b.bounds)] for b in own])
        gathered = [torch.empty_like(mine) for _ in self.group.ranks]
        dist.all_gather(gathered, mine, group=self._on_host)
        return {
            TeacherForward(self.group.students[rank].dp, index): tuple(size)
            for rank, sizes in zip(self.group.ranks, gathered, strict=True)
            for index, size in enumerate(sizes.tolist())
        }

    def transfer(
        self, own: Tensor | None, route: "Route", counts: Sequence[int], shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Send items, the entries of a tensor's first dimension, between devices.

        Args:
            own: [n, *shape] the items that this rank holds; None: it holds none.
            route: where they are sent.
            counts: number of items from each rank of the exchange group.
            shape, dtype: shape and dtype of an item.

        Returns:
            [count, *shape] from each rank of the exchange group.
        """
        if own is None:
            items = torch.empty(0, *shape, dtype=dtype, device="cuda")
        else:
            items = own.index_select(0, route.sent).to(dtype)
        received = items.new_empty(sum(counts), *shape)
        dist.all_to_all_single(received, items, list(counts), route.counts, group=self._on_device)
        return received.split(list(counts))

    def route(self, plan: TransferPlan) -> "Route":
        """The part of a plan that this rank sends."""
        sent = [plan.sent(self.rank, receiver) for receiver in self.group.ranks]
        return Route(_on_device(torch.cat(sent)), list(map(len, sent)))


class Route(NamedTuple):
    """The items that a rank sends."""

    sent: Tensor
    """[n] int64 on the device: indices into the items that it holds, in the order of the receivers."""
    counts: list[int]
    """Number of items for each rank of the exchange group."""


class PassRoutes(NamedTuple):
    """Routes of the hidden states of one forward pass of every teacher replica."""

    sent: Route
    received: list[Tensor]
    """[n] int64 on the device from each rank of the exchange group: indices into the needed tokens of its replica."""
    needed: dict[int, int]
    """Teacher replica -> number of tokens that this rank needs of its pass."""


@dataclass(frozen=True)
class StepExchange:
    """Communication for the microbatches of one call of `Teacher.signals`."""

    exchange: TeacherExchange
    assignments: dict[int, Assignment]
    """Teacher replica -> its forward passes."""
    batches: tuple[KDBatch, ...]
    """The microbatches that this rank's teacher replica reads, whole and on the host."""
    needed: tuple[Tensor, ...]
    """[b, s] bool for each of them: the tokens whose hidden states the student needs."""
    own: tuple[KDBatch, ...]
    """The microbatches of this rank's student replica, likewise."""

    def send_states(self, hidden: Iterator[Tensor], width: int, dtype: torch.dtype, states: WaitingStates) -> None:
        """Send the teacher's final hidden states to the student, split like the student's own.

        Args:
            hidden: yields [s/cp, b, Ht] (of the teacher's sequence-parallel slice) for each of `batches` on the
                teacher's last stage, nothing on other stages. Each is sent before the next is taken.
            width: Ht.
            dtype: dtype of the hidden states.
            states: receives one tensor for each of `own` on the student's last stage: [s/cp, b, Ht] (or its
                sequence-parallel slice), or [m, Ht] of the supervised tokens in it. Nothing on other stages.
        """
        is_last, missing = self.exchange.student.is_last_stage, set(range(len(self.own)))
        for index in range(max(len(assignment.forwards) for assignment in self.assignments.values())):
            found = self._exchange_pass(index, next(hidden, None), width, dtype)
            missing -= found.keys()
            for microbatch, one in found.items():
                states[microbatch] = self._shaped(microbatch, one, width)
        for microbatch in missing if is_last else ():  # none of its tokens is needed on this rank
            nothing = torch.empty(0, width, dtype=dtype, device="cuda")
            states[microbatch] = self._shaped(microbatch, nothing, width)

    def _shaped(self, microbatch: int, states: Tensor, width: int) -> Tensor:
        batch = self.own[microbatch]
        return states if batch.supervised is not None else states.view(-1, batch.tokens.shape[0], width)

    def _exchange_pass(self, index: int, hidden: Tensor | None, width: int, dtype: torch.dtype) -> dict[int, Tensor]:
        """Exchange the outputs of all teacher replicas' forward pass `index`; returns the part that this rank needs, by
        microbatch."""
        exchange = self.exchange
        routes, found = self._routes(index), {}
        tokens = None if hidden is None else hidden.flatten(0, 1)
        parts = exchange.transfer(tokens, routes.sent, list(map(len, routes.received)), (width,), dtype)
        for sender, target, part in zip(exchange.group.ranks, routes.received, parts, strict=True):
            if len(target):
                replica = exchange.group.teachers[sender].dp
                microbatch = self.assignments[replica].forwards[index].microbatch
                if microbatch not in found:
                    found[microbatch] = part.new_empty(routes.needed[replica], width)
                found[microbatch][target] = part
        return found

    def _routes(self, index: int) -> PassRoutes:
        """The routes of pass `index`. Those of passes over equal shapes are made once, and stay on the device."""
        known, shape = self.exchange.known_routes, tuple(self._shape(replica, index) for replica in self.assignments)
        if None in shape:
            return self._make_routes(index)
        if shape not in known:
            if len(known) == MOST_ROUTES:
                known.pop(next(iter(known)))
            known[shape] = self._make_routes(index)
        return known[shape]

    def _make_routes(self, index: int) -> PassRoutes:
        exchange, rank = self.exchange, self.exchange.rank
        plans = {replica: self._plan(replica, index) for replica in self.assignments}
        received = [plans[exchange.group.teachers[sender].dp].received(sender, rank) for sender in exchange.group.ranks]
        needed = {replica: len(plan.needed.get(rank, ())) for replica, plan in plans.items()}
        return PassRoutes(exchange.route(plans[exchange.teacher.dp]), list(map(_on_device, received)), needed)

    def _shape(self, replica: int, index: int) -> Hashable | None:
        """Everything that `_plan` depends on, if that does not include the masks of a microbatch; else None."""
        found = self._pass(replica, index)
        if found is None:
            return ()
        batch, wanted = found
        if not wanted.all():
            return None
        return replica, self.assignments[replica].forwards[index].student, batch.tokens.shape, batch.bounds

    def _pass(self, replica: int, index: int) -> tuple[KDBatch, Tensor] | None:
        """The microbatch of a pass whose output this rank sends or may need, and the tokens [b, s] that are needed."""
        exchange, forward = self.exchange, self.assignments[replica].needed_at(index)
        if forward is not None and replica == exchange.teacher.dp:
            return self.batches[index], self.needed[index]
        if forward is not None and forward.student == exchange.student.dp:
            batch = self.own[forward.microbatch]
            return batch, _needed_tokens(batch)
        return None

    def _plan(self, replica: int, index: int) -> TransferPlan:
        """Transfer of tokens, numbered position * b + row, after a forward pass; empty if this rank neither sends nor
        receives."""
        exchange, found = self.exchange, self._pass(replica, index)
        if found is None:
            return TransferPlan({}, {})
        batch, wanted = found
        forward = self.assignments[replica].forwards[index]
        held = last_stage(exchange.group.teachers, replica)
        needed = last_stage(exchange.group.students, forward.student)
        bounds, rows, wanted = batch.bounds, torch.arange(batch.tokens.shape[0]), wanted.t().reshape(-1)

        def tokens(sharding: RowSharding, coords: RankCoords) -> Tensor:
            return (sharding.positions(bounds, coords)[:, None] * len(rows) + rows).flatten()

        of_students = {rank: tokens(exchange.student_sharding, coords) for rank, coords in needed.items()}
        return TransferPlan(
            {rank: tokens(exchange.teacher_sharding, coords) for rank, coords in held.items()},
            {rank: numbers[wanted[numbers]] for rank, numbers in of_students.items()},
        )


def _on_device(index: Tensor) -> Tensor:
    """A copy on the device that waits for nothing: a copy from pageable memory waits for all work on the device, and
    the next forward pass would be launched only then."""
    return index.pin_memory().to("cuda", non_blocking=True)


_Size = tuple[int, int, int]
"""Rows, tokens per row, and number of segment bounds (0: not packed)."""


def _word_count(size: _Size) -> int:
    """Length of the result of `_encode`."""
    rows, tokens, bounds = size
    return 3 * rows * tokens + bounds


def _encode(batch: KDBatch) -> Tensor:
    """[n] int64, the inputs of a model for a whole microbatch, and the tokens whose outputs are needed."""
    bounds = torch.tensor(() if batch.packed is None else batch.bounds, dtype=torch.int64)
    return torch.cat([*(x.flatten().long() for x in (batch.tokens, batch.position_ids, _needed_tokens(batch))), bounds])


def _needed_tokens(batch: KDBatch) -> Tensor:
    """[b, s] bool of the whole microbatch."""
    if batch.supervised is None:
        return torch.ones_like(batch.tokens, dtype=torch.bool)
    return batch.supervised.whole


def _decode(words: Tensor, size: _Size) -> tuple[KDBatch, Tensor]:
    rows, tokens, bounds = size
    *parts, ends = words.split([rows * tokens] * 3 + [bounds])
    ids, positions, needed = (part.view(rows, tokens) for part in parts)
    return KDBatch.of_tokens(ids, positions, ends.tolist() if bounds else None), needed.bool()


def _coords_of_all_ranks(groups: Groups) -> list[RankCoords]:
    """Collective over all ranks."""
    own = torch.tensor(
        [groups.tp.rank(), groups.cp.rank(), groups.dp.rank(), groups.is_last_stage], dtype=torch.int64, device="cuda"
    )
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    return [RankCoords(tp, cp, dp, bool(last)) for tp, cp, dp, last in (coords.tolist() for coords in gathered)]
