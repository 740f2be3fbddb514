"""The front rank of a teacher service: receives requests, has the ranks compute them, and answers."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import zmq
from torch import Tensor

from mkd.teacher.service.addresses import Address, Secret, service_socket
from mkd.teacher.service.facts import TeacherFacts
from mkd.teacher.service.messages import Kind, Message, ProtocolError
from mkd.teacher.service.model import IDLE_S, Order, TeacherRanks
from mkd.teacher.service.monitoring import ServiceStatus
from mkd.teacher.service.requests import ForwardRequest
from mkd.teacher.service.targets import read_targets
from mkd.utils.logging import EVERY_RANK, logger

_MOST_QUEUED = 1024
"""Forward requests that are read before they are computed; the others wait in ZeroMQ's queues."""
_REPORT_S = 30.0


def most_request_bytes(facts: TeacherFacts) -> int:
    """Largest frame of a request: a 4-byte number for each token, or a head."""
    return max(4 * facts.most_tokens + 64, 64 << 10)


@dataclass
class _Work:
    """Counts since the start of the service."""

    received: int = 0
    """Forward requests that were read."""
    requests: int = 0
    """Forward requests that were computed."""
    passes: int = 0
    """Forward passes."""
    tokens: int = 0
    busy_s: float = 0.0
    refused: int = 0


@dataclass(frozen=True)
class _Waiting:
    """A request that is not computed yet."""

    client: bytes
    number: int
    request: ForwardRequest


@dataclass(frozen=True)
class _Computing:
    """Requests whose forward pass is launched."""

    taken: list[_Waiting]
    began: float
    """Time of the launch."""
    on_device: Tensor
    answer: Tensor
    """On the host; complete after `done`."""
    done: torch.cuda.Event | None
    """None if it is complete."""


