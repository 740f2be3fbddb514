"""Flags in YAML files: values are what is written, and every invalid file is one line that names it."""

import os
import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mkd.config.command_words import files_named, given_flags, read_settings, without_files, words_of
from mkd.config.flag_checks import check_settings
from mkd.config.flags import flag_parser
from mkd.config.run_file import read_file, to_yaml
from mkd.errors import MkdConfigError, MkdNodeError


@pytest.fixture
def write(tmp_path: Path):
    """Write run.yaml; returns its path."""

    def write(content: str | bytes, name: str = "run.yaml") -> str:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return write


def words(file: str) -> list[str]:
    """The checked words of a file."""
    found = read_file(file)
    check_settings(found, flag_parser())
    return words_of(found)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("kd-ratio: 0.9", ["--kd-ratio", "0.9"]),
        ("kd_ratio: 0.9", ["--kd-ratio", "0.9"]),
        ("--kd-ratio: 0.9", ["--kd-ratio", "0.9"]),
        ("lr: 1e-4", ["--lr", "1e-4"]),
        ("bf16: true\nkd-dry-run: false", ["--bf16"]),
        # Values of YAML 1.1 that are numbers, booleans or dates elsewhere.
        ("kd-hidden-loss: 6:12", ["--kd-hidden-loss", "6:12"]),
        ("seq-length: 0010", ["--seq-length", "0010"]),
        ("save: no", ["--save", "no"]),
        ("save: 2026-11-28", ["--save", "2026-11-28"]),
        ('save: "true"', ["--save", "true"]),
        ("split: 99,1,0", ["--split", "99,1,0"]),
        ("kd-xtoken-loss: true", ["--kd-xtoken-loss"]),
        ("kd-xtoken-loss: gold", ["--kd-xtoken-loss", "gold"]),
        ("exit-duration-in-mins: -1", ["--exit-duration-in-mins=-1"]),
        ("kd-rollout-stop: ---", ["--kd-rollout-stop=---"]),
        ("data-path: [0.7, a, 0.3, b]", ["--data-path", "0.7", "a", "0.3", "b"]),
        ("data-path:\n- [0.7, a]\n- [0.3, b]", ["--data-path", "0.7", "a", "0.3", "b"]),
        ("data-path: a", ["--data-path", "a"]),
        ("optimizer:\n  lr: 1e-4\n  decay: {lr-decay-style: cosine}", ["--lr", "1e-4", "--lr-decay-style", "cosine"]),
        ("lr: 1\nabout: {lr: 2, anything: [1, {}]}", ["--lr", "1"]),
        ("\ufefflr: 1\n# comment\n", ["--lr", "1"]),
    ],
)
def test_a_value_is_what_is_written(content: str, expected: list[str], write) -> None:
    assert words(write(content)) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", " is empty"),
        ("# nothing\n", " is empty"),
        ("- lr", " is not a mapping of flags"),
        ("text", " is not a mapping of flags"),
        ("kd-temprature: 2", ", line 1: no flag is named kd-temprature (did you mean kd-temperature?)"),
        ("lr: 1\nratio: 2", ", line 2: no flag is named ratio (did you mean kd-ratio?)"),
        ("kd: {ratio: 2}", ", line 1: no flag is named ratio (did you mean kd-ratio?)"),
        ("qqqqqqqq: 1", "no flag is named qqqqqqqq (mkd train --help-all lists all flags)"),
        ("help: true", "no flag is named help"),
        ("bias-swiglu-fusion: false", "did you mean no-bias-swiglu-fusion?"),
        ("lr: 1\nlr: 2", ", line 2: lr is given twice"),
        ("lr: 1\n_lr: 2\n--lr: 3", ", line 3: --lr is also in line 1"),
        ("a: {lr: 1}\nb: {lr: 2}", ", line 2: --lr is also in line 1"),
        ("lr: abc", ", line 1: --lr: invalid float value: 'abc'"),
        ("kd-loss: kl", ", line 1: --kd-loss: invalid choice: 'kl'"),
        ("lr: true", ', line 1: lr takes a value, not true; write "true" if that is meant'),
        ("bf16: 1", ", line 1: bf16 is 1; it takes true or false"),
        ("bf16: yes", ", line 1: bf16 is yes; it takes true or false"),
        ("lr: [1, 2]", ", line 1: lr has 2 values; it takes one"),
        ("lr: []", "lr has an empty list"),
        ("lr:", "lr has no value"),
        ("lr: ~", "lr has no value"),
        ("data-path: [a, null]", "data-path has no value"),
        ("data-path: [{a: 1}]", "data-path has a list of mappings"),
        ("data-path: [a, --bf16]", "a value that begins with --"),
        ("lr: !!python/object/apply:os.system [ls]", "lr"),
        ("lr: !!bool x", "of kind bool"),
        ("lr: !!binary aGk=", "of kind binary"),
        ("? [a]\n: 1", "a key is not the name of a flag"),
        ("--: 1", "a key is not the name of a flag"),
        ("kd-config: other.yaml", "a file cannot name others"),
        ("lr: &x 1\nmin-lr: *x", ", line 2: not a YAML file of flags (aliases (*NAME) are not supported)"),
        ("a: " + "[" * 100_000, "more than 8 levels"),
        ("a: {" * 100, "more than 8 levels"),
        ("lr: 1\n---\nlr: 2", "not a YAML file of flags"),
        ("lr: 'a", "not a YAML file of flags"),
        ("\tlr: 1", "not a YAML file of flags"),
        ("lr: \x01", "not a YAML file of flags"),
        (b"lr: \xff", "is not UTF-8 text (byte 4)"),
        (b"lr: 1\n" * 200_000, "has more than 1048576 bytes"),
    ],
)
def test_an_invalid_file_is_one_line(content: str | bytes, message: str, write) -> None:
    file = write(content)
    start = time.monotonic()
    with pytest.raises(MkdConfigError) as caught:
        words(file)
    text = str(caught.value)
    assert text.startswith(f"--kd-config {file}")
    assert message in text
    assert "\n" not in text
    assert len(text) < 500 + len(file)
    assert time.monotonic() - start < 20


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    cases = {"pipe": "is not a regular file", "absent": "No such file", ".": "Is a directory", "a\0b": "cannot be read"}
    for name, message in cases.items():
        with pytest.raises(MkdConfigError, match=message) as caught:
            read_file(f"{tmp_path}/{name}" if name != "." else str(tmp_path))
        assert (caught.type is MkdNodeError) == (name in ("absent", "."))


