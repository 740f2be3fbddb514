"""Threads that send texts to the addresses of one teacher, send them again where an address fails, and score a known
text before the answers of an address are used: a server that was restarted with other weights is found."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from mkd.errors import MkdTeacherTimeout
from mkd.teacher.inference.apis import InferenceApi, score
from mkd.teacher.inference.http import HttpServer, ServerLost, pause_s
from mkd.teacher.inference.known_text import KnownText
from mkd.teacher.inference.scores import TokenScores
from mkd.utils.logging import EVERY_RANK, logger

IN_FLIGHT = 8
"""Texts that an address has at one time: servers batch them."""
_UNVERIFIED = 16
"""Answers of an address that may wait for the known text."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 5.0
_LOG_S = 30.0
"""Seconds between two lines about failures of an address."""


@dataclass(frozen=True)
class ServedModel:
    """A model of an inference server."""

    server: HttpServer
    api: InferenceApi
    name: str
    """The name under which the server has it."""

    def score(self, text: Sequence[int], top_k: int, vocab: int) -> TokenScores:
        """See `mkd.teacher.inference.apis.score`."""
        return score(self.api, self.server, self.name, text, top_k, vocab)

    def remedy(self, top_k: int, tokens: int, length: int) -> str:
        """The remedy, for messages, if the server refuses a text.

        Args:
            top_k: see `score`.
            tokens: those of the text.
            length: tokens for which the server must be started.
        """
        start = self.api.remedy.format(top_k=top_k, length=length)
        return (
            f"This job needs the {top_k} most probable tokens of each position (--kd-top-k) in texts of {tokens} "
            f"tokens: start the server with {start}, or reduce --kd-top-k or --seq-length"
        )


@dataclass
class _Text[W, A]:
    """A text until it is answered."""

    work: W
    answer: Future[A] = field(default_factory=Future)
    was_answered: bool = False
    """True if an answer has arrived once, which may not have been verified."""


@dataclass
class _Address[M: ServedModel, W, A]:
    """State of one server."""

    model: M
    busy: int = 0
    """Texts that it computes."""
    unverified: list[tuple[_Text[W, A], A]] = field(default_factory=list)
    """Answers that arrived after the last check of the known text."""
    is_lost: bool = False
    """True if the last request failed, and that was logged."""
    logged_at: float = -math.inf


class ScoringPool[M: ServedModel, W, A]:
    """Sends each text to one of the servers."""

    def __init__(
        self,
        models: Sequence[M],
        known: KnownText,
        compute: Callable[[M, W], A],
        *,
        top_k: int,
        vocab: int,
    ) -> None:
        """Start the threads.

        Args:
            models: the same model of one or more servers.
            known: a text by which other weights are recognized.
            compute: requests the answer for a text from a model, in the threads.
            top_k: tokens per position of the known text.
            vocab: size of the vocabulary.
        """
        self._known, self._compute, self._top_k, self._vocab = known, compute, top_k, vocab
        self._change = threading.Condition()
        self._queue: deque[_Text[W, A]] = deque()
        self._closing = threading.Event()
        self._problem = ""
        self.answered_at = time.monotonic()
        """Time of the last answer to a text that had none yet, or of the last answers that were verified: a server that
        fails each time before its answers are verified is as silent as one without answers."""
        for model in models:
            address: _Address[M, W, A] = _Address(model)
            for number in range(IN_FLIGHT):
                # Daemons: a thread that waits for a silent server does not keep the job from ending.
                threading.Thread(
                    target=self._run, args=(address,), name=f"teacher {model.server} {number}", daemon=True
                ).start()

    def submit(self, work: W) -> Future[A]:
        """Send a text. The future raises an MkdError if an answer cannot be used."""
        text: _Text[W, A] = _Text(work)
        with self._change:
            self._queue.append(text)
            self._change.notify_all()
        return text.answer

    def check_silence(self, began: float, limit_s: float) -> None:
        """Raise MkdTeacherTimeout if no answer has come for the time limit since `began`."""
        silent = time.monotonic() - max(began, self.answered_at)
        if silent > limit_s:
            raise MkdTeacherTimeout(
                f"the teacher has not answered for {silent:.0f} s (--kd-teacher-timeout {limit_s:g}"
                f"{'; ' * bool(self._problem)}{self._problem}): start it again, and then this job"
            )

    def close(self) -> None:
        """End the threads when their requests end; texts without an answer stay without one."""
        self._closing.set()
        with self._change:
            self._change.notify_all()

    def _run(self, address: _Address[M, W, A]) -> None:
        failures = 0
        while (work := self._next(address)) is not None:
            try:
                self._do(address, work)
                failures = 0
            except ServerLost as error:
                self._lose(address, work, error)
                failures += 1
                self._closing.wait(pause_s(failures, _FIRST_PAUSE_S, _LONGEST_PAUSE_S))
            except Exception as error:  # also a fault of this code: the thread that waits raises it
                for text in self._drop(address, work):
                    text.answer.set_exception(error)

    def _next(self, address: _Address[M, W, A]) -> _Text[W, A] | list[tuple[_Text[W, A], A]] | None:
        """The next work for an address: a text, or answers to verify; None at the end."""
        with self._change:
            while not self._closing.is_set():
                waits = address.unverified
                if len(waits) >= _UNVERIFIED or (waits and not self._queue and not address.busy):
                    address.unverified = []
                    return waits
                if self._queue:
                    address.busy += 1
                    return self._queue.popleft()
                self._change.wait()
        return None

    def _do(self, address: _Address[M, W, A], work: _Text[W, A] | list[tuple[_Text[W, A], A]]) -> None:
        model = address.model
        if isinstance(work, list):
            now = model.score(self._known.text, self._top_k, self._vocab)
            self._known.check(now, str(model.server), "at the start of this run")
            for text, answer in work:
                text.answer.set_result(answer)
            self.answered_at = time.monotonic()
        else:
            answer = self._compute(model, work.work)
            with self._change:
                address.busy -= 1
                address.unverified.append((work, answer))
                self._change.notify_all()
            if not work.was_answered:
                work.was_answered, self.answered_at = True, time.monotonic()
        if address.is_lost:
            address.is_lost = False
            logger.info(f"{model.server} answers again", extra=EVERY_RANK)

    def _drop(self, address: _Address[M, W, A], work: _Text[W, A] | list[tuple[_Text[W, A], A]]) -> list[_Text[W, A]]:
        """The texts of some work that has failed."""
        if isinstance(work, list):
            return [text for text, _ in work]
        with self._change:
            address.busy -= 1
            self._change.notify_all()
        return [work]

    def _lose(
        self, address: _Address[M, W, A], work: _Text[W, A] | list[tuple[_Text[W, A], A]], error: ServerLost
    ) -> None:
        """Have the texts sent again, also those whose answers are not verified."""
        texts = self._drop(address, work)
        self._problem = str(error)
        with self._change:
            texts += [text for text, _ in address.unverified]
            address.unverified = []
            self._queue.extendleft(reversed(texts))
            self._change.notify_all()
        if not address.is_lost and time.monotonic() - address.logged_at > _LOG_S:
            address.is_lost, address.logged_at = True, time.monotonic()
            logger.warning(f"{error}; {len(texts)} texts are sent again", extra=EVERY_RANK)
