"""Names of --kd-* flags: one list, which is read before torch and megatron are imported."""

import subprocess
import sys
from pathlib import Path

import pytest

from mkd.config.flag_checks import check_kd_names
from mkd.config.flags import flag_parser
from mkd.config.kd_fields import kd_flags
from mkd.errors import MkdConfigError


def test_the_names_are_those_of_the_parser() -> None:
    assert sorted(kd_flags()) == sorted(
        name for action in flag_parser()._actions if action.dest.startswith("kd_") for name in action.option_strings
    )


def test_a_misspelled_flag_is_found_before_torch_is_imported() -> None:
    script = (
        "import sys\nfrom mkd.cli import train\n"
        "status = train.main()\nprint(status, sorted({'torch', 'megatron', 'transformers'}.intersection(sys.modules)))"
    )
    command = [sys.executable, "-c", script, "--lr", "1e-3", "--kd-ratoi", "0.5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["1 []"], done.stderr
    assert "error: unknown on the command line: --kd-ratoi (did you mean --kd-ratio?)" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kd-ratoi=0.5"], r"unknown on the command line: --kd-ratoi=0.5 \(did you mean --kd-ratio\?\)"),
        (["--kd-qqqqqqqq"], r"--kd-qqqqqqqq \(mkd train --help-all lists all flags\)"),
        (["--kd-config", "FILE"], r"line 2: no flag is named kd-temprature \(did you mean kd-temperature\?\)"),
    ],
)
def test_unknown_names(tmp_path: Path, words: list[str], message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("lr: 1\nkd-temprature: 2\n")
    with pytest.raises(MkdConfigError, match=message):
        check_kd_names([str(file) if word == "FILE" else word for word in words])


def test_known_names(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("kd_ratio: 0.5\nlr: 1\n")
    check_kd_names(["--kd-config", str(file), "--kd-no-temperature-squared", "--kd-loss=jsd", "--lrr", "kd-x"])
