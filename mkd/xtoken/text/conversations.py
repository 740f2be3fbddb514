"""Rendered conversations, and the position of each message in the rendered text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mkd.data.sources.chat import ChatTemplate
from mkd.data.sources.conversation import ASSISTANT, Conversation
from mkd.errors import MkdDataError
from mkd.xtoken.text.tokens import Role, SpanTokenizer, TokenSpans

Span = tuple[int, int] | None
"""(first character, end); None if it is unknown."""


@dataclass(frozen=True)
class ChatSpans:
    """A conversation rendered by one model's template and tokenized."""

    text: str
    """Output of the template."""
    tokens: TokenSpans
    """Tokens of the text. Special tokens are part of the text, none is added."""
    contents: list[Span]
    """Span of each message's content, without whitespace at its ends. None also for an empty message."""
    openings: frozenset[int]
    """Ids of the special tokens in the generation prompt, which begin a message."""

    def end_of_turn(self, message: int) -> int | None:
        """Index of the special token that ends a message, after at most whitespace; None if there is none."""
        end = self.contents[message][1]
        after = np.flatnonzero(self.tokens.offsets[:, 0] >= end)
        for token in after:
            if self.tokens.roles[token] not in (Role.CONTENT, Role.UNK):
                return None if self.tokens.ids[token] in self.openings else int(token)
            if self.text[slice(*self.tokens.offsets[token])].strip():
                return None
        return None


def ends_of_turn(student: SpanTokenizer, teacher: SpanTokenizer) -> tuple[tuple[str, str], ...]:
    """(student's, teacher's) special token that ends an answer in their chat templates, which may differ from the
    end-of-sequence token. Empty if a template or such a token is missing."""
    chat = Conversation([{"role": "user", "content": "What?"}, {"role": ASSISTANT, "content": "This."}])
    found = []
    for tokenizer in (student, teacher):
        try:
            spans = encode_chat(tokenizer, chat)
        except MkdDataError:
            return ()
        end = None if spans.contents[-1] is None else spans.end_of_turn(1)
        if end is None:
            return ()
        found.append(tokenizer.tokenizer.convert_ids_to_tokens(int(spans.tokens.ids[end])))
    return (tuple(found),)


def encode_chat(tokenizer: SpanTokenizer, chat: Conversation) -> ChatSpans:
    """Render and tokenize a conversation, and locate its messages.

    Raises:
        MkdDataError: the tokenizer has no template, or the template refuses the conversation.
    """
    template = tokenizer.template
    text, prompt = template.text(chat), template.text(chat, prompt=True)
    tokens = tokenizer.encode(text)
    return ChatSpans(text, tokens, _content_spans(text, template, chat), _openings(tokenizer, text, tokens, prompt))


def _openings(tokenizer: SpanTokenizer, text: str, tokens: TokenSpans, prompt: str) -> frozenset[int]:
    """See `ChatSpans.openings`; `prompt` is the text with the generation prompt."""
    more = tokenizer.encode(prompt.removeprefix(text))
    special = (more.roles != Role.CONTENT) & (more.roles != Role.UNK)
    if not prompt.startswith(text):  # a template may end a conversation with more than the last turn's end
        both = min(len(tokens), len(more))
        differ = np.flatnonzero(tokens.ids[:both] != more.ids[:both])
        special[: differ[0] if len(differ) else both] = False
    return frozenset(more.ids[special].tolist())


def _content_spans(text: str, template: ChatTemplate, chat: Conversation) -> list[Span]:
    """Locate the contents by rendering the conversation a second time with a mark in place of each.

    The text around the marks also surrounds the contents, unless the template inspects a content (for reasoning, say)
    and renders it differently. Then the content is located if it occurs exactly once in the rest of the text.
    """
    contents = [(message.get("content") or "").strip() for message in chat.messages]
    marks = [f"\ue0f1{number}\ue0f2" if content else "" for number, content in enumerate(contents)]
    marked = template.text(_with_contents(chat, marks))
    spans: list[Span] = []
    done = done_marked = 0
    matches = True
    for content, mark in zip(contents, marks, strict=True):
        found = marked.find(mark, done_marked) if mark else -1
        if found < 0:
            spans.append(None)
            continue
        between = marked[done_marked:found]
        begin = _after(text, done, between, content) if matches else None
        if begin is None and text.count(content, done) == 1:
            begin = text.index(content, done)
        matches = begin is not None
        done_marked = found + len(mark)
        done = begin + len(content) if matches else done
        spans.append((begin, done) if matches else None)
    return spans


def _with_contents(chat: Conversation, contents: Sequence[str]) -> Conversation:
    def changed(message: dict[str, Any], content: str) -> dict[str, Any]:
        return {**message, "content": content} if content else message

    messages = [changed(message, content) for message, content in zip(chat.messages, contents, strict=True)]
    return Conversation(messages, chat.given, chat.tools, chat.where)


def _after(text: str, done: int, between: str, content: str) -> int | None:
    """Start of a content that follows `between`, else None; both may be preceded by more whitespace."""
    for start in (done, _skip_space(text, done)):
        if text.startswith(between, start):
            begin = _skip_space(text, start + len(between))
            return begin if text.startswith(content, begin) else None
    return None


def _skip_space(text: str, begin: int) -> int:
    while begin < len(text) and text[begin].isspace():
        begin += 1
    return begin
