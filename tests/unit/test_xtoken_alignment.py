"""Tokens that cover the same characters: four kinds of tokenizers, all scripts, white space, control characters."""

import unicodedata
from itertools import combinations

import numpy as np
import pytest

from mkd.xtoken.alignment import NO_CHUNK, Alignment, align
from mkd.xtoken.tokens import Role, TokenSpans
from tests.tokenizers_of_kinds import KINDS, TEXTS, span_tokenizer

PIECES = [
    *("the", " the", "The quick", "don't", "naïve", "e\u0301te\u0301", "ﬁne", "İstanbul", "Straße", "x\u0300\u0301y"),
    *("你好", "世界。", "こんにちは", "안녕", "\u1112\u1161\u11ab", "привет", "Ελλάδα", "שלום", "مرحبا", "नमस्ते", "ไทย"),
    *("🎈", "👩‍👩‍👧", "🇩🇪", "é🎈", "\ufeff", "\u200b", "\u00a0", "\u3000", "\u2028", "¼", "①"),
    *(" ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", " \n ", "\x00", "\x01", "\x7f", "\x1b[0m", "\ufffd"),
    *("def f(x):\n    return x**2  # ok", "{'a': [1, 2]}", "<br/>", "a_b-c", "3.14159", "0x1F", "https://x.y/?q=1&r=2"),
    *(",", ".", "...", "!?", "(", ")", '"', "▁", "Ġ", "##ing", "<0x41>", "<s>", "</s>", "<|end|>", "[SEP]", "<|turn|>"),
]


def random_text(generator: np.random.Generator) -> str:
    """Pieces of many kinds, letters of any script, and bits of real text."""
    parts = []
    for _ in range(generator.integers(0, 12)):
        kind = generator.integers(3)
        if kind == 0:
            parts.append(PIECES[generator.integers(len(PIECES))])
        elif kind == 1:
            text = TEXTS[generator.integers(len(TEXTS))]
            begin = generator.integers(len(text))
            parts.append(text[begin : begin + generator.integers(1, 40)])
        else:
            codes = generator.integers(1, 0x2FFFF, size=generator.integers(1, 4))
            parts.append("".join(chr(c) for c in codes if unicodedata.category(chr(c)) != "Cs"))
    return "".join(parts)


def covered(spans: TokenSpans, tokens: np.ndarray) -> set[int]:
    """Characters that tokens cover."""
    return {c for begin, end in spans.offsets[tokens] for c in range(begin, end)}


def check(text: str, sides: tuple[TokenSpans, TokenSpans], found: Alignment) -> None:
    """All that an alignment of content promises."""
    chunks = found.student_chunk, found.teacher_chunk
    inside = [covered(side, np.arange(len(side))) for side in sides]
    dropped = [set(range(len(text))) - tokens for tokens in inside]
    for side, chunk in zip(sides, chunks, strict=True):
        assert chunk.dtype == np.int32
        assert len(chunk) == len(side)
        used = chunk[chunk != NO_CHUNK]
        assert (np.diff(used) >= 0).all()
        assert np.unique(used).tolist() == list(range(found.count))
        assert not (side.roles[chunk != NO_CHUNK] == Role.UNK).any()
    for number in range(found.count):
        tokens = [np.flatnonzero(chunk == number) for chunk in chunks]
        assert all(len(t) and t[-1] - t[0] == len(t) - 1 for t in tokens)
        places = [covered(side, t) for side, t in zip(sides, tokens, strict=True)]
        assert places[0] ^ places[1] <= dropped[0] | dropped[1]
        assert (places[0] & places[1]) or not (places[0] | places[1]) - dropped[0] - dropped[1]
        if any((side.roles[t] != Role.CONTENT).any() for side, t in zip(sides, tokens, strict=True)):
            assert [len(t) for t in tokens] == [1, 1]


@pytest.mark.parametrize("pair", list(combinations(KINDS, 2)), ids="-".join)
def test_chunks_cover_the_same_characters(pair: tuple[str, str]) -> None:
    generator = np.random.default_rng(0)
    student, teacher = (span_tokenizer(kind) for kind in pair)
    chunks = 0
    for _ in range(1000):
        text = random_text(generator)
        sides = student.encode(text), teacher.encode(text)
        found = align(text, *sides)
        check(text, sides, found)
        back = align(text, *sides[::-1])
        assert back.student_chunk.tolist() == found.teacher_chunk.tolist()
        assert back.teacher_chunk.tolist() == found.student_chunk.tolist()
        chunks += found.count
    assert chunks > 10_000
