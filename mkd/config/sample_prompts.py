"""Checks of the flags by which the student writes texts: --kd-sample-prompts and --kd-eval-tasks."""

from argparse import Namespace

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


def _check_writing(args: Namespace, flag: str, file: str, texts: str, tokens: int) -> None:
    """Refuse a flag by which the student writes texts where nothing is evaluated, and under flags with which rows of
    other lengths than the training data's cannot be computed, or change the training."""
    what = f"{flag} {file}"
    if args.eval_iters == 0:
        raise MkdConfigError(f"{what}: {texts} are written at evaluations, and --eval-iters is 0")
    if args.tokenizer_type != "HuggingFaceTokenizer":
        raise MkdConfigError(f"{what} needs a HuggingFaceTokenizer, --tokenizer-type is {args.tokenizer_type}")
    if tokens >= args.seq_length:
        raise MkdConfigError(
            f"{flag.rpartition('-')[0]}-tokens is {tokens}; it must be below --seq-length {args.seq_length}: prompt "
            "and continuation are one row"
        )
    reasons = {
        "--cuda-graph-impl": (args.cuda_graph_impl != "none", "a CUDA graph has one shape"),
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
