"""Rules that keep the code readable: sizes, annotated signatures, docstrings, and ruff."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import quantiles

import pytest

ROOT = Path(__file__).resolve().parents[2]

FILE_LINES, FUNCTION_LINES, KERNEL_LINES = 800, 100, 150
"""Hard limits. Functions are measured without their docstring, so that nobody saves on documentation. A kernel that
Triton compiles cannot be cut into smaller ones at no cost."""
FILE_LINES_P90, FUNCTION_LINES_P90 = 450, 40
"""Nine of ten files and functions are no longer than this."""


def python_files(*folders: str) -> list[Path]:
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [*files, *ROOT.glob("*.py")]


FILES = python_files("mkd", "tools", "benchmarks", "examples", "tests")
LIBRARY = python_files("mkd", "tools", "benchmarks", "examples")


@dataclass(frozen=True)
class Function:
    """A function of the code."""

    place: str
    """File, line and name."""
    lines: int
    """Its length without the docstring."""
    is_kernel: bool


@dataclass(frozen=True)
class SourceFile:
    """The facts that the rules compare."""

    name: str
    lines: int
    functions: tuple[Function, ...]
    unannotated: tuple[str, ...]
    """Public functions without complete annotations."""
    fragments: tuple[str, ...]
    """Docstrings that begin with one of `FRAGMENTS`."""

    @classmethod
    def read(cls, path: Path) -> "SourceFile":
        text, name = path.read_text(), str(path.relative_to(ROOT))
        tree = ast.parse(text)
        functions = tuple(
            Function(f"{name}:{one.lineno} {one.name}", length_of(one), is_kernel(one)) for one in functions_of(tree)
        )
        unannotated = tuple(
            f"{name}:{one.lineno} {one.name} {missing}"
            for one in public_functions(tree)
            if (missing := missing_annotations(one))
        )
        fragments = tuple(
            f"{name}:{line} {text}" for line, text in docstrings_of(tree) if text.split(maxsplit=1)[0] in FRAGMENTS
        )
        return cls(name, len(text.splitlines()), functions, unannotated, fragments)


@cache
def source_files() -> list[SourceFile]:
    """Each file is parsed once for all tests. The trees are not kept: they slow every collection of garbage down."""
    return [SourceFile.read(path) for path in FILES]


def library_files() -> list[SourceFile]:
    names = {str(path.relative_to(ROOT)) for path in LIBRARY}
    return [file for file in source_files() if file.name in names]


def functions_of(tree: ast.AST) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def lines_of_docstring(function: ast.FunctionDef) -> int:
    has_one = ast.get_docstring(function) is not None
    return function.body[0].end_lineno - function.body[0].lineno + 1 if has_one else 0


def length_of(function: ast.FunctionDef) -> int:
    return function.end_lineno - function.lineno + 1 - lines_of_docstring(function)


def test_files_and_functions_stay_below_the_hard_limits() -> None:
    assert [file.name for file in source_files() if file.lines > FILE_LINES] == []
    functions = [one for file in source_files() for one in file.functions]
    assert [one.place for one in functions if one.lines > (KERNEL_LINES if one.is_kernel else FUNCTION_LINES)] == []


def test_most_files_and_functions_are_short() -> None:
    functions = [one.lines for file in library_files() for one in file.functions if not one.is_kernel]
    assert quantiles([file.lines for file in library_files()], n=10)[-1] <= FILE_LINES_P90
    assert quantiles(functions, n=10)[-1] <= FUNCTION_LINES_P90


def missing_annotations(function: ast.FunctionDef) -> list[str]:
    arguments = function.args
    plain = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    plain += [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    missing = [a.arg for a in plain if a.annotation is None and a.arg not in ("self", "cls", "ctx")]
    return missing if function.returns is not None else [*missing, "return"]


def is_kernel(function):
    """Triton compiles it: its arguments are pointers and scalars, or marked as constants."""
    return any("triton" in ast.unparse(decorator) for decorator in function.decorator_list)


def public_functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """Public functions and methods, and constructors of public classes."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef) or node.__dict__.get("name", "").startswith("_"):
            continue
        for function in node.body:
            is_function = isinstance(function, ast.FunctionDef) and not is_kernel(function)
            if is_function and (function.name == "__init__" or not function.name.startswith("_")):
                yield function


def test_public_signatures_are_annotated() -> None:
    assert [place for file in library_files() for place in file.unannotated] == []


def docstrings_of(tree: ast.Module) -> list[tuple[int, str]]:
    """Line and text of each string that is a statement: docstrings, also of constants and fields."""
    bodies = [node.body for node in ast.walk(tree) if isinstance(getattr(node, "body", None), list)]
    values = [node.value for body in bodies for node in body if isinstance(node, ast.Expr)]
    strings = [v for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)]
    return [(string.lineno, string.value.strip()) for string in strings]


FRAGMENTS = ("Of", "What", "Who", "Whose", "Whether", "Which", "Where")
"""First words of a docstring that names no thing and states nothing."""


def test_docstrings_do_not_begin_with_a_fragment() -> None:
    """A docstring names what a thing is, or states what it does."""
    assert [place for file in source_files() for place in file.fragments] == []


def test_docstrings_of_constants_and_fields_are_found():
    source = 'K = 1  # one\n"""Of a constant."""\nclass C:\n    x: int\n    """Whose field."""\n'
    assert docstrings_of(ast.parse(source)) == [(2, "Of a constant."), (5, "Whose field.")]


def test_distributed_tests_are_collected(request):
    """By default pytest passes over folders named dist without a word."""
    assert "dist" not in request.config.getini("norecursedirs")


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff_finds_nothing(command):
    done = subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
