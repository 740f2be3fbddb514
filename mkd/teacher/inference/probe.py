"""Requests before the first step: find a server's model, and check that its answers fit the job."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mkd.errors import MkdTeacherError, MkdTeacherTimeout
from mkd.teacher.inference.apis import APIS
from mkd.teacher.inference.http import HttpServer, ServerAddress, ServerLost, ServerRefusal
from mkd.teacher.inference.known_text import SAME_NATS, KnownText
from mkd.teacher.inference.pool import ServedModel
from mkd.teacher.inference.states_files import StatesMissing
from mkd.utils.logging import logger

_PAUSE_S = 1.0
_MOST_BYTES = 4 << 20
_MOST_MODELS = 10_000
SHORT = 16
"""Tokens of the known text that a run scores repeatedly."""


@dataclass(frozen=True)
class ModelCard:
    """Entry of a server's list of models."""

    name: str
    """Its id in requests."""
    api: str
    """Key of `APIS`."""
    positions: int | None
    """Longest text, with generated tokens; None if not listed."""


def wait_for_server[T](request: Callable[[], T], origin: str, timeout_s: float) -> T:
    """Repeat a request until the server answers.

    Raises:
        MkdTeacherTimeout: it does not within `timeout_s` seconds.
    """
    began, has_waited = time.monotonic(), False
    while True:
        try:
            return request()
        except ServerLost as error:
            waited = time.monotonic() - began
            if waited + _PAUSE_S > timeout_s:
                raise MkdTeacherTimeout(
                    f"{origin}: no inference server answers there within {timeout_s:g} s ({error}): start it, or "
                    "correct the address"
                ) from None
            if not has_waited and waited > 5.0:
                has_waited = True
                logger.info(f"waiting for {origin}, up to {timeout_s:.0f} s ({error})")
            time.sleep(_PAUSE_S)


_UNKNOWN_PATH = (404, 405, 501)
"""Statuses with which a server answers that does not have a path."""


def find_model(server: HttpServer, address: ServerAddress, api: str, flag: str) -> ModelCard:
    """Find the model of a server.

    Args:
        server: the server.
        address: its address, which may name one of several models.
        api: value of --kd-teacher-api or --kd-rollout-api.
        flag: the flag of the address, for messages.

    Raises:
        ServerLost: the server does not answer now.
        MkdTeacherError: it is not an inference server, or the choice of a model or protocol is not clear.
    """
    try:
        answer = server.get("/v1/models", _MOST_BYTES)
    except ServerRefusal as error:
        if error.answer not in _UNKNOWN_PATH:
            raise
        raise MkdTeacherError(
            f"{flag} {address} has no /v1/models (status {error.answer}): this is neither vLLM nor SGLang; correct the "
            "address"
        ) from None
    try:
        cards = [card for card in answer["data"][:_MOST_MODELS] if _is_name(card["id"])]
        names = [card["id"] for card in cards]
    except (LookupError, TypeError):
        raise MkdTeacherError(f"{flag} {address} lists no models: is it an inference server?") from None
    wanted = [card for card in cards if address.model in (None, card["id"])]
    if len(wanted) != 1:
        listed = ", ".join(names[:8]) or "none"
        remedy = "give one as ?model=NAME at the end of the address"
        raise MkdTeacherError(f"{flag} {address} serves the models {listed:.300}: {remedy}")
    card: dict[str, Any] = wanted[0]
    found = card.get("owned_by")
    if api == "auto" and not (isinstance(found, str) and found in APIS):
        raise MkdTeacherError(
            f"{flag} {address} does not report whether it is vLLM or SGLang (owned_by is {found!r:.60}): give "
            f"{server.flags.api} {' or '.join(APIS)}"
        )
    positions = card.get("max_model_len")
    is_length = type(positions) is int and positions > 0
    return ModelCard(card["id"], found if api == "auto" else api, positions if is_length else None)


def _is_name(value: Any) -> bool:
    """False for anything but a text, and for one with control characters or halves of surrogate pairs."""
    return isinstance(value, str) and value.isprintable()


