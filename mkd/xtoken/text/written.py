"""Texts that the student has written, in the tokens of teachers with other tokenizers.

A teacher reads the prompt as its own chat template writes it, up to the beginning of the answer, and then the text of
the written tokens. The student's tokens are those that it has written, even where its tokenizer splits the same text
differently; the characters that each of them covers follow from its bytes.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mkd.data.sources.aligned import TeacherText
from mkd.data.sources.conversation import ASSISTANT, Conversation
from mkd.data.sources.prompts import Prompt
from mkd.errors import MkdDataError
from mkd.xtoken.text.alignment import NO_CHUNK, align_spans, tokens_within, unaligned
from mkd.xtoken.text.samples import AlignedPair
from mkd.xtoken.text.token_bytes import read_token_bytes
from mkd.xtoken.text.tokens import Role, SpanTokenizer, TokenSpans

_MARK = "\ue0f1"
"""A character of private use in the place of an answer."""
_ANSWER = "This"
_BROKEN = re.compile("[\udc80-\udcff]")
"""Bytes that are not UTF-8, as Python's `surrogateescape` decodes them."""
_TAG_OR_WORD = re.compile(r"<[^<>\s]+>|\S+")
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class TokenSpeller:
    """Texts of the student's tokens."""

    bytes_of: tuple[bytes, ...]
    """[size] bytes of each token; the name of a special token; nothing for an unused id."""
    role_of: np.ndarray
    """[size] int8 `Role`."""

    @classmethod
    def of(cls, tokenizer: SpanTokenizer) -> "TokenSpeller":
        """The speller of a tokenizer. Raises MkdConfigError if the bytes of its tokens are unknown."""
        bytes_of = [token or b"" for token in read_token_bytes(tokenizer).of_id]
        for number in np.flatnonzero(tokenizer.role_of_id != Role.CONTENT).tolist():
            bytes_of[number] = str(tokenizer.tokenizer.convert_ids_to_tokens(number)).encode()
        return cls(tuple(bytes_of), tokenizer.role_of_id)

    def spell(self, ids: Sequence[int], names: Mapping[int, str]) -> tuple[str, TokenSpans]:
        """The text of tokens, and the characters that each token covers.

        A byte that is not part of a whole character becomes U+FFFD. Tokens with such a byte or without a text have the
        role UNK, so that they are in no chunk.

        Args:
            ids: of the tokens; the model may have more ids than the tokenizer.
            names: text of special tokens, where it is not their own name.
        """
        size = len(self.bytes_of)
        parts = [
            names[number].encode() if number in names else self.bytes_of[number] if number < size else b""
            for number in ids
        ]
        text = b"".join(parts).decode("utf-8", "surrogateescape")
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        is_broken = (codes >= 0xDC80) & (codes <= 0xDCFF)
        sizes = 1 + (codes >= 0x80) + (codes >= 0x800).astype(np.int64) + (codes >= 0x10000)
        ends = np.cumsum(np.where(is_broken, 1, sizes))
        bounds = np.cumsum([0, *map(len, parts)])
        first = np.searchsorted(ends, bounds[:-1], side="right")
        end = np.where(np.diff(bounds) > 0, np.searchsorted(ends, bounds[1:] - 1, side="right") + 1, first)
        broken = np.cumsum([0, *is_broken])
        tokens = np.array(ids, dtype=np.int32)
        roles = np.append(self.role_of, np.int8(Role.UNK))[np.minimum(tokens, size)]
        roles[(first == end) | (broken[end] > broken[first])] = Role.UNK
        return _BROKEN.sub(_REPLACEMENT, text), TokenSpans(tokens, np.stack([first, end], axis=1), roles)


