"""A teacher with another tokenizer from the command line: training, resume, layouts, what is refused."""

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mkd.errors import MkdError
from mkd.job.job import Job
from mkd.xtoken.text.tokens import SpanTokenizer
from mkd.xtoken.vocabulary.build import build_projection
from tests.e2e.test_bad_input import attempt  # noqa: F401
from tests.e2e.test_pretrain import assert_same_weights, cut_back, steps, trained
from tests.support.chats import MARKED, PLAIN, talk, write_lines
from tests.support.e2e.small_job import TEACHER, SmallJob, make_model, make_small_job, make_tokenizer, text
from tests.support.tolerance import GRADIENT, STEP_LOSS

FOUR = {"--train-iters": 4, "--lr-decay-iters": 4, "--save-interval": 2}
TWO = {"--train-iters": 2, "--lr-decay-iters": 2, "--save-interval": None}
PARTITION = {"--kd-xtoken-loss": "partition_kl"}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
    """With a teacher whose vocabulary is another one, larger and made from other text, and conversations."""
    job = make_small_job(tmp_path_factory.mktemp("xtoken"))
    other = make_tokenizer(411, "many words in another order " * 9 + text()[::2])
    make_model(job.root / "other", other, 3, TEACHER)
    words = text().split()
    for folder, template in ((job.student, MARKED), (job.root / "other", PLAIN)):
        (folder / "chat_template.jinja").write_text(template)
    chats = [talk(*(" ".join(words[7 * i + j : 9 * i + 3 * j + 4]) for j in range(4))) for i in range(40)]
    write_lines(job.root / "chat.jsonl", [{"messages": messages} for messages in chats])
    return job


def other_teacher(job: SmallJob, **changes: Any) -> dict[str, Any]:
    """A blend of documents and conversations in packed rows, learned from the other teacher."""
    return {
        "--kd-teacher-hf": job.root / "other",
        **PARTITION,
        "--data-path": [0.4, job.data, 0.6, job.root / "chat.jsonl"],
        "--kd-packing": "best_fit",
        "--kd-packing-multiple": 8,
        "--seq-length": 64,
        **FOUR,
        **changes,
    }


@pytest.fixture(scope="module")
def four_steps(job: SmallJob, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    save = tmp_path_factory.mktemp("four") / "save"
    return save, trained(job, other_teacher(job, **{"--save": save, "--load": save}))


def test_what_is_said(four_steps: tuple[Path, Any]) -> None:
    output = four_steps[1].output
    assert "mkd: tokenizers --kd-teacher-hf" in output
    assert re.search(r"partition_kl, \d+ of 307 student tokens in its vocabulary of 411, rows of \d+ tokens", output)
    counts = r"tokens of the student, \d+ of them with CE; \d+ of a teacher, in \d+ chunks with \d+ of the student's"
    assert re.search(counts, output)
    assert re.search(r"\d% of them tokens \(of the teacher's rows: [\d.]+%\)", output)
    assert "bits per byte on the first" in output
    lines = [line for line in four_steps[1].metrics if "kd" in line]
    assert len(lines) == 4 and all(line["kd"] > 0 and line["ce"] > 0 for line in lines)


def test_resume_is_bit_equal(job: SmallJob, four_steps: tuple[Path, Any], tmp_path: Path) -> None:
    save, whole = four_steps
    resumed = cut_back(save, tmp_path / "save", 2)
    result = trained(job, other_teacher(job, **{"--save": resumed, "--load": resumed}))
    assert steps(result) == steps(whole)
    assert_same_weights(save, resumed)


def written_texts(job: SmallJob, folder: Path, **changes: Any) -> dict[str, Any]:
    """Half of the rows are written, after conversations and texts."""
    prompts = [{"messages": talk("it")}, {"prompt": "The import"}, {"prompt": "A class is"}]
    flags = {"--kd-on-policy": 0.5, "--kd-prompts": write_lines(folder / "prompts.jsonl", prompts)}
    return other_teacher(job, **flags, **{"--kd-rollout-tokens": 12, "--kd-position-weight": 16, **changes})


def test_written_texts(job: SmallJob, tmp_path: Path) -> None:
    """A resumed job is bit-equal to one that was not interrupted between steps whose texts were written at once."""
    flags = {"--kd-loss": "reverse_kl", "--kd-rollout-steps": 3, "--kd-rollout-samples": 2, "--kd-balance": True}
    save = tmp_path / "save"
    whole = trained(job, written_texts(job, tmp_path, **flags, **{"--save": save, "--load": save}))
    lines = [line for line in whole.metrics if "grad_norm" in line]
    assert all(0.0 < line["written_aligned"] <= 1.0 and line["kd_first_64"] > 0.0 for line in lines)
    for before, after in pairwise(lines):
        assert after["balance"] == pytest.approx(before["ce"] / before["kd"], rel=1e-5)
    assert re.search(r"written +\d+\.\d tokens, .* aligned", whole.output)
    resumed = cut_back(save, tmp_path / "resumed", 2)
    result = trained(job, written_texts(job, tmp_path, **flags, **{"--save": resumed, "--load": resumed}))
    assert steps(result) == steps(whole)
    assert_same_weights(save, resumed)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"--tensor-model-parallel-size": 2, "--sequence-parallel": True}, id="tp2"),
        # Every day with padding that is cut off.
        pytest.param({"--pipeline-model-parallel-size": 2}, id="pp2", marks=pytest.mark.slow),
    ],
)
def test_two_ranks(job: SmallJob, four_steps: tuple[Path, Any], tmp_path: Path, layout: dict[str, Any]) -> None:
    changes = {"--kd-metrics-file": tmp_path / "m.jsonl", "--save-interval": None, **layout}
    result = trained(job, other_teacher(job, **changes), ranks=2)
    for seen, expected in zip(steps(result), steps(four_steps[1]), strict=True):
        for key in ("loss", "ce", "kd", "grad_norm"):
            assert seen[key] == pytest.approx(expected[key], rel=GRADIENT), (seen["iteration"], key)


