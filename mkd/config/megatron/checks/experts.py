"""A student with experts: flags that megatron refuses only inside the first training step."""

from argparse import Namespace
from importlib.util import find_spec

from mkd.errors import MkdConfigError, MkdPackageError


def check_experts(args: Namespace) -> None:
    """Refuse flags of a student with experts that megatron refuses only inside the first training step."""
    if args.num_experts is None:
        return
    tp = args.tensor_model_parallel_size
    if tp > 1 and not args.sequence_parallel:
        raise MkdConfigError(
            f"--tensor-model-parallel-size {tp} needs --sequence-parallel for a student with {args.num_experts} "
            "experts: megatron does not train them without it"
        )
    if args.moe_apply_probs_on_input and args.moe_router_topk != 1:
        raise MkdConfigError(
            f"--moe-apply-probs-on-input needs one expert per token, the student has {args.moe_router_topk} "
            "(--moe-router-topk)"
        )
    if args.moe_router_fusion and find_spec("transformer_engine") is None:
        raise MkdPackageError(
            "--moe-router-fusion needs Transformer Engine, which is not installed in this Python: leave it out"
        )
    if args.moe_latent_size and args.moe_shared_expert_overlap:
        raise MkdConfigError("--moe-shared-expert-overlap does not work with --moe-latent-size: leave it out")
    _check_balancing(args)


def _check_balancing(args: Namespace) -> None:
    """Refuse a type of load balancing that contradicts other flags of the router."""
    kinds, coefficients = (
        value if isinstance(value, list) else [value]
        for value in (args.moe_router_load_balancing_type, args.moe_aux_loss_coeff)
    )
    if kinds == ["sinkhorn"] and any(coefficients):
        raise MkdConfigError(
            f"--moe-router-load-balancing-type sinkhorn has no load-balancing loss, but its coefficient is "
            f"{coefficients[0]:g}: give --moe-aux-loss-coeff 0"
        )
    if kinds != ["quantile_balancing"]:
        return
    what = "--moe-router-load-balancing-type quantile_balancing"
    for flag in ("--moe-router-fusion", "--moe-router-num-groups", "--moe-router-group-topk"):
        if getattr(args, flag.removeprefix("--").replace("-", "_")):
            raise MkdConfigError(f"{what} does not work with {flag}: leave one of them out")
    assignments = args.micro_batch_size * args.seq_length * args.moe_router_topk
    if assignments % args.num_experts:
        raise MkdConfigError(
            f"{what} needs equal shares: --micro-batch-size {args.micro_batch_size} * --seq-length {args.seq_length} * "
            f"{args.moe_router_topk} experts per token is not divisible by the {args.num_experts} experts"
        )
