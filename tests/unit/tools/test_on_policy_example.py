"""examples/on_policy: the problems, and the check of their answers."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from mkd.data.sources.tasks import read_tasks
from tests.support.e2e.small_job import ROOT

DIGITS = 3


@pytest.fixture(scope="module")
def make_task() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_task", ROOT / "examples/on_policy/make_task.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_worked_sums(make_task: ModuleType) -> None:
    assert make_task.worked_sum(483, 729, DIGITS) == "3+9=12;8+2=11;4+7=12;1212"
    assert make_task.worked_sum(5, 10, DIGITS) == "5+0=05;0+1=01;0+0=00;0015"


def test_the_checker_accepts_right_answers_alone(make_task: ModuleType, tmp_path: Path) -> None:
    make_task.write_problems(tmp_path, train=50, held_out=20, digits=DIGITS)
    held_out, train = lines(tmp_path / "valid.jsonl"), lines(tmp_path / "train.jsonl")
    assert len({record["prompt"] for record in held_out + train}) == 70
    assert [record["messages"][0]["content"] for record in lines(tmp_path / "prompts.jsonl")] == [
        record["prompt"] for record in train
    ]
    tokenizer = make_task.make_tokenizer()
    tasks = read_tasks(str(tmp_path / "tasks.jsonl"), tokenizer, 64)
    for task, record in zip(tasks, held_out, strict=True):
        answer = record["completion"]
        assert tokenizer.decode(task.prompt.tokens) == f"<start>{record['prompt']}="
        assert task.is_solved_by(answer)
        assert not task.is_solved_by(answer[:-1] + str((int(answer[-1]) + 1) % 10))
        assert not task.is_solved_by(answer[: -DIGITS - 1])
        assert tokenizer.decode(tokenizer.encode(answer)) == answer