@dataclass(frozen=True)
class TeacherPrompt:
    """The text that a teacher reads before an answer."""

    text: str
    is_chat: bool = False
    """True if a chat template has written it."""
    opening: str = ""
    """First tag or word of what the template writes after its generation prompt, such as <think> of an empty block of
    reasoning; empty if that is nothing."""
    bare: str = ""
    """The text up to the generation prompt, for answers that begin with `opening` themselves."""

    @classmethod
    def of(cls, prompt: Prompt, teacher: SpanTokenizer) -> "TeacherPrompt":
        """The prompt for a teacher: the same text; or the conversation in the teacher's template, as the template
        writes it before an answer.

        Raises:
            MkdDataError: the template refuses the conversation, or writes no answer.
        """
        if prompt.conversation is None:
            return cls(prompt.text)
        bare = teacher.template.text(prompt.conversation, prompt=True)
        answered = teacher.template.text(_with_answer(prompt.conversation, _MARK))
        if _MARK not in answered:
            raise MkdDataError(
                f"{prompt.where}: the chat template of {teacher.flag} {teacher.name} writes no answer after this "
                "conversation, so that the teacher would not read the student's: take another template"
            )
        text = answered[: answered.rindex(_MARK)]
        more = _TAG_OR_WORD.search(text.removeprefix(bare)) if text.startswith(bare) else None
        return cls(text, True, more[0] if more else "", bare)

    def before(self, answer: str) -> str:
        """The text before an answer."""
        return self.bare if self.opening and answer.lstrip().startswith(self.opening) else self.text


