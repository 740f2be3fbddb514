"""Written texts in the tokens of teachers: those of given texts, and texts that no tokenizer returns."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from mkd.data.sources.aligned import TeacherText
from mkd.data.sources.conversation import Conversation
from mkd.data.sources.prompts import Prompt
from mkd.errors import MkdDataError
from mkd.xtoken.text.alignment import NO_CHUNK
from mkd.xtoken.text.samples import Passage, align_sample
from mkd.xtoken.text.tokens import SpanTokenizer
from mkd.xtoken.text.written import TeacherPrompt, TokenSpeller, WrittenAligner, WrittenView, names_of, separator_of
from tests.support.chats import PLAIN, talk
from tests.support.tokenizers_of_kinds import span_tokenizer
from tests.unit.xtoken.test_samples import BRACKETS, REASONING, TEACHERS, with_template

STUDENT = with_template("byte_bpe", PLAIN)
QUESTION = talk("What is this?", "It.", "And the function?")
ANSWER = "The function é🎈 takes\n  arguments."


def aligner(
    student: SpanTokenizer,
    teacher: SpanTokenizer,
    prompt: Prompt,
    most: int = 1000,
    ends: tuple[str, str] | None = None,
) -> WrittenAligner:
    """For one prompt and teacher; `ends` are the names of two equivalent special tokens."""
    ours, theirs = ends or (student.tokenizer.eos_token, teacher.tokenizer.eos_token)
    pair = (student.tokenizer.convert_tokens_to_ids(ours), teacher.tokenizer.convert_tokens_to_ids(theirs))
    names = names_of(teacher, dict([pair]))
    view = WrittenView(teacher, (TeacherPrompt.of(prompt, teacher),), names, names, None, most)
    speller = TokenSpeller.of(student)
    return WrittenAligner(speller, separator_of(student, speller), (view,))


def chat_prompt(student: SpanTokenizer, messages: list = QUESTION) -> Prompt:
    chat = Conversation(messages, where="p.jsonl, line 1")
    text = student.template.text(chat, prompt=True)
    return Prompt(text, tuple(student.encode(text).ids.tolist()), where=chat.where, conversation=chat)


def text_prompt(student: SpanTokenizer, text: str) -> Prompt:
    return Prompt(text, tuple(student.tokenizer(text)["input_ids"]), where="p.jsonl, line 1")


def written(found: WrittenAligner, prompt: Prompt, new: Sequence[int]) -> TeacherText:
    (text,) = found.texts(0, prompt.tokens, new)
    ids = [*prompt.tokens, *new]
    assert len(text.student_chunk) == len(ids) and len(text.ids) == len(text.targets) == len(text.chunk) >= 2
    assert np.array_equal(text.targets, text.chunk != NO_CHUNK)
    assert (text.student_chunk[: len(prompt.tokens)] == NO_CHUNK).all()
    for chunk in (text.student_chunk, text.chunk):  # consecutive tokens, in the order of the text
        numbers = chunk[chunk != NO_CHUNK]
        assert np.array_equal(np.unique(numbers), np.arange(text.chunk.max(initial=NO_CHUNK) + 1))
        assert (np.diff(numbers) >= 0).all()
        assert np.diff(np.flatnonzero(chunk != NO_CHUNK))[np.diff(numbers) == 0].max(initial=1) == 1
    return text


def pieces(
    text: TeacherText, ids: Sequence[int], student: SpanTokenizer, teacher: SpanTokenizer
) -> list[tuple[str, str]]:
    """(student text, teacher text) of each chunk."""
    views = (student, np.array(ids), text.student_chunk), (teacher, text.ids, text.chunk)
    return [
        tuple(view.tokenizer.decode(tokens[chunk == number]) for view, tokens, chunk in views)
        for number in range(text.chunk.max(initial=NO_CHUNK) + 1)
    ]


@pytest.mark.parametrize("teacher", TEACHERS)
def test_an_answer_is_aligned_like_a_given_one(teacher: str) -> None:
    """The teacher's tokens end with the answer; those of a given conversation may go on."""
    other, prompt = TEACHERS[teacher], chat_prompt(STUDENT)
    given = align_sample(STUDENT, other, Conversation([*QUESTION, *talk("", ANSWER)[1:]]))
    new = given.student_ids[len(prompt.tokens) :].tolist()
    new = new[: new.index(STUDENT.tokenizer.eos_token_id) + 1]
    text = written(aligner(STUDENT, other, prompt), prompt, new)
    size = len(prompt.tokens) + len(new)
    assert text.ids.tolist() == given.teacher_ids[: len(text.ids)].tolist()
    before = given.alignment.student_chunk[: len(prompt.tokens)].max() + 1  # chunks of the earlier answer
    last = given.alignment.student_chunk[len(prompt.tokens) : size]
    assert text.student_chunk[len(prompt.tokens) :].tolist() == (last - before * (last >= 0)).tolist()
    both = given.alignment.teacher_chunk[: len(text.ids)]
    assert text.chunk.tolist() == np.where(both >= before, both - before, NO_CHUNK).tolist()
    assert "".join(ours for ours, _ in pieces(text, [*prompt.tokens, *new], STUDENT, other)).endswith(
        "arguments.<|end|>"
    )


