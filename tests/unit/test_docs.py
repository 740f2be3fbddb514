"""The documentation names what exists."""

import ast
import io
import re
from collections.abc import Iterable
from contextlib import redirect_stdout
from dataclasses import fields
from pathlib import Path

import pytest

from mkd.config.flags import flags_given
from mkd.config.kd_config import KDConfig
from mkd.config.megatron.checks.run_length import REQUIRED
from tests.support.fork_server import fork_server

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_FLAGS = {"--kd-xtoken-loss", "--kd-temprature"}
"""In error messages: one that is still to come, and a misspelled one."""

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


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub makes of the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.replace("`", "").strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_anchor_exists(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text())
    assert {
        (file, anchor) for file, anchor in links if anchor not in anchors_of((page.parent / file) if file else page)
    } == set()


def commands_of(page: Path) -> list[str]:
    """The commands in the fenced blocks of a page, each in one line."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_whole_training_command_has_the_flags_that_a_run_needs(page: Path) -> None:
    """One that leaves flags out has an ellipsis, a word for them in capitals, or a file."""
    shortened = re.compile(r"\.\.\.|FLAG|SAME|ARGS|--kd-config")
    for command in commands_of(page):
        if re.search(r"-m mkd train |^mkd train ", command) and not shortened.search(command):
            missing = [flag for flag in REQUIRED if flag not in (*command.split(), "--num-layers")]
            assert missing == [], command


def _collect(files: list[str], names: Path) -> None:
    """Write the names of the tests in these files, one per line."""

    class Names:
        def pytest_collection_finish(self, session: pytest.Session) -> None:
            names.write_text("".join(f"{item.nodeid}\n" for item in session.items))

    with redirect_stdout(io.StringIO()):
        pytest.main(
            ["--collect-only", "-m", "", "--rootdir", str(ROOT), *(f"{ROOT}/{file}" for file in files)],
            plugins=[Names()],
        )


def collected(files: Iterable[str], names: Path) -> set[tuple[str, str]]:
    """(file, name) of tests with their cases, and without."""
    collecting = fork_server().Process(target=_collect, args=(list(files), names))
    collecting.start()
    collecting.join()
    found = {tuple(line.split("::")[:2]) for line in names.read_text().splitlines()}
    return found | {(file, name.split("[")[0]) for file, name in found}


def named_cases(page: str) -> set[tuple[str, str]]:
    """(file, test) of each `test_...` on a page; the file is the one named last before it."""
    named, file = set(), None
    for found in re.finditer(r"(tests/[\w/]+\.py)|`(test_[^`]+)`", page):
        if found[1]:
            file = found[1]
        else:
            named.add((file, found[2]))
    return named


def test_the_support_matrix_names_tests_that_exist(tmp_path: Path) -> None:
    named = named_cases((ROOT / "docs/support.md").read_text())
    assert len(named) > 20
    files = {file for file, _ in named}
    assert sorted(named - collected(files, tmp_path / "names")) == []


def test_a_test_belongs_to_the_file_named_before_it() -> None:
    page = "tests/a/test_x.py\n| TP | `test_one[tp2 / dp2]` |\nSee tests/test_y.py.\n| `test_two` |"
    assert named_cases(page) == {("tests/a/test_x.py", "test_one[tp2 / dp2]"), ("tests/test_y.py", "test_two")}


def symbols_of(file: str) -> set[str]:
    """Functions, classes and constants at the top level of a file."""
    found: set[str] = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def test_the_code_tour_names_symbols_that_exist() -> None:
    questions, answers = (ROOT / "docs/code_tour.md").read_text().split("### Answers")
    rows = re.findall(r"^\| (\d+) \| (.*?) \| (.*?) \|", answers, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == [
        int(n) for n in re.findall(r"^(\d+)\. .*\?$", questions, re.MULTILINE)
    ]
    for number, files, symbols in rows:
        for file, symbol in zip(re.findall(r"`(.*?)`", files), re.findall(r"`(.*?)`", symbols), strict=True):
            assert symbol in symbols_of(file), f"answer {number}: {file} has no {symbol}"


def test_the_readme_links_every_page() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [page.name for page in PAGES[1:] if f"](docs/{page.name})" not in readme] == []
