"""The list of the checks of Megatron's arguments, which also complete them and make them Megatron's global ones."""

from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path

from megatron.training.arguments import validate_args
from megatron.training.checkpointing import load_args_from_checkpoint
from megatron.training.global_vars import get_tokenizer, rebuild_tokenizer, set_global_variables
from megatron.training.vocab_utils import calculate_padded_vocab_size

from mkd import cpu
from mkd.compat.checkpoints import tracker_override
from mkd.compat.refusals import megatron_refusals
from mkd.compat.unpickling import allowed_classes_only
from mkd.config.check_list import Check, run_checks
from mkd.config.kd_config import KDConfig
from mkd.config.megatron.checks.attention import check_attention_kernels, check_context_parallel
from mkd.config.megatron.checks.batches import check_batch
from mkd.config.megatron.checks.checkpoints import check_load, check_save, check_saving
from mkd.config.megatron.checks.cuda_graphs import check_student_graphs
from mkd.config.megatron.checks.optimizer import check_learning_rate, check_optimizer
from mkd.config.megatron.checks.parallel_sizes import check_ranks, check_sizes, check_student
from mkd.config.megatron.checks.parts import check_parts, check_student_fp8, check_trackers
from mkd.config.megatron.checks.rows import check_positions, check_sequence, check_variable_lengths
from mkd.config.megatron.checks.run_length import check_alternatives, check_intervals, check_required
from mkd.config.megatron.epochs import adopt_epochs
from mkd.config.run_state import RunState
from mkd.cpu.flags import set_cpu_values
from mkd.cpu.machine_needs import check_machine_needs
from mkd.errors import MkdConfigError, MkdNodeError
from mkd.utils.logging import logger
from mkd.utils.model_folders.pretrained import code_needed, from_disk_alone
from mkd.utils.model_folders.regular_files import require_regular_files
from mkd.utils.model_folders.tokenizer_flag import tokenizer_origin


@dataclass
class CommandLine:
    """A parsed command line, whose Megatron arguments the checks complete in place."""

    args: Namespace
    """Megatron's arguments."""
    kd: KDConfig
    state: RunState = field(default_factory=RunState)
    is_complete: bool = False
    """True once `args` are checked, completed and Megatron's global ones, with a tokenizer."""


def finish(args: Namespace, kd: KDConfig, state: RunState) -> None:
    """Check the arguments, complete those that depend on others, and make them megatron's global ones.

    Raises:
        MkdConfigError: a flag that is missing, sizes that do not divide, or anything that megatron itself refuses.
        MkdCheckpointError: `--load` or `--pretrained-checkpoint` names a folder without a checkpoint.
    """
    run_checks(ARGUMENT_CHECKS, CommandLine(args, kd, state))


def _load_checkpoint_args(line: CommandLine) -> None:
    """--use-checkpoint-args: arguments of --pretrained-checkpoint, then those of the selected checkpoint, which the
    tracker need not name."""
    args = line.args
    if not args.use_checkpoint_args:
        return
    with allowed_classes_only():
        load_args_from_checkpoint(args, load_arg="pretrained_checkpoint")
    if not line.state.resumes:
        return
    name = Path(line.state.resume_from).name
    step, given = None if name == "release" else int(name.removeprefix("iter_")), args.ckpt_step
    args.ckpt_step = step
    with tracker_override(step), allowed_classes_only():
        load_args_from_checkpoint(args)
    args.ckpt_step = given


def _set_device_values(line: CommandLine) -> None:
    """Values that a CPU, a Python without Apex, and distillation need."""
    args = line.args
    if cpu.is_target():
        changed = set_cpu_values(args)
        if changed:
            logger.info(f"on CPU: {', '.join(f'{n}={getattr(args, n)}' for n in changed)}")
    elif args.gradient_accumulation_fusion and not _has_fused_weight_gradient():
        args.gradient_accumulation_fusion = False
        logger.info("NVIDIA Apex is not installed: gradient_accumulation_fusion=False")
    # The one divisor of a step is its number of supervised tokens, over all ranks (docs/losses.md).
    args.calculate_per_token_loss = True


def _check_lengths(line: CommandLine) -> None:
    if line.kd.variable_seq_lengths:
        check_variable_lengths(line.args)


def _validate(line: CommandLine) -> None:
    """Megatron's own checks, which also complete the arguments."""
    args = line.args
    if args.vocab_size is not None and args.padded_vocab_size is None:
        # From the model's vocabulary, which may exceed the tokenizer's.
        args.padded_vocab_size = calculate_padded_vocab_size(
            args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size, logging_enabled=False
        )
    asynchronous = args.async_save
    if cpu.is_target():
        # A save on CPU forks its writer, which sees the weights as they are at that time; a persistent writer would
        # share the trainer's memory. Megatron has no asynchronous save without a persistent writer.
        args.async_save = args.use_persistent_ckpt_worker = False
    positions = args.max_position_embeddings
    if positions is not None and line.kd.packing != "none":
        args.max_position_embeddings = max(positions, args.seq_length)  # see check_positions
    with megatron_refusals("the flags"):
        validate_args(args)
    args.async_save = asynchronous
    args.max_position_embeddings = positions if positions is not None else args.max_position_embeddings
    if args.tokenizer_type is None:
        raise MkdConfigError(
            "--tokenizer-type is missing (HuggingFaceTokenizer with --tokenizer-model DIR, or another)"
        )


