"""A conversation of a chat file: its messages, checked, and which of them are learned.

A message with a key in LEARN_KEYS whose value is 0 or false is context only; a `weight` between 0 and 1 is the weight
of its tokens in the loss.
"""

import json
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from mkd.data.sources.record_forms import AS_FOUND, ROLES, RecordOptions, standard_record, unknown_role
from mkd.data.sources.text import decode, json_object, require_unicode
from mkd.errors import MkdDataError

ASSISTANT = "assistant"
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of an answer's reasoning; transformers copies the one that a message has to the others."""
SPOKEN = ("tool_calls", "function_call", REASONING, "content")
"""Keys of a message that a chat template writes; a template that drops one of them drops a part of the conversation."""
LEARN_KEYS = ("weight", "train", "training", "train_on_turn", "loss")
"""Keys of a message that determine whether it is learned: OpenAI's, axolotl's and ms-swift's."""
LEAST_WEIGHT = 1e-6
"""Smaller weights than this and above 0 are lost in single precision: nothing would be learned."""


@dataclass(frozen=True)
class Conversation:
    """One line of a chat file."""

    messages: list[dict[str, Any]]
    given: int = 0
    """Number of first messages that are context only, whatever their role: those of `prompt`."""
    tools: list[Any] | None = None
    where: str = ""
    """File and line."""

    @classmethod
    def parse(cls, line: bytes, where: str, options: RecordOptions = AS_FOUND) -> "Conversation":
        """Parse a JSON object in one of the forms of `mkd.data.sources.record_forms`.

        A string prompt is a user message, a string completion an assistant message. `tools` is passed to the template.

        Raises:
            MkdDataError: another form; names file and line.
        """
        record = standard_record(json_object(decode(line, where), where), options.form, where)
        tools = record.get("tools")
        if tools is not None and not isinstance(tools, list):
            raise MkdDataError(f"{where}: tools is a {type(tools).__name__}, not a list")
        if "messages" in record:
            return cls(_messages(record, "messages", None, where), 0, tools, where)
        prompt = _messages(record, "prompt", "user", where)
        return cls([*prompt, *_messages(record, "completion", ASSISTANT, where)], len(prompt), tools, where)

    @property
    def has_answer(self) -> bool:
        return any(map(self.is_learned, range(len(self.messages))))

    def is_learned(self, number: int) -> bool:
        """True for an answer that is learned: neither context only nor excluded by a key in LEARN_KEYS."""
        is_answer = number >= self.given and self.messages[number]["role"] == ASSISTANT
        return is_answer and not self.is_excluded(number)

    def is_excluded(self, number: int) -> bool:
        """True for an answer that a key in LEARN_KEYS excludes."""
        message = self.messages[number]
        return message["role"] == ASSISTANT and _learned(message) is False

    @property
    def fractions(self) -> set[float]:
        """The weights of learned messages that are neither 0 nor 1."""
        learned = [message for number, message in enumerate(self.messages) if self.is_learned(number)]
        return {_weight(message) for message in learned} - {1.0}

    def with_weight(self, weight: float) -> "Conversation":
        """The conversation in which only the messages of one weight are learned."""
        messages = [
            {**message, **({"weight": 0} if message["role"] == ASSISTANT and _weight(message) != weight else {})}
            for message in self.messages
        ]
        return replace(self, messages=messages)

    @property
    def has_empty_message(self) -> bool:
        """True if a user or assistant message is empty; system prompts and tool results may be."""
        return not self.messages or any(
            message["role"] in ("user", ASSISTANT)
            and not (message.get("content") or "").strip()
            and not message.get("tool_calls")
            for message in self.messages
        )


def _messages(record: dict[str, Any], key: str, role_of_text: str | None, where: str) -> list[dict[str, Any]]:
    value = record[key]
    if role_of_text and isinstance(value, str):
        value = [{"role": role_of_text, "content": value}]
    if not isinstance(value, list):
        raise MkdDataError(f"{where}: {key} is a {type(value).__name__}, not a list of messages")
    for number, message in enumerate(value, start=1):
        name = f"{where}: message {number} of {key}"
        if not isinstance(message, dict):
            raise MkdDataError(f"{name} is a {type(message).__name__}, not an object with role and content")
        if message.get("role") not in ROLES:
            raise MkdDataError(f"{name} {unknown_role(message)}")
        if (other := _misnamed_content(message)) is not None:
            raise MkdDataError(f"{name} has {other} and no content: rename {other} to content")
        content = message.get("content")
        if not isinstance(content, str | None):
            raise MkdDataError(f"{name} has a {type(content).__name__} as content, not a string")
        require_unicode(content or "", name)
        _check_learned(message, name)
    return value


def _misnamed_content(message: dict[str, Any]) -> str | None:
    """The key of a text that is meant as content; None for a message that has a key in SPOKEN, or no text at all:
    tables have no null keys, so an empty message may have no content."""
    spoken = {one for key in SPOKEN for one in ((key,) if isinstance(key, str) else key)}
    if not spoken.isdisjoint(message):
        return None
    texts = [key for key, value in message.items() if isinstance(value, str) and value.strip()]
    return next(filter(is_near_content, texts), None)


def is_near_content(key: str) -> bool:
    """True for a key under which a message may have its content by mistake."""
    return key in ("text", "value") or bool(get_close_matches(key[:16].lower(), ["content"]))


def _learned(message: dict[str, Any]) -> bool | None:
    """True or False by the keys in LEARN_KEYS; None without any. The message has passed `_check_learned`."""
    given = [bool(message[key]) for key in LEARN_KEYS if message.get(key) is not None]
    return given[0] if given else None


def _weight(message: dict[str, Any]) -> float:
    """Weight of a message that has passed `_check_learned`, from 0 to 1."""
    if _learned(message) is False:
        return 0.0
    return 1.0 if message.get("weight") is None else float(message["weight"])


def _check_learned(message: dict[str, Any], name: str) -> None:
    given = {key: message[key] for key in LEARN_KEYS if message.get(key) is not None}
    for key, value in given.items():
        is_number = isinstance(value, int | float)
        if isinstance(value, bool) or (
            is_number and (value in (0, 1) or (key == "weight" and LEAST_WEIGHT <= value < 1))
        ):
            continue
        if is_number:
            legal = "0 or false, or 1 or true; a fraction is a weight"
            if key == "weight":
                legal = f"a weight from 0 to 1, and at least {LEAST_WEIGHT:g} if it is not 0"
            raise MkdDataError(f"{name} has {key} {value}, which must be {legal}")
        raise MkdDataError(f"{name} has the {type(value).__name__} {value!r} as {key}, not 0, 1, false or true")
    if len(set(map(bool, given.values()))) > 1:
        stated = ", ".join(f"{key} {json.dumps(value)}" for key, value in given.items())
        raise MkdDataError(f"{name} has {stated}, which contradict each other: keep one of them")
    if message["role"] != ASSISTANT and _learned(message):
        key = next(iter(given))
        raise MkdDataError(
            f"{name} has {key} {json.dumps(given[key])} and the role {message['role']}, but only messages of the "
            f"{ASSISTANT} are learned: remove {key}"
        )
    if message.get("train_detail") is not None:
        raise MkdDataError(f"{name} has train_detail, which is not supported: a message is learned as a whole or not")
