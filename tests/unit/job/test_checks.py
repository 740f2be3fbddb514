"""mkd/job/checks.py: the list that a job and the doctor share."""

import sys
from pathlib import Path

import pytest

from mkd.config.check_list import run_checks
from mkd.config.flags import parse_command_line
from mkd.job.checks import CHECKS, JobDraft
from mkd.utils.tokenizer_flag import tokenizer_flag
from tests.support.hf_folders import add_tokenizer, make_llama


def test_names_are_unique() -> None:
    names = [check.name for check in CHECKS]
    assert len(names) == len(set(names))


def test_each_check_needs_earlier_ones_only() -> None:
    earlier: set[str] = set()
    for check in CHECKS:
        assert set(check.needs) <= earlier, check.name
        earlier.add(check.name)


@pytest.mark.parametrize("given", [False, True])
def test_the_flag_of_the_tokenizer_is_the_one_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    student = str(make_llama(tmp_path / "student"))
    add_tokenizer(Path(student), ["one", "two"])
    words = ["--kd-teacher-hf", "T", "--kd-ratio", "0.5", "--kd-student-hf", student]
    words += ["--tokenizer-model", student] if given else []
    monkeypatch.setattr(sys, "argv", ["x", *words])
    draft = JobDraft(*parse_command_line())
    run_checks([check for check in CHECKS if check.name in ("student", "architecture", "tokenizer files")], draft)
    assert draft.args.tokenizer_model == student
    assert tokenizer_flag(draft.args) == ("--tokenizer-model" if given else "--kd-student-hf")