@pytest.mark.parametrize("kind", ["unigram", "metaspace_bpe", "wordpiece"])
def test_a_continued_text_is_aligned_like_a_given_one(kind: str) -> None:
    """Chunks whose tokens are all written, for a text that the student's tokenizer splits at the same place."""
    student, teacher, whole = span_tokenizer("byte_bpe"), span_tokenizer(kind), "The function takes arguments."
    given = align_sample(student, teacher, [Passage(whole)])
    prompt = text_prompt(student, "The function")
    new = given.student_ids[len(prompt.tokens) :].tolist()
    assert given.student_ids[: len(prompt.tokens)].tolist() == list(prompt.tokens)
    text = written(aligner(student, teacher, prompt), prompt, new)
    assert text.ids.tolist() == given.teacher_ids.tolist()
    asked, ours = np.split(given.alignment.student_chunk, [len(prompt.tokens)])
    first = asked.max() + 1  # a chunk that begins in the prompt is left out
    assert text.student_chunk[len(prompt.tokens) :].tolist() == np.where(ours >= first, ours - first, NO_CHUNK).tolist()
    assert ours.max() > first


@pytest.mark.parametrize("kind", ["byte_bpe", "unigram", "metaspace_bpe"])
def test_the_students_own_tokens_are_kept(kind: str) -> None:
    """A text in the smallest tokens that the student has, which its tokenizer never returns."""
    student, teacher = span_tokenizer(kind), TEACHERS["plain"]
    speller, prompt = TokenSpeller.of(student), text_prompt(student, "What is this?")
    letters = {token: number for number, token in enumerate(speller.bytes_of) if len(token) == 1}
    new = [letters[bytes([byte])] for byte in " the naïve one.".encode()]
    text = written(aligner(student, teacher, prompt), prompt, new)
    assert teacher.tokenizer.decode(text.ids, skip_special_tokens=True) == "What is this? the naïve one."
    found = pieces(text, [*prompt.tokens, *new], student, teacher)
    assert "".join(theirs for _, theirs in found).replace(" ", "") == "thenaïveone."
    assert (text.student_chunk >= 0).sum() == len(new)


def test_a_space_that_belongs_to_the_template_is_no_part_of_the_answer() -> None:
    """The student's first token holds it, as those of SentencePiece do."""
    student, teacher = with_template("metaspace_bpe", BRACKETS), with_template("byte_bpe", PLAIN)
    prompt = chat_prompt(student)
    whole = student.template.text(Conversation([*QUESTION, *talk("", "This is it.")[1:]]))
    ids = student.encode(whole).ids.tolist()
    found = aligner(student, teacher, prompt)
    new = ids[len(prompt.tokens) :]
    text = written(found, prompt, new)
    assert teacher.tokenizer.decode(text.ids).endswith("<|start|>assistant\nThis is it.<|end|>")
    assert pieces(text, [*prompt.tokens, *new], student, teacher)[-1] == ("</s>", "<|end|>")


def test_an_answer_with_reasoning_of_its_own() -> None:
    """The empty block that the teacher's template writes is left out before it."""
    teacher = with_template("unigram", REASONING)
    prompt = chat_prompt(STUDENT)
    found = aligner(STUDENT, teacher, prompt)
    for answer, expected in (
        ("so", "assistant\n<think></think>so"),
        ("<think>a</think>so", "assistant\n<think>a</think>so"),
    ):
        text = written(found, prompt, STUDENT.encode(answer).ids.tolist())
        assert teacher.tokenizer.decode(text.ids).replace(" ", "").endswith(expected)


