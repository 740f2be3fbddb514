"""Rules that keep the code readable: sizes, annotated signatures, docstrings, and ruff."""

import ast
import subprocess
import sys
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


@cache
def tree_of(path: Path) -> ast.Module:
    """Each file is parsed once for all tests."""
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions_of(tree: ast.AST) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def lines_of_docstring(function: ast.FunctionDef) -> int:
    has_one = ast.get_docstring(function) is not None
    return function.body[0].end_lineno - function.body[0].lineno + 1 if has_one else 0


def length_of(function: ast.FunctionDef) -> int:
    return function.end_lineno - function.lineno + 1 - lines_of_docstring(function)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_and_functions_stay_below_the_hard_limits(path):
    assert len(path.read_text().splitlines()) <= FILE_LINES, "split this file"
    for function in functions_of(tree_of(path)):
        limit = KERNEL_LINES if is_kernel(function) else FUNCTION_LINES
        assert length_of(function) <= limit, f"{function.name} at line {function.lineno}"


def test_most_files_and_functions_are_short():
    files = [len(path.read_text().splitlines()) for path in LIBRARY]
    functions = [length_of(f) for path in LIBRARY for f in functions_of(tree_of(path)) if not is_kernel(f)]
    assert quantiles(files, n=10)[-1] <= FILE_LINES_P90
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


@pytest.mark.parametrize("path", LIBRARY, ids=name_of)
def test_public_signatures_are_annotated(path):
    for node in ast.walk(tree_of(path)):
        if not isinstance(node, ast.Module | ast.ClassDef) or node.__dict__.get("name", "").startswith("_"):
            continue
        for function in node.body:
            is_function = isinstance(function, ast.FunctionDef) and not is_kernel(function)
            if is_function and (function.name == "__init__" or not function.name.startswith("_")):
                assert missing_annotations(function) == [], f"{function.name} at line {function.lineno}"


def docstrings_of(tree: ast.Module) -> list[tuple[int, str]]:
    """Line and text of each string that is a statement: docstrings, also of constants and fields."""
    bodies = [node.body for node in ast.walk(tree) if isinstance(getattr(node, "body", None), list)]
    values = [node.value for body in bodies for node in body if isinstance(node, ast.Expr)]
    strings = [v for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)]
    return [(string.lineno, string.value.strip()) for string in strings]


FRAGMENTS = ("Of", "What", "Who", "Whose", "Whether", "Which", "Where")
"""First words of a docstring that names no thing and states nothing."""


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_docstrings_do_not_begin_with_a_fragment(path):
    """A docstring names what a thing is, or states what it does."""
    for line, text in docstrings_of(tree_of(path)):
        assert text.split(maxsplit=1)[0] not in FRAGMENTS, f"line {line}: {text}"


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
