"""Rules that keep the code readable: import order, sizes, annotated signatures, and ruff."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# fmt: off
LAYERS = [
    "errors", "progress", "launch", "compat", "stopping", "context_parallel", "cpu", "config_values", "config_checks",
    "config", "flag_checks", "teacher_sizes", "arguments", "balance", "groups", "data", "models", "checkpoint",
    "teacher", "losses", "hidden_layers", "xtoken", "memory", "flops", "evaluation", "terms", "guards", "selection",
    "step",
    "schedule", "console", "trackers", "metrics",
]
# fmt: on
"""A module of mkd imports only from its own layer and from those before it. A module that is not listed is an entry:
it may import all, and no listed module may import it."""

FILE_LINES = 450
FUNCTION_LINES = 60
"""Without the docstring, so that nobody saves on documentation."""
KERNEL_LINES = 110
"""For functions that Triton compiles: their bodies cannot be cut into smaller ones at no cost."""


def python_files(*folders: str) -> list[Path]:
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [*files, *ROOT.glob("*.py")]


FILES = python_files("mkd", "tools", "examples", "tests")
LIBRARY = python_files("mkd", "tools", "examples")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def layer_of(module: str) -> int:
    """Place of `mkd.<layer>...` in the order; entries come after all layers."""
    parts = module.split(".")
    return LAYERS.index(parts[1]) if len(parts) > 1 and parts[1] in LAYERS else len(LAYERS)


def imports_of(source: str) -> list[tuple[int, str]]:
    """Line and full name of each import of mkd, wherever it stands in the file."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import; write the full name"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return sorted((line, name) for line, name in found if name.split(".")[0] == "mkd")


def upward_imports(module: str, source: str) -> list[str]:
    """Imports in `module` that go against the order of the layers."""
    own = layer_of(module)
    if own == len(LAYERS):
        return []
    return [f"line {line}: {name}" for line, name in imports_of(source) if layer_of(name) > own]


@pytest.mark.parametrize("path", sorted((ROOT / "mkd").rglob("*.py")), ids=name_of)
def test_modules_import_only_from_above(path):
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    assert upward_imports(module, path.read_text()) == []


def test_upward_imports_are_seen():
    source = "def f():\n    from mkd.schedule import wrap\nimport mkd.errors\nfrom mkd import step, config\n"
    assert upward_imports("mkd.losses.reference", source) == ["line 2: mkd.schedule.wrap", "line 4: mkd.step"]
    assert upward_imports("mkd.errors", "from mkd.runlog import Run") == ["line 1: mkd.runlog.Run"]
    assert upward_imports("mkd.runlog", source) == []


def functions_of(tree: ast.AST) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def lines_of_docstring(function: ast.FunctionDef) -> int:
    has_one = ast.get_docstring(function) is not None
    return function.body[0].end_lineno - function.body[0].lineno + 1 if has_one else 0


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_and_functions_are_short(path):
    source = path.read_text()
    assert len(source.splitlines()) <= FILE_LINES, "split this file"
    for function in functions_of(ast.parse(source)):
        is_kernel = any("triton" in ast.unparse(decorator) for decorator in function.decorator_list)
        lines = function.end_lineno - function.lineno + 1 - lines_of_docstring(function)
        limit = KERNEL_LINES if is_kernel else FUNCTION_LINES
        assert lines <= limit, f"{function.name} at line {function.lineno} has {lines} lines, more than {limit}"


def missing_annotations(function: ast.FunctionDef) -> list[str]:
    arguments = function.args
    plain = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    plain += [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    missing = [a.arg for a in plain if a.annotation is None and a.arg not in ("self", "cls", "ctx")]
    return missing if function.returns is not None else [*missing, "return"]


def is_kernel(function):
    """Triton compiles it: its arguments are pointers and scalars, or marked as constants."""
    return any(ast.unparse(decorator) == "triton.jit" for decorator in function.decorator_list)


@pytest.mark.parametrize("path", LIBRARY, ids=name_of)
def test_public_signatures_are_annotated(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Module | ast.ClassDef) or node.__dict__.get("name", "").startswith("_"):
            continue
        for function in node.body:
            is_function = isinstance(function, ast.FunctionDef) and not is_kernel(function)
            if is_function and (function.name == "__init__" or not function.name.startswith("_")):
                assert missing_annotations(function) == [], f"{function.name} at line {function.lineno}"


def test_distributed_tests_are_collected(request):
    """By default pytest passes over folders named dist without a word."""
    assert "dist" not in request.config.getini("norecursedirs")


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff_finds_nothing(command):
    done = subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
