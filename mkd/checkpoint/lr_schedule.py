"""The schedule of learning rate and weight decay that a checkpoint was trained with, beside this job's."""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from mkd.errors import MkdConfigError


def check_schedule(args: Namespace, stored: Namespace, state: Mapping[str, Any], origin: str) -> list[str]:
    """Refuse a checkpoint of another schedule, unless a flag says which of the two counts.

    megatron-core 0.19 compares the same values, with an assertion and when all models are loaded.

    Args:
        args: Megatron's, of this job, complete. Where the checkpoint's schedule counts, its `lr` and `min_lr` are set:
            Megatron finds a parameter's optimizer state by them. Where the two differ in nothing that has an effect,
            `use_checkpoint_opt_param_scheduler` is set, so that Megatron does not stop either.
        stored: those in the checkpoint.
        state: of Megatron's `OptimizerParamScheduler` in the checkpoint; steps are counted in samples.
        origin: the flag and folder to name.

    Returns:
        What is different and may be.

    Raises:
        MkdConfigError: naming each flag that differs with both values.
    """
    schedule = _schedule(args)
    differing = [name for name, (_, value) in schedule.items() if state.get(name, value) != value]
    counting = [name for name in differing if name not in _without_effect(schedule, state)]
    if differing and not counting and not args.override_opt_param_scheduler:
        args.use_checkpoint_opt_param_scheduler = True
    # A flag may be behind several of them.
    texts = dict.fromkeys(_change(args, stored, schedule[name][0], state[name], schedule[name][1]) for name in counting)
    changes = ", ".join(texts)
    if not changes:
        return []
    if args.use_checkpoint_opt_param_scheduler:
        args.lr, args.min_lr = state["max_lr"], state["min_lr"]
        return [f"the schedule is the checkpoint's: {changes}"]
    if args.override_opt_param_scheduler:
        return [f"the schedule is this command's: {changes}"]
    raise MkdConfigError(
        f"{origin} was trained with another schedule: {changes}. Give --override-opt-param-scheduler to go on with "
        "this command's, or --use-checkpoint-opt-param-scheduler to keep the checkpoint's, whose rate stays where it "
        "has ended"
    )


def _without_effect(schedule: Mapping[str, tuple[str, Any]], state: Mapping[str, Any]) -> set[str]:
    """Lengths of what is constant in both schedules."""
    lengths = {"lr_decay_style": "lr_decay_steps", "wd_incr_style": "wd_incr_steps"}
    return {length for style, length in lengths.items() if schedule[style][1] == state.get(style) == "constant"}


def _schedule(args: Namespace) -> dict[str, tuple[str, Any]]:
    """Name in Megatron's scheduler -> (flag, value), as `megatron.training.training.get_optimizer_param_scheduler`."""
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
    """Of one flag; steps in the unit of the flag."""
    if flag == "--lr-warmup-fraction":
        return f"--lr-warmup-fraction is {there:g} samples there and {here:g} in this job"
    if flag.endswith("-iters"):
        batches = stored.global_batch_size, args.global_batch_size
        times = ["" if batches[0] == batches[1] else f" * --global-batch-size {batch}" for batch in batches]
        there, here = (f"{n / batch:g}{text}" for n, batch, text in zip((there, here), batches, times, strict=True))
    return f"{flag} is {there} there and {here} in this job"
