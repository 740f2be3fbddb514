"""One sample, document or conversation, as the tokens of a student and of one teacher with their alignment."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mkd.data.sources.conversation import Conversation
from mkd.errors import MkdDataError
from mkd.xtoken.text.alignment import (
    NO_CHUNK,
    Alignment,
    TokensWithin,
    align,
    align_spans,
    concatenated,
    tokens_within,
    unaligned,
)
from mkd.xtoken.text.conversations import ChatSpans, encode_chat
from mkd.xtoken.text.tokens import SpanTokenizer


@dataclass(frozen=True)
class Passage:
    """One text of a document, and the student's special tokens around it."""

    text: str
    begins: bool = False
    """True if the beginning-of-sequence token precedes the text."""
    ends: bool = True
    """True if the end-of-sequence token follows the text."""


@dataclass(frozen=True)
class AlignedPair:
    """Tokens of both models, the student's targets, and the alignment."""

    student_ids: np.ndarray
    """[n_s] int32."""
    teacher_ids: np.ndarray
    """[n_t] int32."""
    student_targets: np.ndarray
    """[n_s] bool, True for targets of cross-entropy. Never the first token, which no position predicts."""
    teacher_targets: np.ndarray
    """[n_t] bool, True for tokens in a chunk."""
    alignment: Alignment
    """Only chunks all of whose tokens are predicted by both models, and in conversations are targets of the student."""
    not_found: int = 0
    """Messages that could not be located in the output of the chat templates."""

    def truncated(self, student_length: int, teacher_length: int) -> "AlignedPair":
        """The sample with both sequences cut to these lengths."""
        s, t = slice(student_length), slice(teacher_length)
        alignment = self.alignment.truncated(student_length, teacher_length)
        return AlignedPair(
            self.student_ids[s],
            self.teacher_ids[t],
            self.student_targets[s],
            alignment.teacher_chunk != NO_CHUNK,
            alignment,
            self.not_found,
        )

    def only_pairs(self, special: np.ndarray, pairs: Sequence[tuple[int, int]]) -> "AlignedPair":
        """Drop the chunks of special tokens that are not in `pairs`.

        Args:
            special: [n_s] bool, the student's special tokens; each is alone in its chunk, in both views.
            pairs: ids (student, teacher) of equivalent tokens.
        """
        found, known = self.alignment, set(pairs)
        ids = np.zeros((2, found.count), dtype=np.int64)
        for view, chunk, tokens in (
            (0, found.student_chunk, self.student_ids),
            (1, found.teacher_chunk, self.teacher_ids),
        ):
            ids[view, chunk[chunk != NO_CHUNK]] = tokens[chunk != NO_CHUNK]
        kept = np.ones(found.count, dtype=bool)
        chunks = found.student_chunk[special & (found.student_chunk != NO_CHUNK)]
        kept[chunks] = [pair in known for pair in zip(*ids[:, chunks].tolist(), strict=True)]
        found = found.only(kept)
        return replace(self, alignment=found, teacher_targets=found.teacher_chunk != NO_CHUNK)


def align_sample(
    student: SpanTokenizer,
    teacher: SpanTokenizer,
    sample: Sequence[Passage] | Conversation,
    *,
    all_messages: bool = False,
) -> AlignedPair:
    """Tokenize a sample for both models and align it.

    Args:
        student: the ids are those of training with one tokenizer: texts with the special tokens around them, or a
            conversation rendered by its template.
        teacher: its texts begin with its beginning-of-sequence token if the tokenizer adds one by default, and end as
            the student's do.
        sample: a document, or a conversation, which each model's own template renders.
        all_messages: align messages of all roles, not only the assistant's.

    Raises:
        MkdDataError: see `SpanTokenizer.encode` and `ChatTemplate.encode`; or the sample has no tokens.
    """
    if not isinstance(sample, Conversation):
        encoded = [
            (
                student.encode(passage.text, bos=passage.begins, eos=passage.ends),
                teacher.encode(passage.text, bos=teacher.adds_bos, eos=passage.ends),
            )
            for passage in sample
        ]
        found = concatenated([align(passage.text, *both) for passage, both in zip(sample, encoded, strict=True)])
        ids, teacher_ids = (np.concatenate([both[view].ids for both in encoded]) for view in (0, 1))
        return _sample(ids, teacher_ids, _all_but_first(ids), found)
    ids, supervised = student.template.encode(sample)
    chats = encode_chat(student, sample), encode_chat(teacher, sample)
    if not np.array_equal(ids, chats[0].tokens.ids):
        raise MkdDataError(
            f"{sample.where}: the chat template of {student.flag} {student.name} does not render the conversation "
            "the same way twice"
        )
    selected = [i for i in range(len(sample.messages)) if all_messages or sample.is_learned(i)]
    located = [i for i in selected if all(chat.contents[i] for chat in chats)]
    with_text = [i for i in selected if (sample.messages[i].get("content") or "").strip()]
    targets = supervised & _all_but_first(ids)
    alignment = _align_messages(*chats, located)
    if not all_messages:
        alignment = alignment.within(targets, np.ones(len(chats[1].tokens), dtype=bool))
    return _sample(chats[0].tokens.ids, chats[1].tokens.ids, targets, alignment, len(with_text) - len(located))


def _sample(
    student: np.ndarray, teacher: np.ndarray, targets: np.ndarray, alignment: Alignment, not_found: int = 0
) -> AlignedPair:
    for ids, model in ((student, "student"), (teacher, "teacher")):
        if len(ids) == 0:
            raise MkdDataError(f"a sample has no token for the {model}: leave out empty texts")
    predicted = alignment.within(_all_but_first(student), _all_but_first(teacher))
    in_chunk = predicted.teacher_chunk != NO_CHUNK
    return AlignedPair(student, teacher, targets, in_chunk, predicted, not_found)


def _all_but_first(ids: np.ndarray) -> np.ndarray:
    return np.arange(len(ids)) > 0


def _align_messages(student: ChatSpans, teacher: ChatSpans, messages: list[int]) -> Alignment:
    """Align messages one by one, each with the token that ends it; text between them is not aligned."""
    whole = unaligned(len(student.tokens), len(teacher.tokens))
    count = 0
    for number in messages:
        regions = [_region(chat, number) for chat in (student, teacher)]
        if None in regions:
            continue
        begin, end = student.contents[number]
        for *firsts, part in _message_parts(student.text[begin:end], regions):
            both = (whole.student_chunk, part.student_chunk), (whole.teacher_chunk, part.teacher_chunk)
            for first, (chunks, found) in zip(firsts, both, strict=True):
                inside = np.flatnonzero(found != NO_CHUNK)
                chunks[first + inside] = found[inside] + count
            count += part.count
    return replace(whole, count=count)


def _region(chat: ChatSpans, message: int) -> tuple[TokensWithin, int | None] | None:
    """The tokens of a message's content, and the index of the token that ends its turn."""
    content = tokens_within(chat.text, chat.tokens, *chat.contents[message])
    return None if content is None else (content, chat.end_of_turn(message))


def _message_parts(
    content: str, regions: list[tuple[TokensWithin, int | None]]
) -> Iterator[tuple[int, int, Alignment]]:
    """(first student token, first teacher token, alignment) of the content, and of the end-of-turn tokens."""
    (student, end), (teacher, teacher_end) = regions
    yield (
        student.begin,
        teacher.begin,
        align_spans(content, student.offsets, student.roles, teacher.offsets, teacher.roles),
    )
    if end is not None and teacher_end is not None:
        one = np.zeros(1, dtype=np.int32)
        yield end, teacher_end, Alignment(one, one.copy(), 1)
