"""The ranks of a teacher service: the front rank has the requests, and all ranks compute them together."""

import struct
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.data.batch import KDBatch
from mkd.distributed.context_parallel import dual_chunk_positions
from mkd.distributed.groups import Groups
from mkd.losses import LinearLogits
from mkd.teacher.interface import HiddenSignal
from mkd.teacher.online import OnlineTeacher
from mkd.teacher.service.requests import ForwardRequest
from mkd.teacher.service.targets import SampledTargets, TopKTargets

_HEAD_ROWS = 4096
"""LM head rows that the front rank receives at once."""
_HEAD_WORDS = 8
"""Numbers that describe a request, see `_sizes`."""
IDLE_S = 1.0
"""The front rank sends an order at least this often, so that no rank's wait reaches the time limit of collectives."""


class Order(IntEnum):
    """Orders of the front rank."""

    IDLE = 0
    FORWARD = 1
    STOP = 2


class TeacherRanks:
    """One replica of a teacher, on all ranks of the job.

    The front rank is the first tensor- and context-parallel rank of the last pipeline stage, which has the outputs.
    """

    def __init__(
        self, teacher: OnlineTeacher, groups: Groups, *, sequence_parallel: bool, token_multiple: int = 1
    ) -> None:
        """Collective over all ranks.

        Args:
            teacher: the model.
            groups: its layout, with one replica.
            sequence_parallel: True if its tensor-parallel ranks hold slices of the sequence.
            token_multiple: divisor of the tokens on a rank.
        """
        assert groups.dp.size() == 1, "a service is one replica"
        self._teacher, self._groups, self._sequence_parallel = teacher, groups, sequence_parallel
        self._token_multiple = token_multiple
        self.is_front = groups.leads_replica
        self._ranks, self._host_group = dist.get_world_size(), None
        self._front = 0
        if self._ranks > 1:
            # On the host: requests are there, and a rank that waits for one must not keep its device busy.
            self._host_group = dist.new_group(backend="gloo", timeout=timedelta(minutes=30))
            flags = [torch.zeros(1, dtype=torch.int64) for _ in range(self._ranks)]
            dist.all_gather(flags, torch.tensor([int(self.is_front)]), group=self._host_group)
            self._front = torch.cat(flags).argmax().item()

    @torch.no_grad()
    def lm_head(self, vocab: int) -> Tensor | None:
        """[vocab, Ht] LM head, on the host of the front rank, None elsewhere. Collective over all ranks."""
        groups = self._groups
        signal = self._signal(_shortest_batch(groups, self._sequence_parallel, self._token_multiple))
        if signal is None:
            return None
        own, tp = signal.head, groups.tp
        whole = torch.empty(vocab, own.shape[1], dtype=own.dtype) if self.is_front else None
        for owner in range(tp.size()):
            for start in range(0, len(own), _HEAD_ROWS):
                rows = own[start : start + _HEAD_ROWS].contiguous()
                if tp.size() > 1:
                    rows = rows.clone() if tp.rank() == owner else torch.empty_like(rows)
                    dist.broadcast(rows.view(torch.uint8), group=tp, group_src=owner)
                first = owner * len(own) + start
                if whole is not None and first < vocab:
                    whole[first : first + len(rows)] = rows[: vocab - first].cpu()
        return whole

    def order(self, order: Order, request: ForwardRequest | None = None) -> Tensor | None:
        """Front rank: have all ranks carry out an order.

        Args:
            order: the order.
            request: that of `Order.FORWARD`, on the host.

        Returns:
            [k, Ht] final hidden states of the wanted tokens, or [k, columns] of their targets, on the device.
        """
        if self._ranks > 1:
            head = torch.zeros(1 + _HEAD_WORDS, dtype=torch.int64)
            head[0] = order
            if request is not None:
                head[1:] = torch.tensor(_sizes(request))
            dist.broadcast(head, self._front, group=self._host_group)
            if request is not None:
                words = torch.cat([one.flatten() for one in request.tensors])
                dist.broadcast(words, self._front, group=self._host_group)
        return None if request is None else self._compute(request)

    def follow(self) -> None:
        """Other ranks: carry out orders until one is `Order.STOP`."""
        while True:
            head = torch.zeros(1 + _HEAD_WORDS, dtype=torch.int64)
            dist.broadcast(head, self._front, group=self._host_group)
            order, *sizes = head.tolist()
            if order == Order.STOP:
                return
            if order == Order.FORWARD:
                words = torch.empty(sum(_counts(sizes)), dtype=torch.int32)
                dist.broadcast(words, self._front, group=self._host_group)
                self._compute(_request(words, sizes))

    @torch.no_grad()
    def _compute(self, request: ForwardRequest) -> Tensor | None:
        """The answer on the front rank, None elsewhere."""
        whole, groups = request.batch(), self._groups
        wanted = request.wanted.long().pin_memory().to("cuda", non_blocking=True)
        signal = self._signal(whole)
        if signal is None:
            return None
        hidden = self._gather_tokens(signal.hidden.contiguous(), whole)
        hidden = hidden.index_select(0, wanted)
        if request.targets is not None and groups.cp.rank() == 0:
            teacher = LinearLogits(hidden, signal.head, signal.logit_map)
            labels, uniforms = request.labels.long().to(hidden.device), request.uniforms()
            uniforms = None if uniforms is None else uniforms.to(hidden.device)
            hidden = request.targets.compute(teacher, labels, uniforms, groups.tp)
        return hidden if self.is_front else None

    def _gather_tokens(self, hidden: Tensor, whole: KDBatch) -> Tensor:
        """[b * s, Ht] hidden states of all tokens of a microbatch, on each rank of the last stage."""
        groups = self._groups
        if self._sequence_parallel:
            hidden = torch.cat(_gather(hidden, groups.tp))
        parts = _gather(hidden, groups.cp)
        if len(parts) > 1:
            size, bounds = len(parts), whole.bounds
            order = torch.cat([dual_chunk_positions(bounds, rank, size) for rank in range(size)]).to(hidden.device)
            together = torch.cat(parts)
            hidden = torch.empty_like(together).index_copy_(0, order, together)
        return hidden.transpose(0, 1).reshape(-1, hidden.shape[-1])

    def _signal(self, whole: KDBatch) -> HiddenSignal | None:
        """The signal of one microbatch on this rank; None off the last stage."""
        return next(iter(self._teacher.signals([whole.on_rank(self._groups.cp)])), None)


