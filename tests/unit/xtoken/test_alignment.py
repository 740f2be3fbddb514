"""Tokens that cover the same characters: four kinds of tokenizers, all scripts, whitespace, control characters."""

import json
import unicodedata
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import CanineTokenizer, PreTrainedTokenizerFast

from mkd.errors import MkdDataError
from mkd.xtoken.text.alignment import NO_CHUNK, Alignment, align, align_spans
from mkd.xtoken.text.tokens import Role, SpanTokenizer, TokenSpans
from tests.support.tokenizers_of_kinds import KINDS, TEXTS, span_tokenizer, transformers_tokenizer

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


@pytest.mark.parametrize("texts", [350, pytest.param(5000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("pair", list(combinations(KINDS, 2)), ids="-".join)
def test_chunks_cover_the_same_characters(pair: tuple[str, str], texts: int) -> None:
    generator = np.random.default_rng(0)
    student, teacher = (span_tokenizer(kind) for kind in pair)
    chunks = 0
    for _ in range(texts):
        text = random_text(generator)
        sides = student.encode(text), teacher.encode(text)
        found = align(text, *sides)
        check(text, sides, found)
        back = align(text, *sides[::-1])
        assert back.student_chunk.tolist() == found.teacher_chunk.tolist()
        assert back.teacher_chunk.tolist() == found.student_chunk.tolist()
        chunks += found.count
    assert chunks > 10 * texts


def cuts(spans: TokenSpans, length: int) -> set[int]:
    """Positions that no token crosses, for tokens that cover the whole text."""
    return {place for place in range(length + 1) if not any(a < place < b for a, b in spans.offsets)}


def test_chunks_are_as_small_as_they_can_be() -> None:
    generator = np.random.default_rng(1)
    student, teacher = span_tokenizer("byte_bpe"), span_tokenizer("metaspace_bpe")
    compared = 0
    while compared < 100:
        text = random_text(generator)
        sides = student.encode(text), teacher.encode(text)
        if any((side.roles != Role.CONTENT).any() for side in sides):
            continue
        common = sorted(set.intersection(*(cuts(side, len(text)) for side in sides)))
        found = align(text, *sides)
        assert found.count == len(common) - 1
        for side, chunk in zip(sides, (found.student_chunk, found.teacher_chunk), strict=True):
            wanted = np.searchsorted(common, side.offsets[:, 0], side="right") - 1
            assert chunk.tolist() == wanted.tolist()
        compared += 1


def spans(*offsets: tuple[int, int]) -> np.ndarray:
    return np.array(offsets, dtype=np.int64).reshape(-1, 2)


CONTENT, UNK, OTHER = Role.CONTENT, Role.UNK, Role.OTHER
SPANS = {
    "same": ("abc d", [(0, 3), (3, 5)], [(0, 3), (3, 5)], [0, 1], [0, 1]),
    "one and two": ("abcd", [(0, 4)], [(0, 1), (1, 4)], [0], [0, 0]),
    "crossing": ("abcdef", [(0, 2), (2, 4), (4, 6)], [(0, 3), (3, 4), (4, 6)], [0, 0, 1], [0, 0, 1]),
    "bytes of a character": ("é🎈", [(0, 1), (0, 1), (1, 2), (1, 2)], [(0, 1), (1, 2)], [0, 0, 1, 1], [0, 1]),
    "bytes of two characters": (
        "é🎈a",
        [(0, 1), (0, 2), (1, 2), (2, 3)],
        [(0, 1), (1, 2), (2, 3)],
        [0, 0, 0, 1],
        [0, 0, 1],
    ),
    "spaces dropped": ("ab  cd", [(0, 2), (2, 6)], [(0, 2), (4, 6)], [0, 1], [0, 1]),
    "a space of its own": ("ab  cd", [(0, 2), (2, 4), (4, 6)], [(0, 2), (4, 6)], [0, -1, 1], [0, 1]),
    "spaces at the ends": (" a ", [(0, 1), (1, 2), (2, 3)], [(1, 2)], [-1, 0, -1], [0]),
    "both drop": ("a b", [(0, 1), (2, 3)], [(0, 1), (2, 3)], [0, 1], [0, 1]),
    "an accent dropped": ("e\u0301t", [(0, 1), (1, 2), (2, 3)], [(0, 1), (2, 3)], [0, 0, 1], [0, 1]),
    "control characters at the ends": ("\x01a\x02", [(0, 1), (1, 2), (2, 3)], [(1, 2)], [0, 0, 0], [0]),
    "a prefix without characters": ("ab", [(0, 0), (0, 1), (1, 2)], [(0, 1), (1, 2)], [0, 0, 1], [0, 1]),
    "an end without characters": ("ab", [(0, 1), (1, 2), (2, 2), (2, 2)], [(0, 1), (1, 2)], [0, 1, 1, 1], [0, 1]),
    "nothing but such": ("  ", [(0, 0), (0, 0)], [(0, 1), (1, 2)], [-1, -1], [-1, -1]),
    "an end that comes back": ("a b", [(0, 2), (0, 1), (2, 3)], [(0, 1), (1, 3)], [0, 0, 0], [0, 0]),
    "a beginning that comes back": ("a b", [(0, 1), (2, 3), (1, 3)], [(0, 2), (2, 3)], [0, 0, 0], [0, 0]),
    "one side is empty": ("ab", [], [(0, 1), (1, 2)], [], [-1, -1]),
    "both are empty": ("", [], [], [], []),
}


@pytest.mark.parametrize("case", SPANS)
def test_spans(case: str) -> None:
    text, *sides, student, teacher = SPANS[case]
    a, b = (spans(*side) for side in sides)
    found = align_spans(text, a, np.zeros(len(a)), b, np.zeros(len(b)))
    assert found.student_chunk.tolist() == student
    assert found.teacher_chunk.tolist() == teacher
    assert found.count == len({*student, *teacher} - {NO_CHUNK})


@pytest.mark.parametrize(
    ("student", "teacher", "chunks"),
    [
        ([CONTENT, OTHER, CONTENT], [CONTENT, OTHER, CONTENT], [0, 1, 2]),
        ([CONTENT, Role.EOS, CONTENT], [CONTENT, Role.PAD, CONTENT], [0, 1, 2]),
        ([CONTENT, OTHER, CONTENT], [CONTENT, CONTENT, CONTENT], [0, -1, 1]),
        ([CONTENT, UNK, CONTENT], [CONTENT, CONTENT, CONTENT], [0, -1, 1]),
        ([CONTENT, CONTENT, CONTENT], [CONTENT, UNK, CONTENT], [0, -1, 1]),
        ([CONTENT, UNK, CONTENT], [CONTENT, UNK, CONTENT], [0, -1, 1]),
        ([CONTENT, OTHER, CONTENT], [CONTENT, UNK, CONTENT], [0, -1, 1]),
    ],
)
def test_special_and_unknown_tokens_in_a_text(student: list[Role], teacher: list[Role], chunks: list[int]) -> None:
    offsets = spans((0, 1), (1, 2), (2, 3))
    found = align_spans("abc", offsets, np.array(student), offsets, np.array(teacher))
    assert found.student_chunk.tolist() == found.teacher_chunk.tolist() == chunks


def test_a_special_token_is_alone_in_its_chunk() -> None:
    sides = spans((0, 1), (1, 3)), np.array([OTHER, CONTENT]), spans((0, 2), (2, 3)), np.array([CONTENT, OTHER])
    assert align_spans("abc", *sides).count == 0


def test_a_special_token_that_the_other_side_spells_out() -> None:
    text = "a<|end|>b"
    sides = span_tokenizer("byte_bpe").encode(text), span_tokenizer("unigram").encode(text)
    assert (sides[0].roles == Role.EOS).sum() == 1
    found = align(text, *sides)
    assert found.count == 2
    assert found.student_chunk[sides[0].roles == Role.EOS].tolist() == [NO_CHUNK]


@pytest.mark.parametrize("ends", [(a, b, c, d) for a in (0, 1) for b in (0, 1) for c in (0, 1) for d in (0, 1)])
@pytest.mark.parametrize("text", ["the function", "", "\n"])
def test_added_tokens_are_paired_by_role(text: str, ends: tuple[int, int, int, int]) -> None:
    bos, eos, teacher_bos, teacher_eos = map(bool, ends)
    student = span_tokenizer("byte_bpe").encode(text, bos=bos, eos=eos)
    teacher = span_tokenizer("wordpiece").encode(text, bos=teacher_bos, eos=teacher_eos)
    plain = align(text, span_tokenizer("byte_bpe").encode(text), span_tokenizer("wordpiece").encode(text))
    found = align(text, student, teacher)
    assert found.count == plain.count + (bos and teacher_bos) + (eos and teacher_eos)
    if bos and teacher_bos:
        assert found.student_chunk[0] == found.teacher_chunk[0] == 0
    elif bos:
        assert found.student_chunk[0] == NO_CHUNK
    if eos and teacher_eos:
        assert found.student_chunk[-1] == found.teacher_chunk[-1] == found.count - 1
    elif teacher_eos:
        assert found.teacher_chunk[-1] == NO_CHUNK


def test_one_token_for_all_roles() -> None:
    """Padding is never in a text, and an end is an end though the same token begins and pads."""
    tokenizer = transformers_tokenizer("byte_bpe").__class__(
        tokenizer_object=transformers_tokenizer("byte_bpe").backend_tokenizer,
        **dict.fromkeys(("bos_token", "eos_token", "pad_token"), "<|end|>"),
    )
    side = SpanTokenizer(tokenizer).encode("the", bos=True, eos=True)
    assert side.roles.tolist() == [Role.BOS, *[Role.CONTENT] * (len(side) - 2), Role.EOS]
    other = span_tokenizer("metaspace_bpe").encode("the", eos=True)
    found = align("the", side, other)
    assert (found.student_chunk[0], found.student_chunk[-1]) == (NO_CHUNK, found.count - 1)
    assert found.teacher_chunk[-1] == found.count - 1


@pytest.mark.parametrize("kind", ["unigram", "metaspace_bpe", "wordpiece"])
def test_undeclared_unknown_token(kind: str) -> None:
    """A folder may say nothing of it, and it may be an ordinary token."""
    content = json.loads(transformers_tokenizer(kind).backend_tokenizer.to_str())
    unknown = content["model"].get("unk_token") or "<unk>"
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != unknown]
    side = SpanTokenizer(PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content))))
    assert side.tokenizer.unk_token is None
    assert side.role_of_id[side.tokenizer.get_vocab()[unknown]] == Role.UNK


