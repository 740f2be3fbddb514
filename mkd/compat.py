"""Every patch of, and workaround for, megatron: each with its upstream reason and a test that fails when it is no
longer needed (tests/unit/test_compat.py).
"""

import argparse
import inspect
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TextIO

from mkd.errors import MkdCheckpointError


def padding_of_stage(chunk: Any, padding: Any) -> Any:
    """The padding mask ([b, s] bool, or None) as a stage of a GPTModel takes it, whose routers leave padding out of
    their balance of experts then. None for a dense model, and for the one way of balancing that takes no mask.

    megatron-core 0.19 cuts the mask over sequence-parallel ranks on the first pipeline stage only; the routers of the
    others would take a mask of all tokens for one of their own.
    """
    config = chunk.config
    if padding is None or not config.num_moe_experts:
        return None
    if config.moe_router_load_balancing_type == "quantile_balancing":
        return None
    if config.sequence_parallel and not chunk.pre_process:
        tp = chunk.pg_collection.tp
        return padding.chunk(tp.size(), dim=1)[tp.rank()].contiguous()
    return padding


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

    megatron-core 0.19 takes process groups as arguments, and yet falls back on the global ones in many places
    (sequence parallelism's default groups, routers, rotary embeddings, checkpoints), where a model in another layout
    would compute something else without a word.

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
        if megatron_args.do_valid and (megatron_args.iteration == 0 or megatron_args.kd_unfinished_evaluation):
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

    def evaluate_and_tell(*args: Any, **kwargs: Any) -> Any:
        result = evaluate(*args, **kwargs)
        if result[0] is not None:
            hooks.after_evaluation(*evaluated, result[0])
            result = ({}, *result[1:])
        return result

    def log_and_tell(*args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(log).bind(*args, **kwargs).arguments
        hooks.after_iteration(
            call["iteration"], call["loss_dict"], call["learning_rate"], call["grad_norm"], bool(call["skipped_iter"])
        )
        return _quietly(training, log, **{**call, "loss_dict": {}})

    training.get_forward_backward_func = get_wrapped_schedule
    training.train = train_after_evaluation
    training.evaluate = evaluate_and_tell
    training.evaluate_and_print_results = evaluate_at
    training.training_log = log_and_tell


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
    """Call without the lines that megatron prints on the last rank: `mkd.metrics` prints them."""
    printer, training.print_rank_last = training.print_rank_last, lambda message: None
    try:
        return call(*args, **kwargs)
    finally:
        training.print_rank_last = printer


class CheckpointHooks(Protocol):
    """What mkd adds to megatron's saving and loading of checkpoints. All but `writer` are called on all ranks."""

    def before(self, folder: Path) -> None:
        """Called before anything is written into the folder of an iteration."""
        ...

    def writer(self, write: Callable[..., None]) -> Callable[..., None]:
        """Wrap what writes a rank's shards: a function of (rank, buckets, ...) that may run in another process."""
        ...

    def written(self, folder: Path) -> None:
        """Called when all files are written, before the tracker names them."""
        ...

    def published(self) -> None:
        """Called when the tracker names what was written last."""
        ...

    def replacing(self, tracker: Path) -> AbstractContextManager[TextIO]:
        """Open the tracker for writing. Called on rank 0 only."""
        ...


def install_checkpoint_hooks(hooks: CheckpointHooks) -> None:
    """Let a checkpoint count only when it is whole, and end with an error when one cannot be loaded.

    megatron-core 0.19 writes the tracker in place, writes into folders that an earlier attempt has left, hashes on rank
    0 alone, and ends some failed loads with exit status 0.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
    from megatron.training import checkpointing, training

    save, request_of = dist_checkpointing.save, TorchDistSaveShardedStrategy.async_save
    save_checkpoint, schedule = checkpointing.save_checkpoint, checkpointing.schedule_async_save

    def save_and_tell(state: Any, folder: str, *args: Any, **kwargs: Any) -> Any:
        hooks.before(Path(folder))
        request = save(state, folder, *args, **kwargs)
        if request is None:
            hooks.written(Path(folder))
        else:
            request.add_finalize_fn(lambda: hooks.written(Path(folder)))
        return request

    def request_with_own_writer(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = request_of(self, *args, **kwargs)
        return request if request.async_fn is None else request._replace(async_fn=hooks.writer(request.async_fn))

    def schedule_and_tell(request: Any) -> None:
        request.add_finalize_fn(hooks.published)
        schedule(request)

    def save_checkpoint_and_tell(*args: Any, **kwargs: Any) -> None:
        with _told_when_not_saved(*args, **kwargs):
            save_checkpoint(*args, **kwargs)
        if not training.get_args().async_save:
            hooks.published()

    dist_checkpointing.save = save_and_tell
    TorchDistSaveShardedStrategy.async_save = request_with_own_writer
    checkpointing.schedule_async_save = schedule_and_tell
    checkpointing.save_checkpoint = training.save_checkpoint = save_checkpoint_and_tell
    checkpointing.maybe_msc = _WholeTracker(checkpointing.maybe_msc, hooks.replacing)
    training.load_checkpoint = _load_or_refuse(training.load_checkpoint)


class _WholeTracker:
    """megatron's file functions, but the tracker is replaced in one step."""

    def __init__(self, files: Any, replacing: Callable[[Path], AbstractContextManager[TextIO]]) -> None:
        self._files, self._replacing = files, replacing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def open(self, path: str, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        whole = mode == "w" and "://" not in str(path) and Path(path).name == "latest_checkpointed_iteration.txt"
        return self._replacing(Path(path)) if whole else self._files.open(path, mode, *args, **kwargs)


def _load_or_refuse(load: Callable) -> Callable:
    """Loading that fails with an `MkdCheckpointError`."""
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint.api import CheckpointException

    known = (
        CheckpointingException,
        CheckpointException,
        AssertionError,
        LookupError,
        RuntimeError,
        OSError,
        ValueError,
    )

    def load_or_refuse(*args: Any, **kwargs: Any) -> Any:
        try:
            return load(*args, **kwargs)
        except SystemExit as error:
            raise MkdCheckpointError(
                "megatron refuses the checkpoint in --load or --pretrained-checkpoint (its reason is above)"
            ) from error
        except known as error:
            raise MkdCheckpointError(
                f"the checkpoint in --load or --pretrained-checkpoint cannot be loaded: {_in_one_line(error)}"
            ) from error

    return load_or_refuse


def _in_one_line(error: BaseException) -> str:
    failures = getattr(error, "failures", None)  # torch's, of each rank
    cause = next(iter(failures.values()))[0] if failures else error
    return f"{type(cause).__name__}: {' '.join(str(cause).split())[:500]}"


@contextmanager
def _told_when_not_saved(iteration: int, *_: Any, **__: Any) -> Iterator[None]:
    """A save that fails, because the disk is full for example, is an `MkdCheckpointError`."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except (CheckpointException, RuntimeError, OSError) as error:
        from megatron.training import get_args

        folder = Path(get_args().save)
        tracker = folder / "latest_checkpointed_iteration.txt"
        named = tracker.read_text().strip() if tracker.is_file() else ""
        before = f"iter_{named:0>7} is still whole" if named else "there is none before it"
        free = shutil.disk_usage(folder).free / 2**30  # megatron loses the system's reason
        raise MkdCheckpointError(
            f"--save: {folder / f'iter_{iteration:07d}'} was not saved, {free:.3f} GiB are free there "
            f"({_in_one_line(error)}); {before}. Make room or mend the folder; the same command goes on from there"
        ) from error


@contextmanager
def tracker_says(iteration: int | None) -> Iterator[None]:
    """Inside, megatron takes this iteration for what every tracker file names; None for a release.

    megatron-core 0.19 exits with status 0 on a tracker that it cannot read, before mkd has mended it.
    """
    from megatron.training import checkpointing

    read = checkpointing.read_metadata
    checkpointing.read_metadata = lambda file: (iteration or 0, iteration is None)
    try:
        yield
    finally:
        checkpointing.read_metadata = read


def resume_distributed_optimizer() -> None:
    """Let the distributed optimizer continue from a checkpoint where Adam is PyTorch's, as on CPU.

    megatron-core 0.19 asserts on its way to a checkpoint that the steps of all parameters are equal, but before a load
    there are none; it gives all parameters one tensor of the number of steps, to which each of them then adds; and it
    looks for this number among the tensors of the fully reshardable form, which does not have it there.
    """
    import torch
    from megatron.core.optimizer import distrib_optimizer

    optimizer = distrib_optimizer.DistributedOptimizer
    if distrib_optimizer.HAVE_APEX_OR_TE or optimizer.state_dict.__module__ == __name__:
        return
    state_dict, load_state_dict = optimizer.state_dict, optimizer.load_state_dict
    set_states = optimizer._set_main_param_and_optimizer_states

    def state_dict_before_a_load(self: Any) -> dict:
        if self.optimizer.state:
            return state_dict(self)
        self.optimizer.state["a placeholder"] = {"step": torch.zeros(())}
        try:
            return state_dict(self)
        finally:
            self.optimizer.state.clear()

    def load_steps_of_their_own(self: Any, state: dict) -> None:
        load_state_dict(self, state)
        for values in self.optimizer.state.values():
            if "step" in values:
                values["step"] = values["step"].clone()

    def set_states_but_no_step(self: Any, model_param: Any, tensors: dict) -> None:
        set_states(self, model_param, {"step": None, **tensors})  # what is no tensor is left as it is

    optimizer.state_dict, optimizer.load_state_dict = state_dict_before_a_load, load_steps_of_their_own
    optimizer._set_main_param_and_optimizer_states = set_states_but_no_step


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