@dataclass(frozen=True)
class WrittenView:
    """Written texts in the tokens of one teacher."""

    tokenizer: SpanTokenizer
    prompts: tuple[TeacherPrompt, ...]
    names: Mapping[int, str]
    """The teacher's name of each of the student's special tokens that has a counterpart, after prompts that are
    texts."""
    chat_names: Mapping[int, str]
    """The same after conversations."""
    pairs: tuple[tuple[int, int], ...] | None
    """See `AlignedPair.only_pairs`; None keeps all chunks."""
    most: int
    """Tokens of a text at most; chunks behind them are dropped."""

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise MkdDataError for a prompt after which nothing fits into a row of this teacher."""
        teacher = self.tokenizer
        for prompt, own in zip(prompts, self.prompts, strict=True):
            count = len(teacher.encode(own.text, bos=self._begins(own)))
            if count >= self.most:
                raise MkdDataError(
                    f"{prompt.where}: the prompt has {count} tokens for {teacher.flag} {teacher.name}, whose texts "
                    f"have at most {self.most} with the answer: shorten it, or give a larger --kd-teacher-seq-length"
                )

    def _begins(self, prompt: TeacherPrompt) -> bool:
        return self.tokenizer.adds_bos and not prompt.is_chat

    def text(self, number: int, prompt: Sequence[int], new: Sequence[int], student: "WrittenAligner") -> TeacherText:
        """A written text; see `WrittenAligner.texts`."""
        before = self.prompts[number]
        names = self.chat_names if before.is_chat else self.names
        text, tokens = student.speller.spell(new, names)
        begin = len(student.separator) if before.is_chat and text.startswith(student.separator) else 0
        # The end of a character that is cut off, and an end token without a counterpart, are not text.
        is_text = np.flatnonzero((tokens.roles == Role.CONTENT) | np.isin(tokens.ids, list(names)))
        end = max(begin, int(tokens.offsets[is_text[-1], 1]) if len(is_text) else 0)
        answer = text[begin:end]
        prefix = before.before(answer)
        teacher = self.tokenizer.encode(prefix + answer, bos=self._begins(before))
        pair = _aligned((prompt, text, tokens, (begin, end)), (prefix + answer, teacher, len(prefix)))
        if self.pairs is not None:
            special = ~np.isin(student.roles(pair.student_ids), (Role.CONTENT, Role.UNK))
            pair = pair.only_pairs(special, self.pairs)
        pair = pair.truncated(len(pair.student_ids), self.most)
        found = pair.alignment
        missing = max(0, 2 - len(pair.teacher_ids))  # a row has at least one position
        return TeacherText(
            np.pad(pair.teacher_ids, (0, missing)),
            np.pad(pair.teacher_targets, (0, missing)),
            np.pad(found.teacher_chunk, (0, missing), constant_values=NO_CHUNK),
            found.student_chunk,
        )


def _aligned(
    student: tuple[Sequence[int], str, TokenSpans, tuple[int, int]], teacher: tuple[str, TokenSpans, int]
) -> AlignedPair:
    """The tokens of both models and the chunks in the answer.

    Args:
        student: ids of the prompt; text and tokens behind it; first character and end of the answer in the text.
        teacher: text and tokens of prompt and answer, and the first character of the answer.
    """
    prompt, text, tokens, (begin, end) = student
    whole, teacher_tokens, teacher_begin = teacher
    ids = np.array([*prompt, *tokens.ids], dtype=np.int32)
    found = unaligned(len(ids), len(teacher_tokens))
    own, its = (
        tokens_within(text, tokens, begin, end),
        tokens_within(whole, teacher_tokens, teacher_begin, len(whole)),
    )
    if own is not None and its is not None:
        part = align_spans(text[begin:end], own.offsets, own.roles, its.offsets, its.roles)
        first = len(prompt) + own.begin
        found.student_chunk[first : first + len(own.roles)] = part.student_chunk
        found.teacher_chunk[its.begin : its.begin + len(its.roles)] = part.teacher_chunk
        found = replace(found, count=part.count)
    in_chunk = found.teacher_chunk != NO_CHUNK
    return AlignedPair(ids, teacher_tokens.ids, np.arange(len(ids)) >= len(prompt), in_chunk, found)


@dataclass(frozen=True)
class WrittenAligner:
    """Aligns written texts with the tokens of each teacher with another tokenizer."""

    speller: TokenSpeller
    separator: str
    """Text that the student's template writes between its generation prompt and an answer, as the student's tokens
    spell it; it is not part of the answer."""
    views: tuple[WrittenView, ...]

    def texts(self, number: int, prompt: Sequence[int], new: Sequence[int]) -> tuple[TeacherText, ...]:
        """A written text in the tokens of each teacher, with the chunks of the written tokens.

        Args:
            number: of the prompt.
            prompt: its ids for the student.
            new: the written tokens.
        """
        return tuple(view.text(number, prompt, new, self) for view in self.views)

    def roles(self, ids: np.ndarray) -> np.ndarray:
        """[n] `Role` of the student's tokens."""
        size = len(self.speller.role_of)
        return np.append(self.speller.role_of, np.int8(Role.UNK))[np.minimum(ids, size)]


def names_of(teacher: SpanTokenizer, pairs: Mapping[int, int]) -> dict[int, str]:
    """Student's special token -> name of the teacher's, for pairs of ids. Without those that a text cannot hold."""
    names = {ours: str(teacher.tokenizer.convert_ids_to_tokens(theirs)) for ours, theirs in pairs.items()}
    return {ours: name for ours, name in names.items() if teacher.encode(name).ids.tolist() == [pairs[ours]]}


def separator_of(student: SpanTokenizer, speller: TokenSpeller) -> str:
    """`WrittenAligner.separator`; empty without a chat template."""
    question = Conversation([{"role": "user", "content": "What?"}])
    try:
        prompt = student.template.text(question, prompt=True)
        answered = student.template.text(_with_answer(question, _ANSWER))
    except MkdDataError:
        return ""
    before, ids = (student.encode(text).ids.tolist() for text in (prompt, answered))
    if ids[: len(before)] != before:
        return ""
    text, _ = speller.spell(ids[len(before) :], {})
    return text[: max(0, text.lower().find(_ANSWER.lower()))]


def _with_answer(chat: Conversation, answer: str) -> Conversation:
    return replace(chat, messages=[*chat.messages, {"role": ASSISTANT, "content": answer}])
