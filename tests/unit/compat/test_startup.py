"""mkd/compat/startup.py, and that megatron-core 0.19 still needs it."""

import argparse
import ast
import importlib.util
import inspect
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from megatron.core.datasets import utils
from megatron.training import argument_utils, initialize
from megatron.training.argument_utils import ArgumentGroupFactory
from megatron.training.arguments import add_megatron_arguments

from mkd.compat.startup import read_help_texts_once, repair_help, skip_warm_up, use_prebuilt_dataset_helpers
from mkd.config import flags, kd_fields
from mkd.config.kd_config import KDConfig
from tests.support.upstream import fresh, source_of


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


COMPILED = """
import torch

compiled, compile = [], torch.compile
count = lambda graph, inputs: compiled.append(graph) or graph.forward
torch.compile = lambda function: compile(function, backend=count)
from megatron.core.fusions.fused_bias_dropout import bias_dropout_add_fused_train
from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from megatron.training import argument_utils, initialize
from megatron.training.argument_utils import ArgumentGroupFactory
from types import SimpleNamespace


def tensor(*sizes):
    return torch.ones(sizes, dtype=torch.bfloat16, requires_grad=True)


def graphs_of_model(swiglu, bias, dropout):
    before, width = len(compiled), 64 if swiglu else 32
    activation = (lambda x, b: bias_swiglu_impl(x, b, False, False)) if swiglu else bias_gelu_impl
    if swiglu or bias:  # there is no fused GELU without bias
        activation(tensor(8, 2, width), tensor(width) if bias else None).sum().backward()
    bias_dropout_add_fused_train((tensor(8, 2, 16), tensor(16) if bias else None), tensor(8, 2, 16), dropout)
    return len(compiled) - before


torch.rand = lambda size, dtype, device: torch.ones(size, dtype=dtype)  # the device is "cuda"
sizes = dict(bf16=True, ffn_hidden_size=32, hidden_size=16, seq_length=8, micro_batch_size=2)
layout = dict(tensor_model_parallel_size=1, context_parallel_size=1, sequence_parallel=False)
for swiglu in (True, False):
    initialize.get_args = lambda: SimpleNamespace(swiglu=swiglu, **sizes, **layout)
    for model in ((swiglu, bias, dropout) for bias in (True, False) for dropout in (0.0, 0.1)):
        torch._dynamo.reset()
        alone = graphs_of_model(*model)
        torch._dynamo.reset()
        initialize._warmup_jit_function()
        print(alone == graphs_of_model(*model) > 0)
"""


def test_after_upstreams_warm_up_models_compile_as_much_as_without_it() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "TORCHDYNAMO_DISABLE"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", COMPILED], capture_output=True, text=True, env=environ)
    assert done.stdout.split() == ["True"] * 8, done.stderr


def test_upstream_warms_up() -> None:
    upstream = fresh(initialize)
    upstream.get_args = lambda: pytest.fail("the warm-up has begun")
    with pytest.raises(pytest.fail.Exception, match="has begun"):
        upstream.set_jit_fusion_options()
    assert "set_jit_fusion_options(" in source_of("pretrain")


def test_warm_up_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    monkeypatch.setattr(initialize, "_warmup_jit_function", begun.append)
    skip_warm_up()
    initialize.set_jit_fusion_options(tp_size=2)
    assert begun == []


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


def test_help_texts_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream reads those of a class, and of the class that it extends, for every factory."""
    upstream = fresh(argument_utils).ArgumentGroupFactory._get_field_docstrings
    read: list[type] = []

    def counted(factory: ArgumentGroupFactory, config: type) -> dict[str, str]:
        read.append(config)
        return upstream(factory, config)

    monkeypatch.setattr(ArgumentGroupFactory, "_get_field_docstrings", counted)
    texts = [ArgumentGroupFactory(KDConfig).field_docstrings for _ in range(2)]
    once = len(read) // 2
    assert once > 0 and read[:once] == read[once:]
    read.clear()
    read_help_texts_once()
    texts += [ArgumentGroupFactory(KDConfig).field_docstrings for _ in range(2)]
    assert len(read) == once
    assert texts == [texts[0]] * 4


def test_help_keeps_what_argparse_formats():
    parser = argparse.ArgumentParser()
    parser.add_argument("--share", default=3, help="50% of 100%% (default: %(default)s, %(type)s); 5%)")
    repair_help(parser)
    assert "50% of 100% (default: 3, None); 5%)" in " ".join(parser.format_help().split())
