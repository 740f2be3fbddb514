"""Positions of messages in the text of a whole conversation.

A message's span follows from the renderings of the conversation up to it. If these are prefixes of the whole text,
their lengths are the bounds. Many templates render a message differently once others follow: they remove the reasoning
of earlier answers, end the last answer with another token, or open a reasoning block in the generation prompt. Then the
message is located by marks: the conversation is rendered again with a private-use character inside each message, which
must leave the rest of the text unchanged. A mark has a position in the whole text and one in the text up to the
message, and the texts after the two are compared:

- an answer begins where the whole text stops following the generation prompt;
- it ends where the conversation up to it ends, or else after the special token that ends it in both texts.

A message that cannot be located in this way is an error, never a guess.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from mkd.errors import MkdDataError

type Message = dict[str, Any]
type Span = tuple[int, int]
"""(first character, end)."""

_FIRST_MARK = 0xF0000
"""First code point of a private-use plane, which no text contains; `MessageLocator` checks that."""
_MARK = re.compile("[\U000f0000-\U000ffffd]")
_MARKS_PER_MESSAGE = 2
"""One in the content and one in the last tool call, since a template may drop one of them."""
_TAG = re.compile(r"<[^<>]*>|\[[^\[\]]*\]")
_END_OF_REASONING = "</think>"


class NotLocatedError(ValueError):
    """A message has no certain position in the text; the message of the error is the reason."""


@dataclass(frozen=True)
class SpecialTokens:
    """Tokens of a tokenizer that delimit messages."""

    special: tuple[str, ...]
    """Special tokens: they end and begin messages."""
    added: tuple[str, ...]
    """All added tokens, special or not, such as `<think>`."""

    @cached_property
    def _search(self) -> Callable[[str], re.Match[str] | None]:
        longest_first = sorted(self.special, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)").search

    def first(self, text: str) -> re.Match[str] | None:
        """First special token in a text."""
        return self._search(text)

    def whole_part(self, text: str) -> int:
        """Length of the longest beginning of a text that ends with white space or an added token; 0 without one."""
        end = len(text)
        while end and not text[end - 1].isspace() and not text.endswith(self.added, 0, end):
            end -= 1
        return end

    def end_of_message(self, text: str, begin: int, end: int) -> int:
        """`end`, or the end of the special token before it if only white space follows that token."""
        message = text[begin:end].rstrip()
        return begin + len(message) if message.endswith(self.special) else end


@dataclass(frozen=True)
class _Rendering:
    text: str
    """Without the marks."""
    marks: dict[str, int]
    """Mark -> position of its first occurrence in the text."""

    @classmethod
    def read(cls, marked: str) -> "_Rendering":
        marks: dict[str, int] = {}
        for number, found in enumerate(_MARK.finditer(marked)):
            marks.setdefault(found[0], found.start() - number)
        return cls(_MARK.sub("", marked), marks)

    def positions(self, messages: range) -> Iterator[tuple[str, int]]:
        """Marks of the messages in reversed order, and their positions."""
        for number in reversed(messages):
            for mark in reversed(_marks(number)):
                if mark in self.marks:
                    yield mark, self.marks[mark]


@dataclass(frozen=True)
class MessageLocator:
    """Locates messages in the text of one conversation."""

    render: Callable[[Sequence[Message], bool], str]
    """(messages, add the generation prompt) -> text. Raises MkdDataError if the template refuses them."""
    messages: Sequence[Message]
    tokens: SpecialTokens
    _texts: dict[tuple[int, bool], str] = field(default_factory=dict)
    _renderings: dict[tuple[int, bool], _Rendering] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Text of the whole conversation."""
        return self.text_of(len(self.messages), prompt=False)

    def text_of(self, count: int, prompt: bool) -> str:
        """Text of the first `count` messages, with or without the generation prompt. Rendered once."""
        key = count, prompt
        if key not in self._texts:
            self._texts[key] = self.render(self.messages[:count], prompt)
        return self._texts[key]

    def answer(self, number: int) -> Span:
        """Span of an answer: what follows the generation prompt, with the token that ends the turn.

        Raises:
            NotLocatedError: its position is not certain.
            MkdDataError: see `render`.
        """
        begin, end = self.begin_of_answer(number), self.end(number)
        return begin, self.tokens.end_of_message(self.text, begin, end)

    def begin_of_answer(self, number: int) -> int:
        """End of the generation prompt of message `number`. Raises as `answer`."""
        if self.text.startswith(prompted := self.text_of(number, prompt=True)):
            return len(prompted)
        return self._begin_in(self._whole, number)

    def begin(self, number: int) -> int:
        """First character of a message with its header. Raises as `answer`."""
        if number == 0:
            return 0
        if self.text.startswith(before := self.text_of(number, prompt=False)):
            return len(before)
        return len(self.text) - len(self.text[self.end(number - 1) :].lstrip())

    def end(self, number: int) -> int:
        """End of a message, with the token that ends it. Raises as `answer`."""
        if self.text.startswith(ended := self.text_of(number + 1, prompt=False)):
            return len(ended)
        ended, whole = self._marked(number + 1, prompt=False), self._whole
        mark = self._shared_mark(number, whole, ended)
        position, rest = whole.marks[mark], ended.text[ended.marks[mark] :]
        later = [at for _, at in whole.positions(range(number + 1, len(self.messages))) if at > position]
        following = self.text[position : min(later, default=len(self.text))]
        end = position + (len(rest) if following.startswith(rest) else self._end_of_turn(number, mark, following, rest))
        if max(at for _, at in whole.positions(range(number, number + 1))) > end:
            raise NotLocatedError("writes a part of it after another message")
        return end

    def is_rewritten(self, number: int) -> bool:
        """True if an answer's text in the whole conversation differs from that in the conversation up to it, apart from
        the token that ends it. Raises as `answer`."""
        ended, prompted = self.text_of(number + 1, prompt=False), self.text_of(number, prompt=True)
        if self.text.startswith(ended):
            return False
        begin, marked = self.begin_of_answer(number), self._marked(number + 1, prompt=False)
        mark = self._shared_mark(number, self._whole, marked)
        try:
            begin_alone = len(prompted) if ended.startswith(prompted) else self._begin_in(marked, number)
        except NotLocatedError:
            return True
        return self.text[begin : self._whole.marks[mark]] != ended[begin_alone : marked.marks[mark]]

    def _begin_in(self, rendering: _Rendering, number: int) -> int:
        """End of the generation prompt of an answer in a rendering, as far as the rendering follows it."""
        prompted = self._marked(number, prompt=True)
        begin, begin_prompted = 0, 0
        for mark, position in rendering.positions(range(number)):
            if mark in prompted.marks:
                begin, begin_prompted = position, prompted.marks[mark]
                break
        own = [position for _, position in rendering.positions(range(number, number + 1))]
        if not own or min(own) < begin:
            raise NotLocatedError("does not write it, or not after the message before it")
        between, rest = rendering.text[begin : min(own)], prompted.text[begin_prompted:]
        if between.startswith(rest):
            return begin + len(rest)
        common = self.tokens.whole_part(_common(between, rest))
        if begin_prompted + common <= self._begin_of_prompt(number):
            raise NotLocatedError("does not write the generation prompt before it")
        return begin + common

    def _begin_of_prompt(self, number: int) -> int:
        """First character of the generation prompt in the text before an answer."""
        prompted, before = self.text_of(number, prompt=True), self.text_of(number, prompt=False)
        if prompted.startswith(before):
            return len(before)
        return self.tokens.whole_part(_common(prompted, before))

    def _end_of_turn(self, number: int, mark: str, following: str, rest: str) -> int:
        """End of the special token that ends a message although the conversation up to it ends differently.

        Args:
            number: the message.
            mark: its mark.
            following: the whole text from the mark to the next message's.
            rest: text of the conversation up to the message, from the mark on.
        """
        prompted = self._marked(number + 1, prompt=True)
        texts = [following, rest, prompted.text[prompted.marks.get(mark, len(prompted.text)) :]]
        found = [self.tokens.first(text) for text in texts]
        if all(found) and not self.tokens.first(json.dumps(self.messages[number], ensure_ascii=False, default=str)):
            whole, _, last = found
            same_text = len({text[: token.start()] for text, token in zip(texts, found, strict=True)}) == 1
            first_answer = max(number, 1)
            opens = whole[0] in self.text_of(first_answer, prompt=True)[self._begin_of_prompt(first_answer) :]
            if same_text and whole[0] == last[0] and not opens:
                return whole.end()
        raise NotLocatedError("does not end it as it ends the conversation up to it")

    def _shared_mark(self, number: int, *renderings: _Rendering) -> str:
        for mark in reversed(_marks(number)):
            if all(mark in rendering.marks for rendering in renderings):
                return mark
        raise NotLocatedError("does not write it, or changes it")

    @property
    def _whole(self) -> _Rendering:
        return self._marked(len(self.messages), prompt=False)

    def _marked(self, count: int, prompt: bool) -> _Rendering:
        """The text of `text_of`, with the positions of the marks."""
        key = count, prompt
        if key not in self._renderings:
            found = _Rendering.read(self.render(self._marked_messages[:count], prompt))
            if found.text != self.text_of(count, prompt):
                found = replace(found, marks={})
            self._renderings[key] = found
        return self._renderings[key]

    @cached_property
    def _marked_messages(self) -> list[Message]:
        """The messages with all marks that leave the text unchanged."""
        numbers = range(len(self.messages))
        every = {mark for number in numbers for mark in _marks(number)}
        if not self._leaves_text(every):
            every = {mark for mark in sorted(every) if self._leaves_text({mark})}
            if not self._leaves_text(every):
                raise NotLocatedError("changes the text around a message with the message")
        return self._with_marks(every)

    def _leaves_text(self, marks: set[str]) -> bool:
        try:
            return _Rendering.read(self.render(self._with_marks(marks), False)).text == self.text
        except MkdDataError:
            return False

    def _with_marks(self, marks: set[str]) -> list[Message]:
        return [
            _mark_message(message, *(mark if mark in marks else "" for mark in _marks(number)))
            for number, message in enumerate(self.messages)
        ]