def test_two_teachers_with_different_tokenizers(job: SmallJob, tmp_path: Path) -> None:
    """The sum of what each teaches alone, from the same rows, on two pipeline stages."""
    changes = {"--save-interval": None, "--train-iters": 1, "--lr-decay-iters": 1, "--kd-ratio": 1.0}

    def first(**more: Any) -> dict[str, Any]:
        result = trained(job, other_teacher(job, **changes, **more, **{"--kd-metrics-file": tmp_path / "m.jsonl"}))
        return next(line for line in result.metrics if "kd" in line)

    alone = first()
    both = first(**{"--kd-teacher-hf": [job.teacher, job.root / "other"], "--kd-teacher-weights": [0.25, 2.0]})
    assert both["kd_2"] == pytest.approx(alone["kd"], rel=STEP_LOSS)
    assert both["kd"] == pytest.approx(0.25 * both["kd_1"] + 2.0 * both["kd_2"], rel=STEP_LOSS)
    assert both["loss"] == pytest.approx(both["kd"], rel=STEP_LOSS)


def test_each_text_has_the_teacher_that_predicts_it_best(job: SmallJob, tmp_path: Path) -> None:
    """One of them has another tokenizer and the default loss; on two pipeline stages, with an evaluation."""
    changes = {"--save-interval": None, **TWO, "--kd-metrics-file": tmp_path / "m.jsonl", "--kd-ratio": 1.0}
    changes |= {"--kd-teacher-hf": [job.root / "other", job.teacher], "--kd-teachers-mode": "select"}
    changes |= {"--pipeline-model-parallel-size": 2, "--save-interval": None, "--kd-xtoken-loss": True}
    result = trained(job, other_teacher(job, **changes), ranks=2)
    assert "for each text the best of" in result.output
    assert re.search(r"partition_kl, \d+ of 307 student tokens", result.output)
    for folder in (job.root / "other", job.teacher):
        assert re.search(rf"teacher \w+, --kd-teacher-hf {re.escape(str(folder))}: CE \d", result.output)
    lines = [line for line in result.metrics if "kd" in line]
    assert len(lines) == 2
    for line in lines:
        assert line["selected_1"] + line["selected_2"] == pytest.approx(1.0)
        assert line["kd"] == pytest.approx(line["kd_1"] + line["kd_2"], rel=STEP_LOSS)
        assert line["loss"] == pytest.approx(line["kd"], rel=STEP_LOSS)
    assert any("valid_selected_1" in line for line in result.metrics)


