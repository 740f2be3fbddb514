"""Checkpoints: folders that hold them, their format, their intervals, and which of them are kept."""

from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

from mkd import cpu
from mkd.config.kd_config import KDConfig
from mkd.config.run_state import RunState
from mkd.errors import MkdCheckpointError, MkdConfigError
from mkd.utils.model_folders.formats import TRACKER, hf_hint


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


def has_checkpoint(folder: str | None) -> bool:
    """True if a Megatron checkpoint folder has a checkpoint."""
    return folder is not None and (Path(folder) / TRACKER).is_file()


def saves_where_it_loads(args: Namespace) -> bool:
    """True if `--load` and `--save` are one folder, as for a job that restarts itself."""
    return None not in (args.load, args.save) and Path(args.load).resolve() == Path(args.save).resolve()


def check_load(args: Namespace, kd: KDConfig, state: RunState) -> None:
    """Refuse initial weights from two sources, and folders without a checkpoint."""
    if args.pretrained_checkpoint is not None:
        if kd.student_hf is not None:
            raise MkdConfigError(
                f"--kd-student-hf {kd.student_hf} and --pretrained-checkpoint {args.pretrained_checkpoint} both give "
                "the student's initial weights: give one of them"
            )
        if not has_checkpoint(args.pretrained_checkpoint):
            remedy = hf_hint(Path(args.pretrained_checkpoint), "--pretrained-checkpoint") or ": correct the path"
            raise MkdCheckpointError(
                f"--pretrained-checkpoint {args.pretrained_checkpoint} has no checkpoint (no {TRACKER} there){remedy}"
            )
    # The first start of a job that restarts itself: --load and --save are one folder, which is still empty.
    if args.load is None or state.resumes or saves_where_it_loads(args):
        return
    remedy = hf_hint(Path(args.load), "--pretrained-checkpoint")
    remedy = remedy or ": correct the path, or leave --load out to start from step 0"
    raise MkdCheckpointError(f"--load {args.load} has no checkpoint (no {TRACKER} there){remedy}")


def check_initialization(args: Namespace, kd: KDConfig, state: RunState) -> None:
    """Refuse --no-initialization for a student whose weights are read from nowhere: they would be whatever the memory
    holds."""
    if args.perform_initialization or state.resumes:
        return
    if kd.student_hf is None and args.pretrained_checkpoint is None:
        raise MkdConfigError(
            "--no-initialization leaves the student without initial weights: leave it out for random ones, or give "
            "--kd-student-hf or --pretrained-checkpoint"
        )


def check_save(args: Namespace) -> None:
    """Refuse to replace the checkpoints of another run, those in a --save folder that --load does not name, and with
    --finetune those of the own run."""
    if args.finetune and saves_where_it_loads(args):
        remedy = "leave it out"
        if has_checkpoint(args.load):
            remedy += (
                f" to resume the run. For a new run with its weights give --pretrained-checkpoint {args.load}, and "
                "another folder in --load and --save"
            )
        raise MkdConfigError(
            f"--finetune with --load and --save {args.save}: each start would begin at iteration 0 and replace the "
            f"checkpoints of the last one; {remedy}"
        )
    if not has_checkpoint(args.save) or saves_where_it_loads(args):
        return
    start = "at iteration 0" if args.load is None else f"from --load {args.load}"
    how = f"--load {args.save}, without --finetune," if args.finetune else f"--load {args.save}"
    raise MkdCheckpointError(
        f"--save {args.save} has checkpoints already, and this job would begin {start} and replace them: give {how} "
        "to resume their run, or another --save"
    )
