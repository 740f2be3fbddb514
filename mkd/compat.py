"""Every patch of, and workaround for, megatron: each with its upstream reason and a test that fails when it is no
longer needed (tests/unit/test_compat.py).
"""

import argparse
import inspect
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol


def use_prebuilt_dataset_helpers() -> None:
    """Let `initialize_megatron` use the compiled dataset helpers that the wheel ships.

    megatron-core 0.19 calls `make` in the installed datasets folder at every start; the wheel has the compiled module
    but no Makefile, so rank 0 exits with status 1.
    """
    from megatron.core.datasets import utils

    try:
        from megatron.core.datasets import helpers_cpp  # noqa: F401
    except ImportError:
        return  # a source checkout: let megatron compile
    utils.compile_helpers = lambda: None


def repair_help(parser: argparse.ArgumentParser) -> None:
    """Make `--help` print: escape per cent signs in help texts that argparse cannot format.

    megatron-core 0.19 has help texts with a bare "%", on which `--help` ends in a ValueError.
    """
    for action in parser._actions:
        if action.help and action.help is not argparse.SUPPRESS:
            action.help = re.sub(r"%%|%\(\w+\)[sdfr]|%", lambda m: "%%" if m[0] == "%" else m[0], action.help)


class TrainingHooks(Protocol):
    """What mkd adds to `megatron.training`'s loop."""

    def around(self, schedule: Callable) -> Callable:
        """Wrap a forward-backward function."""
        ...

    def before_training(self, iteration: int) -> None:
        """Called once, before the first evaluation."""
        ...

    def after_iteration(
        self, iteration: int, losses: dict[str, Any], lr: float | None, grad_norm: float | None, skipped: bool
    ) -> None:
        """Called after each optimizer step; the iteration counts from 1."""
        ...

    def after_evaluation(self, split: str, iteration: int, losses: dict[str, Any]) -> None:
        """Called after each pass over validation or test data; the split is "valid" or "test"."""
        ...


def install_training_hooks(hooks: TrainingHooks) -> None:
    """Put mkd's schedule, its evaluation before the first step, and its metrics into megatron's training loop.

    megatron-core 0.19's `pretrain` takes a forward step, but neither a schedule nor a place for metrics, and prints a
    line that leaves out negative values and calls exp(x) of every metric a perplexity.
    """
    from megatron.training import training

    get_schedule = training.get_forward_backward_func
    train, evaluate, log = training.train, training.evaluate, training.training_log
    evaluate_and_print = training.evaluate_and_print_results
    evaluated: tuple[str, int] | None = None

    def get_wrapped_schedule(*args: Any, **kwargs: Any) -> Callable:
        return hooks.around(get_schedule(*args, **kwargs))

    def train_after_evaluation(*args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(train).bind(*args, **kwargs).arguments
        megatron_args = training.get_args()
        hooks.before_training(megatron_args.iteration)
        if megatron_args.iteration == 0 and megatron_args.do_valid:
            paused = training.should_disable_forward_pre_hook(megatron_args)
            if paused:
                training.disable_forward_pre_hook(call["model"], param_sync=False)
            training.evaluate_and_print_results(
                "iteration 0",
                call["forward_step_func"],
                call["valid_data_iterator"],
                call["model"],
                0,
                call["process_non_loss_data_func"],
                call["config"],
            )
            if paused:
                training.enable_forward_pre_hook(call["model"])
        return train(*args, **kwargs)

    def evaluate_at(
        prefix: str, step: Any, iterator: Any, model: Any, iteration: int, *rest: Any, **options: Any
    ) -> Any:
        nonlocal evaluated
        wanted = ("test" if prefix.endswith("test set") else "valid", iteration)
        if wanted == evaluated:
            return None  # pretrain evaluates once more at the end what the last iteration has just evaluated
        evaluated = wanted
        return _quietly(training, evaluate_and_print, prefix, step, iterator, model, iteration, *rest, **options)

    def evaluate_and_tell(*args: Any, **kwargs: Any) -> Any:
        result = evaluate(*args, **kwargs)
        if result[0] is not None:
            hooks.after_evaluation(*evaluated, result[0])
        return result

    def log_and_tell(*args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(log).bind(*args, **kwargs).arguments
        hooks.after_iteration(
            call["iteration"], call["loss_dict"], call["learning_rate"], call["grad_norm"], bool(call["skipped_iter"])
        )
        return _quietly(training, log, *args, **kwargs)

    training.get_forward_backward_func = get_wrapped_schedule
    training.train = train_after_evaluation
    training.evaluate = evaluate_and_tell
    training.evaluate_and_print_results = evaluate_at
    training.training_log = log_and_tell


def _quietly(training: ModuleType, call: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call without the lines that megatron prints on the last rank: `mkd.metrics` prints them."""
    printer, training.print_rank_last = training.print_rank_last, lambda message: None
    try:
        return call(*args, **kwargs)
    finally:
        training.print_rank_last = printer
