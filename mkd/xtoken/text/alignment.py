"""Which tokens of a student and of a teacher cover the same characters of a text.

A boundary between two tokens lies after the last character of all tokens up to it and before the first character of
all later ones, if there is such a place: bytes of one character are not parted. Characters that no token covers, as
where a tokenizer drops white space, leave a boundary free to be anywhere among them. Where boundaries of both sides
meet, a chunk ends and the next begins. All of it is sorting and counting, linear in the number of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mkd.xtoken.text.tokens import NOT_IN_TEXT, Role, TokenSpans

NO_CHUNK = -1
NO_CLUSTER = -1


@dataclass(frozen=True)
class Alignment:
    """Chunks: runs of tokens of the student and of the teacher that cover the same characters.

    A chunk has tokens of the text only, or one special token of each side. Its tokens are contiguous on each side and
    there is at least one on each. What one tokenizer drops from the text (white space, control characters) is not
    compared. Tokens in no chunk are those without a counterpart.
    """

    student_chunk: np.ndarray
    """[n_s] int32: chunk of every token, NO_CHUNK for none."""
    teacher_chunk: np.ndarray
    """[n_t] int32."""
    count: int
    """Chunks are numbered 0 to count - 1 in the text's order."""

    def only(self, kept: np.ndarray) -> "Alignment":
        """The chunks of a [count] bool mask, numbered anew."""
        number = np.where(kept, np.cumsum(kept) - 1, NO_CHUNK).astype(np.int32)
        number = np.append(number, np.int32(NO_CHUNK))  # where index NO_CHUNK finds it
        return Alignment(number[self.student_chunk], number[self.teacher_chunk], int(kept.sum()))

    def within(self, student_tokens: np.ndarray, teacher_tokens: np.ndarray) -> "Alignment":
        """The chunks whose tokens are all in both masks, [n_s] and [n_t] bool."""
        kept = np.ones(self.count, dtype=bool)
        for chunk, tokens in ((self.student_chunk, student_tokens), (self.teacher_chunk, teacher_tokens)):
            kept[chunk[~tokens & (chunk >= 0)]] = False
        return self.only(kept)

    def truncated(self, student_length: int, teacher_length: int) -> "Alignment":
        """What is left of it when sequences are cut after so many tokens: the chunks that are still whole."""
        masks = [
            np.arange(len(chunk)) < length
            for chunk, length in ((self.student_chunk, student_length), (self.teacher_chunk, teacher_length))
        ]
        whole = self.within(*masks)
        return Alignment(whole.student_chunk[:student_length], whole.teacher_chunk[:teacher_length], whole.count)


def align(text: str, student: TokenSpans, teacher: TokenSpans) -> Alignment:
    """Align two tokenizations of one text.

    Tokens that were added before or after the text are paired by role, content by characters. A chunk with an unknown
    token, or with a special token that is not alone on both sides, is none.
    """
    (s_begin, s_end), (t_begin, t_end) = (_in_text(side) for side in (student, teacher))
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
        student, teacher: [n_s, 2] and [n_t, 2] int64, first character and end of each token.
        student_roles, teacher_roles: [n_s] and [n_t] `Role`.
    """
    sides = _clusters(text, student), _clusters(text, teacher)
    chunk_of_cluster, count = _meet(*sides)
    chunks = [of_cluster[side.of_token] for of_cluster, side in zip(chunk_of_cluster, sides, strict=True)]
    kept = _comparable(chunks, (student_roles, teacher_roles), count)
    return Alignment(*chunks, count).only(kept)


def concatenated(parts: Sequence[Alignment]) -> Alignment:
    """The alignment of sequences that are put one after the other."""
    before = np.cumsum([0, *(part.count for part in parts)])
    sides = [[part.student_chunk for part in parts], [part.teacher_chunk for part in parts]]
    numbered = [
        np.concatenate([np.where(c >= 0, c + n, NO_CHUNK) for c, n in zip(side, before, strict=False)])
        for side in sides
    ]
    return Alignment(*(side.astype(np.int32) for side in numbered), int(before[-1]))


def unaligned(student_length: int, teacher_length: int) -> Alignment:
    """No chunk at all."""
    return Alignment(*(np.full(n, NO_CHUNK, dtype=np.int32) for n in (student_length, teacher_length)), 0)


def _in_text(side: TokenSpans) -> tuple[int, int]:
    """First and end of the tokens that were not added. Without any, the end of a sequence comes after them."""
    inside = np.flatnonzero(side.offsets[:, 0] != NOT_IN_TEXT)
    if len(inside):
        return int(inside[0]), int(inside[-1]) + 1
    begin = int((side.roles == Role.BOS).sum())
    return begin, begin


def _align_added(student: np.ndarray, teacher: np.ndarray) -> Alignment:
    """Pair equal roles in their order, each token with one at most."""
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
    """Tokens that no boundary parts, and the boundaries before, between and after them."""

    of_token: np.ndarray
    """[n] cluster of every token; NO_CLUSTER where the tokens together cover no character."""
    low: np.ndarray
    """[clusters + 1] first place of each boundary, as a number of characters before it."""
    high: np.ndarray
    """[clusters + 1] last place; always before the next boundary's first."""


