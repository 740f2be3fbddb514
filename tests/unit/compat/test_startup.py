"""mkd/compat/startup.py, and that megatron-core 0.19 still needs it."""

import argparse
import ast
import importlib.util
import inspect
import itertools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from megatron.core.datasets import utils
from megatron.training.arguments import add_megatron_arguments

from mkd.compat.startup import repair_help, use_prebuilt_dataset_helpers
from mkd.config import flags, kd_fields
from mkd.config.kd_config import KDConfig
from tests.support.upstream import fresh


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that would run; each fails like `make` without a Makefile."""
    seen: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command: seen.append(command) or SimpleNamespace(returncode=2))
    return seen


def test_upstream_calls_make_where_there_is_no_makefile(commands):
    assert importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None
    assert not (Path(utils.__file__).parent / "Makefile").exists()
    with pytest.raises(SystemExit):
        fresh(utils).compile_helpers()
    assert commands == [["make", "-C", str(Path(utils.__file__).parent)]]


def test_prebuilt_helpers_are_used(commands, monkeypatch):
    monkeypatch.setattr(utils, "compile_helpers", fresh(utils).compile_helpers)
    use_prebuilt_dataset_helpers()
    utils.compile_helpers()
    assert commands == []


def test_a_source_checkout_still_compiles(commands, monkeypatch):
    upstream = fresh(utils).compile_helpers
    monkeypatch.setattr(utils, "compile_helpers", upstream)
    monkeypatch.setitem(sys.modules, "megatron.core.datasets.helpers_cpp", None)  # importing it fails
    monkeypatch.delattr("megatron.core.datasets.helpers_cpp", raising=False)
    use_prebuilt_dataset_helpers()
    assert utils.compile_helpers is upstream


def megatron_parser() -> argparse.ArgumentParser:
    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def test_upstream_help_cannot_be_printed():
    with pytest.raises(ValueError):
        megatron_parser().format_help()


def field_docstrings() -> dict[str, str]:
    """KDConfig's fields and the docstring under each."""
    tree = ast.parse(inspect.getsource(kd_fields))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "KDFields")
    pairs = itertools.pairwise(body)
    return {
        field.target.id: text.value.value
        for field, text in pairs
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def test_help_lists_every_field_with_its_docstring():
    text = "".join(flags.add_kd_flags(megatron_parser()).format_help().split())  # lines are broken after hyphens too
    docstrings = field_docstrings()
    assert set(docstrings) == {field.name for field in KDConfig.__dataclass_fields__.values()}
    for name, docstring in docstrings.items():
        flag = "--kd-" + name.replace("_", "-").replace("temperature-squared", "no-temperature-squared")
        assert flag in text
        assert "".join(docstring.split()) in text, flag
    assert "--tensor-model-parallel-size" in text


def test_help_keeps_what_argparse_formats():
    parser = argparse.ArgumentParser()
    parser.add_argument("--share", default=3, help="50% of 100%% (default: %(default)s, %(type)s); 5%)")
    repair_help(parser)
    assert "50% of 100% (default: 3, None); 5%)" in " ".join(parser.format_help().split())
