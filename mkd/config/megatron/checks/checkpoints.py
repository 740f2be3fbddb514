"""Checkpoints: their format, their intervals, and which of them are kept."""

from argparse import Namespace
from importlib.util import find_spec

from mkd import cpu
from mkd.config.kd_config import KDConfig
from mkd.errors import MkdConfigError


def _check_keep_best(args: Namespace, metric: str) -> None:
    """Refuse to compare checkpoints that are not saved or not evaluated."""
    what = f"--kd-keep-best is {metric}"
    if args.save is None:
        raise MkdConfigError(f"{what}, but there is no folder to save in: give --save")
    if args.ckpt_format != "torch_dist":
        raise MkdConfigError(f"--kd-keep-best needs --ckpt-format torch_dist, not {args.ckpt_format}")
    if args.eval_iters == 0:
        raise MkdConfigError(f"{what}, and --eval-iters is 0: nothing is evaluated")
    if args.save_interval and args.save_interval % args.eval_interval:
        raise MkdConfigError(
            f"{what}, and --save-interval {args.save_interval} is not a multiple of --eval-interval "
            f"{args.eval_interval}: each checkpoint needs an evaluation"
        )


def _check_format(args: Namespace, kd: KDConfig) -> None:
    """Refuse formats of checkpoints whose state of distillation a resumed job does not read."""
    if args.ckpt_format == "torch" and (args.save is not None or (args.load is not None and not args.finetune)):
        raise MkdConfigError(
            "--ckpt-format torch is not supported: leave it out (checkpoints in that format are converted with "
            "Megatron-LM first)"
        )
    keeps_state = {"--kd-balance": kd.balance, f"--kd-rollout-steps {kd.rollout_steps}": kd.rollout_steps > 1}
    for flag, is_given in keeps_state.items():
        if is_given and args.ckpt_format != "torch_dist" and args.save is not None:
            raise MkdConfigError(
                f"{flag} needs --ckpt-format torch_dist, not {args.ckpt_format}: a resumed job reads its state "
                "from the checkpoint"
            )


def check_saving(args: Namespace, kd: KDConfig) -> None:
    """Refuse checkpoint flags that contradict each other, and an asynchronous save that would be synchronous."""
    interval = kd.save_hf_interval
    _check_format(args, kd)
    if kd.keep_last is not None:
        if args.save is None:
            raise MkdConfigError(f"--kd-keep-last is {kd.keep_last}, but there is no folder to save in: give --save")
        if args.ckpt_format != "torch_dist":
            raise MkdConfigError(f"--kd-keep-last needs --ckpt-format torch_dist, not {args.ckpt_format}")
    if kd.keep_best is not None:
        _check_keep_best(args, kd.keep_best)
    if interval is not None:
        if args.save is None:
            raise MkdConfigError(f"--kd-save-hf-interval is {interval}, but there is no folder to save in: give --save")
        if args.ckpt_format != "torch_dist":
            raise MkdConfigError(f"--kd-save-hf-interval needs --ckpt-format torch_dist, not {args.ckpt_format}")
        if args.save_interval and interval % args.save_interval:
            raise MkdConfigError(
                f"--kd-save-hf-interval is {interval}, which is not a multiple of --save-interval "
                f"{args.save_interval}: a Hugging Face folder is made from a checkpoint"
            )
    if not args.async_save or cpu.is_target():
        return
    if not args.use_persistent_ckpt_worker:
        raise MkdConfigError("--async-save works only with --use-persistent-ckpt-worker: give both, or neither")
    if args.async_strategy == "nvrx" and find_spec("nvidia_resiliency_ext") is None:
        raise MkdConfigError(
            "--async-save needs the package nvidia-resiliency-ext: install it, or give --async-strategy mcore"
        )
