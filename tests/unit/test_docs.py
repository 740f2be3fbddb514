"""The documentation names what exists."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from mkd.arguments import flags_given
from mkd.config import KDConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_FLAGS = {"--kd-xtoken-loss", "--kd-temprature"}
"""In error messages: one that is still to come, and a misspelt one."""

MEGATRONS = {"tools/preprocess_data.py"}
"""Files of Megatron-LM's own repository."""


def flag_of(field: str) -> str:
    return "--kd-no-temperature-squared" if field == "temperature_squared" else "--kd-" + field.replace("_", "-")


@pytest.mark.parametrize("field", [field.name for field in fields(KDConfig)])
def test_every_flag_has_a_row(field: str) -> None:
    assert re.search(rf"^\| `{flag_of(field)}[ `]", (ROOT / "docs/flags.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_that_is_named_exists(page: Path) -> None:
    named = set(re.findall(r"--kd-[a-z][a-z-]*[a-z]", page.read_text())) - NOT_FLAGS
    known = flags_given(sorted(named))
    assert named == set(known.values())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_and_file_exists(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), target
    for path in re.findall(r"`?((?:tests|tools|mkd|examples|docs)/[\w/]+\.(?:py|sh|md))`?", text):
        assert (ROOT / path).exists() or path in MEGATRONS, path