def test_averaged_logits_of_one_teacher_twice_are_its_own(job: SmallJob, tmp_path: Path) -> None:
    changes = {"--save-interval": None, **TWO, "--kd-metrics-file": tmp_path / "m.jsonl"}
    once = trained(job, changes)
    teachers = {"--kd-teacher-hf": [job.teacher, job.teacher], "--kd-teachers-mode": "averaged_logits"}
    twice = trained(job, {**changes, **teachers, "--kd-teacher-weights": [3.0, 1.0]})
    for seen, expected in zip(steps(twice), steps(once), strict=True):
        for key in ("loss", "ce", "kd", "grad_norm"):
            assert seen[key] == pytest.approx(expected[key], rel=GRADIENT), (seen["iteration"], key)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"--kd-xtoken-loss": None},
            r"have different tokenizers: \d+ ordinary tokens differ, .*; 1 control token differs: id 410 .*; "
            "a teacher with a different tokenizer needs --kd-xtoken-loss",
        ),
        ({"--kd-teacher-hf": "teacher"}, "have the same tokenizer: leave it out"),
        ({"--kd-teacher-seq-length": 60}, "--kd-teacher-seq-length is 60, not a multiple of 8"),
        (
            {"--kd-teacher-seq-length": 104, "--kd-packing": None, "--kd-packing-multiple": None},
            "--kd-teacher-seq-length 104 is longer than the teacher's 96 positions",
        ),
        ({"--kd-top-k": 4}, "--kd-top-k is 4, but --kd-teacher-hf"),
        ({"--kd-hidden-loss": "1:1"}, "--kd-hidden-loss 1:1 does not work with it"),
        ({"--kd-projection": "wrong"}, "is for another tokenizer of the teacher"),
        ({"--kd-teacher-hf": ["teacher", "other"], "--kd-teachers-mode": "averaged_logits"}, "averaged_logits needs"),
        ({"--kd-teacher-weights": [1.0]}, "are for several teachers"),
        (
            {
                "--kd-teacher-hf": ["teacher", "other"],
                "--kd-teachers-mode": "select",
                "--kd-teacher-weights": [1.0, 2.0],
            },
            "distills each text from one teacher",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_refused(
    job: SmallJob,
    attempt: Callable[..., Job],  # noqa: F811
    changes: dict[str, Any],
    message: str,
) -> None:
    """Before a weight is loaded."""
    names = changes.get("--kd-teacher-hf")
    if isinstance(names, list):
        changes = {**changes, "--kd-teacher-hf": [job.root / name for name in names]}
    elif names is not None:
        changes = {**changes, "--kd-teacher-hf": job.root / names}
    if "--kd-projection" in changes:
        student = SpanTokenizer(job.student)
        build_projection(student, student).save(job.root / "wrong.safetensors")
        changes = {"--kd-projection": job.root / "wrong.safetensors"}
    with pytest.raises(MkdError, match=message):
        attempt({**other_teacher(job, **changes), "--save-interval": None, "--kd-dry-run": True})


def test_padding_that_is_cut_off_changes_nothing(job: SmallJob, tmp_path: Path) -> None:
    """Both views are trimmed: their lengths then differ from step to step, also between pipeline stages."""
    changes = {"--data-path": job.root / "chat.jsonl", "--kd-packing": None, "--kd-packing-multiple": None}
    changes |= {**TWO, "--kd-metrics-file": tmp_path / "m.jsonl"}
    whole = trained(job, other_teacher(job, **changes))
    cut = {"--kd-variable-seq-lengths": True, "--pipeline-model-parallel-size": 2}
    short = trained(job, other_teacher(job, **changes, **cut), ranks=2)
    for seen, expected in zip(steps(short), steps(whole), strict=True):
        for key in ("loss", "ce", "kd", "grad_norm"):
            assert seen[key] == pytest.approx(expected[key], rel=GRADIENT), (seen["iteration"], key)