def test_truncated_sequences_keep_whole_chunks() -> None:
    text = "the function 🎈 takes arguments"
    sides = span_tokenizer("byte_bpe").encode(text), span_tokenizer("unigram").encode(text)
    whole = align(text, *sides)
    for student in range(len(sides[0]) + 1):
        for teacher in range(len(sides[1]) + 1):
            cut = whole.truncated(student, teacher)
            assert (len(cut.student_chunk), len(cut.teacher_chunk)) == (student, teacher)
            for number in range(cut.count):
                assert (cut.student_chunk == number).sum() == (whole.student_chunk == number).sum() > 0
                assert (cut.teacher_chunk == number).sum() == (whole.teacher_chunk == number).sum() > 0
            left = set(whole.student_chunk[student:]) | set(whole.teacher_chunk[teacher:])
            assert cut.count == len(set(range(whole.count)) - left)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_training(kind: str) -> None:
    generator = np.random.default_rng(2)
    for _ in range(50):
        text = random_text(generator)
        wanted = transformers_tokenizer(kind)(text, add_special_tokens=False)["input_ids"]
        assert span_tokenizer(kind).encode(text).ids.tolist() == wanted


def test_unusable_tokenizers(tmp_path) -> None:
    with pytest.raises(MkdDataError, match=r"--kd-teacher-hf .*nowhere does not exist"):
        SpanTokenizer(tmp_path / "nowhere", "--kd-teacher-hf")
    with pytest.raises(MkdDataError, match="CanineTokenizer is a slow tokenizer, which has no offsets of tokens"):
        SpanTokenizer(CanineTokenizer())
    with pytest.raises(MkdDataError, match="has no token"):
        SpanTokenizer(PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE())))
    with pytest.raises(MkdDataError, match="text: half a surrogate pair at character 1"):
        span_tokenizer("unigram").encode("a\ud800")
    nameless = transformers_tokenizer("byte_bpe").__class__(
        tokenizer_object=transformers_tokenizer("byte_bpe").backend_tokenizer
    )
    with pytest.raises(MkdDataError, match="has no eos_token to add"):
        SpanTokenizer(nameless).encode("a", eos=True)


