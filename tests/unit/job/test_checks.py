"""mkd/job/checks.py: the list that a job and the doctor share."""

import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mkd.checkpoint.source import EnsembleSource
from mkd.config.check_list import run_checks
from mkd.config.flags import parse_command_line
from mkd.config.kd_config import KDConfig
from mkd.job.checks import CHECKS, JobDraft
from mkd.utils.model_folders.tokenizer_flag import tokenizer_flag
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


def test_a_teacher_with_the_same_tokenizer_limits_samples_beside_one_with_another() -> None:
    same, other = (
        SimpleNamespace(architecture={"max_position_embeddings": positions}, origin="T") for positions in (96, 64)
    )
    draft = JobDraft(Namespace(max_position_embeddings=128), KDConfig(teacher_hf=["A", "B"], ratio=0.5))
    draft.source, draft.foreign = EnsembleSource((same, other)), [other]
    assert draft.data.longest_sample == 96
