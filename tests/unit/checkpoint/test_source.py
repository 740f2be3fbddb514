"""Common vocabulary of student and teacher."""

from pathlib import Path

import pytest

from mkd.checkpoint.source import ModelSource, common_vocabulary
from mkd.errors import MkdConfigError


def teacher(vocab_size: int | None, tokenizer_hash: str | None) -> ModelSource:
    return ModelSource(
        "--kd-teacher-hf T", Path("T"), {}, vocab_size, tokenizer_hash, None, lambda: "", lambda *load: None
    )


@pytest.mark.parametrize(
    ("student", "other", "common"),
    [
        ((131, "a"), (131, "a"), 131),
        ((131, None), (131, "a"), 131),
        ((131, None), (131, None), 131),
        ((131, None), (None, None), 131),
        ((151936, "a"), (152064, "a"), 151936),
        ((152064, "a"), (151936, "a"), 151936),
    ],
)
def test_common_tokens(student, other, common):
    assert common_vocabulary("--kd-student-hf S", *student, teacher(*other)) == common


@pytest.mark.parametrize(
    ("student", "other", "words"),
    [
        ((131, "a"), (131, "b"), ["different tokenizers"]),
        ((131, "a"), (136, "b"), ["different tokenizers"]),
        ((131, None), (136, "a"), ["131 tokens", "136", "tokenizer's files"]),
        ((131, "a"), (136, None), ["131 tokens", "136", "tokenizer's files"]),
    ],
)
def test_refused(student, other, words):
    with pytest.raises(MkdConfigError) as caught:
        common_vocabulary("--kd-student-hf S", *student, teacher(*other))
    for word in ("--kd-student-hf S", "--kd-teacher-hf T", *words):
        assert word in str(caught.value)