def _set_globals(line: CommandLine) -> None:
    """Make the arguments megatron's global ones, and build the tokenizer."""
    args = line.args
    if args.tokenizer_type == "HuggingFaceTokenizer" and args.tokenizer_model is None:
        raise MkdConfigError("--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model DIR, which is missing")
    writers, args.tensorboard_dir, args.wandb_project = (args.tensorboard_dir, args.wandb_project), None, ""
    set_global_variables(args, build_tokenizer=False)
    args.tensorboard_dir, args.wandb_project = writers  # trackers start with the training: `mkd.report.trackers`
    try:
        if args.tokenizer_model is not None and Path(args.tokenizer_model).is_dir():
            require_regular_files(Path(args.tokenizer_model))
        with from_disk_alone():
            rebuild_tokenizer(args)
    except Exception as error:  # whatever the tokenizer's own library raises
        reason = code_needed(str(args.tokenizer_model), ("AutoTokenizer", "AutoConfig"), error)
        reason = reason or f"cannot be loaded as {args.tokenizer_type}: {' '.join(str(error).split())}"
        if args.tokenizer_type != "HuggingFaceTokenizer" and args.tokenizer_model is not None:
            reason += (
                "; with --tokenizer-type HuggingFaceTokenizer it is a folder of transformers (mkd downloads nothing)"
            )
        is_here = args.tokenizer_model is None or Path(args.tokenizer_model).exists()
        kind = MkdConfigError if is_here else MkdNodeError
        raise kind(f"{tokenizer_origin(args)} {reason}") from error
    line.is_complete = True


def _has_fused_weight_gradient() -> bool:
    try:
        import fused_weight_gradient_mlp_cuda  # noqa: F401
    except ImportError:
        return False
    return True


def true_vocabulary(args: Namespace) -> int:
    """Vocabulary size without padding: the architecture's, or the tokenizer's if the architecture has none."""
    return args.vocab_size or get_tokenizer().vocab_size


_GIVEN = ("--seq-length", "--micro-batch-size", "--train-iters", "--lr", "--eval-interval")

ARGUMENT_CHECKS: tuple[Check[CommandLine], ...] = (
    Check("--load", lambda line: check_load(line.args, line.kd, line.state), needs=("checkpoint",)),
    Check("checkpoints in --save", lambda line: check_save(line.args)),
    Check("saving", lambda line: check_saving(line.args, line.kd)),
    Check("optimizer", lambda line: check_optimizer(line.args)),
    Check("parts", lambda line: check_parts(line.args)),
    Check("machine", lambda line: check_machine_needs(line.args)),
    Check("trackers", lambda line: check_trackers(line.args, line.kd)),
    Check("checkpoint's arguments", _load_checkpoint_args, needs=("--load",)),
    Check("device values", _set_device_values),
    Check(
        "--num-layers",
        lambda line: check_required(line.args, "--num-layers"),
        needs=("architecture", "checkpoint's arguments"),
    ),
    Check("length in epochs", lambda line: adopt_epochs(line.args, line.kd.epochs)),
    *(
        Check(
            flag,
            lambda line, flag=flag: check_required(line.args, flag),
            needs=("length in epochs",) if flag == "--train-iters" else (),
        )
        for flag in _GIVEN
    ),
    Check("intervals", lambda line: check_intervals(line.args), needs=("--eval-interval",)),
    Check("alternatives", lambda line: check_alternatives(line.args), needs=("--train-iters",)),
    Check("learning rate", lambda line: check_learning_rate(line.args), needs=("alternatives", "--lr")),
    Check("parallel sizes", lambda line: check_sizes(line.args)),
    Check("ranks", lambda line: check_ranks(line.args), needs=("parallel sizes",)),
    Check("student's layout", lambda line: check_student(line.args), needs=("parallel sizes",)),
    Check("row length", lambda line: check_sequence(line.args), needs=("parallel sizes", "--seq-length")),
    Check("context parallelism", lambda line: check_context_parallel(line.args), needs=("parallel sizes",)),
    Check(
        "batch",
        lambda line: check_batch(line.args),
        needs=("parallel sizes", "--seq-length", "--micro-batch-size"),
    ),
    Check("positions", lambda line: check_positions(line.args, line.kd), needs=("--seq-length",)),
    Check("attention kernels", lambda line: check_attention_kernels(line.args, line.kd)),
    Check("FP8", lambda line: check_student_fp8(line.args)),
    Check("variable lengths", _check_lengths),
)
"""Checks of Megatron's arguments, in the order of a job."""

ARGUMENT_CHECKS += (
    Check("megatron's checks", _validate, needs=tuple(check.name for check in ARGUMENT_CHECKS)),
    # After Megatron's, which turn its older flags of graphs into --cuda-graph-impl.
    Check("CUDA graphs", lambda line: check_student_graphs(line.args, line.kd), needs=("megatron's checks",)),
    Check("tokenizer", _set_globals, needs=("megatron's checks", "tokenizer files")),
)
