"""Connections of a client to the addresses of one teacher, in a thread: requests are shared, and none is lost."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from mkd.errors import MkdTeacherError, MkdTeacherTimeout
from mkd.teacher.service.addresses import TOKEN, Address, Secret, client_socket
from mkd.teacher.service.facts import TeacherFacts
from mkd.teacher.service.messages import Kind, Message, ProtocolError
from mkd.utils.logging import EVERY_RANK, logger

_FACTS_BYTES = 64 << 10
_IN_FLIGHT = 4
"""Requests that an address has at one time: enough to keep it busy, few enough to share the work."""
_POLL_MS = 1_000
_MOST_AT_ONCE = 64
"""Messages of one address that are read before other work."""


@dataclass
class _Request:
    """A request until it is answered."""

    message: Message
    read: Callable[[Message], Any]
    """See `TeacherConnections.submit`."""
    answer: Future[Any] = field(default_factory=Future)

    def receive(self, answer: Message) -> None:
        """Set the result, or the error, of the answer."""
        try:
            result = self.read(answer)
        except Exception as error:  # also a fault of this code: the thread that waits raises it
            self.answer.set_exception(error)
        else:
            self.answer.set_result(result)


@dataclass
class _Link:
    """A connection to one address; a lost one is replaced by a new one."""

    address: Address
    socket: zmq.Socket
    monitor: zmq.Socket
    is_connected: bool = False
    is_greeted: bool = False
    """True once HELLO is sent."""
    is_ready: bool = False
    """True once its facts are those of the teacher."""
    was_lost: bool = False
    """True if a connection to the address was ready before this one."""
    requests: dict[int, _Request] = field(default_factory=dict)
    """Requests that it has not answered."""

    def greet(self) -> None:
        """Send HELLO over a new connection, if its queue exists already."""
        if self.is_connected and not self.is_greeted:
            with suppress(zmq.Again):
                self.socket.send_multipart(Message(Kind.HELLO).frames(), zmq.NOBLOCK)
                self.is_greeted = True

    @property
    def poll_ms(self) -> int:
        """Time after which the connection needs attention without an event."""
        return _POLL_MS if self.is_greeted or not self.is_connected else 20

    def close(self) -> None:
        """Drop what was not sent; nothing if it is closed already."""
        if self.socket.closed:
            return
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)


def _unchanged(answer: Message) -> Message:
    return answer


class TeacherConnections:
    """Sends each request to one of the addresses, and sends it again to another where a connection is lost."""

    def __init__(
        self,
        addresses: Sequence[Address],
        secret: Secret | None,
        facts: TeacherFacts,
        most_bytes: int,
        *,
        pins: bool = False,
    ) -> None:
        """Start the thread.

        Args:
            addresses: services of the same teacher.
            secret: see `Secret`.
            facts: the facts that all of them have.
            most_bytes: largest frame of an answer.
            pins: answers are received in pinned host memory.
        """
        self._pins = pins
        self._facts, self._addresses, self._secret, self._most_bytes = facts, tuple(addresses), secret, most_bytes
        self._context = zmq.Context()
        self._lock, self._new = threading.Lock(), deque[_Request]()
        self._failure: Exception | None = None
        self._is_closing = False
        self._number = 0
        self.answered_at = time.monotonic()
        """Time of the last answer."""
        self._wake_in, self._wake_out = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._wake_in.bind("inproc://wake")
        self._wake_out.connect("inproc://wake")
        self._thread = threading.Thread(target=self._run, name="teacher service", daemon=True)
        self._thread.start()

    def submit[T](self, message: Message, read: Callable[[Message], T] = _unchanged) -> Future[T]:
        """Send a request when a service can take it. Callers use one thread.

        Args:
            message: the request, whose number is set here.
            read: from the answer to the future's result; is called in the thread of the connections, beside the work
                of the thread that waits, and may raise an error for it.

        Returns:
            The answer. It raises MkdTeacherError if the service refuses the request, or is another teacher now.
        """
        self._number += 1
        request = _Request(Message(message.kind, self._number, message.values, message.tensors), read)
        with self._lock:
            if self._failure is not None:
                request.answer.set_exception(self._failure)
                return request.answer
            self._new.append(request)
        self._wake()
        return request.answer

    def host_bytes(self, answer_bytes: int) -> int:
        """Host memory of an answer; torch's pinned blocks have powers of two."""
        return 1 << max(0, answer_bytes - 1).bit_length() if self._pins else answer_bytes

    def check_silence(self, began: float, limit_s: float) -> None:
        """Raise MkdTeacherTimeout if no answer has come for the time limit since `began`."""
        silent = time.monotonic() - max(began, self.answered_at)
        if silent > limit_s:
            raise MkdTeacherTimeout(
                f"the teacher has not answered for {silent:.0f} s (--kd-teacher-timeout {limit_s:g}): start it again "
                "(mkd serve-teacher), and then this job"
            )

    def close(self) -> None:
        """End the thread."""
        self._is_closing = True
        self._wake()
        self._thread.join()
        self._wake_out.close(0)
        self._context.destroy(0)  # closes what a failed thread has left open

    def _wake(self) -> None:
        with suppress(zmq.Again):  # enough signals are under way, or the thread has failed
            self._wake_out.send(b"", zmq.NOBLOCK)

    def _run(self) -> None:
        links: list[_Link] = []
        waiting: deque[_Request] = deque()
        try:
            links += [self._connect(address) for address in self._addresses]
            while not self._is_closing:
                with self._lock:
                    waiting.extend(self._new)
                    self._new.clear()
                _share(links, waiting)
                self._wait(links)
                for number, link in enumerate(links):
                    if self._serve(link):
                        continue
                    waiting.extendleft(reversed(link.requests.values()))
                    link.requests.clear()
                    link.close()
                    links[number] = self._connect(link.address)
                    links[number].was_lost = link.is_ready or link.was_lost
        except Exception as error:  # also a fault of this code: the thread that waits raises it
            self._fail(error, [*waiting, *(one for link in links for one in link.requests.values())])
        finally:
            for link in links:
                link.close()
            self._wake_in.close(0)

    def _connect(self, address: Address) -> _Link:
        return _Link(address, *client_socket(self._context, address, self._secret, self._most_bytes))

    def _wait(self, links: Sequence[_Link]) -> None:
        """Wait for an event of a connection, an answer or a new request."""
        poller = zmq.Poller()
        for socket in (self._wake_in, *(one for link in links for one in (link.socket, link.monitor))):
            poller.register(socket, zmq.POLLIN)
        poller.poll(min(link.poll_ms for link in links))
        while self._wake_in.poll(0):
            self._wake_in.recv()

    def _serve(self, link: _Link) -> bool:
        """Read what has arrived on a connection; False if it is lost."""
        for _ in range(_MOST_AT_ONCE):  # one that sends without end does not keep others from being read
            if not link.socket.poll(0):
                break
            self._receive(link, link.socket.recv_multipart(copy=False))
        while link.monitor.poll(0):
            event = recv_monitor_message(link.monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                link.is_connected = True
            elif event == zmq.EVENT_DISCONNECTED:
                if (
                    not link.is_ready and not link.requests
                ):  # nothing to send again: ZeroMQ connects again, after a pause
                    link.is_connected = link.is_greeted = False
                    continue
                if link.is_ready:
                    waiting = f"its {len(link.requests)} requests are" if link.requests else "further requests are"
                    logger.warning(
                        f"lost the teacher at {link.address}: {waiting} sent to the next service that answers",
                        extra=EVERY_RANK,
                    )
                return False
        link.greet()
        return True

    def _receive(self, link: _Link, frames: Sequence[zmq.Frame]) -> None:
        """Raises MkdTeacherError for an answer that no service of this teacher gives."""
        try:
            message = Message.of([frame.buffer for frame in frames], pins=self._pins)
            if message.kind == Kind.FACTS:
                self._compare(link, TeacherFacts.of(message.values))
                return
        except ProtocolError as error:
            raise MkdTeacherError(f"{link.address} answers with {error}: is it mkd serve-teacher?") from None
        if message.kind == Kind.REFUSED:
            raise MkdTeacherError(f"the teacher at {link.address} refuses a request: {message.values.get('reason')}")
        request = link.requests.pop(message.number, None)
        if request is not None:
            self.answered_at = time.monotonic()
            request.receive(message)

    def _compare(self, link: _Link, facts: TeacherFacts) -> None:
        if not facts.is_same(self._facts):
            raise MkdTeacherError(
                f"the teacher at {link.address} is {facts.fingerprint} ({facts.description}) now, and was "
                f"{self._facts.fingerprint} ({self._facts.description}) before: start it with the same teacher and "
                "flags"
            )
        if link.was_lost:
            logger.info(f"the teacher at {link.address} answers again", extra=EVERY_RANK)
        link.is_ready = True

    def _fail(self, error: Exception, requests: Sequence[_Request]) -> None:
        """Have all requests, and those to come, raise the error."""
        with self._lock:
            self._failure = error
            requests = [*requests, *self._new]
            self._new.clear()
        for request in requests:
            request.answer.set_exception(error)


def _share(links: Sequence[_Link], waiting: deque[_Request]) -> None:
    """Send waiting requests, in their order, each to the connection that has the fewest."""
    while waiting:
        ready = [link for link in links if link.is_ready and len(link.requests) < _IN_FLIGHT]
        if not ready:
            return
        link = min(ready, key=lambda one: len(one.requests))
        try:
            link.socket.send_multipart(waiting[0].message.frames(), zmq.NOBLOCK)
        except zmq.Again:  # lost, which an event will report
            link.is_ready = False
            continue
        request = waiting.popleft()
        link.requests[request.message.number] = request


def request_facts(
    addresses: Sequence[Address], secret: Secret | None, timeout_s: float, flag: str
) -> list[TeacherFacts]:
    """The facts of the teacher at each address.

    Args:
        addresses: the services.
        secret: see `Secret`.
        timeout_s: seconds until an address that is silent is an error; a teacher may still be loading.
        flag: the flag to name.

    Raises:
        MkdTeacherTimeout: an address does not answer.
        MkdTeacherError: it has another secret, or is not a teacher service.
    """
    deadline = time.monotonic() + timeout_s
    with zmq.Context() as context:
        return [_facts_of(context, address, secret, deadline, f"{flag} {address}") for address in addresses]


def _facts_of(
    context: zmq.Context, address: Address, secret: Secret | None, deadline: float, origin: str
) -> TeacherFacts:
    began, has_waited = time.monotonic(), False
    link = _Link(address, *client_socket(context, address, secret, _FACTS_BYTES))
    try:
        while (left := deadline - time.monotonic()) > 0:
            _poller(link).poll(min(link.poll_ms, 1000.0 * left))
            _read_events(link, origin)
            link.greet()
            if link.socket.poll(0):
                return _read_facts(link, origin)
            if not has_waited and time.monotonic() - began > 5.0:
                has_waited = True
                logger.info(f"waiting for {origin}, up to {deadline - began:.0f} s")
    finally:
        link.close()
    raise MkdTeacherTimeout(
        f"{origin}: no teacher answers there within {deadline - began:.0f} s: start it (mkd serve-teacher), or correct "
        f"the address; {TOKEN} must be the same on both sides, or be set on neither"
    )


def _poller(link: _Link) -> zmq.Poller:
    poller = zmq.Poller()
    for socket in (link.socket, link.monitor):
        poller.register(socket, zmq.POLLIN)
    return poller


def _read_events(link: _Link, origin: str) -> None:
    """Raises MkdTeacherError if the connection is refused."""
    while link.monitor.poll(0):
        event = recv_monitor_message(link.monitor)["event"]
        if event in (zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED):
            link.is_connected, link.is_greeted = event == zmq.EVENT_HANDSHAKE_SUCCEEDED, False
        else:
            raise MkdTeacherError(
                f"{origin} refuses the connection: {TOKEN} must be the same on both sides, or be set on neither"
            )


def _read_facts(link: _Link, origin: str) -> TeacherFacts:
    try:
        message = Message.of(link.socket.recv_multipart())
        if message.kind != Kind.FACTS:
            raise ProtocolError(f"{message.kind.name}: {message.values.get('reason', 'no facts')}")
        return TeacherFacts.of(message.values)
    except ProtocolError as error:
        raise MkdTeacherError(f"{origin} answers with {error}: is it mkd serve-teacher of the same version?") from None
