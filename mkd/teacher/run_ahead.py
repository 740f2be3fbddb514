"""Requests to a teacher that runs elsewhere: sent some steps before the student needs the answers, and awaited by all
ranks together, so that a failure ends all of them before any has begun the step."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mkd.compat.stopping import WaitAborted
from mkd.data.batch import KDBatch
from mkd.data.lookahead import Lookahead
from mkd.errors import MkdCacheError, MkdError, MkdNumericError, MkdTeacherError, MkdTeacherTimeout
from mkd.utils.logging import logger

_ERRORS: tuple[type[MkdError], ...] = (MkdTeacherTimeout, MkdTeacherError, MkdNumericError, MkdCacheError)
"""Errors that all ranks raise together, by the number that they exchange, from 1."""
ROUND_S = 0.2
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


class BatchRequest(Protocol):
    """Request for the teacher's outputs on one microbatch."""

    @property
    def key(self) -> bytes:
        """Hash, equal for equal requests."""
        ...

    @property
    def answer_bytes(self) -> int:
        """Host memory of the answers."""
        ...


@dataclass(frozen=True)
class PendingRequest[R: BatchRequest]:
    """A request and its answers to come."""

    request: R
    answers: Sequence[Future[Any]]


class RequestQueue[R: BatchRequest]:
    """The requests of the present step and of later ones, on a rank that sends requests."""

    def __init__(
        self, options: RunAhead, request_of: Callable[[KDBatch], R], send_request: Callable[[R], Sequence[Future[Any]]]
    ) -> None:
        """No request is sent yet.

        Args:
            options: how far to run ahead.
            request_of: the request for a whole microbatch on the host.
            send_request: sends a request; returns its answers.
        """
        self._options, self._request_of, self._send_request = options, request_of, send_request
        self._pending: dict[bool, dict[bytes, PendingRequest[R]]] = {False: {}, True: {}}
        self._sent_ahead = {False: 0, True: 0}
        self._step: dict[bytes, PendingRequest[R]] = {}

    def send(self, batches: Sequence[KDBatch], upcoming: Lookahead) -> list[PendingRequest[R]]:
        """Send what was not sent yet, for this step and later ones; returns the requests of this step, one per
        microbatch."""
        phase, pending = upcoming.evaluating, self._pending[upcoming.evaluating]
        step, requests = {}, [self._request_of(batch) for batch in batches]
        keys = [request.key for request in requests]
        is_repeated = all(key in self._step for key in keys)  # Megatron may run the same step again
        sent = sum(key in pending for key in keys)
        if sent < len(requests) and not is_repeated:  # other microbatches were expected
            self._sent_ahead[phase] = 0
        for key, request in zip(keys, requests, strict=True):
            if key not in step:
                step[key] = self._step.get(key) or pending.pop(key, None) or self._send(request)
        if not is_repeated:
            self._sent_ahead[phase] = max(0, self._sent_ahead[phase] - len(batches))
            if not self._sent_ahead[phase]:
                pending.clear()
        self._send_ahead(upcoming, pending)
        self._step = step
        return [step[key] for key in keys]

    def begin(self, batch: KDBatch) -> None:
        """Send the request of a microbatch of the next training step, of which others do not exist yet. A request that
        cannot be sent is sent again with the others, where all ranks fail together."""
        pending = self._pending[False]
        try:
            request = self._request_of(batch)
            if request.key not in pending and request.key not in self._step:
                pending[request.key] = self._send(request)
        except _ERRORS as error:
            logger.debug(f"a request of the teacher is sent again: {error}")

    def _send(self, request: R) -> PendingRequest[R]:
        return PendingRequest(request, self._send_request(request))

    def _send_ahead(self, upcoming: Lookahead, pending: dict[bytes, PendingRequest[R]]) -> None:
        """Send requests of later steps, in their order, while their answers fit into the buffer."""
        if not self._options.steps:
            return
        phase = upcoming.evaluating
        make = replace(upcoming, count=self._options.steps * upcoming.count).fetch(self._sent_ahead[phase])
        held = sum(one.request.answer_bytes for each in self._pending.values() for one in each.values())
        for batch in make():
            request = self._request_of(batch)
            held += request.answer_bytes
            if held > self._options.most_bytes:
                return
            if (key := request.key) not in pending:
                pending[key] = self._send(request)
            self._sent_ahead[phase] += 1


class AllRanks:
    """Waiting and failing on all ranks alike."""

    def __init__(self, timeout_s: float) -> None:
        """Collective over all ranks.

        Args:
            timeout_s: longest wait of a rank between two exchanges.
        """
        # On the host: a collective on the device would drain its queue once per step.
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s) + timedelta(hours=1))

    def wait[R: BatchRequest](
        self,
        pending: Sequence[PendingRequest[R]],
        check: Callable[[PendingRequest[R]], None],
        check_silence: Callable[[float], None],
        is_stopping: Callable[[], bool],
    ) -> None:
        """Return when the answers of every rank have arrived. The ranks exchange their states in rounds, because a
        signal may reach any of them.

        Args:
            pending: the requests of this rank.
            check: raises an MkdError if the answers to one of them, which have arrived, cannot be used.
            check_silence: raises MkdTeacherTimeout if a teacher has been silent for too long since a time.
            is_stopping: True if this process has received a signal to stop.

        Raises:
            MkdTeacherTimeout, MkdTeacherError, MkdNumericError, MkdCacheError: on all ranks, what one has found.
            WaitAborted: on all ranks, if one of them is stopping and one of them has no answer yet.
        """
        began, waiting = time.monotonic(), deque(pending)
        while True:
            failure = None
            try:
                _receive(waiting, check, lambda: check_silence(began))
            except _ERRORS as error:
                failure = error
            found = torch.tensor([_number(failure), bool(waiting), is_stopping()], dtype=torch.int64)
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
            number, is_waiting, stops = found.tolist()
            if number:
                self.raise_everywhere(failure)
            if not is_waiting:
                return
            if stops:
                raise WaitAborted

    def attempt[T](self, work: Callable[[], T]) -> T:
        """Call a function on every rank, and raise on all ranks what one of them raises."""
        result, failure = None, None
        try:
            result = work()
        except _ERRORS as error:
            failure = error
        self.raise_everywhere(failure)
        return result

    def raise_everywhere(self, failure: MkdError | None) -> None:
        """Raise on all ranks what one rank has found. Collective."""
        kind = _number(failure)
        found = torch.tensor([kind])
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        if not found[0]:
            return
        texts: list[tuple[int, str] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(texts, (kind, str(failure)), group=self.group)
        kind, text = next(one for one in texts if one[0] == found[0])
        raise _ERRORS[kind - 1](text)


def _receive[R: BatchRequest](
    waiting: deque[PendingRequest[R]], check: Callable[[PendingRequest[R]], None], check_silence: Callable[[], None]
) -> None:
    """Remove requests whose answers arrive within one round; raises an error of an answer, or of its absence."""
    ends = time.monotonic() + ROUND_S
    while waiting:
        try:
            for answer in waiting[0].answers:
                answer.result(timeout=max(0.0, ends - time.monotonic()))
        except NoAnswer:
            check_silence()
            return
        check(waiting[0])
        waiting.popleft()


def _number(failure: MkdError | None) -> int:
    """The number of an error's class in `_ERRORS`, from 1; 0 for none."""
    return 0 if failure is None else 1 + next(i for i, one in enumerate(_ERRORS) if isinstance(failure, one))
