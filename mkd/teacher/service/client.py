"""The teacher that a service computes; no model weights but the LM head are on the student's ranks."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.compat.stopping import WaitAborted
from mkd.data.batch import KDBatch
from mkd.data.lookahead import Lookahead
from mkd.distributed.context_parallel import dual_chunk_positions
from mkd.distributed.groups import Groups
from mkd.errors import MkdError, MkdNumericError, MkdTeacherError, MkdTeacherTimeout
from mkd.losses import LogitMap
from mkd.teacher.interface import HiddenSignal
from mkd.teacher.service.connections import TeacherConnections
from mkd.teacher.service.facts import TeacherFacts
from mkd.teacher.service.messages import Kind, Message
from mkd.teacher.service.requests import ForwardRequest
from mkd.teacher.service.server import MOST_ANSWER_BYTES

_ERRORS: tuple[type[MkdError], ...] = (MkdTeacherTimeout, MkdTeacherError, MkdNumericError)
"""Errors that all ranks raise together, by the number that they exchange, from 1."""
_ROUND_S = 0.2
"""Seconds of waiting after which all ranks exchange what they have found."""


@dataclass(frozen=True)
class RunAhead:
    """Bounds of the run-ahead before the student; they change no number."""

    steps: int
    """Steps whose requests are sent before the present one is computed; 0 for none."""
    most_bytes: float
    """Answers that wait in host memory at most, beyond those of the present step."""
    timeout_s: float
    """Seconds without any answer after which a waiting job ends."""


@dataclass(frozen=True)
class _Asked:
    """A request and its answer to come."""

    request: ForwardRequest
    answer: Future[Message]


def _number(failure: MkdError | None) -> int:
    """The number of an error's class in `_ERRORS`, from 1; 0 for none."""
    return 0 if failure is None else 1 + next(i for i, one in enumerate(_ERRORS) if isinstance(failure, one))