@dataclass(frozen=True)
class Probe:
    """A test of servers with a few texts."""

    text: tuple[int, ...]
    """Token ids, at least `SHORT`."""
    sentence: str | None
    """The same as characters, to compare tokenizers; None if unknown."""
    top_k: int
    vocab: int
    longest: int
    """Tokens of the longest text that the job may send."""
    flag: str
    """The flag of the addresses, for messages."""
    timeout_s: float

    def run(self, models: Sequence[ServedModel]) -> KnownText:
        """Test each server; returns the known text, with the scores of the first.

        Raises:
            MkdTeacherTimeout: a server does not answer.
            MkdTeacherError, MkdNumericError: its answers cannot be used.
        """
        known = None
        for model in models:
            found = wait_for_server(
                lambda model=model: self._test(model), f"{self.flag} {model.server}", self.timeout_s
            )
            if known is None:
                known = found
            known.check(found.scores, f"{self.flag} {model.server}", str(models[0].server))
        return known

    def _test(self, model: ServedModel) -> KnownText:
        origin, text = f"{self.flag} {model.server}", self.text[:SHORT]
        first = self._score(model, text)
        distance = first.distance(self._score(model, text))
        if not distance <= SAME_NATS:
            raise MkdTeacherError(
                f"{origin} answers the same text with log-probabilities that differ by {distance:.3f} nats on average: "
                "are several models behind this address, or does it sample or drop out?"
            )
        half = self._score(model, text[: SHORT // 2])
        distance = abs(half.own_log_probs - first.own_log_probs[: SHORT // 2 - 1]).mean()
        if not distance <= SAME_NATS:
            raise MkdTeacherError(
                f"{origin} answers the beginning of a text with other log-probabilities than the whole text (by "
                f"{distance:.3f} nats on average): its model is not causal, or its entries are shifted"
            )
        self._test_vocabulary(model)
        self._test_tokenizer(model)
        if self.longest > len(text):
            copies = -(-self.longest // len(self.text))
            self._score(model, (self.text * copies)[: self.longest])
        return KnownText(text, first)

    def _score(self, model: ServedModel, text: Sequence[int]) -> Any:
        try:
            return model.score(text, self.top_k, self.vocab)
        except ServerRefusal as error:
            remedy = model.remedy(self.top_k, len(text), self.longest + 1)
            raise MkdTeacherError(f"{self.flag} {error}. {remedy}") from None
        except StatesMissing as error:  # a wrong folder does not become the right one while the job waits
            remedy = model.remedy(self.top_k, len(text), self.longest + 1)
            raise MkdTeacherError(f"{self.flag} {error}. {remedy}") from None

    def _test_vocabulary(self, model: ServedModel) -> None:
        try:
            model.score((*self.text[:4], self.vocab - 1), self.top_k, self.vocab)
        except ServerRefusal as error:
            raise MkdTeacherError(
                f"{self.flag} {error}. The student's vocabulary has {self.vocab} tokens, and the server refuses the "
                "last of them: a model with another vocabulary is served there"
            ) from None

    def _test_tokenizer(self, model: ServedModel) -> None:
        """Compare tokenizers, if the server has a route for it."""
        if self.sentence is None:
            return
        body = {"model": model.name, "prompt": self.sentence, "add_special_tokens": False}
        try:
            found = model.server.post("/tokenize", json.dumps(body).encode(), _MOST_BYTES)
            tokens = list(found["tokens"])
        except (ServerRefusal, LookupError, TypeError):
            logger.warning(
                f"{self.flag} {model.server} has no route /tokenize: its tokenizer cannot be compared with the "
                "student's; with another vocabulary the loss is meaningless"
            )
            return
        if tokens != list(self.text):
            raise MkdTeacherError(
                f"{self.flag} {model.server} has another tokenizer than the student: it divides a sentence into the "
                f"tokens {tokens[:8]}..., the student's into {list(self.text[:8])}...; serve a teacher with the "
                "student's tokenizer"
            )
