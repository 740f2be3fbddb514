"""Alignment of two tokenizations of one text: which runs of tokens cover the same characters.

The boundary between two tokens lies after the last character of all tokens up to it and before the first character of
all later ones, if there is such a position: bytes of one character are not separated. Characters that no token covers,
for example whitespace that a tokenizer drops, leave a boundary free to be anywhere among them. A text chunk ends, and
the next begins, where boundaries of both tokenizations can coincide. All of it is sorting and counting, linear in the
number of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mkd.xtoken.text.tokens import NOT_IN_TEXT, Role, TokenSpans

NO_CHUNK = -1
NO_CLUSTER = -1


@dataclass(frozen=True)
class Alignment:
    """Text chunks: runs of tokens of the student and of the teacher that cover the same characters.

    A chunk has tokens of the text only, or one special token of each model. It has at least one token of each model,
    and they are consecutive. Characters that one tokenizer drops (whitespace, control characters) are not compared.
    Tokens without a counterpart are in no chunk.
    """

    student_chunk: np.ndarray
    """[n_s] int32 chunk of each student token, NO_CHUNK for none."""
    teacher_chunk: np.ndarray
    """[n_t] int32 chunk of each teacher token."""
    count: int
    """Chunks are numbered 0 to count - 1 in the text's order."""

    def only(self, kept: np.ndarray) -> "Alignment":
        """The chunks of a [count] bool mask, renumbered."""
        number = np.where(kept, np.cumsum(kept) - 1, NO_CHUNK).astype(np.int32)
        number = np.append(number, np.int32(NO_CHUNK))  # read by index NO_CHUNK
        return Alignment(number[self.student_chunk], number[self.teacher_chunk], int(kept.sum()))

    def within(self, student_tokens: np.ndarray, teacher_tokens: np.ndarray) -> "Alignment":
        """The chunks all of whose tokens are in the masks, [n_s] and [n_t] bool."""
        kept = np.ones(self.count, dtype=bool)
        for chunk, tokens in ((self.student_chunk, student_tokens), (self.teacher_chunk, teacher_tokens)):
            kept[chunk[~tokens & (chunk >= 0)]] = False
        return self.only(kept)

    def truncated(self, student_length: int, teacher_length: int) -> "Alignment":
        """The alignment of both sequences cut to these lengths: chunks that are not whole are dropped."""
        masks = [
            np.arange(len(chunk)) < length
            for chunk, length in ((self.student_chunk, student_length), (self.teacher_chunk, teacher_length))
        ]
        whole = self.within(*masks)
        return Alignment(whole.student_chunk[:student_length], whole.teacher_chunk[:teacher_length], whole.count)


def align(text: str, student: TokenSpans, teacher: TokenSpans) -> Alignment:
    """Align two tokenizations of one text.

    Tokens that were added before or after the text are paired by role, content by characters. Chunks with an unknown
    token, or with a special token and any other token of the same model, are dropped.
    """
    (s_begin, s_end), (t_begin, t_end) = (_in_text(spans) for spans in (student, teacher))
    s, t = slice(s_begin, s_end), slice(t_begin, t_end)
    parts = [
        _align_added(student.roles[:s_begin], teacher.roles[:t_begin]),
        align_spans(text, student.offsets[s], student.roles[s], teacher.offsets[t], teacher.roles[t]),
        _align_added(student.roles[s_end:], teacher.roles[t_end:]),
    ]
    return concatenated(parts)


def align_spans(
    text: str, student: np.ndarray, student_roles: np.ndarray, teacher: np.ndarray, teacher_roles: np.ndarray
) -> Alignment:
    """Align tokens that all lie in the text.

    Args:
        text: [characters].
        student, teacher: [n_s, 2] and [n_t, 2] int64, (first character, end) of each token.
        student_roles, teacher_roles: [n_s] and [n_t] `Role`.
    """
    both = _clusters(text, student), _clusters(text, teacher)
    chunk_of_cluster, count = _common_chunks(*both)
    chunks = [chunk[clusters.of_token] for chunk, clusters in zip(chunk_of_cluster, both, strict=True)]
    kept = _comparable(chunks, (student_roles, teacher_roles), count)
    return Alignment(*chunks, count).only(kept)


@dataclass(frozen=True)
class TokensWithin:
    """The tokens of a part of a text."""

    begin: int
    """Index of the first token."""
    offsets: np.ndarray
    """[n, 2] int64 offsets in the part."""
    roles: np.ndarray
    """[n] `Role`; UNK for a token with characters outside the part other than whitespace."""


def tokens_within(text: str, tokens: TokenSpans, begin: int, end: int) -> TokensWithin | None:
    """The tokens that cover a character of text[begin:end]; None if a tokenizer drops all of them."""
    offsets = tokens.offsets
    inside = np.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > begin))
    if len(inside) == 0:
        return None
    first, last = int(inside[0]), int(inside[-1])
    offsets, roles = offsets[first : last + 1], tokens.roles[first : last + 1].copy()
    for token in np.flatnonzero((offsets[:, 0] < begin) | (offsets[:, 1] > end)):
        a, b = offsets[token]
        if (text[a:begin] + text[end:b]).strip():
            roles[token] = Role.UNK
    return TokensWithin(first, offsets.clip(begin, end) - begin, roles)