class ServedTeacher:
    """Requests are sent by one rank per model replica: the first tensor- and context-parallel rank of its last stage.

    That rank receives the hidden states of whole rows once and scatters them, so that every other rank gets its own
    slice only. `prepare` returns when all answers of the step have arrived: a failure is then raised on all ranks,
    before any of them has begun the step.
    """

    def __init__(
        self,
        connections: TeacherConnections | None,
        facts: TeacherFacts,
        groups: Groups,
        ahead: RunAhead,
        *,
        padded_vocab: int,
        sequence_parallel: bool,
    ) -> None:
        """Fetch the LM head. Collective over all ranks.

        Args:
            connections: see `needs_connections`.
            facts: the teacher.
            groups: the student's layout.
            ahead: options of running ahead.
            padded_vocab: rows of the student's LM head on all tensor-parallel ranks.
            sequence_parallel: True if the student's tensor-parallel ranks hold slices of the sequence.
        """
        self._connections, self._facts, self._groups, self._options = connections, facts, groups, ahead
        self._sequence_parallel = sequence_parallel
        self._asks = groups.is_last_stage and groups.tp.rank() == 0 and groups.cp.rank() == 0
        # On the host: a collective on the device would drain its queue once per step.
        limit = timedelta(seconds=ahead.timeout_s) + timedelta(hours=1)
        self._host_group = dist.new_group(backend="gloo", timeout=limit)
        self._asked: dict[bool, dict[bytes, _Asked]] = {False: {}, True: {}}
        self._sent_ahead = {False: 0, True: 0}
        self._step: dict[bytes, _Asked] = {}
        self._keys: list[bytes] = []
        self._whole: list[KDBatch] = []
        self._head = self._fetch_head(padded_vocab // groups.tp.size())

    @staticmethod
    def needs_connections(groups: Groups) -> bool:
        """True on ranks that send requests: for microbatches, or for rows of the LM head."""
        asks = groups.tp.rank() == 0 and groups.cp.rank() == 0
        return groups.is_last_stage and (asks or groups.dp_cp.rank() == 0)

    @property
    def runs_before_student(self) -> bool:
        """See `Teacher.runs_before_student`."""
        return False

    def metrics(self) -> dict[str, float]:
        """See `Teacher.metrics`."""
        return {}

    def fingerprint(self) -> str:
        """See `Teacher.fingerprint`."""
        return self._facts.fingerprint

    def close(self) -> None:
        """Close the connections."""
        if self._connections is not None:
            self._connections.close()

    def prepare(self, batches: Sequence[KDBatch], upcoming: Lookahead) -> list[KDBatch]:
        """See `Teacher.prepare`.

        Raises:
            MkdTeacherTimeout: on all ranks, if no answer has come for the time limit.
            MkdTeacherError, MkdNumericError: on all ranks, if an answer cannot be used.
            WaitAborted: on all ranks, if one of them is stopping and one of them has no answer yet.
        """
        self._whole = list(batches)
        step = self._send(batches, upcoming) if self._asks else {}
        self._wait(list(step.values()), upcoming.is_stopping)
        self._step = step
        return self._whole

    def _send(self, batches: Sequence[KDBatch], upcoming: Lookahead) -> dict[bytes, _Asked]:
        """Send what was not sent yet, for this step and later ones; returns the requests of this step."""
        phase, asked = upcoming.evaluating, self._asked[upcoming.evaluating]
        step, requests = {}, [ForwardRequest.of_batch(batch) for batch in batches]
        self._keys = [request.key for request in requests]
        is_repeated = all(key in self._step for key in self._keys)  # Megatron may run the same step again
        sent = sum(key in asked for key in self._keys)
        if sent < len(requests) and not is_repeated:  # other microbatches were expected
            self._sent_ahead[phase] = 0
        for key, request in zip(self._keys, requests, strict=True):
            if key not in step:
                step[key] = self._step.get(key) or asked.pop(key, None) or self._ask(request)
        if not is_repeated:
            self._sent_ahead[phase] = max(0, self._sent_ahead[phase] - len(batches))
            if not self._sent_ahead[phase]:
                asked.clear()
        self._run_ahead(upcoming, asked)
        return step

    def _wait(self, step: list[_Asked], is_stopping: Callable[[], bool]) -> None:
        """Return when every rank has its answers. The ranks exchange their states in rounds, because a signal may reach
        any of them."""
        began, waiting = time.monotonic(), deque(step)
        while True:
            failure = None
            try:
                self._receive(waiting, began)
            except _ERRORS as error:
                failure = error
            found = torch.tensor([_number(failure), bool(waiting), is_stopping()], dtype=torch.int64)
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._host_group)
            number, is_waiting, stops = found.tolist()
            if number:
                self._raise_everywhere(failure)
            if not is_waiting:
                return
            if stops:
                raise WaitAborted

    def _receive(self, waiting: deque[_Asked], began: float) -> None:
        """Remove requests whose answers arrive within one round; raises an error of an answer, or of its absence."""
        ends = time.monotonic() + _ROUND_S
        while waiting:
            try:
                answer = waiting[0].answer.result(timeout=max(0.0, ends - time.monotonic()))
            except NoAnswer:
                self._check_silence(began)
                return
            self._check(waiting[0], answer)
            waiting.popleft()

    def _run_ahead(self, upcoming: Lookahead, asked: dict[bytes, _Asked]) -> None:
        """Send requests of later steps, in their order, while their answers fit into the buffer."""
        if not self._options.steps:
            return
        phase = upcoming.evaluating
        make = replace(upcoming, count=self._options.steps * upcoming.count).fetch(self._sent_ahead[phase])
        held = sum(self._size(one.request) for each in self._asked.values() for one in each.values())
        for batch in make():
            request = ForwardRequest.of_batch(batch)
            held += self._size(request)
            if held > self._options.most_bytes:
                return
            if (key := request.key) not in asked:
                asked[key] = self._ask(request)
            self._sent_ahead[phase] += 1

    def _size(self, request: ForwardRequest) -> int:
        return len(request.wanted) * self._facts.bytes_per_token

    def _ask(self, request: ForwardRequest) -> _Asked:
        values = {"fingerprint": self._facts.fingerprint}
        return _Asked(request, self._connections.submit(Message(Kind.FORWARD, 0, values, request.tensors)))

    def _await(self, answer: Future[Message]) -> Message:
        began = time.monotonic()
        while True:
            try:
                return answer.result(timeout=_ROUND_S)
            except NoAnswer:
                self._check_silence(began)

    def _check_silence(self, began: float) -> None:
        """Raises MkdTeacherTimeout if no answer has come for the time limit since `began`."""
        limit = self._options.timeout_s
        silent = time.monotonic() - max(began, self._connections.answered_at)
        if silent > limit:
            raise MkdTeacherTimeout(
                f"the teacher has not answered for {silent:.0f} s (--kd-teacher-timeout {limit:g}): start it again "
                "(mkd serve-teacher), and then this job"
            )

    def _check(self, asked: _Asked, answer: Message) -> None:
        facts, count = self._facts, len(asked.request.wanted)
        if answer.kind != Kind.HIDDEN or answer.values.get("fingerprint") != facts.fingerprint:
            raise MkdTeacherError(f"the teacher answers with {answer.kind.name} of {answer.values}: is it another one?")
        shapes = [(tuple(one.shape), one.dtype) for one in answer.tensors]
        if shapes != [((count, facts.width), facts.torch_dtype)]:
            raise MkdTeacherError(
                f"the teacher answers with hidden states of {shapes}; {count} tokens of width {facts.width} in "
                f"{facts.dtype} were requested: is it the same version of mkd?"
            )
        if not bool(answer.tensors[0].isfinite().all()):
            raise MkdNumericError(
                f"the hidden states of the teacher {facts.fingerprint} ({facts.description}) are not finite: its "
                "weights are damaged, or it overflows in its precision (--kd-teacher-dtype of mkd serve-teacher)"
            )

    def _raise_everywhere(self, failure: MkdError | None) -> None:
        """Raise on all ranks what one rank has found."""
        kind = _number(failure)
        found = torch.tensor([kind])
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._host_group)
        if not found[0]:
            return
        texts: list[tuple[int, str] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(texts, (kind, str(failure)), group=self._host_group)
        kind, text = next(one for one in texts if one[0] == found[0])
        raise _ERRORS[kind - 1](text)

    def _fetch_head(self, rows: int) -> Tensor | None:
        """[rows, Ht] this rank's rows of the LM head; rows beyond the teacher's vocabulary are 0."""
        groups, head, failure = self._groups, None, None
        if groups.is_last_stage and groups.dp_cp.rank() == 0:
            try:
                head = self._request_rows(groups.tp.rank() * rows, rows).to("cuda")
            except _ERRORS as error:
                failure = error
        self._raise_everywhere(failure)
        if not groups.is_last_stage:
            return None
        if head is None:
            head = torch.empty(rows, self._facts.width, dtype=self._facts.torch_dtype, device="cuda")
        if groups.dp_cp.size() > 1:
            dist.broadcast(head.view(torch.uint8), group=groups.dp_cp, group_src=0)
        return head

    def _request_rows(self, first: int, rows: int) -> Tensor:
        facts = self._facts
        head = torch.zeros(rows, facts.width, dtype=facts.torch_dtype)
        end, most = min(first + rows, facts.vocab), max(1, MOST_ANSWER_BYTES // facts.bytes_per_token)
        for start in range(first, end, most):
            count = min(most, end - start)
            values = {"fingerprint": facts.fingerprint, "start": start, "count": count}
            answer = self._await(self._connections.submit(Message(Kind.HEAD, 0, values)))
            if [(tuple(one.shape), one.dtype) for one in answer.tensors] != [((count, facts.width), facts.torch_dtype)]:
                raise MkdTeacherError("the teacher answers with other rows of its LM head than those requested")
            head[start - first : start - first + count] = answer.tensors[0]
        return head

    def signals(self, batches: Sequence[KDBatch]) -> list[HiddenSignal]:
        """See `Teacher.signals`. `prepare` has had the same microbatches."""
        if not self._groups.is_last_stage:
            return []
        logit_map = LogitMap(self._facts.logit_scale, self._facts.logit_softcap)
        return [HiddenSignal(self._hidden(batch), self._head, logit_map) for batch in batches]

    def _hidden(self, batch: KDBatch) -> Tensor:
        """This rank's slice of the hidden states of a microbatch: [s/cp, b, Ht], or [s/cp/tp, b, Ht]."""
        groups, whole = self._groups, self._whole[batch.number]
        rows, length = whole.tokens.shape
        cp, tp = groups.cp, groups.tp
        parts, shape = None, (length // cp.size(), rows, self._facts.width)
        if self._asks:
            hidden, size = self._dense(whole, self._step[self._keys[batch.number]]), cp.size()
            places = (dual_chunk_positions(whole.bounds, rank, size).to(hidden.device) for rank in range(size))
            parts = [hidden] if size == 1 else [hidden.index_select(0, one) for one in places]
        own = self._scatter(parts, shape, cp) if tp.rank() == 0 else None
        if tp.size() == 1:
            return own
        if not self._sequence_parallel:
            own = self._empty(shape) if own is None else own
            dist.broadcast(own.view(torch.uint8), group=tp, group_src=0)
            return own
        parts = None if own is None else [one.contiguous() for one in own.chunk(tp.size())]
        return self._scatter(parts, (shape[0] // tp.size(), *shape[1:]), tp)

    def _scatter(self, parts: list[Tensor] | None, shape: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
        """Rank 0 of a group has one part per rank; returns this rank's."""
        if group.size() == 1:
            return parts[0]
        own = self._empty(shape)
        # As bytes, because gloo does not scatter every dtype.
        parts = None if parts is None else [one.view(torch.uint8) for one in parts]
        dist.scatter(own.view(torch.uint8), parts, group=group, group_src=0)
        return own

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self._facts.torch_dtype, device="cuda")

    def _dense(self, whole: KDBatch, asked: _Asked) -> Tensor:
        """[s, b, Ht] on the device; 0 for tokens that were not wanted."""
        rows, length = whole.tokens.shape
        wanted = asked.request.wanted.long().pin_memory().to("cuda", non_blocking=True)
        found = asked.answer.result().tensors[0].pin_memory().to("cuda", non_blocking=True)
        places = wanted % length * rows + wanted // length
        hidden = torch.zeros(length * rows, self._facts.width, dtype=self._facts.torch_dtype, device="cuda")
        return hidden.index_copy_(0, places, found).view(length, rows, self._facts.width)