def test_later_files_and_the_command_line_win(write) -> None:
    first = write("lr: 1\nbf16: true\nseq-length: 64", "a.yaml")
    second = write("bf16: false\nlr: 2", "b.yaml")
    argv = ["--seq-length", "128", "--kd-config", first, second, "--min-lr", "0"]
    assert files_named(argv) == [first, second]
    assert files_named([f"--kd-config={first}", "--kd-config", second]) == [first, second]
    assert without_files(argv) == ["--seq-length", "128", "--min-lr", "0"]
    parsed = flag_parser().parse_args([*words_of(read_settings(argv)), *argv])
    assert (parsed.lr, parsed.bf16, parsed.seq_length, parsed.min_lr) == (2.0, False, 128, 0.0)
    assert parsed.kd_config == [first, second]


def test_given_flags_are_the_last_ones_of_each_argument() -> None:
    argv = [
        "--lr",
        "1",
        "--bf16",
        "--data-path",
        "0.5",
        "a",
        "0.5",
        "b",
        "--lr=2",
        "--kd-xtoken-loss",
        "--min-lr",
        "-1",
    ]
    assert given_flags(argv, flag_parser()) == {
        "bf16": True,
        "data-path": ["0.5", "a", "0.5", "b"],
        "lr": "2",
        "kd-xtoken-loss": True,
        "min-lr": "-1",
    }


TEXTS = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=12).filter(
    lambda text: not text.startswith("--")
)


@settings(max_examples=200, deadline=None)
@given(save=TEXTS, data=st.lists(TEXTS.filter(lambda text: not text.startswith("-")), min_size=2, max_size=3))
def test_what_is_written_is_read_back(save: str, data: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever YAML makes of it: booleans, dates, quotes, line ends."""
    file = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    flags = {"save": save, "data-path": data, "bf16": True, "lr": "1e-4"}
    file.write_text(to_yaml({"flags": flags, "about": {"note": [None, 1, {"a": False}]}}), encoding="utf-8", newline="")
    parser = flag_parser()
    assert given_flags(words(str(file)), parser) == flags


def test_text_of_numbers_is_not_quoted() -> None:
    assert to_yaml({"lr": "1e-4", "kd-ratio": "0.9", "save": "no"}) == "lr: 1e-4\nkd-ratio: 0.9\nsave: no\n"


ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
BLOCKS = [block for page in PAGES for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)]


@pytest.mark.parametrize("content", [*BLOCKS, *(path.read_text() for path in (ROOT / "examples").rglob("*.yaml"))])
def test_files_of_the_docs_and_examples_are_valid(content: str, write) -> None:
    assert words(write(content))
