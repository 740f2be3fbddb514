"""mkd/compat.py and the other workarounds for megatron-core 0.19: each works, and a test fails when upstream no longer
needs it, so that it can go.
"""

import argparse
import ast
import importlib.util
import inspect
import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from megatron.core.datasets import utils
from megatron.core.transformer.moe import router
from megatron.training import training
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.arguments import add_megatron_arguments

import mkd.config.kd_config
from mkd import compat
from mkd.config import flags
from mkd.models.gpt import gpt_config


def fresh(module: ModuleType) -> ModuleType:
    """The module as upstream ships it, whatever has been patched in this process."""
    spec = importlib.util.spec_from_file_location(f"{module.__package__}.fresh", module.__file__)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


def source_of(function: str) -> str:
    """Upstream's text of a function of megatron.training.training."""
    text = Path(training.__file__).read_text()
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == function]
    return ast.get_source_segment(text, nodes[0])


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that would have been run; each fails as `make` does without a Makefile."""
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
    compat.use_prebuilt_dataset_helpers()
    utils.compile_helpers()
    assert commands == []


def test_a_source_checkout_still_compiles(commands, monkeypatch):
    upstream = fresh(utils).compile_helpers
    monkeypatch.setattr(utils, "compile_helpers", upstream)
    monkeypatch.setitem(sys.modules, "megatron.core.datasets.helpers_cpp", None)  # importing it fails
    monkeypatch.delattr("megatron.core.datasets.helpers_cpp", raising=False)
    compat.use_prebuilt_dataset_helpers()
    assert utils.compile_helpers is upstream


def megatron_parser() -> argparse.ArgumentParser:
    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def test_upstream_help_cannot_be_printed():
    with pytest.raises(ValueError):
        megatron_parser().format_help()


def field_docstrings() -> dict[str, str]:
    """KDConfig's fields and the docstring under each."""
    tree = ast.parse(inspect.getsource(mkd.config.kd_config))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "KDConfig")
    pairs = itertools.pairwise(body)
    return {
        field.target.id: text.value.value
        for field, text in pairs
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def test_help_lists_every_field_with_its_docstring():
    text = " ".join(flags.add_kd_flags(megatron_parser()).format_help().split())
    docstrings = field_docstrings()
    assert set(docstrings) == {field.name for field in mkd.config.kd_config.KDConfig.__dataclass_fields__.values()}
    for name, docstring in docstrings.items():
        flag = "--kd-" + name.replace("_", "-").replace("temperature-squared", "no-temperature-squared")
        assert flag in text
        assert " ".join(docstring.split()) in text, flag
    assert "--tensor-model-parallel-size" in text


def test_help_keeps_what_argparse_formats():
    parser = argparse.ArgumentParser()
    parser.add_argument("--share", default=3, help="50% of 100%% (default: %(default)s, %(type)s); 5%)")
    compat.repair_help(parser)
    assert "50% of 100% (default: 3, None); 5%)" in " ".join(parser.format_help().split())


def test_upstream_forgets_the_rope_scaling_factor():
    args = flags.default_arguments()
    vars(args).update(num_layers=2, hidden_size=32, num_attention_heads=2, params_dtype=torch.float32)
    vars(args).update(use_rope_scaling=True, rope_scaling_factor=32.0, padded_vocab_size=128, apply_rope_fusion=False)
    assert gpt_config_from_args(args).rope_scaling_factor == 8.0
    assert gpt_config(args).rope_scaling_factor == 32.0


# What install_training_hooks takes from upstream calls, by function.
TAKEN = {
    "train": {"forward_step_func", "model", "valid_data_iterator", "process_non_loss_data_func", "config"},
    "evaluate_and_print_results": {"prefix", "forward_step_func", "data_iterator", "model", "iteration"},
    "training_log": {"iteration", "loss_dict", "learning_rate", "grad_norm", "skipped_iter"},
    "evaluate": set(),
    "get_forward_backward_func": set(),
    "print_rank_last": {"message"},
    "should_disable_forward_pre_hook": {"args"},
    "disable_forward_pre_hook": {"model_chunks", "param_sync"},
    "enable_forward_pre_hook": {"model_chunks"},
}


@pytest.mark.parametrize("name", TAKEN)
def test_upstream_has_what_the_hooks_replace(name):
    assert TAKEN[name] <= set(inspect.signature(getattr(training, name)).parameters)


def test_upstream_calls_what_the_hooks_replace_by_its_name_in_the_module():
    tree = ast.parse(inspect.getsource(training))
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    replaced = {"train", "evaluate", "training_log", "evaluate_and_print_results", "get_forward_backward_func"}
    assert replaced <= called


def test_upstream_lines_leave_out_negative_values_and_call_everything_a_perplexity():
    printed = source_of("training_log").split("avg = total_loss_dict")[1]
    assert "if avg >= 0.0:" in printed.split("log_string +=")[0]
    assert "PPL" in source_of("evaluate_and_print_results")


class Recorder:
    """Training hooks that record their calls."""

    unfinished_evaluation = False

    def __init__(self, calls: list) -> None:
        self.calls = calls

    def around(self, schedule: Callable) -> Callable:
        return lambda *args: ("around", schedule(*args))

    def before_training(self, iteration: int) -> None:
        self.calls.append(("before", iteration))

    def after_iteration(self, *values: object) -> None:
        self.calls.append(("iteration", *values))

    def after_evaluation(self, *values: object) -> None:
        self.calls.append(("evaluation", *values))


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> tuple[list, SimpleNamespace]:
    """The calls that happen, and megatron's arguments, with its functions replaced by ones of the same signature."""
    calls: list = []
    args = SimpleNamespace(iteration=0, do_valid=True)

    def stand_in(name: str, act: Callable) -> None:
        signature = inspect.signature(getattr(training, name))

        def call(*given: object, **named: object) -> object:
            return act(**signature.bind(*given, **named).arguments)

        call.__signature__ = signature
        monkeypatch.setattr(training, name, call)

    def evaluate_and_print(prefix: str, iteration: int, **rest: object) -> None:
        training.print_rank_last(f"line of {prefix}")
        training.evaluate(rest["forward_step_func"], rest["data_iterator"], rest["model"], None, rest["config"])

    stand_in("train", lambda **rest: calls.append("train") or "trained")
    stand_in("evaluate", lambda **rest: ({"ce": 2.0}, None, False))
    stand_in("evaluate_and_print_results", evaluate_and_print)
    stand_in("training_log", lambda **rest: training.print_rank_last("line") or "logged")
    monkeypatch.setattr(training, "get_forward_backward_func", lambda *given: lambda *inner: (given, inner))
    monkeypatch.setattr(training, "print_rank_last", lambda message: calls.append(("printed", message)))
    monkeypatch.setattr(training, "get_args", lambda: args)
    monkeypatch.setattr(training, "should_disable_forward_pre_hook", lambda args: True)
    monkeypatch.setattr(training, "disable_forward_pre_hook", lambda model, param_sync: calls.append("hooks off"))
    monkeypatch.setattr(training, "enable_forward_pre_hook", lambda model: calls.append("hooks on"))
    compat.install_training_hooks(Recorder(calls))
    return calls, args


TRAIN = ("step", ["model"], "optimizer", "scheduler", "train data", "valid data", None, "config", {}, None)


def test_evaluation_before_the_first_step(hooked):
    calls, _ = hooked
    assert training.train(*TRAIN) == "trained"
    wanted = [("before", 0), "hooks off", ("evaluation", "valid", 0, {"ce": 2.0}), "hooks on", "train"]
    assert calls == wanted


def test_no_evaluation_before_the_first_step_of_a_resumed_run_or_without_data(hooked):
    calls, args = hooked
    args.iteration = 7
    training.train(*TRAIN)
    args.iteration, args.do_valid = 0, False
    training.train(*TRAIN)
    assert calls == [("before", 7), "train", ("before", 0), "train"]


@pytest.mark.parametrize("prefix, split", [("iteration 5", "valid"), ("iteration 5 on test set", "test")])
def test_evaluations_are_told_with_their_split_and_printed_by_mkd_alone(hooked, prefix, split):
    calls, _ = hooked
    training.evaluate_and_print_results(prefix, "step", "data", ["model"], 5, None, "config")
    assert calls == [("evaluation", split, 5, {"ce": 2.0})]
    training.print_rank_last("something else")
    assert calls[-1] == ("printed", "something else")


def test_the_same_weights_are_not_evaluated_twice(hooked):
    calls, _ = hooked
    for prefix in ("iteration 5", "iteration 5 on validation set", "iteration 5 on test set"):
        training.evaluate_and_print_results(prefix, "step", "data", ["model"], 5, None, "config")
    assert calls == [("evaluation", "valid", 5, {"ce": 2.0}), ("evaluation", "test", 5, {"ce": 2.0})]


def test_upstream_names_the_test_split_in_its_prefix():
    assert "on test set" in source_of("pretrain")


def test_iterations_are_told(hooked):
    calls, _ = hooked
    losses = {"kd": -1e-9}
    assert training.training_log(losses, {}, 1e-3, 4, 1.0, False, 1, 0.5, None, None, None) == "logged"
    assert calls == [("iteration", 4, losses, 1e-3, 0.5, True, 1.0)]


def test_schedule_is_wrapped(hooked):
    schedule = training.get_forward_backward_func(1, 2)
    assert schedule("batch") == ("around", ((1, 2), ("batch",)))


def test_padding_does_not_move_the_bias_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = fresh(router)
    names = ("get_tokens_per_expert_and_token_count", "_apply_expert_bias")
    monkeypatch.setattr(router, names[0], getattr(upstream, names[0]))
    monkeypatch.setattr(router.TopKRouter, names[1], getattr(upstream.TopKRouter, names[1]))
    choices = torch.tensor([[1, 0], [0, 1], [1, 0]], dtype=torch.bool)
    padding = torch.tensor([False, False, True])

    def counted() -> list[float]:
        module = SimpleNamespace(enable_expert_bias=True, local_tokens_per_expert=torch.zeros(2))
        router.TopKRouter._apply_expert_bias(module, choices, padding)
        return module.local_tokens_per_expert.tolist()

    with pytest.raises(RuntimeError, match="must match"):
        counted()
    compat.balance_experts_over_unequal_ranks()
    assert counted() == [1.0, 1.0]


def test_samples_that_are_only_looked_at_are_not_replayed(monkeypatch):
    """Megatron's iterator remembers all that is drawn from it, so looking ahead above it would be replayed."""
    from megatron.core import rerun_state_machine

    machine = SimpleNamespace(get_mode=lambda: rerun_state_machine.RerunMode.VALIDATE_RESULTS)
    monkeypatch.setattr(rerun_state_machine, "get_rerun_state_machine", lambda: machine)
    source = rerun_state_machine.RerunDataIterator(iter(range(5)))
    assert [next(source), next(source)] == [0, 1] and source.saved_microbatches == [0, 1]
    assert compat.peek(source, 2) == [2, 3] and source.saved_microbatches == [0, 1]
    source.rewind()
    assert [next(source), next(source)] == [0, 1] and compat.peek(source, 2) == [2, 3]
    source.advance()
    assert next(source) == 2 and compat.peek(source, 9) == [3, 4] and compat.peek(source, 1) == [3]
    assert [next(source), next(source)] == [3, 4] and compat.peek(source, 1) == []
    assert compat.peek(iter(range(3)), 2) == []
