"""Checks of the flags by which the student writes texts: --kd-sample-prompts, --kd-eval-tasks, --kd-on-policy."""

import math
from argparse import Namespace
from fractions import Fraction

from mkd.config.kd_config import KDConfig
from mkd.errors import MkdConfigError


def check_sampling(args: Namespace, kd: KDConfig) -> None:
    """Refuse --kd-sample-prompts where the student cannot write; see `_check_writing`."""
    if kd.sample_prompts is not None:
        _check_writing(args, "--kd-sample-prompts", kd.sample_prompts, "samples", kd.sample_tokens)


def check_tasks(args: Namespace, kd: KDConfig) -> None:
    """Refuse --kd-eval-tasks where the student cannot write; see `_check_writing`."""
    if kd.eval_tasks is not None:
        _check_writing(args, "--kd-eval-tasks", kd.eval_tasks, "answers", kd.eval_tokens)


def check_rollouts(args: Namespace, kd: KDConfig) -> None:
    """Refuse --kd-on-policy where the student cannot write; see `_check_writing`."""
    if not kd.is_on_policy:
        return
    share = kd.on_policy_over_time
    value = kd.on_policy_schedule if kd.on_policy is None else f"{kd.on_policy:g}"
    what = f"{'--kd-on-policy-schedule' if kd.on_policy is None else '--kd-on-policy'} {value}"
    is_fixed = args.step_batch_size_schedule is None  # Megatron sets another size beside the schedule
    if is_fixed and math.floor(args.global_batch_size * Fraction(repr(max(share.start, share.end)))) < 1:
        raise MkdConfigError(f"{what} of --global-batch-size {args.global_batch_size} is less than one row: raise it")
    if args.overlap_param_gather and not args.use_distributed_optimizer:
        raise MkdConfigError(
            f"{what} does not work with --overlap-param-gather and without --use-distributed-optimizer (it has not "
            "been tested): leave it out"
        )
    if args.overlap_param_gather_with_optimizer_step:
        raise MkdConfigError(
            f"{what} does not work with --overlap-param-gather-with-optimizer-step (it has not been tested): leave it "
            "out"
        )
    if kd.rollout_offload:
        _check_offload(args)
    if kd.rollout_url is not None and kd.rollout_weights is None and args.save is None:
        raise MkdConfigError(
            f"--kd-rollout-url {' '.join(kd.rollout_url)}: there is no folder for the student's weights: give --save, "
            "or --kd-rollout-weights DIR"
        )
    _check_options(args, "--kd-on-policy", value, ("--kd-rollout-tokens", kd.rollout_tokens))


def _check_offload(args: Namespace) -> None:
    """Refuse --kd-rollout-offload where the optimizer's state is on the host already, or must keep its addresses."""
    reasons = {
        "--optimizer-cpu-offload": (args.optimizer_cpu_offload, "its state is in host memory already"),
        "--optimizer-cuda-graph": (args.optimizer_cuda_graph, "a CUDA graph holds the addresses of the state"),
    }
    for other, (given, reason) in reasons.items():
        if given:
            raise MkdConfigError(f"--kd-rollout-offload does not work with {other} ({reason}): leave one of them out")


def _check_writing(args: Namespace, flag: str, file: str, texts: str, tokens: int) -> None:
    """Refuse a flag by which the student writes texts where nothing is evaluated, and under flags with which rows of
    other lengths than the training data's cannot be computed, or change the training."""
    what = f"{flag} {file}"
    if args.eval_iters == 0:
        raise MkdConfigError(f"{what}: {texts} are written at evaluations, and --eval-iters is 0")
    _check_options(args, flag, file, (f"{flag.rpartition('-')[0]}-tokens", tokens))


def _check_options(args: Namespace, flag: str, value: str, tokens: tuple[str, int]) -> None:
    """Refuse what `_check_writing` refuses beside the lack of evaluations; `tokens` is the flag of their number with
    its value."""
    what = f"{flag} {value}"
    if args.tokenizer_type != "HuggingFaceTokenizer":
        raise MkdConfigError(f"{what} needs a HuggingFaceTokenizer, --tokenizer-type is {args.tokenizer_type}")
    if tokens[1] >= args.seq_length:
        raise MkdConfigError(
            f"{tokens[0]} is {tokens[1]}; it must be below --seq-length {args.seq_length}: prompt and continuation are "
            "one row"
        )
    reasons = {
        "--tp-comm-overlap": (args.tp_comm_overlap, "its buffers have one shape"),
        "--fp8-format": (args.fp8, "the scales of the training would change"),
        "--fp4-format": (args.fp4, "the scales of the training would change"),
        "--use-megatron-fsdp": (args.use_megatron_fsdp, "it has not been tested"),
        "--use-torch-fsdp2": (args.use_torch_fsdp2, "it has not been tested"),
        "--overlap-moe-expert-parallel-comm": (args.overlap_moe_expert_parallel_comm, "it runs no whole layers"),
        "--moe-expert-capacity-factor": (
            args.moe_expert_capacity_factor is not None,
            "a token's experts would depend on the other prompts",
        ),
        "--moe-expert-rank-capacity-factor": (
            args.moe_expert_rank_capacity_factor is not None,
            "a token's experts would depend on the other prompts",
        ),
        "--moe-router-load-balancing-type quantile_balancing": (
            "quantile_balancing" in args.moe_router_load_balancing_type,
            "a token's experts would depend on the other prompts",
        ),
    }
    for other, (given, reason) in reasons.items():
        if given:
            raise MkdConfigError(f"{flag} does not work with {other} ({reason}): leave one of them out")
