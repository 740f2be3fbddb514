"""Flags of packages and kernels that this Python or this GPU lacks; megatron finds out when it needs them."""

from argparse import Namespace
from importlib.util import find_spec

from megatron.core.transformer.enums import AttnBackend

from mkd import cpu
from mkd.config.kd_config import KDConfig
from mkd.config.megatron.fp8_teacher import MIN_FP8_CAPABILITY
from mkd.errors import MkdConfigError, MkdPackageError


def check_parts(args: Namespace) -> None:
    """Refuse flags of parts that are not there; megatron finds out when the models are built, or later."""
    faults = (getattr(args, f"fault_injector_{name}", None) for name in ("ranks", "num_ranks"))
    if any(value is not None for value in faults) and find_spec("nvidia_resiliency_ext") is None:
        raise MkdPackageError(
            "--fault-injector-ranks and --fault-injector-num-ranks need the package nvidia-resiliency-ext, which is "
            "not installed in this Python: install it, or leave them out"
        )
    if args.attention_backend == AttnBackend.local:
        raise MkdConfigError(
            "--attention-backend local is not supported (megatron-core 0.19 itself fails with it): give "
            "--transformer-impl local, or another backend"
        )
    if getattr(args, "reuse_grad_buf_for_mxfp8_param_ag", False) and not args.fp8_param_gather:
        raise MkdConfigError(
            "--reuse-grad-buf-for-mxfp8-param-ag works only with --fp8-param-gather: give both, or neither"
        )
    for name in ("experimental_attention_variant", "use_te_activation_func"):
        value = getattr(args, name, None)  # mkd has local layers with a gated delta net
        if value and value != "gated_delta_net" and (cpu.is_target() or args.transformer_impl == "local"):
            raise MkdConfigError(f"--{name.replace('_', '-')} needs Transformer Engine, on GPUs: leave it out")


def check_trackers(args: Namespace, kd: KDConfig) -> None:
    """Raise MkdConfigError for a tracker that is not installed or lacks a flag."""
    wanted = {
        "--tensorboard-dir": (args.tensorboard_dir, "tensorboard"),
        "--wandb-project": (args.wandb_project, "wandb"),
        "--kd-mlflow-experiment": (kd.mlflow_experiment, "mlflow"),
    }
    for flag, (value, package) in wanted.items():
        if value and find_spec(package) is None:
            raise MkdConfigError(
                f"{flag} is {value}, but the package {package} is not installed: pip install {package}, or leave it out"
            )
    if args.wandb_project and not args.wandb_exp_name:
        raise MkdConfigError(f"--wandb-project is {args.wandb_project}: give --wandb-exp-name as well")
    if args.wandb_project and not args.wandb_save_dir and args.save is None:
        raise MkdConfigError(f"--wandb-project is {args.wandb_project}: give --wandb-save-dir, or --save")


def check_student_fp8(args: Namespace) -> None:
    """Refuse --fp8-format on GPUs without FP8 matrix products, which Transformer Engine refuses in the first step."""
    capability = cpu.compute_capability()
    if args.fp8 and capability is not None and capability < MIN_FP8_CAPABILITY:
        raise MkdConfigError(
            f"--fp8-format is {args.fp8}, but this GPU has compute capability {capability}, below "
            f"{MIN_FP8_CAPABILITY}: leave it out"
        )


def check_transformer_engine(args: Namespace) -> None:
    """Refuse Transformer Engine, megatron's default on GPUs, where it is not installed."""
    if cpu.is_target() or args.transformer_impl == "local" or find_spec("transformer_engine") is not None:
        return
    cp = args.context_parallel_size
    needed = f"--context-parallel-size {cp}" if cp > 1 else None
    if getattr(args, "kd_packing", "none") != "none":
        needed = f"--kd-packing {args.kd_packing}"
    raise MkdPackageError(
        f"--transformer-impl is {args.transformer_impl}, but Transformer Engine is not installed in this Python: "
        "install it (pip install 'transformer-engine[pytorch]')"
        + (f"; {needed} does not work without it" if needed else ", or give --transformer-impl local, which is slower")
    )