def _common(first: str, second: str) -> str:
    """Longest common beginning of two texts."""
    pairs = enumerate(zip(first, second, strict=False))
    return first[: next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))]


def _marks(number: int) -> list[str]:
    """Marks of a message, of its content and of its last tool call."""
    first = _FIRST_MARK + number * _MARKS_PER_MESSAGE
    return [chr(first + i) for i in range(_MARKS_PER_MESSAGE)]


def _mark_message(message: Message, content: str, call: str) -> Message:
    """A copy of a message with one mark in its content and one in its last tool call; an empty mark adds nothing."""
    message = dict(message)
    if content and isinstance(message.get("content"), str):
        message["content"] = _mark_text(message["content"], content)
    if call and isinstance(calls := message.get("tool_calls"), list) and calls:
        message["tool_calls"] = [*calls[:-1], _mark_call(calls[-1], call)]
    return message


def _mark_call(call: Any, mark: str) -> Any:
    """A copy of a tool call with a mark in its last argument, or in its name if no argument is a text."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _mark_call(call["function"], mark)}
    for key in ("arguments", "name"):
        if (marked := _mark_value(call.get(key), mark)) is not None:
            return {**call, key: marked}
    return call


def _mark_value(value: Any, mark: str) -> Any:
    """A copy of a value with a mark in its last text; None if it has no text."""
    if isinstance(value, str):
        return _mark_text(value, mark) if value.strip() else None
    if isinstance(value, dict):
        for key in reversed(value):
            if (marked := _mark_value(value[key], mark)) is not None:
                return {**value, key: marked}
    return None


def _mark_text(text: str, mark: str) -> str:
    """Insert a mark into the text after the reasoning, not at its ends and not inside a tag, if possible."""
    first = text.rfind(_END_OF_REASONING) + len(_END_OF_REASONING) if _END_OF_REASONING in text else 0
    visible = text[first:].strip()
    if not visible:
        return text
    begin = text.index(visible, first)
    middle = begin + len(visible) // 2
    for tag in _TAG.finditer(text, begin):
        if tag.start() < middle < tag.end():
            middle = tag.end() if tag.end() < begin + len(visible) else max(tag.start(), begin)
            break
    return text[:middle] + mark + text[middle:]
