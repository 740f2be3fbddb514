"""Batches: the ranks and pipeline stages that divide them, and schedules of their size."""

from argparse import Namespace
from itertools import pairwise

from mkd.errors import MkdConfigError


def check_virtual_stages(args: Namespace) -> None:
    """Refuse steps and evaluations whose microbatches do not fill the interleaved pipeline schedule.

    Args:
        args: Megatron's, after its own checks.
    """
    if args.virtual_pipeline_model_parallel_size is None:
        return
    pp = args.pipeline_model_parallel_size
    group = args.microbatch_group_size_per_vp_stage or pp
    first = args.global_batch_size if args.rampup_batch_size is None else int(args.rampup_batch_size[0])
    batches = {"--global-batch-size": (first, args.micro_batch_size)}
    if args.rampup_batch_size is not None:
        batches = {"--rampup-batch-size": batches["--global-batch-size"]}
    if args.eval_iters:
        batches["--eval-global-batch-size"] = (args.eval_global_batch_size, args.eval_micro_batch_size)
    for flag, (batch, micro) in batches.items():
        count = batch // (micro * args.data_parallel_size)
        if not pp <= group <= count or 0 < count % group < pp:
            raise MkdConfigError(
                f"{flag} {batch} gives {count} microbatches of {micro} to each of {args.data_parallel_size} "
                f"data-parallel ranks: virtual pipeline stages compute {group} at a time "
                "(--microbatch-group-size-per-virtual-pipeline-stage, by default the pipeline-parallel size); the "
                f"number must be a multiple of it, or leave a remainder of at least {pp}"
            )


def check_batch(args: Namespace) -> None:
    """Refuse a global batch that the ranks do not divide."""
    model_size = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    replicas = args.world_size // model_size
    batch, micro = args.global_batch_size, args.micro_batch_size
    if micro < 1:
        raise MkdConfigError(f"--micro-batch-size is {micro}; it must be at least 1")
    is_fixed = batch is not None and args.rampup_batch_size is None
    if is_fixed and replicas > 0 and batch % (micro * replicas):
        raise MkdConfigError(
            f"--global-batch-size {batch} is not divisible by --micro-batch-size {micro} * {replicas} data-parallel "
            "ranks"
        )
    if args.step_batch_size_schedule is not None:
        _step_batch_sizes(args.step_batch_size_schedule, args.seq_length)
        if args.train_iters is not None:
            raise MkdConfigError(
                f"--step-batch-size-schedule {args.step_batch_size_schedule} does not work with --train-iters "
                f"{args.train_iters}: Megatron counts warmup and decay of the learning rate in samples, and multiplies "
                "iterations by one batch size; give --train-samples and the other lengths in samples"
            )


def check_batches_grow(args: Namespace, rows: int) -> None:
    """Refuse a schedule of batches that become smaller after the rows that a run has read: Megatron would end there.

    Args:
        args: Megatron's.
        rows: that the run has read before this job.
    """
    schedule = args.step_batch_size_schedule
    if schedule is None:
        return
    for (_, before), (samples, batch) in pairwise(_step_batch_sizes(schedule, args.seq_length)):
        if batch < before and rows < samples:
            raise MkdConfigError(
                f"--step-batch-size-schedule {schedule}: the batch falls from {before} to {batch} after {samples} "
                f"samples, which Megatron supports at a resume only, and this job begins after {rows}: let batches "
                "grow, or stop the run there and resume it"
            )


def _step_batch_sizes(schedule: str, seq_length: int) -> list[tuple[int, int]]:
    """The samples after which a batch size begins, and this size. Refuses a schedule that Megatron cannot read."""
    from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

    try:
        return StepBatchsizeNumMicroBatchesCalculator(1, 1, False, 1, schedule, seq_length).schedule
    except (AssertionError, ValueError, OverflowError) as error:
        raise MkdConfigError(
            f"--step-batch-size-schedule {schedule} ({error}): write TOKENS:BATCH for each batch size, from 0 tokens "
            f'on, such as "0:64 {1000 * seq_length}:128"; --seq-length is {seq_length}'
        ) from None
