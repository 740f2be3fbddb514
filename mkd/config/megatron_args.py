"""Megatron's arguments: adopt a model's architecture, check them, complete them and make them global."""

import traceback
from argparse import Namespace
from pathlib import Path
from typing import Any

from megatron.training.arguments import validate_args
from megatron.training.checkpointing import load_args_from_checkpoint
from megatron.training.global_vars import get_tokenizer, rebuild_tokenizer, set_global_variables
from megatron.training.vocab_utils import calculate_padded_vocab_size

from mkd import cpu
from mkd.compat.checkpoints import tracker_override
from mkd.config.flags import flags_given
from mkd.config.kd_config import KDConfig
from mkd.config.megatron_arg_names import ARGS, ArgRole
from mkd.config.megatron_checks import (
    check_attention_kernels,
    check_layout,
    check_learning_rate,
    check_required,
    check_saving,
    check_trackers,
    check_variable_lengths,
)
from mkd.config.run_state import RunState
from mkd.cpu.flags import set_cpu_values
from mkd.errors import MkdCheckpointError, MkdConfigError
from mkd.utils.logging import logger


def adopt_architecture(args: Namespace, architecture: dict[str, Any], origin: str) -> None:
    """Set the model's size and kind from a folder, in place.

    Args:
        args: Megatron's parsed arguments.
        architecture: Megatron argument name -> value.
        origin: the flag and folder that say so, for error messages.

    Raises:
        MkdConfigError: a flag on the command line says something else.
    """
    given = flags_given()
    for name, value in architecture.items():
        if name in given and getattr(args, name) != value:
            if name in ARGS and ArgRole.RUN_CHOICE in ARGS[name].roles:
                continue
            raise MkdConfigError(
                f"{given[name]} is {getattr(args, name)}, but {origin} has {value}: leave {given[name]} out, "
                "the architecture is read from the folder"
            )
        setattr(args, name, value)


def finish(args: Namespace, kd: KDConfig, state: RunState) -> None:
    """Check the arguments, fill in what depends on others, and make them megatron's global ones.

    Raises:
        MkdConfigError: a flag that is missing, sizes that do not divide, or anything megatron itself refuses.
        MkdCheckpointError: `--load` or `--pretrained-checkpoint` names a folder without a checkpoint.
    """
    check_load(args, kd, state)
    check_saving(args, kd)
    check_trackers(args, kd)
    if args.use_checkpoint_args:
        load_args_from_checkpoint(args, load_arg="pretrained_checkpoint")
        _load_args_to_resume(args, state)
    if cpu.is_target():
        changed = set_cpu_values(args)
        if changed:
            logger.info(f"on CPU: {', '.join(f'{n}={getattr(args, n)}' for n in changed)}")
    elif args.gradient_accumulation_fusion and not _has_fused_weight_gradient():
        args.gradient_accumulation_fusion = False
        logger.info("NVIDIA Apex is not installed: gradient_accumulation_fusion=False")
    # The one divisor of a step is its number of supervised tokens, over all ranks (docs/losses.md).
    args.calculate_per_token_loss = True
    check_required(args)
    check_learning_rate(args)
    check_layout(args)
    check_attention_kernels(args, kd)
    if kd.variable_seq_lengths:
        check_variable_lengths(args)
    if args.vocab_size is not None and args.padded_vocab_size is None:
        # Of the model, which may have more rows than its tokenizer has tokens.
        args.padded_vocab_size = calculate_padded_vocab_size(
            args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size, logging_enabled=False
        )
    asynchronous = args.async_save
    if cpu.is_target():
        # A save on CPU forks its writer, which has the weights as they are then; a persistent one would share the
        # trainer's memory. Megatron knows no asynchronous save without a persistent writer.
        args.async_save = args.use_persistent_ckpt_worker = False
    try:
        validate_args(args)
    except (AssertionError, ValueError) as error:
        # Some of megatron's assertions have no message: the asserted condition names the flag.
        reason = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
        raise MkdConfigError(f"megatron refuses the flags: {' '.join(reason.split())}") from error
    args.async_save = asynchronous
    if args.tokenizer_type is None:
        raise MkdConfigError(
            "--tokenizer-type is missing (HuggingFaceTokenizer with --tokenizer-model DIR, or another)"
        )
    writers, args.tensorboard_dir, args.wandb_project = (args.tensorboard_dir, args.wandb_project), None, ""
    set_global_variables(args, build_tokenizer=False)
    args.tensorboard_dir, args.wandb_project = writers  # they begin when training does: `mkd.report.trackers`
    try:
        rebuild_tokenizer(args)
    except Exception as error:  # whatever the tokenizer's own library raises
        raise MkdConfigError(
            f"--tokenizer-model {args.tokenizer_model} cannot be loaded as {args.tokenizer_type}: "
            + " ".join(str(error).split())
        ) from error


def _has_fused_weight_gradient() -> bool:
    try:
        import fused_weight_gradient_mlp_cuda  # noqa: F401
    except ImportError:
        return False
    return True


def has_checkpoint(folder: str | None) -> bool:
    """Whether a Megatron checkpoint folder has something to load."""
    return folder is not None and (Path(folder) / "latest_checkpointed_iteration.txt").is_file()


def saves_where_it_loads(args: Namespace) -> bool:
    """Whether `--load` and `--save` are one folder, as for a job that restarts itself."""
    return None not in (args.load, args.save) and Path(args.load).resolve() == Path(args.save).resolve()


def _load_args_to_resume(args: Namespace, state: RunState) -> None:
    """--use-checkpoint-args from the checkpoint that was selected, which the tracker need not name."""
    if not state.resumes:
        return
    name = Path(state.resume_from).name
    step, given = None if name == "release" else int(name.removeprefix("iter_")), args.ckpt_step
    args.ckpt_step = step
    with tracker_override(step):
        load_args_from_checkpoint(args)
    args.ckpt_step = given


def check_load(args: Namespace, kd: KDConfig, state: RunState) -> None:
    """Refuse initial weights from two sources, and folders without a checkpoint."""
    if args.pretrained_checkpoint is not None:
        if kd.student_hf is not None:
            raise MkdConfigError(
                f"--kd-student-hf {kd.student_hf} and --pretrained-checkpoint {args.pretrained_checkpoint} both give "
                "the student's first weights: give one of them"
            )
        if not has_checkpoint(args.pretrained_checkpoint):
            raise MkdCheckpointError(
                f"--pretrained-checkpoint {args.pretrained_checkpoint} has no checkpoint (no "
                "latest_checkpointed_iteration.txt there): correct the path"
            )
    # The same folder in --load and --save is how a job that restarts itself starts for the first time.
    if args.load is None or state.resumes or saves_where_it_loads(args):
        return
    raise MkdCheckpointError(
        f"--load {args.load} has no checkpoint (no latest_checkpointed_iteration.txt there): correct the path, or "
        "leave --load out to start anew"
    )


def true_vocabulary(args: Namespace) -> int:
    """Number of tokens that exist: the architecture's, or the tokenizer's where none is given."""
    return args.vocab_size or get_tokenizer().vocab_size
