"""tools/show_alignment.py and tools/build_projection.py from their command lines."""

import json
from pathlib import Path

import pytest

from mkd.cli import build_projection, show_alignment
from mkd.xtoken.text.tokens import SpanTokenizer
from mkd.xtoken.vocabulary.projection import Projection
from tests.support.chats import PLAIN, talk, write_lines
from tests.support.tokenizers_of_kinds import transformers_tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments that name a student and a teacher, both with chat templates."""
    root = tmp_path_factory.mktemp("tokenizers")
    for kind in ("byte_bpe", "unigram"):
        transformers_tokenizer(kind).save_pretrained(root / kind)
        (root / kind / "chat_template.jinja").write_text(
            PLAIN if kind == "byte_bpe" else PLAIN.replace("|end", "|turn")
        )
    return ["--student", str(root / "byte_bpe"), "--teacher", str(root / "unigram")]


def test_tokens_are_shown_with_their_chunks(folders: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert show_alignment.main([*folders, "ab the function é"]) == 0
    out = capsys.readouterr().out
    for shown in ("<<ab>>", "·the", r"\xc3|\xa9", "<|end|>", "</s>", "tokens,", "chunks"):
        assert shown in out


def test_rows_of_files_are_shown(folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_lines(tmp_path / "f.jsonl", [{"text": "first"}, {"messages": talk("a question", "some\nanswer")}])
    assert show_alignment.main([*folders, "--file", str(file), "--row", "2"]) == 0
    out = capsys.readouterr().out
    assert "⏎" in out
    assert "<|turn|>" in out
    (tmp_path / "f.txt").write_text("a text")
    assert show_alignment.main([*folders, "--file", str(tmp_path / "f.txt")]) == 0


BAD = {
    "row": (["--row", "3"], "error: --row is 3, and --file "),
    "key": (["--row", "1", "--json-key", "body"], "line 1: no key 'body'"),
    "json": (["--row", "2"], "line 2: broken JSON"),
    "file": (["--file", "nowhere.jsonl"], "error: --file nowhere.jsonl does not exist"),
    "student": (["--student", "nowhere"], "error: --student nowhere does not exist or is not a folder"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_a_one_line_error(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    file = tmp_path / "f.jsonl"
    file.write_text(json.dumps({"text": "a"}) + "\n{\n")
    arguments, message = BAD[case]
    assert show_alignment.main([*folders, "--file", str(file), *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_projection_is_built(folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "p.safetensors"
    assert build_projection.main([*folders, "--out", str(out), "--top-k", "2", "--pair", "<|turn|>=<|turn|>"]) == 0
    sides = [SpanTokenizer(folder) for folder in folders[1::2]]
    found = Projection.load(out, *(side.hash for side in sides))
    assert found.ids.shape == (sides[0].size, 2)
    printed = capsys.readouterr().out
    for name, count in found.summary().items():
        assert f"{count:,}" in printed, name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pair", "a"], "error: --pair a is not of the form STUDENT=TEACHER"),
        (["--pair", "the=<|turn|>"], "has no special token 'the'"),
        (["--top-k", "0"], "error: --top-k is 0"),
        (["--out", "nowhere/p"], "error: --out nowhere/p: "),
        (["--teacher", "nowhere"], "error: --teacher nowhere does not exist"),
    ],
)
def test_bad_options_are_a_one_line_error(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert build_projection.main([*folders, "--out", str(tmp_path / "p"), *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "p").exists()
