"""Texts and conversations for two models: which tokens are targets, and which say the same."""

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from mkd.data.sources.conversation import Conversation
from mkd.errors import MkdDataError
from mkd.xtoken.text.alignment import NO_CHUNK
from mkd.xtoken.text.conversations import ends_of_turn
from mkd.xtoken.text.samples import AlignedPair, Passage, align_sample
from mkd.xtoken.text.tokens import Role, SpanTokenizer
from mkd.xtoken.vocabulary.build import build_projection
from mkd.xtoken.vocabulary.projection import ProjectionOptions
from tests.support.chats import MARKED, PLAIN, talk
from tests.support.tokenizers_of_kinds import span_tokenizer, transformers_tokenizer

BRACKETS = (
    "{% for m in messages %}{{ '<s>[' + m['role'] + '] ' + m['content'].strip() + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>[assistant] ' }}{% endif %}"
)
"""Strips messages, and puts a space before them, which tokens take in."""
REASONING = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% set parts = m['content'].split('</think>') %}"
    "{{ '<think>' + (parts[0].replace('<think>', '') if parts|length > 1 else '') + '</think>' + parts[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
"""Inspects the content of answers, and writes empty thoughts where there are none."""
DROPPING = (
    "{% for m in messages if m['role'] != 'system' %}{{ '<s>' + m['role'] + '\n' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ '</s>' }}{% else %}{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
"""Leaves the system prompt out, and ends only the assistant's turns."""
CLOSING = (
    "{% for m in messages %}{{ '<|turn|>' + m['role'] + '\n' + m['content'] + '</s>\n' }}{% endfor %}"
    "{{ '<|turn|>assistant\n' if add_generation_prompt else '<s>' }}"
)
"""Ends a conversation with a token that ends no turn."""


def with_template(kind: str, template: str) -> SpanTokenizer:
    original = transformers_tokenizer(kind)
    special = {name: getattr(original, name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    copy = PreTrainedTokenizerFast(tokenizer_object=original.backend_tokenizer, name_or_path=kind, **special)
    copy.chat_template = template
    return SpanTokenizer(copy, "--kd-teacher-hf")


STUDENT = with_template("byte_bpe", PLAIN)
TEACHERS = {
    "brackets": with_template("metaspace_bpe", BRACKETS),
    "reasoning": with_template("unigram", REASONING),
    "dropping": with_template("metaspace_bpe", DROPPING),
    "closing": with_template("unigram", CLOSING),
    "plain": with_template("metaspace_bpe", PLAIN.replace("<|end|>", "</s>")),
}


def pieces(sample: AlignedPair, student: SpanTokenizer, teacher: SpanTokenizer) -> list[tuple[str, str]]:
    """(student text, teacher text) of each chunk."""
    found = sample.alignment
    sides = (student, sample.student_ids, found.student_chunk), (teacher, sample.teacher_ids, found.teacher_chunk)
    return [
        tuple(side.tokenizer.decode(ids[chunk == number]) for side, ids, chunk in sides)
        for number in range(found.count)
    ]


def said(sample: AlignedPair, student: SpanTokenizer, teacher: SpanTokenizer) -> str:
    """The student's side of all chunks."""
    return "".join(piece for piece, _ in pieces(sample, student, teacher))


@pytest.mark.parametrize("teacher", ["unigram", "metaspace_bpe", "wordpiece"])
def test_texts(teacher: str) -> None:
    sides = span_tokenizer("byte_bpe"), span_tokenizer(teacher)
    text = "The function takes arguments."
    sample = align_sample(*sides, [Passage(text)])
    assert sample.student_ids.tolist() == [*sides[0].encode(text).ids, sides[0].tokenizer.eos_token_id]
    first = sides[1].encode(text).ids[0] if teacher != "metaspace_bpe" else sides[1].tokenizer.bos_token_id
    assert sample.teacher_ids[0] == first
    assert not sample.student_targets[0]
    assert sample.student_targets[1:].all()
    assert np.array_equal(sample.teacher_targets, sample.alignment.teacher_chunk != NO_CHUNK)
    assert sample.alignment.student_chunk[0] == NO_CHUNK  # nothing predicts it
    assert pieces(sample, *sides)[-1] == (sides[0].tokenizer.eos_token, sides[1].tokenizer.eos_token)
    assert align_sample(*sides, [Passage(text, ends=False)]).alignment.count == sample.alignment.count - 1


def test_the_first_token_of_either_side_is_in_no_chunk() -> None:
    text = "ab the function"
    for pair in (("byte_bpe", "unigram"), ("byte_bpe", "metaspace_bpe"), ("metaspace_bpe", "byte_bpe")):
        sample = align_sample(*map(span_tokenizer, pair), [Passage(text)])
        assert sample.alignment.student_chunk[0] == sample.alignment.teacher_chunk[0] == NO_CHUNK
        used = sample.alignment.student_chunk[sample.alignment.student_chunk != NO_CHUNK]
        assert np.unique(used).tolist() == list(range(sample.alignment.count))


TALK = talk("What is this?", "The function é🎈 takes\n  arguments.", "ok", "this?", system="Be the function.")


@pytest.mark.parametrize("teacher", TEACHERS)
@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
def test_conversations_are_aligned_message_by_message(teacher: str, template: str) -> None:
    sides = with_template("byte_bpe", template), TEACHERS[teacher]
    sample = align_sample(*sides, Conversation(TALK))
    assert said(sample, *sides) == "The function é🎈 takes\n  arguments.<|end|>this?<|end|>"
    assert sample.not_found == 0
    for ours, theirs in pieces(sample, *sides):
        assert theirs.strip() == ("</s>" if ours == "<|end|>" else ours.strip())
    assert sample.student_targets[sample.alignment.student_chunk != NO_CHUNK].all()
    ids, supervised = sides[0].template.encode(Conversation(TALK))
    assert sample.student_ids.tolist() == ids.tolist()
    assert sample.student_targets.tolist() == supervised.tolist()


def test_the_place_of_a_message_is_its_own() -> None:
    """Not where another message has the same text, or a role has that name."""
    chat = Conversation(talk("assistant", "assistant", "the", "the", "e", "th"))
    for teacher in TEACHERS.values():
        sample = align_sample(STUDENT, teacher, chat)
        assert said(sample, STUDENT, teacher) == "assistant<|end|>the<|end|>th<|end|>"
        places = np.flatnonzero(sample.teacher_targets)
        text = teacher.tokenizer.decode(sample.teacher_ids[: places[0]])
        assert text.count("assistant") == 2  # the user's word and the role


def test_white_space_at_the_ends_of_messages_is_not_compared() -> None:
    chat = Conversation(talk("a", " \n The function \n", "b", "takes "))
    for teacher in TEACHERS.values():
        sample = align_sample(STUDENT, teacher, chat)
        assert "".join(said(sample, STUDENT, teacher).split()) == "Thefunction<|end|>takes<|end|>"


def test_all_messages_on_demand() -> None:
    for name, teacher in TEACHERS.items():
        sample = align_sample(STUDENT, teacher, Conversation(TALK), all_messages=True)
        prompt = "" if name == "dropping" else "Be the function.<|end|>"
        ends = "" if name == "dropping" else "<|end|>"
        wanted = f"{prompt}What is this?{ends}The function é🎈 takes\n  arguments.<|end|>ok{ends}this?<|end|>"
        assert said(sample, STUDENT, teacher) == wanted
        assert sample.not_found == (name == "dropping")
        assert sample.student_targets.sum() < (sample.alignment.student_chunk != NO_CHUNK).sum()


def test_reasoning_is_found_though_the_template_looks_into_it() -> None:
    thoughts = "<think>this is a function</think>The function."
    teacher = TEACHERS["reasoning"]
    sample = align_sample(STUDENT, teacher, Conversation(talk("a", thoughts, "b", "None")))
    assert said(sample, STUDENT, teacher) == f"{thoughts}<|end|>None<|end|>"
    assert sample.not_found == 0


def test_messages_that_a_template_changes_are_counted_and_left_out() -> None:
    teacher = with_template("metaspace_bpe", BRACKETS.replace("m['content'].strip()", "m['content'].upper()"))
    sample = align_sample(STUDENT, teacher, Conversation(talk("a", "the function", "b", "NONE")))
    assert said(sample, STUDENT, teacher) == "NONE<|end|>"
    assert sample.not_found == 1
    assert sample.student_targets.sum() > (sample.alignment.student_chunk != NO_CHUNK).sum()


def test_prompt_messages_are_not_aligned() -> None:
    teacher = TEACHERS["plain"]
    sample = align_sample(STUDENT, teacher, Conversation(talk("a", "given", "b", "the answer"), given=3))
    assert said(sample, STUDENT, teacher) == "the answer<|end|>"


def test_unsupervised_assistant_messages_are_not_aligned() -> None:
    """Nothing comes before a first message, so training only reads it."""
    teacher = TEACHERS["plain"]
    sample = align_sample(STUDENT, teacher, Conversation(talk("a", "only read", "b", "the answer")[1:]))
    assert said(sample, STUDENT, teacher) == "the answer<|end|>"


def test_unlearned_answers_are_not_aligned() -> None:
    """They stay in the tokens of both models."""
    teacher, messages = TEACHERS["plain"], talk("a", "not this", "b", "the answer", "c", "the function")
    unlearned = Conversation([{**message, **({"weight": 0} if i == 1 else {})} for i, message in enumerate(messages)])
    sample, whole = align_sample(STUDENT, teacher, unlearned), align_sample(STUDENT, teacher, Conversation(messages))
    assert said(sample, STUDENT, teacher) == "the answer<|end|>the function<|end|>"
    assert sample.student_targets.tolist() == STUDENT.template.encode(unlearned)[1].tolist()
    for ids in ("student_ids", "teacher_ids"):
        assert getattr(sample, ids).tolist() == getattr(whole, ids).tolist()
    everything = align_sample(STUDENT, teacher, unlearned, all_messages=True)
    assert said(everything, STUDENT, teacher).startswith("a<|end|>not this<|end|>")
    assert everything.student_targets.tolist() == sample.student_targets.tolist()


def test_prompt_messages_need_not_be_located() -> None:
    teacher = with_template("metaspace_bpe", BRACKETS.replace("m['content'].strip()", "m['content'].upper()"))
    sample = align_sample(STUDENT, teacher, Conversation(talk("a", "given", "b", "NONE"), given=3))
    assert sample.not_found == 0


def test_a_token_that_goes_beyond_its_message_is_in_no_chunk() -> None:
    teacher = with_template("metaspace_bpe", BRACKETS.replace("m['content'].strip()", "'th' + m['content']"))
    joined = teacher.tokenizer.get_vocab()["▁the▁"]
    sample = align_sample(STUDENT, teacher, Conversation(talk("a", "e function")))
    assert joined in sample.teacher_ids
    assert joined not in sample.teacher_ids[sample.teacher_targets]
    assert said(sample, STUDENT, teacher) == "<|end|>"


def test_a_message_that_a_tokenizer_drops() -> None:
    teacher = with_template("wordpiece", BRACKETS.replace("<s>", "[CLS]").replace("</s>", "[SEP]"))
    sample = align_sample(STUDENT, teacher, Conversation(talk("a", "\x01\x02", "b", "the")))
    assert said(sample, STUDENT, teacher) == "the<|end|>"


def test_answers_that_end_otherwise_than_texts() -> None:
    """As with models that have an end of turn beside the end of sequence, which the roles would pair with it."""
    teacher = with_template("metaspace_bpe", CLOSING.replace("<|turn|>", "<s>").replace("</s>", "<|turn|>"))
    assert ends_of_turn(STUDENT, teacher) == (("<|end|>", "<|turn|>"),)
    assert ends_of_turn(span_tokenizer("byte_bpe"), teacher) == ()  # no template
    ids = [side.tokenizer.get_vocab() for side in (STUDENT, teacher)]
    chat, text = Conversation(talk("a", "the function")), [Passage("the function")]
    for pairs, other, kept in ((ends_of_turn(STUDENT, teacher), "<|turn|>", chat), ((), "</s>", text)):
        common = build_projection(STUDENT, teacher, ProjectionOptions(pairs=pairs)).common.tolist()
        assert [ids[0]["<|end|>"], ids[1][other]] in common
        for sample in (chat, text):
            whole = align_sample(STUDENT, teacher, sample)
            end = whole.student_ids == ids[0]["<|end|>"]
            only = whole.only_pairs(STUDENT.role_of_id[whole.student_ids] != Role.CONTENT, [tuple(p) for p in common])
            assert whole.alignment.count - only.alignment.count == (sample is not kept)
            assert (only.alignment.student_chunk[end][-1] >= 0) == (sample is kept)
            assert np.array_equal(only.teacher_targets, only.alignment.teacher_chunk != NO_CHUNK)
            assert (only.alignment.student_chunk[~end] >= 0).sum() == (whole.alignment.student_chunk[~end] >= 0).sum()


def test_truncated_samples() -> None:
    teacher = TEACHERS["brackets"]
    whole = align_sample(STUDENT, teacher, Conversation(TALK))
    last = int(np.flatnonzero(whole.alignment.teacher_chunk == 3)[0])
    cut = whole.truncated(len(whole.student_ids), last)
    assert cut.alignment.count == 3
    assert cut.teacher_targets.sum() == (whole.alignment.teacher_chunk[:last] != NO_CHUNK).sum()
    assert len(cut.teacher_ids) == last
    assert cut.student_targets.tolist() == whole.student_targets.tolist()


def test_samples_that_cannot_be_used() -> None:
    byte_bpe, wordpiece = span_tokenizer("byte_bpe"), span_tokenizer("wordpiece")
    with pytest.raises(MkdDataError, match="a sample has no token for the student"):
        align_sample(byte_bpe, wordpiece, [Passage("", ends=False)])
    with pytest.raises(MkdDataError, match="a sample has no token for the teacher"):
        align_sample(byte_bpe, wordpiece, [Passage(" \n", ends=False)])
    assert align_sample(byte_bpe, wordpiece, [Passage(" \n")]).alignment.count == 0
    with pytest.raises(MkdDataError, match="wordpiece has no chat template"):
        align_sample(STUDENT, wordpiece, Conversation(TALK))