def test_bytes_that_are_no_characters() -> None:
    """They are U+FFFD for the teacher and in no chunk; at the end of a text they are left out."""
    teacher, prompt = TEACHERS["plain"], chat_prompt(STUDENT)
    speller = TokenSpeller.of(STUDENT)
    byte = {token: number for number, token in enumerate(speller.bytes_of) if len(token) == 1}
    new = STUDENT.encode("The function").ids.tolist()
    cut = [byte[bytes([value])] for value in "é🎈".encode()[:4]]  # é, and two of four bytes
    found = aligner(STUDENT, teacher, prompt)
    text = written(found, prompt, [*new, *cut])
    assert teacher.tokenizer.decode(text.ids).endswith("The functioné")
    assert text.student_chunk[-2:].tolist() == [NO_CHUNK] * 2 and (text.student_chunk[-4:-2] >= 0).all()
    text = written(found, prompt, [*new, byte[b"\xff"], *cut[2:], *STUDENT.encode(" is").ids.tolist()])
    assert teacher.tokenizer.decode(text.ids).endswith("The function\ufffd\ufffd\ufffd is")
    assert text.student_chunk[-1] >= 0 and (text.student_chunk[-4:-1] == NO_CHUNK).all()
    only = written(found, prompt, [byte[b"\xff"]] * 3)
    assert (only.chunk == NO_CHUNK).all() and (only.student_chunk == NO_CHUNK).all()


def test_special_tokens_in_the_middle() -> None:
    """One with a counterpart is that; another one is its name, in no chunk; an id beyond the tokenizer is not text."""
    teacher, prompt = TEACHERS["plain"], chat_prompt(STUDENT)
    end, start = (STUDENT.tokenizer.convert_tokens_to_ids(name) for name in ("<|end|>", "<|start|>"))
    words = STUDENT.encode("the function").ids.tolist()
    new = [*words, end, *words, start, *words, 5000, *words, start, end]
    text = written(aligner(STUDENT, teacher, prompt), prompt, new)
    assert (
        teacher.tokenizer.decode(text.ids)
        .replace(" ", "")
        .endswith("thefunction</s>thefunction<|start|>thefunctionthefunction<|start|></s>")
    )
    chunk = text.student_chunk[len(prompt.tokens) :]
    at = [number for number, token in enumerate(new) if token in (start, 5000)]
    assert (chunk[at] == NO_CHUNK).all() and chunk[new.index(end)] >= 0 and chunk[-1] >= 0
    kept = replace(aligner(STUDENT, teacher, prompt).views[0], pairs=())
    (filtered,) = WrittenAligner(TokenSpeller.of(STUDENT), "", (kept,)).texts(0, prompt.tokens, new)
    assert filtered.student_chunk[-1] == NO_CHUNK and (filtered.student_chunk >= 0).sum() == (chunk >= 0).sum() - 2
    alone = written(aligner(STUDENT, teacher, prompt), prompt, [start])
    assert (alone.chunk == NO_CHUNK).all() and teacher.tokenizer.decode(alone.ids).endswith("assistant\n")


def test_texts_that_are_longer_than_the_teachers_row() -> None:
    teacher, prompt = TEACHERS["plain"], chat_prompt(STUDENT)
    new = STUDENT.encode("the function takes " * 9).ids.tolist()
    whole = written(aligner(STUDENT, teacher, prompt), prompt, new)
    most = len(whole.ids) - 7
    text = written(aligner(STUDENT, teacher, prompt, most), prompt, new)
    assert text.ids.tolist() == whole.ids[:most].tolist()
    count = text.chunk.max() + 1
    assert count > 0 and np.array_equal(
        text.student_chunk, np.where(whole.student_chunk < count, whole.student_chunk, -1)
    )
    before = teacher.encode(aligner(STUDENT, teacher, prompt).views[0].prompts[0].text)
    for size, error in ((len(before) + 1, None), (len(before), "p.jsonl, line 1: the prompt has")):
        view = aligner(STUDENT, teacher, prompt, size).views[0]
        if error is None:
            view.check([prompt])
            continue
        with pytest.raises(MkdDataError, match=error):
            view.check([prompt])


def test_a_template_without_answers() -> None:
    teacher = with_template("unigram", "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}")
    with pytest.raises(MkdDataError, match="line 1: the chat template of --kd-teacher-hf unigram writes no answer"):
        TeacherPrompt.of(chat_prompt(STUDENT), teacher)


@pytest.mark.parametrize("kind", ["byte_bpe", "unigram", "metaspace_bpe", "wordpiece"])
def test_random_tokens(kind: str) -> None:
    """Whatever the student writes, chunks are runs of tokens in both views, and teachers read the same text."""
    student, random = with_template(kind, PLAIN), np.random.RandomState(5)
    for teacher in (TEACHERS["plain"], TEACHERS["reasoning"], with_template("byte_bpe", PLAIN)):
        for prompt in (chat_prompt(student), text_prompt(student, "It is")):
            found = aligner(student, teacher, prompt)
            for _ in range(20):
                written(found, prompt, random.randint(0, student.size + 20, random.randint(1, 40)).tolist())
