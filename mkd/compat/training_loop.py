"""mkd's part in Megatron's training loop: schedule, first evaluation and metrics."""

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol


class TrainingHooks(Protocol):
    """mkd's additions to `megatron.training`'s loop."""

    @property
    def unfinished_evaluation(self) -> bool:
        """True if a resumed run starts with the evaluation that was ended before its checkpoint."""
        ...

    def around(self, schedule: Callable) -> Callable:
        """Wrap a forward-backward function."""
        ...

    def before_training(self, iteration: int, chunks: list[Any], optimizer: Any) -> None:
        """Called once, before the first evaluation, with the student's model chunks, their first weights, and the
        optimizer of Megatron."""
        ...

    def after_training(self) -> None:
        """Called once, after the last step of a training that no signal or limit ended."""
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
        """Called after each optimizer step; iterations count from 1. The loss scale is the next step's."""
        ...

    def after_evaluation(self, split: str, iteration: int, losses: dict[str, Any], model: list[Any]) -> None:
        """Called on all ranks after each evaluation; the split is "valid" or "test"."""
        ...


def install_training_hooks(hooks: TrainingHooks) -> None:
    """Add mkd's schedule, its metrics, and the evaluation before the first step (or the one that a stopped job did not
    finish) to megatron's training loop.

    megatron-core 0.19's `pretrain` takes a forward step, but neither a schedule nor a metrics writer. It prints a line
    that omits negative values and calls exp(x) of every metric a perplexity. It does not get the losses, which it would
    write to TensorBoard a second time.
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
        hooks.before_training(megatron_args.iteration, call["model"], call["optimizer"])
        # Read by schedules over iterations; megatron sets it in each step, and to 0 before.
        megatron_args.curr_iteration = max(megatron_args.iteration - 1, 0)
        if megatron_args.do_valid and (megatron_args.iteration == 0 or hooks.unfinished_evaluation):
            _evaluate_first(training, call)
        result = train(*args, **kwargs)
        hooks.after_training()
        return result

    def evaluate_at(
        prefix: str, step: Any, iterator: Any, model: Any, iteration: int, *rest: Any, **options: Any
    ) -> Any:
        nonlocal evaluated
        evaluation = ("test" if prefix.endswith("test set") else "valid", iteration)
        if evaluation == evaluated:
            return None  # at the end pretrain repeats the evaluation after the last iteration
        evaluated = evaluation
        return _quietly(training, evaluate_and_print, prefix, step, iterator, model, iteration, *rest, **options)

    def evaluate_with_hooks(*args: Any, **kwargs: Any) -> Any:
        result = evaluate(*args, **kwargs)
        if result[0] is not None:
            model = inspect.signature(evaluate).bind(*args, **kwargs).arguments["model"]
            hooks.after_evaluation(*evaluated, result[0], model)
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
    """Evaluate before the first step; `call` holds the arguments of `train`."""
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
    """Call without the lines that megatron prints on the last rank; `mkd.report.metrics` prints its own."""
    printer, training.print_rank_last = training.print_rank_last, lambda message: None
    try:
        return call(*args, **kwargs)
    finally:
        training.print_rank_last = printer