def test_hashes_tell_tokenizers_apart() -> None:
    kinds = {span_tokenizer(kind).hash for kind in KINDS}
    assert len(kinds) == len(KINDS)
    for kind in KINDS:
        assert SpanTokenizer(transformers_tokenizer(kind)).hash == span_tokenizer(kind).hash


@pytest.mark.parametrize(
    ("vocabulary", "whole", "words"),
    [
        ({"a": 0, "b": 1, "c": 1}, {"a": 0}, "gives the id 1 to the tokens 'b' and 'c': take its tokenizer.json from"),
        ({"a": 0, "b": 1}, {"a": 0, "b": 2}, "has a token with the id 2, but its tokenizer.json has 2 ids"),
    ],
)
def test_ids_that_are_not_one_per_token_are_refused(vocabulary: dict, whole: dict, words: str) -> None:
    """The library reads such a file in one of several ways, at random."""
    side = object.__new__(SpanTokenizer)
    side.flag, side.name = "--kd-teacher-hf", "folder"
    side._backend = SimpleNamespace(get_vocab=lambda with_added_tokens: vocabulary)
    side.tokenizer = SimpleNamespace(get_vocab=lambda: whole)
    with pytest.raises(MkdDataError, match=f"--kd-teacher-hf folder {words}"):
        side._check_ids()
