"""Compares the schedule of learning rate and weight decay in a checkpoint with this job's schedule."""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from mkd.errors import MkdConfigError


def check_schedule(args: Namespace, stored: Namespace, state: Mapping[str, Any], origin: str) -> list[str]:
    """Refuse a checkpoint with another schedule, unless a flag selects one of the two.

    megatron-core 0.19 compares the same values with an assertion, after all models are loaded.

    Args:
        args: Megatron's arguments of this job, complete. Modified: with the checkpoint's schedule, `lr` and `min_lr`
            are set to its values, because Megatron looks up the optimizer state of a parameter by them. If the
            schedules differ only in values without effect, `use_checkpoint_opt_param_scheduler` is set, so that
            Megatron's own check passes.
        stored: Megatron's arguments in the checkpoint.
        state: state of Megatron's `OptimizerParamScheduler` in the checkpoint; steps are counted in samples.
        origin: the flag and folder to name.

    Returns:
        One sentence about accepted differences, in a list; empty without differences.

    Raises:
        MkdConfigError: naming each flag that differs with both values.
    """
    schedule = _schedule(args)
    differing = [name for name, (_, value) in schedule.items() if state.get(name, value) != value]
    effective = [name for name in differing if name not in _without_effect(schedule, state)]
    if differing and not effective and not args.override_opt_param_scheduler:
        args.use_checkpoint_opt_param_scheduler = True
    # One flag may determine several values.
    values = ((schedule[name][0], state[name], schedule[name][1]) for name in effective)
    changes = ", ".join(dict.fromkeys(_change(args, stored, *value) for value in values))
    if not changes:
        return []
    if args.use_checkpoint_opt_param_scheduler:
        args.lr, args.min_lr = state["max_lr"], state["min_lr"]
        return [f"the schedule is the checkpoint's: {changes}"]
    if args.override_opt_param_scheduler:
        return [f"the schedule is this command's: {changes}"]
    raise MkdConfigError(
        f"{origin} was trained with another schedule: {changes}. Give --override-opt-param-scheduler to continue with "
        "this command's, or --use-checkpoint-opt-param-scheduler to keep the checkpoint's, whose rate stays at "
        "its last value"
    )


def _without_effect(schedule: Mapping[str, tuple[str, Any]], state: Mapping[str, Any]) -> set[str]:
    """Names of lengths without effect, because the value is constant in both schedules."""
    lengths = {"lr_decay_style": "lr_decay_steps", "wd_incr_style": "wd_incr_steps"}
    return {length for style, length in lengths.items() if schedule[style][1] == state.get(style) == "constant"}


def _schedule(args: Namespace) -> dict[str, tuple[str, Any]]:
    """Name in Megatron's scheduler -> (flag, value).

    As in `megatron.training.training.get_optimizer_param_scheduler`.
    """
    unit, samples = ("iters", args.global_batch_size) if args.train_iters else ("samples", 1)
    total_flag, total = f"--train-{unit}", getattr(args, f"train_{unit}") * samples
    decay_flag, decay = f"--lr-decay-{unit}", getattr(args, f"lr_decay_{unit}")
    decay_flag, decay = (total_flag, total) if decay is None else (decay_flag, decay * samples)
    warmup_flag, warmup = f"--lr-warmup-{unit}", getattr(args, f"lr_warmup_{unit}") * samples
    if args.lr_warmup_fraction is not None:
        warmup_flag, warmup = "--lr-warmup-fraction", args.lr_warmup_fraction * decay
    constant = args.weight_decay_incr_style == "constant"
    return {
        "max_lr": ("--lr", args.lr),
        "min_lr": ("--min-lr", args.min_lr),
        "lr_warmup_steps": (warmup_flag, warmup),
        "lr_decay_steps": (decay_flag, decay),
        "lr_decay_style": ("--lr-decay-style", args.lr_decay_style),
        "start_wd": ("--weight-decay" if constant else "--start-weight-decay", args.start_weight_decay),
        "end_wd": ("--weight-decay" if constant else "--end-weight-decay", args.end_weight_decay),
        "wd_incr_steps": (total_flag, total),
        "wd_incr_style": ("--weight-decay-incr-style", args.weight_decay_incr_style),
    }


def _change(args: Namespace, stored: Namespace, flag: str, there: Any, here: Any) -> str:
    """Clause about one flag with both values; steps are given in the unit of the flag."""
    if flag == "--lr-warmup-fraction":
        return f"--lr-warmup-fraction is {there:g} samples there and {here:g} in this job"
    if flag.endswith("-iters"):
        batches = stored.global_batch_size, args.global_batch_size
        times = ["" if batches[0] == batches[1] else f" * --global-batch-size {batch}" for batch in batches]
        there, here = (f"{n / batch:g}{text}" for n, batch, text in zip((there, here), batches, times, strict=True))
    return f"{flag} is {there} there and {here} in this job"
