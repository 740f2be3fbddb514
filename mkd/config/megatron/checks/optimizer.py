"""The optimizer and the schedule of its learning rate."""

from argparse import Namespace
from importlib.util import find_spec

from mkd.errors import MkdConfigError, MkdPackageError


def check_learning_rate(args: Namespace) -> None:
    """Refuse a learning-rate or weight-decay schedule that megatron would refuse only after the models are loaded."""
    unit = "iters" if args.train_iters else "samples"
    steps, decay_flag = getattr(args, f"lr_decay_{unit}"), f"--lr-decay-{unit}"
    if steps is None:
        steps, decay_flag = getattr(args, f"train_{unit}"), f"--train-{unit}"
    warmup = getattr(args, f"lr_warmup_{unit}")
    if warmup >= steps:
        raise MkdConfigError(f"--lr-warmup-{unit} {warmup} must be below {decay_flag} {steps}")
    for flag, value in (("--min-lr", args.min_lr), ("--lr-warmup-init", args.lr_warmup_init)):
        if not 0.0 <= value <= args.lr:
            raise MkdConfigError(f"{flag} {value:g} must lie between 0 and --lr {args.lr:g}")
    if args.lr_decay_style == "WSD" and getattr(args, f"lr_wsd_decay_{unit}") is None:
        raise MkdConfigError(f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}")
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        raise MkdConfigError(
            "--override-opt-param-scheduler (this command's schedule) contradicts --use-checkpoint-opt-param-scheduler "
            "(the checkpoint's): give one of them"
        )
    if args.no_load_optim and args.use_checkpoint_opt_param_scheduler:
        raise MkdConfigError(
            "--use-checkpoint-opt-param-scheduler does not work with --no-load-optim, which leaves the checkpoint's "
            "schedule out: leave one of them out"
        )


def check_optimizer(args: Namespace) -> None:
    """Refuse an optimizer of a package that is not installed; megatron finds out when it builds the optimizer."""
    if args.optimizer not in ("adam", "sgd") and find_spec("emerging_optimizers") is None:
        raise MkdPackageError(
            f"--optimizer {args.optimizer} needs the package emerging-optimizers, which is not installed in this "
            "Python: pip install emerging-optimizers, or give adam or sgd"
        )
    if args.optimizer == "sgd" and args.use_distributed_optimizer:
        raise MkdConfigError("--optimizer sgd does not work with --use-distributed-optimizer: leave one of them out")
    for name in _PRECISIONS:
        if (dtype := getattr(args, name)) != "fp32" and not args.use_precision_aware_optimizer:
            raise MkdConfigError(
                f"--{name.replace('_', '-')} {dtype} needs --use-precision-aware-optimizer: give both, or neither"
            )
    if args.use_precision_aware_optimizer and not args.use_distributed_optimizer:
        raise MkdConfigError("--use-precision-aware-optimizer needs --use-distributed-optimizer: give both, or neither")


_PRECISIONS = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