def concatenated(parts: Sequence[Alignment]) -> Alignment:
    """The alignment of concatenated sequences."""
    before = np.cumsum([0, *(part.count for part in parts)])
    both = [[part.student_chunk for part in parts], [part.teacher_chunk for part in parts]]
    numbered = [
        np.concatenate([np.where(c >= 0, c + n, NO_CHUNK) for c, n in zip(chunks, before, strict=False)])
        for chunks in both
    ]
    return Alignment(*(chunks.astype(np.int32) for chunks in numbered), int(before[-1]))


def unaligned(student_length: int, teacher_length: int) -> Alignment:
    """An alignment without chunks."""
    return Alignment(*(np.full(n, NO_CHUNK, dtype=np.int32) for n in (student_length, teacher_length)), 0)


def _in_text(spans: TokenSpans) -> tuple[int, int]:
    """(first, end) of the tokens that were not added; an empty range after the BOS if there are none."""
    inside = np.flatnonzero(spans.offsets[:, 0] != NOT_IN_TEXT)
    if len(inside):
        return int(inside[0]), int(inside[-1]) + 1
    begin = int((spans.roles == Role.BOS).sum())
    return begin, begin


def _align_added(student: np.ndarray, teacher: np.ndarray) -> Alignment:
    """Pair tokens of equal roles in order, each token at most once."""
    found = unaligned(len(student), len(teacher))
    count = begin = 0
    for i, role in enumerate(student):
        same = begin + np.flatnonzero(teacher[begin:] == role)
        if len(same):
            found.student_chunk[i] = found.teacher_chunk[same[0]] = count
            count, begin = count + 1, int(same[0]) + 1
    return replace(found, count=count)


@dataclass(frozen=True)
class _Clusters:
    """Runs of tokens without a boundary inside, and the boundaries before, between and after them."""

    of_token: np.ndarray
    """[n] cluster of each token; NO_CLUSTER if all tokens together cover no character."""
    low: np.ndarray
    """[clusters + 1] lowest position of each boundary, as the number of characters before it."""
    high: np.ndarray
    """[clusters + 1] highest position; always below the lowest of the next boundary."""


def _clusters(text: str, offsets: np.ndarray) -> _Clusters:
    """Cut tokens into clusters.

    A boundary may lie anywhere in the whitespace before the next token that no token covers. Other characters without
    a token, such as an accent that became part of its letter, belong to the token before them.
    """
    if (offsets[:, 0] == offsets[:, 1]).all():
        return _Clusters(np.full(len(offsets), NO_CLUSTER), np.array([0]), np.array([len(text)]))
    low = np.append(0, np.maximum.accumulate(offsets[:, 1]))
    high = np.append(np.minimum.accumulate(offsets[::-1, 0])[::-1], len(text))
    before = np.flatnonzero(low <= high)  # boundary before this token
    low, high = low[before], high[before]
    for k in np.flatnonzero(low < high):
        gap = text[low[k] : high[k]]
        if k == 0:
            high[k] -= len(gap.lstrip())
        else:
            low[k] += len(gap.rstrip())
    return _without_empty(before, low, high)


def _without_empty(before: np.ndarray, low: np.ndarray, high: np.ndarray) -> _Clusters:
    """Merge clusters that cover no character with the next one, or at the end with the previous one."""
    kept = np.append(True, low[1:] > high[:-1])
    if not kept[-1]:
        kept[-1] = True
        kept[np.flatnonzero(kept[:-1])[-1]] = False
    before, low, high = before[kept], low[kept], high[kept]
    return _Clusters(np.repeat(np.arange(len(before) - 1), np.diff(before)), low, high)


def _common_chunks(student: _Clusters, teacher: _Clusters) -> tuple[list[np.ndarray], int]:
    """Chunks between the positions where boundaries of both tokenizations can coincide.

    Returns:
        chunk of each cluster of the student and of the teacher, [clusters + 1] int32; and the number of chunks.
    """
    first = np.searchsorted(teacher.high, student.low, side="left")
    last = np.searchsorted(teacher.low, student.high, side="right")
    times = np.maximum(last - first, 0)
    s = np.repeat(np.arange(len(times)), times)
    t = np.arange(len(s)) - np.repeat(np.cumsum(times) - times - first, times)
    s_size, t_size = np.diff(s), np.diff(t)
    both = (s_size > 0) & (t_size > 0)  # else one tokenizer dropped the characters that the other one has here
    number = np.where(both, np.cumsum(both) - 1, NO_CHUNK).astype(np.int32)
    last = np.int32(NO_CHUNK)  # read by index NO_CLUSTER
    return [np.append(np.repeat(number, size), last) for size in (s_size, t_size)], int(both.sum())


def _comparable(chunks: Sequence[np.ndarray], roles: Sequence[np.ndarray], count: int) -> np.ndarray:
    """[count] bool, True for chunks of content only, or of one special token of each model, without unknown tokens."""
    inside = [chunk >= 0 for chunk in chunks]
    special, unknown, size = (
        [np.bincount(c[i], weights=w[i], minlength=count) for c, i, w in zip(chunks, inside, weights, strict=True)]
        for weights in (
            [role != Role.CONTENT for role in roles],
            [role == Role.UNK for role in roles],
            [np.ones(len(role)) for role in roles],
        )
    )
    content = (special[0] == 0) & (special[1] == 0)
    pair = (special[0] == 1) & (special[1] == 1) & (size[0] == 1) & (size[1] == 1)
    return (content | pair) & (unknown[0] == 0) & (unknown[1] == 0)