class TeacherServer:
    """Answers requests in the order of their arrival, one forward pass for each or, on demand, for several.

    On a GPU the next forward pass is launched before the last one is answered: the device computes while its previous
    answer is copied to the host, and sent.
    """

    def __init__(
        self, facts: TeacherFacts, address: Address, secret: Secret | None, batch_tokens: int | None = None
    ) -> None:
        """Listen, before the teacher is loaded: requests wait until `serve`. On the front rank only.

        Args:
            facts: the teacher.
            address, secret: see `service_socket`.
            batch_tokens: tokens of requests that are joined into one forward pass at most; None joins none.

        Raises:
            MkdConfigError, zmq.ZMQError: see `service_socket`.
        """
        self._facts, self._batch_tokens = facts, batch_tokens
        self._state, self._began = "loading", time.monotonic()
        self._ranks: TeacherRanks | None = None
        self._head: Tensor | None = None
        self._context = zmq.Context()
        self._socket, self._authenticator = service_socket(self._context, address, secret, most_request_bytes(facts))
        self.address = self._socket.last_endpoint.decode()
        self._queue: deque[_Waiting] = deque()
        self._computing: deque[_Computing] = deque()
        self._answered_at = 0.0
        self._stream: torch.cuda.Stream | None = None
        self._work, self._reported = _Work(), _Work()
        self._reported_at = time.monotonic()

    def serve(self, ranks: TeacherRanks, head: Tensor, is_stopping: Callable[[], bool]) -> None:
        """Answer until `is_stopping()`; requests that have arrived by then are still computed. The other ranks end
        with this call.

        Args:
            ranks: the ranks that compute.
            head: [V, Ht] the teacher's LM head, on the host.
            is_stopping: called between two requests.
        """
        self._ranks, self._head, self._state = ranks, head, "serving"
        ordered = time.monotonic()
        while not is_stopping():
            self._read(0 if self._queue or self._computing else 200)
            if self._queue or self._computing:
                self._advance()
                ordered = time.monotonic()
            elif time.monotonic() - ordered > IDLE_S:
                self._ranks.order(Order.IDLE)
                ordered = time.monotonic()
            self._report()
        self._state = "stopping"
        self._read(0)
        while self._queue or self._computing:
            self._advance()
        self._ranks.order(Order.STOP)

    def close(self) -> None:
        """Send the last answers, and stop listening."""
        self._socket.close(linger=5_000)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

    def _read(self, wait_ms: int) -> None:
        """Read what has arrived, and answer everything but forward requests at once. The number of messages is
        bounded, so that a client that sends without end does not keep the requests of others from being computed."""
        for _ in range(_MOST_QUEUED - len(self._queue)):
            if not self._socket.poll(wait_ms):
                return
            client, *frames = self._socket.recv_multipart()
            wait_ms = 0
            try:
                message = Message.of(frames)
            except ProtocolError as error:
                self._refuse(client, 0, str(error))
                continue
            try:
                self._handle(client, message)
            except ProtocolError as error:
                self._refuse(client, message.number, str(error))

    def _handle(self, client: bytes, message: Message) -> None:
        match message.kind:
            case Kind.HELLO:
                self._send(client, Message(Kind.FACTS, message.number, self._facts.values()))
            case Kind.STATUS:
                self._send(client, Message(Kind.COUNTERS, message.number, self.counters()))
            case Kind.HEAD:
                self._send(client, Message(Kind.ROWS, message.number, tensors=(self._rows(message.values),)))
            case Kind.FORWARD:
                self._require_same(message.values)
                given = message.values.get("targets")
                targets = None if given is None else read_targets(given, self._facts)
                request = ForwardRequest.of_tensors(message.tensors, self._facts, targets)
                self._queue.append(_Waiting(client, message.number, request))
                self._work.received += 1
            case _:
                raise ProtocolError(f"a message of kind {message.kind.name}")

    def _require_same(self, values: Mapping[str, Any]) -> None:
        """Refuse requests to another teacher: this service may have been restarted with other weights."""
        if values.get("fingerprint") != self._facts.fingerprint:
            raise ProtocolError(f"the teacher here is {self._facts.fingerprint}, not {values.get('fingerprint')}")

    def _rows(self, values: Mapping[str, Any]) -> Tensor:
        self._require_same(values)
        start, count = values.get("start"), values.get("count")
        if (
            type(start) is not int
            or type(count) is not int
            or not 0 <= start < len(self._head)
            or not 0 < count <= self._facts.most_head_rows
        ):
            raise ProtocolError(f"rows {start} to {start} + {count} of an LM head of {len(self._head)}")
        return self._head[start : start + count]

    def _take(self) -> list[_Waiting]:
        """The next request, and those after it that are computed with it."""
        taken = [self._queue.popleft()]
        first, tokens = taken[0].request, taken[0].request.tokens.numel()
        while self._batch_tokens is not None and self._queue and first.can_join(self._queue[0].request):
            tokens += self._queue[0].request.tokens.numel()
            if tokens > self._batch_tokens:
                break
            taken.append(self._queue.popleft())
        return taken

    def _advance(self) -> None:
        """Launch the next forward pass, and answer those that are complete or precede the last one."""
        if self._queue:
            self._computing.append(self._launch(self._take()))
        while self._computing and (self._computing[0].done is None or len(self._computing) > 1 or not self._queue):
            self._answer(self._computing.popleft())

    def _launch(self, taken: list[_Waiting]) -> _Computing:
        began = time.monotonic()
        request = ForwardRequest.joined([one.request for one in taken]) if len(taken) > 1 else taken[0].request
        found = self._ranks.order(Order.FORWARD, request)
        return _Computing(taken, began, found, *self._to_host(found))

    def _to_host(self, found: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start the copy of an answer beside later work of the device."""
        if not found.is_cuda:
            return found, None
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            host.copy_(found, non_blocking=True)
            return host, self._stream.record_event()

    def _answer(self, computing: _Computing) -> None:
        """Send the answers to requests, when they are complete."""
        if computing.done is not None:
            computing.done.synchronize()
        requests = [one.request for one in computing.taken]
        kind = Kind.HIDDEN if requests[0].targets is None else Kind.TARGETS
        values = {"fingerprint": self._facts.fingerprint}
        own_answers = computing.answer.split([len(one.wanted) for one in requests])
        for one, own in zip(computing.taken, own_answers, strict=True):
            self._send(one.client, Message(kind, one.number, values, (own,)))
        now = time.monotonic()
        self._work.requests += len(requests)
        self._work.passes += 1
        self._work.tokens += sum(one.tokens.numel() for one in requests)
        self._work.busy_s += now - max(computing.began, self._answered_at)
        self._answered_at = now

    def _send(self, client: bytes, message: Message) -> None:
        """A client that is gone, or does not read, loses its answers."""
        self._socket.send_multipart([client, *message.frames()], copy=False)

    def _refuse(self, client: bytes, number: int, reason: str) -> None:
        self._work.refused += 1
        if self._work.refused <= 10:
            logger.warning(f"refused a request: {reason}", extra=EVERY_RANK)
        self._send(client, Message(Kind.REFUSED, number, {"reason": reason[:1000]}))

    def counters(self) -> dict[str, float]:
        """Numbers about the work so far, and the requests that wait."""
        return asdict(self._work) | {"queue": len(self._queue)}

    def status(self) -> ServiceStatus:
        """The current state; `Monitor` calls this in its thread."""
        return ServiceStatus(self._state, self._facts.fingerprint, self.counters(), time.monotonic() - self._began)

    def _report(self) -> None:
        """Log one line per interval in which something was computed."""
        now = time.monotonic()
        elapsed, work, before = now - self._reported_at, self._work, self._reported
        if elapsed < _REPORT_S:
            return
        if work.requests > before.requests:
            logger.info(
                f"{(work.requests - before.requests) / elapsed:.1f} requests/s, "
                f"{(work.tokens - before.tokens) / elapsed:,.0f} tokens/s, {len(self._queue)} waiting, busy "
                f"{100 * (work.busy_s - before.busy_s) / elapsed:.0f}% of the time",
                extra=EVERY_RANK,
            )
        self._reported_at, self._reported = now, replace(work)
