"""Threads that divide the texts of a rollout among servers.

A server is prepared first, takes a share of the texts, and writes them at the same time. Then its weights are verified,
and only after that its texts are used: those of a server that was started again with other weights are sent again.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from mkd.errors import MkdTeacherError, MkdTeacherTimeout
from mkd.rollout.interface import Request
from mkd.teacher.inference.http import ServerLost, pause_s
from mkd.utils.logging import EVERY_RANK, logger

MOST_AT_ONCE = 512
"""Texts that a server has at one time at most."""
_MOST_ATTEMPTS, _MOST_BESIDE_OTHERS = 10, 100
"""Times that a text is sent at most; and while another server writes or waits, which may write it later."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 5.0
_TURN_S = 0.2
"""Seconds after which a thread that waits for a server checks if its rollout has ended."""


@dataclass(frozen=True)
class Sharer:
    """The actions of a server in a rollout."""

    name: str
    prepare: Callable[[], None]
    """Returns when its weights are those of the rollout."""
    write: Callable[[Request], list[int]]
    """Called by several threads."""
    verify: Callable[[], None]
    """Returns if its weights are still those of `prepare`."""
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Held by the thread of a rollout that uses the server, the same lock in all rollouts."""


@dataclass
class _Text:
    request: Request
    answer: Future[list[int]] = field(default_factory=Future)
    attempts: int = 0
    """Times that it was sent without an answer that is used."""


class SharedTexts:
    """The texts of one rollout."""

    def __init__(self, sharers: Sequence[Sharer], requests: Sequence[Request]) -> None:
        """Start a thread per server.

        Args:
            sharers: one or more servers.
            requests: the prompts.
        """
        self._texts = [_Text(request) for request in requests]
        self._queue, self._left = deque(self._texts), len(self._texts)
        self._change = threading.Condition()
        self._closing = threading.Event()
        self._waiting = len(sharers)
        """Servers that may take texts soon: neither lost nor writing."""
        self._there = len(sharers)
        """Servers that are not lost."""
        self._problem = ""
        self.answered_at = time.monotonic()
        """Time of the last answer."""
        for sharer in sharers:
            # Daemons: a thread that waits for a silent server does not keep the job from ending.
            threading.Thread(target=self._run, args=(sharer,), name=f"rollout {sharer.name}", daemon=True).start()

    @property
    def answers(self) -> list[Future[list[int]]]:
        """The written tokens of each request. They raise an MkdError if an answer cannot be used."""
        return [text.answer for text in self._texts]

    def check_silence(self, began: float, flags: tuple[str, str], limit_s: float) -> None:
        """Raise MkdTeacherTimeout if no answer has come for the time limit.

        Args:
            began: time at which waiting began.
            flags: of the addresses, and of the limit.
            limit_s: the limit.
        """
        silent = time.monotonic() - max(began, self.answered_at)
        if silent > limit_s:
            raise MkdTeacherTimeout(
                f"no server of {flags[0]} has answered for {silent:.0f} s ({flags[1]} {limit_s:g}"
                f"{'; ' * bool(self._problem)}{self._problem}): start one again, and then this job"
            )

    def close(self) -> None:
        """End the threads when their requests end; texts without an answer stay without one."""
        self._closing.set()
        with self._change:
            self._change.notify_all()

    def _run(self, sharer: Sharer) -> None:
        if self._await_turn(sharer):
            try:
                self._share(sharer)
            finally:
                sharer.turn.release()

    def _await_turn(self, sharer: Sharer) -> bool:
        """True when no thread of an earlier rollout waits for the server: it would have the server load older weights
        while texts are written. False if the rollout ends before that."""
        if sharer.turn.acquire(blocking=False):
            return True
        self._count_server(-1)
        while not sharer.turn.acquire(timeout=_TURN_S):
            if self._closing.is_set() or not self._left:
                return False
        self._count_server(1)
        return True

    def _count_server(self, change: int) -> None:
        with self._change:
            self._waiting += change
            self._there += change

    def _share(self, sharer: Sharer) -> None:
        losses, is_lost = 0, False
        while self._wait_for_texts():
            taken: list[_Text] = []
            try:
                sharer.prepare()
                self.answered_at = time.monotonic()
                if is_lost:
                    self._find(sharer)
                is_lost = False
                if not (taken := self._take()):  # others have taken all of them
                    continue
                found, problem = self._write(sharer, taken)
                sharer.verify()
                self._finish(taken, found)
                taken = []
                if problem is not None:
                    raise problem
                losses = 0
            except ServerLost as error:
                losses += 1
                try:
                    self._lose(taken, error, is_first=not is_lost)
                except MkdTeacherError as last:
                    self._fail(last)
                is_lost = True
                self._closing.wait(pause_s(losses, _FIRST_PAUSE_S, _LONGEST_PAUSE_S))
            except Exception as error:  # also a fault of this code: the thread that waits raises it
                self._fail(error)
                return

    def _wait_for_texts(self) -> bool:
        """True when there are texts to write; False at the end."""
        with self._change:
            while not self._queue and self._left and not self._closing.is_set():
                self._change.wait()
            return bool(self._queue) and not self._closing.is_set()

    def _take(self) -> list[_Text]:
        """A share of the texts."""
        with self._change:
            share = -(-len(self._queue) // max(self._waiting, 1))
            taken = [self._queue.popleft() for _ in range(share)]
            self._waiting -= bool(taken)
        return taken

    def _write(self, sharer: Sharer, taken: Sequence[_Text]) -> tuple[list[list[int] | None], ServerLost | None]:
        """The tokens of each text, None where the server was lost, and the reason for that."""
        waiting, found = deque(enumerate(taken)), [None for _ in taken]
        problems: list[Exception] = []

        def write() -> None:
            while not problems and not self._closing.is_set():
                try:
                    place, text = waiting.popleft()
                except IndexError:
                    return
                try:
                    found[place] = sharer.write(text.request)
                    self.answered_at = time.monotonic()
                except Exception as error:
                    problems.append(error)

        threads = [
            threading.Thread(target=write, name=f"rollout {sharer.name} {number}", daemon=True)
            for number in range(min(len(taken), MOST_AT_ONCE))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in problems:
            if not isinstance(error, ServerLost):
                raise error
        return found, problems[0] if problems else None

    def _finish(self, taken: Sequence[_Text], found: Sequence[list[int] | None]) -> None:
        """Use the answers whose weights are verified; texts without one are sent again."""
        pairs = list(zip(taken, found, strict=True))
        self._send_again([text for text, tokens in pairs if tokens is None], self._there - 1)
        with self._change:
            if self._closing.is_set():
                return
            for text, tokens in pairs:
                if tokens is not None:
                    text.answer.set_result(tokens)
                    self._left -= 1
            self._waiting += 1
            self._change.notify_all()

    def _send_again(self, texts: Sequence[_Text], others: int) -> None:
        """Have texts sent again, to their server or to one of the others that are not lost."""
        with self._change:
            for text in reversed(texts):
                text.attempts += 1
                self._queue.appendleft(text)
            self._change.notify_all()
        most = _MOST_BESIDE_OTHERS if others else _MOST_ATTEMPTS
        if (attempts := max((text.attempts for text in texts), default=0)) >= most:
            raise MkdTeacherError(f"a text was sent {attempts} times without an answer: {self._problem}")

    def _find(self, sharer: Sharer) -> None:
        """A server that was lost may take texts again."""
        logger.info(f"{sharer.name} answers again", extra=EVERY_RANK)
        self._count_server(1)

    def _lose(self, taken: Sequence[_Text], error: ServerLost, *, is_first: bool) -> None:
        """Have the texts sent again."""
        self._problem = str(error)
        if is_first:
            logger.warning(f"{error}; its texts are sent again", extra=EVERY_RANK)
        with self._change:
            self._there -= is_first
            if is_first and not taken:  # one that has taken texts does not count as waiting
                self._waiting -= 1
        self._send_again(taken, self._there)

    def _fail(self, error: Exception) -> None:
        """End the rollout with an error."""
        with self._change:
            for text in self._texts:
                if not text.answer.done():
                    text.answer.set_exception(error)
            self._left = 0
            self._queue.clear()
            self._closing.set()
            self._change.notify_all()