def _gather(part: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """The parts of all ranks of a group, in their order."""
    if group.size() == 1:
        return [part]
    parts = [torch.empty_like(part) for _ in range(group.size())]
    # As bytes, because gloo does not gather every dtype.
    dist.all_gather([one.view(torch.uint8) for one in parts], part.view(torch.uint8), group=group)
    return parts


def _shortest_batch(groups: Groups, sequence_parallel: bool, token_multiple: int) -> KDBatch:
    """A microbatch of a few tokens that the layout can split."""
    length = 2 * token_multiple * groups.cp.size() * (groups.tp.size() if sequence_parallel else 1)
    return KDBatch.of_tokens(torch.zeros(1, length, dtype=torch.int64), torch.arange(length)[None], None)


def _sizes(request: ForwardRequest) -> list[int]:
    """The sizes of a request's tensors, and its targets: `_HEAD_WORDS` numbers; the number of entries is 0 for hidden
    states, and that of keys for top-k targets."""
    targets, keys = request.targets, 0 if request.keys is None else len(request.keys)
    words = (0, 0, 0) if targets is None else (targets.entries, targets.vocab, _bits(targets.temperature))
    return [*request.tokens.shape, len(request.bounds), len(request.wanted), keys, *words]


def _counts(sizes: Sequence[int]) -> list[int]:
    """Numbers in each tensor of a request."""
    rows, tokens, bounds, wanted, keys, entries, _, _ = sizes
    return [rows * tokens, rows * tokens, bounds, wanted, *[wanted][: bool(entries)], *[4 * keys][: bool(keys)]]


def _request(words: Tensor, sizes: Sequence[int]) -> ForwardRequest:
    """The request with these sizes, from the numbers of its tensors."""
    rows, tokens, _, _, keys, entries, vocab, temperature = sizes
    ids, positions, bounds, wanted, *more = words.split(_counts(sizes))
    request = ForwardRequest(ids.view(rows, tokens), positions.view(rows, tokens), bounds, wanted)
    if not entries:
        return request
    kind = SampledTargets if keys else TopKTargets
    hashes = more[1].view(keys, 4) if keys else None
    return replace(request, labels=more[0], keys=hashes, targets=kind(entries, vocab, _float(temperature)))


def _bits(value: float) -> int:
    """The bits of a float64 as an integer."""
    return struct.unpack("<q", struct.pack("<d", value))[0]


def _float(bits: int) -> float:
    """The inverse of `_bits`."""
    return struct.unpack("<d", struct.pack("<q", bits))[0]
