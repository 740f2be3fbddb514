"""Where the messages of a conversation stand in what a chat template made of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mkd.data.sources.chat import ASSISTANT, ChatTemplate, Conversation
from mkd.errors import MkdDataError
from mkd.xtoken.text.tokens import Role, SpanTokenizer, TokenSpans

Place = tuple[int, int] | None
"""First character and end; None where it cannot be told."""


@dataclass(frozen=True)
class ChatSpans:
    """A conversation through one model's template and tokenizer."""

    text: str
    """What the template made of it."""
    tokens: TokenSpans
    """Of the text. Special tokens are in the text, none is added."""
    places: list[Place]
    """Of each message's content, without white space at its ends. None also for an empty message."""

    openings: frozenset[int]
    """Ids of special tokens that begin a message, as in what comes before an answer."""

    def end_of_turn(self, message: int) -> int | None:
        """The special token that ends a message, with at most white space before it; None if there is none."""
        end = self.places[message][1]
        after = np.flatnonzero(self.tokens.offsets[:, 0] >= end)
        for token in after:
            if self.tokens.roles[token] not in (Role.CONTENT, Role.UNK):
                return None if self.tokens.ids[token] in self.openings else int(token)
            if self.text[slice(*self.tokens.offsets[token])].strip():
                return None
        return None


def ends_of_turn(student: SpanTokenizer, teacher: SpanTokenizer) -> tuple[tuple[str, str], ...]:
    """(student's, teacher's) special token that ends an answer in their chat templates: it may be another than ends
    texts. Nothing where a template or such a token is missing."""
    chat = Conversation([{"role": "user", "content": "What?"}, {"role": ASSISTANT, "content": "This."}])
    found = []
    for side in (student, teacher):
        try:
            spans = encode_chat(side, chat)
        except MkdDataError:
            return ()
        end = None if spans.places[-1] is None else spans.end_of_turn(1)
        if end is None:
            return ()
        found.append(side.tokenizer.convert_ids_to_tokens(int(spans.tokens.ids[end])))
    return (tuple(found),)


def encode_chat(tokenizer: SpanTokenizer, chat: Conversation) -> ChatSpans:
    """Render and tokenize a conversation, and find its messages.

    Raises:
        MkdDataError: the tokenizer has no template, or it refuses the conversation.
    """
    template = tokenizer.template
    text, prompt = template.text(chat), template.text(chat, prompt=True)
    tokens = tokenizer.encode(text)
    return ChatSpans(text, tokens, _places(text, template, chat), _openings(tokenizer, text, tokens, prompt))


def _openings(tokenizer: SpanTokenizer, text: str, tokens: TokenSpans, prompt: str) -> frozenset[int]:
    """See `ChatSpans`, from the same conversation with what comes before an answer."""
    more = tokenizer.encode(prompt.removeprefix(text))
    special = (more.roles != Role.CONTENT) & (more.roles != Role.UNK)
    if not prompt.startswith(text):  # a template may end a conversation with more than the last turn's end
        both = min(len(tokens), len(more))
        differ = np.flatnonzero(tokens.ids[:both] != more.ids[:both])
        special[: differ[0] if len(differ) else both] = False
    return frozenset(more.ids[special].tolist())


def _places(text: str, template: ChatTemplate, chat: Conversation) -> list[Place]:
    """Find the contents by rendering the conversation once more with a mark in place of each.

    What stands around the marks stands around the contents too, unless the template looks into a content (for
    reasoning, say) and does something else with it. Then the content counts where it occurs once in the rest of the
    text, and nowhere otherwise.
    """
    contents = [(message.get("content") or "").strip() for message in chat.messages]
    marks = [f"\ue0f1{number}\ue0f2" if content else "" for number, content in enumerate(contents)]
    marked = template.text(_with_contents(chat, marks))
    places: list[Place] = []
    done = done_marked = 0
    in_step = True
    for content, mark in zip(contents, marks, strict=True):
        found = marked.find(mark, done_marked) if mark else -1
        if found < 0:
            places.append(None)
            continue
        between = marked[done_marked:found]
        begin = _after(text, done, between, content) if in_step else None
        if begin is None and text.count(content, done) == 1:
            begin = text.index(content, done)
        in_step = begin is not None
        done_marked = found + len(mark)
        done = begin + len(content) if in_step else done
        places.append((begin, done) if in_step else None)
    return places


def _with_contents(chat: Conversation, contents: Sequence[str]) -> Conversation:
    def changed(message: dict[str, Any], content: str) -> dict[str, Any]:
        return {**message, "content": content} if content else message

    messages = [changed(message, content) for message, content in zip(chat.messages, contents, strict=True)]
    return Conversation(messages, chat.given, chat.tools, chat.where)


def _after(text: str, done: int, between: str, content: str) -> int | None:
    """Where a content begins that follows `between`, if it does; both may have more white space before them."""
    for start in (done, _skip_space(text, done)):
        if text.startswith(between, start):
            begin = _skip_space(text, start + len(between))
            return begin if text.startswith(content, begin) else None
    return None


def _skip_space(text: str, begin: int) -> int:
    while begin < len(text) and text[begin].isspace():
        begin += 1
    return begin
