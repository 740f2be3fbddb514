"""Files of --kd-eval-tasks, and how answers are compared."""

from pathlib import Path
from typing import Any

import pytest

from mkd.data.sources import tasks
from mkd.data.sources.prompts import Prompt, read_prompts
from mkd.data.sources.tasks import Task, read_tasks
from mkd.errors import MkdDataError
from mkd.utils.model_folders.pretrained import load_tokenizer
from tests.support.chats import MARKED, chat_tokenizer
from tests.unit.data.test_prompts import write


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer") / "chat"
    chat_tokenizer(folder, MARKED)
    return load_tokenizer(str(folder))


@pytest.mark.parametrize(
    ("match", "answer", "right", "wrong"),
    [
        ("exact", "yes ", ["yes", " yes\n"], ["yes.", "Yes", "", "yes yes"]),
        ("contains", "42", ["it is 42.", "1420"], ["4 2", ""]),
        ("number", "so 6 * 7 #### 1,234", ["1234", "first 5, then 1,234.0.", "x = +1234"], ["1234 5", "none", "-1234"]),
        ("number", "-0.5", ["it is -.5? no, -0.50", "-.5", "= -.50"], ["0.5", "5", ".5"]),
        ("number", "5", ["step.5", "1.2.5", "5."], [".5", "(.5)", "0.5"]),
        ("regex", r"\b4\d\b", ["a 42 b"], ["142", ""]),
    ],
)
def test_matches(match: Any, answer: str, right: list[str], wrong: list[str]) -> None:
    task = Task(Prompt("", (1,)), answer, match)
    assert [text for text in right if not task.is_solved_by(text)] == []
    assert [text for text in wrong if task.is_solved_by(text)] == []


def test_an_expression_that_takes_too_long_does_not_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_PATTERN_SECONDS", 0.1)
    assert not Task(Prompt("", (1,)), "(b+)+c", "regex").is_solved_by("b" * 64)


def test_prompts_are_those_of_samples(tokenizer: Any, tmp_path: Path) -> None:
    question = {"messages": [{"role": "user", "content": "hello there"}]}
    prompts = read_prompts(write(tmp_path / "p.jsonl", {"prompt": "hello"}, question), tokenizer, 100)
    path = write(
        tmp_path / "t.jsonl",
        {"prompt": "hello", "answer": 4.5, "match": "number"},
        "",
        {**question, "answer": "hi", "match": "contains"},
        {"prompt": "hello", "answer": "hi"},
    )
    first, second, third = read_tasks(path, tokenizer, 100)
    assert [first.prompt, second.prompt, third.prompt] == [*prompts, prompts[0]]
    assert (first.answer, second.match, third.match) == ("4.5", "contains", "exact")


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([], "has 0 lines; 1 to 10000 tasks are answered"),
        ([{"prompt": "x"}], "line 1: there is no answer: give a text or a number in answer"),
        ([{"prompt": "x", "answer": " "}], "line 1: there is no answer"),
        ([{"prompt": "x", "answer": True}], "line 1: there is no answer"),
        ([{"prompt": "x", "answer": "\ud800"}], "line 1: answer: half a surrogate pair"),
        (
            [{"prompt": "x", "answer": "1", "match": "fuzzy"}],
            "line 1: match is 'fuzzy'; it must be one of exact, number",
        ),
        ([{"prompt": "x", "answer": "one", "match": "number"}], "line 1: match is number, and answer 'one' has none"),
        ([{"prompt": "x", "answer": "(", "match": "regex"}], "line 1: the regular expression '(' in answer is invalid"),
        ([{"prompt": "x", "answer": "a" * 1001, "match": "regex"}], "has 1001 characters; at most 1000 are used"),
        ([{"prompt": "x", "answer": "(a+)+b", "match": "regex"}], "leave out nested repetitions"),
        ([{"prompt": "x", "answer": "a{1,65536}{1,65536}{1,9}", "match": "regex"}], "the regular expression"),
        ([{"answer": "1"}], "line 1: neither a text in prompt nor messages"),
        (
            [{"prompt": "hello " * 50, "answer": "1"}],
            "it must have 1 to 9, which is --seq-length without --kd-eval-tok",
        ),
        (["{"], "line 1"),
    ],
)
def test_invalid_files(tokenizer: Any, tmp_path: Path, records: list, words: str, monkeypatch) -> None:
    monkeypatch.setattr(tasks, "_PATTERN_SECONDS", 0.2)
    with pytest.raises(MkdDataError) as caught:
        read_tasks(write(tmp_path / "t.jsonl", *records), tokenizer, 9)
    assert words in str(caught.value) and str(caught.value).startswith("--kd-eval-tasks")
    assert "\n" not in str(caught.value)


def test_missing_file(tokenizer: Any) -> None:
    with pytest.raises(MkdDataError, match="--kd-eval-tasks nowhere does not exist"):
        read_tasks("nowhere", tokenizer, 9)
