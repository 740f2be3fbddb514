"""Chat templates are programs of a folder: rendered in one place, repeatably and within limits."""

import ast
import random
from pathlib import Path

import pytest

from mkd.utils.model_folders.chat_template import apply_chat_template
from mkd.utils.model_folders.pretrained import load_tokenizer
from tests.support.chats import chat_tokenizer

ROOT = Path(__file__).resolve().parents[4]
QUESTION = [{"role": "user", "content": "a"}]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def calls_of_transformers(source: str) -> list[int]:
    """Lines that call `apply_chat_template` of a tokenizer."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    methods = [node for node in nodes if isinstance(node.func, ast.Attribute)]
    return [node.lineno for node in methods if node.func.attr == "apply_chat_template"]


def test_one_module_applies_templates() -> None:
    found = {
        str(path.relative_to(ROOT)): calls_of_transformers(path.read_text()) for path in (ROOT / "mkd").rglob("*.py")
    }
    assert {name for name, lines in found.items() if lines} == {"mkd/utils/model_folders/chat_template.py"}


def test_calls_are_found() -> None:
    assert calls_of_transformers("a.apply_chat_template(b)\napply_chat_template(a, b)\n") == [1]


def test_dates_and_choices_are_constant(tmp_path: Path) -> None:
    chat_tokenizer(tmp_path, "{{ strftime_now('%d %b %Y') }} {{ range(99999) | random }}")
    tokenizer, numbers = load_tokenizer(str(tmp_path)), random.getstate()
    texts = {apply_chat_template(tokenizer, QUESTION, tokenize=False) for _ in range(3)}
    assert len(texts) == 1 and texts.pop().startswith("26 Jul 2024 ")
    assert random.getstate() == numbers


def test_a_template_that_does_not_end_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mkd.utils.model_folders.chat_template._SECONDS", 0.2)
    chat_tokenizer(tmp_path, ENDLESS)
    with pytest.raises(TimeoutError):
        apply_chat_template(load_tokenizer(str(tmp_path)), QUESTION, tokenize=False)
