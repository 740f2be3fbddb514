"""Upstream's code as it is shipped, whatever this process has patched: to test that a patch is still needed."""

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

from megatron.training import training


def fresh(module: ModuleType) -> ModuleType:
    """A second import of a module, without patches."""
    spec = importlib.util.spec_from_file_location(f"{module.__package__}.fresh", module.__file__)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


def source_of(function: str) -> str:
    """Source of a function of megatron.training.training."""
    text = Path(training.__file__).read_text()
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == function]
    return ast.get_source_segment(text, nodes[0])
