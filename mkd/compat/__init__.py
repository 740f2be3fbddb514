"""Every patch of, and workaround for, megatron: each with its upstream reason and a test that fails when it is no
longer needed (tests/unit/compat/test_compat.py). Those of checkpoints are in `mkd.compat.checkpoints`.
"""

import argparse
import inspect
import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from types import ModuleType
from typing import Any, Protocol


def balance_experts_over_unequal_ranks() -> None:
    """Scale the balance loss of experts alike however many tensor- and context-parallel ranks share a sequence, and
    however its padding is spread over them. Calling it again does nothing.

    megatron-core 0.19 multiplies it by the number of ranks and what it takes for the rank's own number of tokens. With
    a padding mask that is the number on all ranks, because the counts it is taken from were summed in place. And where
    experts are balanced by a bias, it applies the mask [tokens] to choices [tokens, experts] as if it were of experts.
    """
    from megatron.core.transformer.moe import router

    count = router.get_tokens_per_expert_and_token_count
    if count.__module__ == __name__:
        return

    def count_alike(
        routing_map: Any, reduce_group: Any, topk: int | None = None, with_padding_mask: bool = False
    ) -> tuple:
        everywhere, here, total = count(routing_map, reduce_group, topk, with_padding_mask)
        return everywhere, total / reduce_group.size() if with_padding_mask else here, total

    count_for_bias = router.TopKRouter._apply_expert_bias

    def count_texts(self: Any, routing_map: Any, padding_mask: Any = None) -> None:
        count_for_bias(self, routing_map, None if padding_mask is None else padding_mask.unsqueeze(-1))

    router.get_tokens_per_expert_and_token_count = count_alike
    router.TopKRouter._apply_expert_bias = count_texts


@contextmanager
def parallel_state_of(layout: dict[str, Any]) -> Iterator[None]:
    """Have megatron's global parallel state be that of another layout inside, and as it was outside.

    megatron-core 0.19 takes process groups as arguments, and yet reads the global ones in places: for the parts of a
    checkpoint that a rank has, for groups that a caller leaves out, for the metrics of routers. A model in another
    layout would load or compute something else there.

    Args:
        layout: the values of that state; empty: nothing is initialized inside. Filled when the context ends.
    """
    from megatron.core import parallel_state

    names = [name for name in vars(parallel_state) if re.fullmatch("_[A-Z_]+", name)]
    outside = {name: getattr(parallel_state, name) for name in names}
    nothing = {name: {} if isinstance(value, dict) else None for name, value in outside.items()}
    vars(parallel_state).update(layout or nothing)
    try:
        yield
    finally:
        layout.update((name, getattr(parallel_state, name)) for name in names)
        vars(parallel_state).update(outside)


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

    @property
    def unfinished_evaluation(self) -> bool:
        """True if a resumed run starts with the evaluation that was ended before its checkpoint."""
        ...

    def around(self, schedule: Callable) -> Callable:
        """Wrap a forward-backward function."""
        ...

    def before_training(self, iteration: int) -> None:
        """Called once, before the first evaluation."""
        ...

    def after_iteration(
        self,
        iteration: int,
        losses: dict[str, Any],
        lr: float | None,
        grad_norm: float | None,
        skipped: bool,
        loss_scale: float,
    ) -> None:
        """Called after each optimizer step; the iteration counts from 1. The loss scale, 1 without fp16, is that of the
        next step."""
        ...

    def after_evaluation(self, split: str, iteration: int, losses: dict[str, Any]) -> None:
        """Called after each pass over validation or test data; the split is "valid" or "test"."""
        ...


def install_training_hooks(hooks: TrainingHooks) -> None:
    """Put mkd's schedule, its evaluation before the first step (and that which a stopped job had not finished), and its
    metrics into megatron's training loop.

    megatron-core 0.19's `pretrain` takes a forward step, but neither a schedule nor a place for metrics, and prints a
    line that leaves out negative values and calls exp(x) of every metric a perplexity. It is not given the losses, of
    which it would write the same to TensorBoard.
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
        # What schedules over time go by; megatron sets it in each step, and to 0 before.
        megatron_args.curr_iteration = max(megatron_args.iteration - 1, 0)
        if megatron_args.do_valid and (megatron_args.iteration == 0 or hooks.unfinished_evaluation):
            _evaluate_first(training, call)
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

    def evaluate_with_hooks(*args: Any, **kwargs: Any) -> Any:
        result = evaluate(*args, **kwargs)
        if result[0] is not None:
            hooks.after_evaluation(*evaluated, result[0])
            result = ({}, *result[1:])
        return result

    def log_with_hooks(*args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(log).bind(*args, **kwargs).arguments
        hooks.after_iteration(
            call["iteration"],
            call["loss_dict"],
            call["learning_rate"],
            call["grad_norm"],
            bool(call["skipped_iter"]),
            call["loss_scale"],
        )
        return _quietly(training, log, **{**call, "loss_dict": {}})

    training.get_forward_backward_func = get_wrapped_schedule
    training.train = train_after_evaluation
    training.evaluate = evaluate_with_hooks
    training.evaluate_and_print_results = evaluate_at
    training.training_log = log_with_hooks


def _evaluate_first(training: ModuleType, call: dict[str, Any]) -> None:
    """Evaluate before the first step of a call of `train`, whose arguments are given."""
    megatron_args = training.get_args()
    paused = training.should_disable_forward_pre_hook(megatron_args)
    if paused:
        training.disable_forward_pre_hook(call["model"], param_sync=False)
    training.evaluate_and_print_results(
        f"iteration {megatron_args.iteration}",
        call["forward_step_func"],
        call["valid_data_iterator"],
        call["model"],
        megatron_args.iteration,
        call["process_non_loss_data_func"],
        call["config"],
    )
    if paused:
        training.enable_forward_pre_hook(call["model"])


def _quietly(training: ModuleType, call: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call without the lines that megatron prints on the last rank: `mkd.report.metrics` prints them."""
    printer, training.print_rank_last = training.print_rank_last, lambda message: None
    try:
        return call(*args, **kwargs)
    finally:
        training.print_rank_last = printer


class _WithLookAhead:
    """An iterator whose next items can be seen without being drawn."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator, self._seen = iterator, deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._seen.popleft() if self._seen else next(self._iterator)

    def peek(self, count: int) -> list[Any]:
        """The next items; fewer where it ends."""
        self._seen.extend(islice(self._iterator, max(count - len(self._seen), 0)))
        return list(islice(self._seen, count))


def peek(iterator: Any, count: int) -> list[Any]:
    """The next samples that one of megatron's data iterators will give; none of any other iterator.

    megatron-core 0.19 replays a suspicious step with the samples that it has seen drawn from its `RerunDataIterator`.
    Samples that are only looked at must not be among them, so this happens below it.
    """
    from megatron.core.rerun_state_machine import RerunDataIterator

    if not isinstance(iterator, RerunDataIterator):
        return []
    if not isinstance(iterator.iterable, _WithLookAhead):
        iterator.iterable = _WithLookAhead(iterator.iterable)
    return iterator.iterable.peek(count)
