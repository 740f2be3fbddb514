"""mkd/utils/encoding.py: bytes that are not UTF-8 in the words of a command line."""

import sys

import pytest

from mkd.cli import convert, plot, preprocess, prune, report
from mkd.config.flags import parse_flags
from mkd.errors import MkdConfigError
from mkd.utils.encoding import require_text

BAD = "/data/a\udcff"
"""As Python reads the bytes /data/a\\xff of a command line."""


def test_text_of_all_kinds_is_accepted() -> None:
    require_text(["--save", "/data/é中😀", "--load=ü", "x"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lr", "1", "--save", BAD], r"--save /data/a\xff: this is not UTF-8"),
        (["--data-path", "0.5", "good", "0.5", BAD], r"--data-path /data/a\xff: this"),
        ([f"--load={BAD}"], r"--load /data/a\xff: this"),
        ([BAD], r"/data/a\xff: this"),
        (["--save", "half a pair \ud83d"], r"--save half a pair \ud83d: this"),
    ],
)
def test_the_flag_before_a_word_is_named(words: list[str], message: str) -> None:
    with pytest.raises(MkdConfigError) as caught:
        require_text(words)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "flag", ["--tensorboard-dir", "--save", "--load", "--kd-metrics-file", "--data-path", "--kd-teacher-hf"]
)
def test_a_job_refuses_names_of_other_bytes(monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    monkeypatch.setattr(sys, "argv", ["mkd train", flag, BAD, "--lr", "1e-3"])
    with pytest.raises(MkdConfigError, match=f"{flag} /data/a"):
        parse_flags()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (convert, ["import", "--hf", BAD, "--save", "x"]),
        (prune, ["depth", "--hf", "x", "--out", BAD]),
        (preprocess, ["--input", BAD]),
        (plot, [BAD, "--out", "x.png"]),
        (report, [BAD]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_tool_refuses_names_of_other_bytes(capsys: pytest.CaptureFixture[str], command, words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(words)
    assert ended.value.code == 2
    assert r"/data/a\xff: this is not UTF-8 text" in capsys.readouterr().err
