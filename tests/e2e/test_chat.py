"""Chat files and packed rows from the command line: resume, layouts, the first line of the log, broken files."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_pretrain import assert_same_weights, cut_back, steps, trained
from tests.support.chats import MARKED, chat_tokenizer, talk, write_lines
from tests.support.data_forms import FILES, FORMS, TALKS
from tests.support.e2e.small_job import SmallJob, make_small_job, run, text
from tests.support.tolerance import GRADIENT

FOUR = {"--train-iters": 4, "--lr-decay-iters": 4, "--save-interval": 2}
CP2 = {"--context-parallel-size": 2}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
    """With a chat template beside the student's tokenizer, and conversations."""
    job = make_small_job(tmp_path_factory.mktemp("chat"))
    chat_tokenizer(job.student, MARKED)
    draw, words = random.Random(0), text().split()
    chats = [
        talk(*(" ".join(draw.choices(words, k=draw.randrange(1, 12))) for _ in range(draw.choice([2, 3, 4]))))
        for _ in range(120)
    ]
    write_lines(job.root / "chat.jsonl", [{"messages": messages} for messages in chats])
    return job


def packed(job: SmallJob, **changes: Any) -> dict[str, Any]:
    """A blend of documents and conversations in packed rows."""
    return {
        "--data-path": [0.3, job.data, 0.7, job.root / "chat.jsonl"],
        "--kd-packing": "best_fit",
        "--kd-packing-multiple": 8,
        "--kd-mask": "all",
        "--seq-length": 64,
        **FOUR,
        **changes,
    }


@pytest.fixture(scope="module")
def four_steps(job: SmallJob, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    save = tmp_path_factory.mktemp("four") / "save"
    return save, trained(job, packed(job, **{"--save": save, "--load": save}))


def test_resume_of_packed_chats_is_bit_equal(job: SmallJob, four_steps: tuple[Path, Any], tmp_path: Path) -> None:
    """Also where a process of its own reads the rows ahead."""
    save, whole = four_steps
    resumed = cut_back(save, tmp_path / "save", 2)
    result = trained(job, packed(job, **{"--save": resumed, "--load": resumed, "--num-workers": 1}))
    assert [line["iteration"] for line in steps(result)] == [1, 2, 3, 4]
    assert steps(result) == steps(whole)
    assert_same_weights(save, resumed)


def test_a_finished_job_evaluates_again(job: SmallJob, four_steps: tuple[Path, Any], tmp_path: Path) -> None:
    """Rows of whole samples are as many as the job takes: none is left."""
    save, whole = four_steps
    again = cut_back(save, tmp_path / "save", 4)
    result = trained(job, packed(job, **{"--save": again, "--load": again}))
    assert "mkd: already at iteration 4 of 4: no steps are left" in result.output
    assert steps(result) == steps(whole)
    last = [line["valid_loss"] for line in result.metrics if line.get("iteration") == 4 and "valid_loss" in line]
    assert len(last) == 2 and last[0] == last[1]


def test_packed_chats_on_two_context_parallel_ranks(
    job: SmallJob, four_steps: tuple[Path, Any], tmp_path: Path
) -> None:
    metrics = {"--kd-metrics-file": tmp_path / "m.jsonl", "--save-interval": None}
    result = trained(job, packed(job, **CP2, **metrics), ranks=2)
    for seen, expected in zip(steps(result), steps(four_steps[1]), strict=True):
        for key in ("loss", "ce", "kd", "grad_norm"):
            assert seen[key] == pytest.approx(expected[key], rel=GRADIENT), (seen["iteration"], key)


def test_a_dry_run_reads_all_data(job: SmallJob) -> None:
    done = run(job.flags(packed(job, **{"--kd-dry-run": True})))
    assert done.status == 0, done.errors
    assert "mkd: rows       packed, padded to multiples of 8" in done.output
    assert "chat.jsonl: 108 samples in" in done.output

    lines = (job.root / "chat.jsonl").read_text().splitlines() * 4
    broken = job.root / "broken.jsonl"
    broken.write_text("\n".join([*lines, '{"messages": [{"role": "robot"}]}']) + "\n")
    done = run(job.flags(packed(job, **{"--kd-dry-run": True, "--data-path": broken})))
    assert done.status == 1
    assert f"error: {broken}, line {len(lines) + 1}: message 1 of messages has the role 'robot'" in done.errors


def test_a_row_for_each_conversation(job: SmallJob, tmp_path: Path) -> None:
    changes = {
        "--data-path": job.root / "chat.jsonl",
        "--kd-packing": "none",
        "--save": tmp_path / "save",
        "--load": tmp_path / "save",
        "--train-iters": 2,
    }
    result = trained(job, packed(job, **changes))
    assert all(line["loss"] > 0 for line in steps(result))
    assert "mkd: rows       one sample each" in result.output
    again = trained(job, packed(job, **changes))
    assert "already at iteration 2 of 2" in again.output and again.metrics[: len(result.metrics)] == result.metrics
    assert again.metrics[-1]["valid_loss"] == result.metrics[-1]["valid_loss"]


def test_every_form_and_file_trains(job: SmallJob, tmp_path: Path) -> None:
    """One blend of all of them: two steps read rows of each, and the form of each is shown with a sample."""
    forms = {**FORMS, "response": lambda messages: dict(zip(("prompt", "response"), ("ask", "say"), strict=True))}
    pairs = list(zip([*forms, *forms], [*FILES, *FILES], strict=False))[: max(len(forms), len(FILES))]
    names = {}
    for form, file in pairs:
        (tmp_path / form).mkdir(exist_ok=True)
        names[str(FILES[file](tmp_path / form / file, [forms[form](messages) for messages in TALKS]))] = form
    changes = {
        "--data-path": [word for name in names for word in (1, name)],
        "--split": "100,0,0",
        "--eval-iters": 0,
        "--train-iters": 2,
        "--micro-batch-size": 1,
        "--global-batch-size": len(names),
        "--kd-metrics-file": tmp_path / "metrics.jsonl",
    }
    result = trained(job, changes)
    assert [line["loss"] > 0 for line in steps(result)] == [True, True]
    shown = {"parts": "messages", "sharegpt_system": "sharegpt", "roles": "sharegpt", "response": "prompt_completion"}
    for name, form in names.items():
        assert f"{name}: {shown.get(form, form)} (recognized in the first" in result.output
        assert f"{name}: learned between [[ and ]]: " in result.output
        assert f"training   {name}: 3 samples in" in result.output, result.output
    assert result.output.count("2 rows wanted") == len(names)
