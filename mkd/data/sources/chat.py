"""Conversations to token ids, with a mask of the assistant's tokens.

The text is the output of the tokenizer's own chat template. The assistant's tokens are those that overlap

- the template's `{% generation %}` blocks, if it has any: exactly the mask of
  `tokenizer.apply_chat_template(..., return_assistant_tokens_mask=True)`;
- otherwise, for each assistant message, the text that rendering the conversation up to and including the message adds
  to rendering it up to the message with a generation prompt. If a template renders the conversation differently once
  others follow, the message is located in the whole text (`chat_spans`), and is learned as that text has it. White
  space after a special token that ends the message is excluded: the model stops at that token. A first message has no
  prompt and is context only.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from mkd.data.sources.chat_spans import MessageLocator, NotLocatedError, SpecialTokens
from mkd.data.sources.conversation import ASSISTANT, SPOKEN, Conversation
from mkd.data.sources.record_forms import AS_FOUND, RecordOptions
from mkd.data.sources.text import BadRecords, RawBatch, once_per_process, require_unicode
from mkd.errors import MkdCheckpointError, MkdDataError
from mkd.utils.model_folders.chat_template import apply_chat_template
from mkd.utils.model_folders.pretrained import load_tokenizer, token_rules

EMPTY, UNSUPERVISED = "with an empty message", "without a word of the assistant"
"""Reasons for leaving out a conversation."""
SUPERVISED = np.uint32(1 << 31)
"""Bit of a stored token id that marks a token of the assistant."""

_PROBED_TOKENS = 16
"""Supervised tokens of an answer that are decoded first to find one that is text."""

_REASONING_BLOCK = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TEMPLATE_CHARACTERS, _TEMPLATE_GROWTH = 100_000, 20
"""Characters that a template may add to a conversation, and how often it may repeat it: tokenizing a text of megabytes
for each of a million conversations would not end."""


@dataclass(frozen=True)
class EncodedChat:
    """A tokenized conversation."""

    ids: np.ndarray
    """[n] int64."""
    supervised: np.ndarray
    """[n] bool, the assistant's tokens."""
    rewritten: bool
    """True if the template writes an answer differently once others follow, without its reasoning, for example."""


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer with its template.

    Raises:
        MkdDataError: the tokenizer has no template, or is slow (has no offsets of tokens in the text).
    """

    tokenizer: PreTrainedTokenizerBase
    folder: str
    """Folder of the tokenizer, for messages."""
    flag: str = "--tokenizer-model"
    """Flag that named the folder, for messages."""

    def __post_init__(self) -> None:
        if not self.tokenizer.chat_template:
            raise MkdDataError(
                f"{self.flag} {self.folder} has no chat template, which chat data requires: put a "
                "chat_template.jinja into the folder"
            )
        if not self.tokenizer.is_fast:
            raise MkdDataError(
                f"{self.flag} {self.folder} is a slow tokenizer, which has no offsets of tokens in a text: convert it "
                "to a tokenizer.json"
            )

    @cached_property
    def marks_assistant(self) -> bool:
        """True if the template has {% generation %} blocks."""
        return _GENERATION.search(self.tokenizer.get_chat_template()) is not None

    def encode(self, chat: Conversation) -> tuple[np.ndarray, np.ndarray]:
        """Token ids ([n] int64) and a mask of the assistant's tokens ([n] bool). Raises as `encode_chat`."""
        coded = self.encode_chat(chat)
        return coded.ids, coded.supervised

    def encode_chat(self, chat: Conversation) -> EncodedChat:
        """Render and tokenize a conversation, and mark the assistant's tokens.

        Raises:
            MkdDataError: the template refuses the conversation, drops a part of it, or writes an answer at a position
                that is not certain.
        """
        locator = self._locator(chat)
        self._check_size(chat, locator.text)
        drops_earlier = self.check_complete(chat, locator.text)
        ids, supervised = self._encode(chat, locator)
        self._check_answers(chat, ids, supervised)
        rewritten = not self.marks_assistant and any(
            self._locate(locator.is_rewritten, chat, number) for number in _answers(chat)
        )
        return EncodedChat(ids, supervised, rewritten or drops_earlier)

    def _check_size(self, chat: Conversation, text: str) -> None:
        if len(text) <= _TEMPLATE_CHARACTERS:
            return
        given = len(json.dumps([chat.messages, chat.tools], default=str))
        if len(text) > _TEMPLATE_CHARACTERS + _TEMPLATE_GROWTH * given:
            raise MkdDataError(
                f"{chat.where}: the chat template of {self.flag} {self.folder} makes {len(text):,} characters of a "
                f"conversation of {given:,}: take the template from the model's source again"
            )

    def _generation_mask(self, chat: Conversation, locator: MessageLocator) -> tuple[np.ndarray, np.ndarray]:
        """Token ids, and the mask of {% generation %} blocks without messages that are context only."""
        options = {"return_dict": True, "return_assistant_tokens_mask": True, "tokenizer_kwargs": {"verbose": False}}
        coded = self._apply(chat, chat.messages, **options)
        ids, supervised = np.array(coded["input_ids"]), np.array(coded["assistant_masks"], dtype=bool)
        unlearned = []
        if chat.given:
            is_answer = chat.messages[chat.given]["role"] == ASSISTANT
            begin_of = locator.begin_of_answer if is_answer else locator.begin
            unlearned.append((0, self._locate(begin_of, chat, chat.given)))
        for number in range(chat.given, len(chat.messages)):
            if chat.is_excluded(number):
                begin, end = (self._locate(bound, chat, number) for bound in (locator.begin, locator.end))
                unlearned.append((begin, end))
        if unlearned:
            supervised &= ~_overlaps(self._tokenize(locator.text)[1], unlearned)
        return ids, supervised

    def weighted_tokens(self, chat: Conversation) -> list[tuple[float, np.ndarray]]:
        """(weight, [n] bool: tokens with it) for each weight of a message that is neither 0 nor 1."""
        found = []
        for weight in sorted(chat.fractions):
            part = chat.with_weight(weight)
            found.append((weight, self._encode(part, self._locator(part))[1]))
        return found

    def _encode(self, chat: Conversation, locator: MessageLocator) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and the mask of the assistant's tokens."""
        if self.marks_assistant:
            return self._generation_mask(chat, locator)
        spans = [self._locate(locator.answer, chat, number) for number in _answers(chat)]
        ids, offsets = self._tokenize(locator.text)
        return ids, _overlaps(offsets, spans)

    def _locator(self, chat: Conversation) -> MessageLocator:
        def render(messages: Sequence[dict[str, Any]], prompt: bool) -> str:
            return self._render(chat, messages, prompt)

        return MessageLocator(render, chat.messages, self._special_tokens)

    def _locate[Found](self, locate: Callable[[int], Found], chat: Conversation, number: int) -> Found:
        """`locate(number)`. Raises MkdDataError if the message has no certain position in the text."""
        try:
            return locate(number)
        except NotLocatedError as error:
            raise MkdDataError(
                f"{chat.where}: the chat template of {self.flag} {self.folder} renders message {number + 1} "
                f"({chat.messages[number]['role']}) differently in the whole conversation than in the conversation up "
                f"to it, and {error}, so that the assistant's tokens cannot be found: mark them in the template with "
                "{% generation %}, or cut conversations after the first answer"
            ) from error

    def text(self, chat: Conversation, prompt: bool = False) -> str:
        """Render a conversation: the text that `encode` tokenizes.

        Args:
            chat: the conversation.
            prompt: add the generation prompt.

        Raises:
            MkdDataError: the template refuses the conversation.
        """
        return self._render(chat, chat.messages, prompt)

    def check_generation_prompt(self, chat: Conversation) -> None:
        """Refuse a template without a generation prompt: after it the model would continue the question.

        The rendering of the conversation is the same with and without one, and an answer to it begins with more than
        white space, such as the name of the assistant's role.

        Args:
            chat: a conversation without answers at its end.

        Raises:
            MkdDataError: see above.
        """
        text, answer = self.text(chat, prompt=True), "\ue0f1"  # a character of private use
        if text != self.text(chat):
            return
        try:
            answered = self._render(chat, [*chat.messages, {"role": ASSISTANT, "content": answer}], prompt=False)
        except MkdDataError:
            return
        if answered.startswith(text) and answered[len(text) :].partition(answer)[0].strip():
            raise MkdDataError(
                f"{chat.where}: the chat template of {self.flag} {self.folder} has no generation prompt, so that the "
                "student would not write an answer: end the template with {% if add_generation_prompt %} and the "
                "beginning of an assistant message"
            )

    def check_complete(self, chat: Conversation, text: str) -> bool:
        """Check that the template drops no part of the conversation: `tools`, a key in SPOKEN, or <think> in a content.

        A part is dropped if the text is the same without it. A template may drop parts of earlier turns, as those of
        reasoning models do: what counts is the conversation up to the message too.

        Args:
            chat: the conversation.
            text: its rendering.

        Returns:
            True if the template drops a part of an earlier turn that it writes if the turn is the last one.

        Raises:
            MkdDataError: the template drops a part.
        """
        dropped = False
        if chat.tools and self._is_text_of(text, replace(chat, tools=None)):
            self._refuse_loss(chat, "the record's tools", "tools")
        for number, message in enumerate(chat.messages, start=1):
            for key, changed in _without_parts(message, text):
                others = [*chat.messages[: number - 1], changed, *chat.messages[number:]]
                if not self._is_text_of(text, replace(chat, messages=others)):
                    continue
                if self._drops_at_end(chat, others, number):
                    self._refuse_loss(chat, f"{key} of message {number} ({message['role']})", key)
                dropped = True
        return dropped

    def _drops_at_end(self, chat: Conversation, others: list[dict[str, Any]], number: int) -> bool:
        try:
            text = self._render(chat, chat.messages[:number], prompt=False)
        except MkdDataError:
            return True
        return self._is_text_of(text, replace(chat, messages=others[:number]))

    def _is_text_of(self, text: str, chat: Conversation) -> bool:
        try:
            return self.text(chat) == text
        except MkdDataError:
            return False

    def _refuse_loss(self, chat: Conversation, part: str, key: str) -> None:
        raise MkdDataError(
            f"{chat.where}: the chat template of {self.flag} {self.folder} does not write {part}, so that it would be "
            f"lost: take a template that writes {key}, or remove {key} from the data"
        )

    def _check_answers(self, chat: Conversation, ids: np.ndarray, supervised: np.ndarray) -> None:
        """Raise MkdDataError for a run of supervised tokens that holds special tokens and whitespace only."""
        edges = np.flatnonzero(np.diff(supervised, prepend=False, append=False))
        for number, (begin, end) in enumerate(zip(edges[::2], edges[1::2], strict=True), start=1):
            for part in (ids[begin : min(end, begin + _PROBED_TOKENS)], ids[begin:end]):
                if self.tokenizer.decode(part, skip_special_tokens=True).strip():
                    break
            else:
                raise MkdDataError(
                    f"{chat.where}: the chat template of {self.flag} {self.folder} writes no text for learned answer "
                    f"{number}, so that the model would learn to end its turn at once: take a template that writes all "
                    "keys of the message, or leave the message out"
                )

    @cached_property
    def _special_tokens(self) -> SpecialTokens:
        added = self.tokenizer.added_tokens_decoder.values()
        return SpecialTokens(
            tuple(token.content for token in added if token.special), tuple(token.content for token in added)
        )

    def _render(self, chat: Conversation, messages: Sequence[dict[str, Any]], prompt: bool) -> str:
        text = self._apply(chat, messages, tokenize=False, add_generation_prompt=prompt)
        require_unicode(text, f"{chat.where}: the conversation as the chat template writes it")
        return text

    def _apply(self, chat: Conversation, messages: Sequence[dict[str, Any]], **options: Any) -> Any:
        if any(message.get("content") is None for message in messages) and not self._takes_null:
            messages = [{**message, "content": message.get("content") or ""} for message in messages]
        try:
            return apply_chat_template(self.tokenizer, messages, tools=chat.tools, **options)
        except TemplateSyntaxError as error:
            raise MkdCheckpointError(
                f"the chat template of {self.flag} {self.folder} is not valid ({error.message}, line {error.lineno} of "
                "the template): correct it"
            ) from error
        except Exception as error:  # Jinja's errors, and Python's in the template's expressions
            raise MkdDataError(
                f"{chat.where}: the chat template of {self.flag} {self.folder} refuses the conversation: "
                f"{str(error) or type(error).__name__}"
            ) from error

    @cached_property
    def _takes_null(self) -> bool:
        """False if the template takes "" as the content of an answer, but fails without a content or writes "None"."""
        call = {"role": ASSISTANT, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
        texts = []
        for content in ("", None):
            messages = [{"role": "user", "content": "a"}, {**call, "content": content}]
            try:
                texts.append(apply_chat_template(self.tokenizer, messages, tokenize=False))
            except Exception:  # Jinja's errors, and Python's in the template's expressions
                texts.append(None)
        empty, null = texts
        return empty is None or (null is not None and null.count("None") <= empty.count("None"))

    def _tokenize(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        coded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return np.array(coded["input_ids"], dtype=np.int64), np.array(coded["offset_mapping"]).reshape(-1, 2)


def _answers(chat: Conversation) -> list[int]:
    """Numbers of the answers that are learned and have a prompt."""
    return [number for number in range(1, len(chat.messages)) if chat.is_learned(number)]


def _without_parts(message: dict[str, Any], text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each part of a message that a template must write and that is not in the text as it is.

    Yields:
        Its key, and the message without it.
    """
    for key in SPOKEN:
        names = [name for name in ((key,) if isinstance(key, str) else key) if _has_text(message.get(name))]
        if not names or (names == ["content"] and message["content"].strip() in text):
            continue
        changed = {name: value for name, value in message.items() if name not in names}
        if names == ["content"]:
            changed["content"] = "\ue0f1"  # a character of private use, which no text contains
        yield names[0], changed
    calls = message.get("tool_calls") or []
    for number in range(len(calls)) if len(calls) > 1 else ():
        yield f"tool call {number + 1}", {**message, "tool_calls": [*calls[:number], *calls[number + 1 :]]}
    content = message.get("content") or ""
    block = _REASONING_BLOCK.search(content) if message["role"] == ASSISTANT else None
    if block and block[1].strip() and block[1].strip() not in text:
        changed = f"{content[: block.start(1)]}\ue0f1{content[block.end(1) :]}"
        yield "the <think> block in content", {**message, "content": changed}


def _has_text(value: Any) -> bool:
    return bool(value.strip() if isinstance(value, str) else value)


def _overlaps(offsets: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """[n] bool, True if a token's characters ([n, 2], first and end) overlap one of the spans."""
    found = np.zeros(len(offsets), dtype=bool)
    for begin, end in spans:
        found |= (offsets[:, 0] < end) & (offsets[:, 1] > begin)
    return found


@dataclass
class EncodedChats:
    """Tokenized conversations of a batch of lines."""

    tokens: np.ndarray
    """[sum of lengths] uint32: ids, with bit SUPERVISED set on the assistant's tokens."""
    lengths: list[int]
    size: int
    """Bytes of the lines."""
    weights: list[tuple[int, int, float]] = field(default_factory=list)
    """(begin, end, weight) of runs in `tokens` whose targets have another weight than 1, in order."""
    skipped: dict[str, int] = field(default_factory=lambda: {EMPTY: 0, UNSUPERVISED: 0})
    """Reason -> conversations left out."""
    bad: BadRecords = field(default_factory=BadRecords)
    rewritten: int = 0
    """Conversations with an answer that the template writes differently once others follow."""


def encode_lines(template: ChatTemplate, batch: RawBatch, options: RecordOptions = AS_FOUND) -> EncodedChats:
    """Parse and tokenize records of a chat file; blank lines are skipped.

    Raises:
        MkdDataError: as `Conversation.parse` and `ChatTemplate.encode`, unless the options leave out such records.
    """
    coded = EncodedChats(np.empty(0, np.uint32), [], batch.size)
    parts = []
    for where, line in batch.located():
        if not line.strip():
            continue
        try:
            chat = Conversation.parse(line, where, options)
            if chat.has_empty_message:
                coded.skipped[EMPTY] += 1
                continue
            found = template.encode_chat(chat) if chat.has_answer else None
        except MkdDataError as error:
            if not options.skips_bad:
                raise options.unskipped(error) from error
            coded.bad.add(error)
            continue
        if found is None or not found.supervised[1:].any():  # no position predicts the first token
            coded.skipped[UNSUPERVISED] += 1
            continue
        begin = sum(coded.lengths)
        for weight, tokens in template.weighted_tokens(chat):
            edges = np.flatnonzero(np.diff(tokens & found.supervised, prepend=False, append=False)) + begin
            coded.weights += [(int(a), int(b), weight) for a, b in zip(edges[::2], edges[1::2], strict=True)]
        parts.append(np.where(found.supervised, SUPERVISED, np.uint32(0)) | found.ids.astype(np.uint32))
        coded.lengths.append(len(found.ids))
        coded.rewritten += found.rewritten
    coded.tokens = np.concatenate([coded.tokens, *parts])
    coded.weights.sort()
    return coded


@dataclass(frozen=True)
class ChatTokenizer:
    """Tokenizes lines of chat files; pickled to worker processes as the name of its folder."""

    folder: str
    """Folder of a Hugging Face tokenizer."""
    options: RecordOptions = AS_FOUND
    flag: str = "--tokenizer-model"
    """Flag that named the folder, for messages."""

    @property
    def template(self) -> ChatTemplate:
        """Raises MkdDataError if the folder has no tokenizer that can be used for chats."""
        return once_per_process(_load_template, self.folder, self.flag)

    def __call__(self, batch: RawBatch) -> EncodedChats:
        return encode_lines(self.template, batch, self.options)

    @cached_property
    def fingerprint(self) -> str:
        """Changes whenever a token of a conversation may change."""
        tokenizer = self.template.tokenizer
        parts = [*token_rules(tokenizer, tokenizer.get_chat_template()), *self.options.key]
        return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def _load_template(folder: str, flag: str) -> ChatTemplate:
    return ChatTemplate(load_tokenizer(folder, flag), folder, flag)
