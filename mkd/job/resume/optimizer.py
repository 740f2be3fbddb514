"""Compares the optimizer's kind, precision, layout and schedule in a checkpoint with those of a job."""

from argparse import Namespace
from collections.abc import Iterable, Mapping
from typing import Any

from mkd.checkpoint.megatron.folder import MegatronFolder
from mkd.checkpoint.megatron.lr_schedule import check_schedule
from mkd.checkpoint.megatron.resume_point import ResumePoint
from mkd.config.megatron.arg_names import ArgRole, names_with
from mkd.errors import MkdConfigError
from mkd.job.memory.stage_layers import chunks_of_stage

FIXED_LAYOUT = "dp_reshardable"
"""Megatron's default format of a distributed optimizer, which is read with any data- or context-parallel size."""
RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"
_OPTIMIZER_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


def check_optimizer_layout(args: Namespace, folder: MegatronFolder, origin: str) -> None:
    """Refuse to resume a distributed optimizer in another layout than the one in which its state can be read.

    megatron-core 0.19 refuses other tensor- and pipeline-parallel sizes only, after all models are loaded, with a flag
    that it no longer has. Several flags can divide the layers among pipeline stages in the same way.

    Raises:
        MkdConfigError: naming each size that differs, and the flags of another division of the layers.
    """
    stored = vars(folder.args)
    is_read = args.use_distributed_optimizer and not args.no_load_optim and not stored.get("no_save_optim")
    if not is_read or folder.optimizer_format != FIXED_LAYOUT:
        return
    names = _different(_OPTIMIZER_SIZES, args, stored)
    if names or not _has_same_stages(args, stored):
        names += _different(names_with(ArgRole.STAGES), args, stored)
    if names:
        sizes = ", ".join(f"--{name.replace('_', '-')} {stored[name]} (here {getattr(args, name)})" for name in names)
        raise MkdConfigError(
            f"{origin} has its optimizer's state for one layout only: {sizes}. Resume in that layout with "
            f"{RESHARDABLE}, and change the layout after the next save; or give --no-load-optim to continue with the "
            "weights alone"
        )


def check_same_optimizer(args: Namespace, folder: MegatronFolder, origin: str) -> None:
    """Refuse to resume the state of an optimizer that was not saved, or is of another kind or precision, which
    megatron-core 0.19 cannot read, and options of the optimizer that it reads from the checkpoint, so that their flags
    would have no effect.

    Raises:
        MkdConfigError: naming the missing state, or each option that differs.
    """
    stored = vars(folder.args)
    if args.no_load_optim:
        return
    if stored.get("no_save_optim"):
        raise MkdConfigError(
            f"{origin} has no state of the optimizer, because it was saved with --no-save-optim: give --no-load-optim "
            "to continue with the weights alone"
        )
    names = ["optimizer", "use_distributed_optimizer"]
    names += ["sgd_momentum"] if args.optimizer == "sgd" else ["adam_beta1", "adam_beta2", "adam_eps"]
    in_half = [values.get("bf16") or values.get("fp16") for values in (stored, vars(args))]
    fixed = args.use_distributed_optimizer and folder.optimizer_format == FIXED_LAYOUT
    if fixed or (not args.use_distributed_optimizer and in_half[0] != in_half[1]):
        names += ["bf16", "fp16"]  # names of the buffers, or fp32 parameters beside those of the model
    if not args.use_distributed_optimizer and (args.decoupled_lr is None) != (stored.get("decoupled_lr") is None):
        names += ["decoupled_lr"]  # with it the optimizer has one more group of parameters
    others = _different(names, args, stored)
    if others:
        texts = [f"--{name.replace('_', '-')} {stored[name]} (here {getattr(args, name)})" for name in others]
        raise MkdConfigError(
            f"{origin} has the state of an optimizer with {', '.join(texts)}: give the same flags, or --no-load-optim "
            "to continue with the weights alone"
        )


def left_out_state(args: Namespace, point: ResumePoint) -> list[str]:
    """One sentence, in a list, if the optimizer's state in the checkpoint is not read: a job that restarts itself would
    leave out its own state, too."""
    if not args.no_load_optim or point.name == "release":
        return []
    return [
        "the optimizer begins anew (--no-load-optim), and would again at each restart: leave the flag out once this "
        "job has saved"
    ]


def _different(names: Iterable[str], args: Namespace, stored: Mapping[str, Any]) -> list[str]:
    """Names of the arguments whose stored value is not that of `args`; a value that is not stored is the same."""
    return [name for name in names if name in stored and stored[name] != getattr(args, name)]


def _has_same_stages(args: Namespace, stored: Mapping[str, Any]) -> bool:
    """True if the layers of each pipeline stage, and of its virtual stages, are those of the checkpoint; the parallel
    sizes must be."""
    kept = {name: stored[name] for name in names_with(ArgRole.STAGES) if name in stored}
    there = Namespace(**{**vars(args), **kept})
    stages = range(args.pipeline_model_parallel_size)
    return all(chunks_of_stage(there, stage) == chunks_of_stage(args, stage) for stage in stages)


def check_stored_schedule(args: Namespace, point: ResumePoint | None) -> list[str]:
    """Compare the schedule of the learning rate in the checkpoint with this job's: see `check_schedule`."""
    if point is None or point.folder is None or point.name == "release" or args.finetune or args.no_load_optim:
        return []
    folder = MegatronFolder(point.folder, "--load")
    if folder.scheduler is None:
        return []
    return check_schedule(args, folder.args, folder.scheduler, f"--load {point.folder}")