def _clusters(text: str, offsets: np.ndarray) -> _Clusters:
    """Cut tokens into clusters.

    A boundary's places are those with nothing but white space that no token covers on their right, up to the next
    token: other characters without a token, such as an accent that became part of its letter, stay with what is
    before them.
    """
    if (offsets[:, 0] == offsets[:, 1]).all():
        return _Clusters(np.full(len(offsets), NO_CLUSTER), np.array([0]), np.array([len(text)]))
    low = np.append(0, np.maximum.accumulate(offsets[:, 1]))
    high = np.append(np.minimum.accumulate(offsets[::-1, 0])[::-1], len(text))
    place = np.flatnonzero(low <= high)  # before token `place`
    low, high = low[place], high[place]
    for k in np.flatnonzero(low < high):
        gap = text[low[k] : high[k]]
        if k == 0:
            high[k] -= len(gap.lstrip())
        else:
            low[k] += len(gap.rstrip())
    return _without_empty(len(offsets), place, low, high)


def _without_empty(tokens: int, place: np.ndarray, low: np.ndarray, high: np.ndarray) -> _Clusters:
    """Join clusters that cover no character with the next one, or the last."""
    kept = np.append(True, low[1:] > high[:-1])
    if not kept[-1]:
        kept[-1] = True
        kept[np.flatnonzero(kept[:-1])[-1]] = False
    place, low, high = place[kept], low[kept], high[kept]
    return _Clusters(np.repeat(np.arange(len(place) - 1), np.diff(place)), low, high)


def _meet(student: _Clusters, teacher: _Clusters) -> tuple[list[np.ndarray], int]:
    """Chunks between the places where boundaries of both sides can be one.

    Returns:
        chunk of each cluster of the student, and of the teacher, [clusters + 1] int32; and how many chunks there are.
    """
    first = np.searchsorted(teacher.high, student.low, side="left")
    last = np.searchsorted(teacher.low, student.high, side="right")
    times = np.maximum(last - first, 0)
    s = np.repeat(np.arange(len(times)), times)
    t = np.arange(len(s)) - np.repeat(np.cumsum(times) - times - first, times)
    s_size, t_size = np.diff(s), np.diff(t)
    both = (s_size > 0) & (t_size > 0)  # else what one side has here, the other dropped from the text
    number = np.where(both, np.cumsum(both) - 1, NO_CHUNK).astype(np.int32)
    last = np.int32(NO_CHUNK)  # where index NO_CLUSTER finds it
    return [np.append(np.repeat(number, size), last) for size in (s_size, t_size)], int(both.sum())


def _comparable(chunks: Sequence[np.ndarray], roles: Sequence[np.ndarray], count: int) -> np.ndarray:
    """[count] bool: chunks of content only, or of one special token on each side; none with an unknown token."""
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
