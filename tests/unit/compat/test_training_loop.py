"""mkd/compat/training_loop.py, and that megatron-core 0.19 still needs it."""

import ast
import inspect
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from megatron.training import training

from mkd.compat.training_loop import install_training_hooks
from tests.support.upstream import source_of

# Parameters of upstream's functions that install_training_hooks reads.
TAKEN = {
    "train": {"forward_step_func", "model", "valid_data_iterator", "process_non_loss_data_func", "config"},
    "evaluate_and_print_results": {"prefix", "forward_step_func", "data_iterator", "model", "iteration"},
    "training_log": {"iteration", "loss_dict", "learning_rate", "grad_norm", "skipped_iter"},
    "evaluate": {"model"},
    "get_forward_backward_func": set(),
    "print_rank_last": {"message"},
    "should_disable_forward_pre_hook": {"args"},
    "disable_forward_pre_hook": {"model_chunks", "param_sync"},
    "enable_forward_pre_hook": {"model_chunks"},
}


@pytest.mark.parametrize("name", TAKEN)
def test_upstream_has_the_functions_that_the_hooks_replace(name):
    assert TAKEN[name] <= set(inspect.signature(getattr(training, name)).parameters)


def test_upstream_calls_them_by_their_names_in_the_module():
    tree = ast.parse(inspect.getsource(training))
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    replaced = {"train", "evaluate", "training_log", "evaluate_and_print_results", "get_forward_backward_func"}
    assert replaced <= called


def test_upstream_lines_omit_negative_values_and_call_every_metric_a_perplexity():
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

    def before_training(self, iteration: int, chunks: object, optimizer: object) -> None:
        self.calls.append(("before", iteration))

    def after_training(self) -> None:
        pass

    def after_iteration(self, *values: object) -> None:
        self.calls.append(("iteration", *values))

    def after_evaluation(self, *values: object) -> None:
        self.calls.append(("evaluation", *values))


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> tuple[list, SimpleNamespace]:
    """(recorded calls, megatron's arguments), with its functions replaced by stand-ins of the same signature."""
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
    install_training_hooks(Recorder(calls))
    return calls, args


TRAIN = ("step", ["model"], "optimizer", "scheduler", "train data", "valid data", None, "config", {}, None)


def test_evaluation_before_the_first_step(hooked):
    calls, _ = hooked
    assert training.train(*TRAIN) == "trained"
    wanted = [("before", 0), "hooks off", ("evaluation", "valid", 0, {"ce": 2.0}, ["model"]), "hooks on", "train"]
    assert calls == wanted


def test_no_evaluation_before_the_first_step_of_a_resumed_run_or_without_data(hooked):
    calls, args = hooked
    args.iteration = 7
    training.train(*TRAIN)
    args.iteration, args.do_valid = 0, False
    training.train(*TRAIN)
    assert calls == [("before", 7), "train", ("before", 0), "train"]


@pytest.mark.parametrize("prefix, split", [("iteration 5", "valid"), ("iteration 5 on test set", "test")])
def test_evaluations_reach_the_hooks_with_their_split_and_upstream_prints_nothing(hooked, prefix, split):
    calls, _ = hooked
    training.evaluate_and_print_results(prefix, "step", "data", ["model"], 5, None, "config")
    assert calls == [("evaluation", split, 5, {"ce": 2.0}, ["model"])]
    training.print_rank_last("something else")
    assert calls[-1] == ("printed", "something else")


def test_the_same_weights_are_not_evaluated_twice(hooked):
    calls, _ = hooked
    for prefix in ("iteration 5", "iteration 5 on validation set", "iteration 5 on test set"):
        training.evaluate_and_print_results(prefix, "step", "data", ["model"], 5, None, "config")
    assert calls == [
        ("evaluation", "valid", 5, {"ce": 2.0}, ["model"]),
        ("evaluation", "test", 5, {"ce": 2.0}, ["model"]),
    ]


def test_upstream_names_the_test_split_in_its_prefix():
    assert "on test set" in source_of("pretrain")


def test_iterations_reach_the_hooks(hooked):
    calls, _ = hooked
    losses = {"kd": -1e-9}
    assert training.training_log(losses, {}, 1e-3, 4, 1.0, False, 1, 0.5, None, None, None) == "logged"
    assert calls == [("iteration", 4, losses, 1e-3, 0.5, True, 1.0)]


def test_schedule_is_wrapped(hooked):
    schedule = training.get_forward_backward_func(1, 2)
    assert schedule("batch") == ("around", ((1, 2), ("batch",)))
