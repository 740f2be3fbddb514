"""Between the command line and everything else: the only reader of Megatron's arguments.

`KDConfig` becomes the `--kd-*` flags; every other flag is Megatron's own.
"""

import sys
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import torch
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.training.argument_utils import ArgumentGroupFactory
from megatron.training.arguments import add_megatron_arguments, parse_args, validate_args
from megatron.training.checkpointing import load_args_from_checkpoint
from megatron.training.global_vars import get_tokenizer, rebuild_tokenizer, set_global_variables
from megatron.training.utils import get_blend_and_blend_per_split
from megatron.training.vocab_utils import calculate_padded_vocab_size

from mkd import compat, cpu
from mkd.compat.checkpoints import tracker_override
from mkd.config.kd_config import RUN_CHOICES, KDConfig
from mkd.config.megatron_checks import (
    check_attention_kernels,
    check_layout,
    check_learning_rate,
    check_required,
    check_saving,
    check_trackers,
    check_variable_lengths,
)
from mkd.config.teacher_fp8 import compute_in_fp8
from mkd.config.teacher_layout import SIZES, check_teacher_divides, has_own_layout, teacher_layout_args
from mkd.cpu.flags import set_cpu_values
from mkd.errors import MkdCheckpointError, MkdConfigError, MkdDataError

# Beginnings of Megatron flags that say something else about the loss, the teacher or what is trained, and what to use.
# Checked on the command line itself: some of them exist only where further packages are installed.
CONTRADICTIONS: dict[str, str] = {
    "--logits-save-": "--kd-teacher-hf or --kd-teacher-load (mkd runs the teacher itself)",
    "--logits-load-": "--kd-teacher-hf or --kd-teacher-load (mkd runs the teacher itself)",
    "--export-kd-": "--kd-teacher-load, --kd-loss, --kd-temperature and --kd-ratio",
    "--freeze-all-layers": "--kd-ratio (the student is what is trained)",
    "--ddp-average-in-collective": "--kd-ratio (mkd divides once by the step's supervised tokens, over all ranks)",
    "--yaml-cfg": "flags such as --kd-ratio on the command line (mkd reads no YAML configuration)",
    "--perform-rl-step": "--kd-ratio (mkd distills; it has no reinforcement learning)",
    "--hybrid-layer-pattern": "--num-layers or --kd-student-hf (mkd trains GPT models)",
    "--mtp-num-layers": "--num-layers or --kd-student-hf (mkd has no loss for multi-token prediction)",
}

# Megatron flags that mkd does not honor yet, and what to do without them.
UNSUPPORTED: dict[str, str] = {
    "--full-validation": "give --eval-iters (megatron-core 0.19 itself fails with it)",
    "--multiple-validation-sets": "give one set",
    "--reset-attention-mask": "give --kd-packing best_fit, where no document sees another",
    "--dataloader-inter-document-masking": "give --kd-packing best_fit, where no document sees another",
    "--sft": "leave it out and name the chat file in --data-path (docs/data.md)",
    "--exit-signal-handler-for-training": "leave it out (at SIGTERM and SIGUSR1 mkd saves and ends; docs/slurm.md)",
    "--defer-embedding-wgrad-compute": "leave it out (mkd computes the LM head's gradient together with the loss)",
}


class _KDFlags(ArgumentGroupFactory):
    """Flags named `--kd-<field>`, stored as `kd_<field>`."""

    def _format_arg_name(self, config_attr_name: str, prefix: str | None = None) -> str:
        words = ["kd", prefix, config_attr_name] if prefix else ["kd", config_attr_name]
        return "--" + "-".join(words).replace("_", "-")

    def _build_argparse_kwargs_from_field(self, attribute: Any) -> dict[str, Any]:
        kwargs = super()._build_argparse_kwargs_from_field(attribute)
        kwargs["dest"] = f"kd_{attribute.name}"
        return kwargs


def add_kd_flags(parser: ArgumentParser) -> ArgumentParser:
    """Add one flag for each field of `KDConfig`, with the field's docstring as help.

    What the parser cannot read is then an MkdConfigError of one line, and not a thousand lines of usage.
    """
    _KDFlags(KDConfig).build_group(parser, title="knowledge distillation")
    compat.repair_help(parser)

    def refuse(message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown == message:
            raise MkdConfigError(message.removeprefix("argument "))
        guesses = get_close_matches(unknown.split()[0].split("=")[0], parser._option_string_actions, n=1, cutoff=0.8)
        hint = f"did you mean {guesses[0]}?" if guesses else "--help lists all flags"
        raise MkdConfigError(f"unknown on the command line: {unknown} ({hint})")

    parser.error = refuse
    return parser


def flags_given(argv: list[str] | None = None) -> dict[str, str]:
    """The flags on the command line: Megatron's argument name -> the flag as it was written."""
    parser = add_kd_flags(add_megatron_arguments(ArgumentParser(allow_abbrev=False)))
    written = {word.split("=")[0] for word in (sys.argv[1:] if argv is None else argv)}
    given = {}
    for action in parser._actions:
        for flag in written.intersection(action.option_strings):
            given[action.dest] = flag
    return given


def parse_command_line() -> tuple[Namespace, KDConfig]:
    """Parse all flags and check those that contradict distillation or each other. Nothing global is set yet."""
    args, fields = parse_flags()
    return args, KDConfig(**fields)


def parse_flags() -> tuple[Namespace, dict[str, Any]]:
    """Parse all flags: Megatron's, and the values of `KDConfig`'s fields, unchecked."""
    refuse_contradictions(sys.argv[1:])
    args = parse_args(add_kd_flags)
    prefix = "kd_"
    return args, {name.removeprefix(prefix): value for name, value in vars(args).items() if name.startswith(prefix)}


def refuse_contradictions(argv: list[str]) -> None:
    """Raise MkdConfigError for a Megatron flag that contradicts distillation or is not supported, saying what to do."""
    for word in argv:
        for beginning, instead in CONTRADICTIONS.items():
            if word.startswith(beginning):
                raise MkdConfigError(f"{word.split('=')[0]} contradicts distillation: use {instead} instead")
        flag = word.split("=")[0]
        if flag in UNSUPPORTED:
            raise MkdConfigError(f"{flag} is not supported: {UNSUPPORTED[flag]}")


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
            if name in RUN_CHOICES:
                continue
            raise MkdConfigError(
                f"{given[name]} is {getattr(args, name)}, but {origin} has {value}: leave {given[name]} out, "
                "the architecture is read from the folder"
            )
        setattr(args, name, value)


def finish(args: Namespace, kd: KDConfig) -> None:
    """Check the arguments, fill in what depends on others, and make them megatron's global ones.

    Raises:
        MkdConfigError: a flag that is missing, sizes that do not divide, or anything megatron itself refuses.
        MkdCheckpointError: `--load` or `--pretrained-checkpoint` names a folder without a checkpoint.
    """
    check_load(args, kd)
    check_saving(args, kd)
    check_trackers(args, kd)
    if args.use_checkpoint_args:
        load_args_from_checkpoint(args, load_arg="pretrained_checkpoint")
        _load_args_to_resume(args)
    if cpu.is_target():
        changed = set_cpu_values(args)
        if changed and args.rank == 0:
            print(f"mkd: on CPU: {', '.join(f'{n}={getattr(args, n)}' for n in changed)}")
    elif args.gradient_accumulation_fusion and not _has_fused_weight_gradient():
        args.gradient_accumulation_fusion = False
        if args.rank == 0:
            print("mkd: NVIDIA Apex is not installed: gradient_accumulation_fusion=False")
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


def resumes(args: Namespace) -> bool:
    """Whether weights come from the checkpoint in `--load`, and not from `--kd-student-hf` or a random start."""
    return args.kd_resume_from is not None


def resume_from(args: Namespace, folder: Path | None) -> None:
    """Say which folder of `--load` is to be read, such as iter_0000100; None when there is none."""
    args.kd_resume_from = None if folder is None else str(folder)


def saves_where_it_loads(args: Namespace) -> bool:
    """Whether `--load` and `--save` are one folder, as for a job that restarts itself."""
    return None not in (args.load, args.save) and Path(args.load).resolve() == Path(args.save).resolve()


def _load_args_to_resume(args: Namespace) -> None:
    """--use-checkpoint-args of the checkpoint that was chosen, whatever the tracker says."""
    if not resumes(args):
        return
    name = Path(args.kd_resume_from).name
    step, given = None if name == "release" else int(name.removeprefix("iter_")), args.ckpt_step
    args.ckpt_step = step
    with tracker_override(step):
        load_args_from_checkpoint(args)
    args.ckpt_step = given


def check_load(args: Namespace, kd: KDConfig) -> None:
    """Refuse first weights from two sources, and folders without a checkpoint; after `resume_from`."""
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
    if args.load is None or resumes(args) or saves_where_it_loads(args):
        return
    raise MkdCheckpointError(
        f"--load {args.load} has no checkpoint (no latest_checkpointed_iteration.txt there): correct the path, or "
        "leave --load out to start anew"
    )


def default_arguments() -> Namespace:
    """Megatron's arguments as they are when no flag is given."""
    return add_megatron_arguments(ArgumentParser(allow_abbrev=False)).parse_args([])


def data_prefixes(args: Namespace) -> list[str]:
    """Every `.bin/.idx` prefix and every chat file that is to be read.

    Raises:
        MkdDataError: none is named, or a list of weights and prefixes is not one.
    """
    try:
        blend, per_split = get_blend_and_blend_per_split(args)
    except (AssertionError, ValueError, KeyError, OSError) as error:
        raise MkdDataError(f"--data-path and the like cannot be read ({error!r}): write WEIGHT PREFIX pairs") from error
    prefixes = [prefix for part in (blend, *(per_split or ())) if part is not None for prefix in part[0]]
    if not prefixes and not args.mock_data:
        raise MkdDataError(
            "no training data: give --data-path PREFIX (PREFIX.bin and PREFIX.idx) or --data-path FILE.jsonl (chats)"
        )
    return prefixes


def dataset_config(args: Namespace, tokenizer: Any) -> GPTDatasetConfig:
    """Megatron's own dataset flags as a configuration.

    Raises:
        MkdConfigError: they contradict each other.
    """
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    options = dict(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=tokenizer,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
    )
    try:
        return GPTDatasetConfig(**options)
    except (AssertionError, ValueError, ZeroDivisionError) as error:
        reason = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
        raise MkdConfigError(f"megatron refuses the data flags (--split {args.split}): {reason}") from error


# What the teacher shares with the student: how and where it computes, never what it is. The layout may be its own.
_SHARED_WITH_TEACHER = (
    *SIZES,
    "rank",
    "world_size",
    "seq_length",
    "transformer_impl",
    "attention_backend",
    "use_cpu_initialization",
    "cp_comm_type",
    "hierarchical_context_parallel_sizes",
    "distributed_timeout_minutes",
    "no_persist_layer_norm",
    "apply_rope_fusion",
    "masked_softmax_fusion",
    "bias_gelu_fusion",
    "bias_swiglu_fusion",
    "bias_dropout_fusion",
    "gradient_accumulation_fusion",
    "deterministic_mode",
    "moe_token_dispatcher_type",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "padded_vocab_size",
)
# What a frozen model has none of, whatever its checkpoint was trained with.
_FROZEN = {
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "perform_initialization": False,
    "virtual_pipeline_model_parallel_size": None,
    "pipeline_model_parallel_layout": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "overlap_p2p_comm": False,
    "tp_comm_overlap": False,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "fp8": None,
    "fp4": None,
    "fp8_param_gather": False,
    "fp4_param_gather": False,
    "cuda_graph_impl": "none",
    "cross_entropy_loss_fusion": False,
    "mtp_num_layers": None,
    "tensor_parallel_num_weight_shards": None,
    "gtp_weight_remat_size": 1,
    "expert_tensor_parallel_num_weight_shards": None,
    "expert_gtp_weight_remat_size": 1,
}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def teacher_arguments(
    architecture: dict[str, Any],
    args: Namespace,
    dtype: str | None,
    own_tokens: tuple[int, int] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Namespace:
    """Megatron arguments that describe the teacher: its own architecture and layout, nothing else of the student.

    Args:
        architecture: Megatron argument name -> value, from the teacher's own config.json or checkpoint.
        args: the student's, after `finish`.
        dtype: fp32, bf16, fp16 or fp8; None takes the student's.
        own_tokens: of a teacher with another tokenizer, its vocabulary's size and the tokens of a row.
        sizes: parallel sizes that are not the student's, see `KDConfig.teacher_sizes`.

    Raises:
        MkdConfigError: parallel sizes that do not divide the teacher, or sequences longer than it knows positions for.
    """
    teacher = Namespace(**{**vars(default_arguments()), **architecture, **_FROZEN})
    for name in _SHARED_WITH_TEACHER:
        setattr(teacher, name, getattr(args, name))
    own = teacher_layout_args(args, sizes or {}, teacher.num_experts)
    for name in SIZES:
        setattr(teacher, name, getattr(own, name))
    row_flag, vocabulary = "--seq-length", args.padded_vocab_size
    if own_tokens is not None:
        row_flag = "--kd-teacher-seq-length"
        vocabulary, teacher.seq_length = own_tokens
    if own_tokens is not None or has_own_layout(own, args):
        teacher.padded_vocab_size = calculate_padded_vocab_size(
            vocabulary, args.make_vocab_size_divisible_by, teacher.tensor_model_parallel_size, logging_enabled=False
        )
    teacher.params_dtype = _DTYPES[dtype] if dtype else args.params_dtype
    teacher.bf16 = teacher.params_dtype == torch.bfloat16
    teacher.fp16 = teacher.params_dtype == torch.float16
    if dtype == "fp8":
        compute_in_fp8(teacher)
    check_teacher_divides(vars(teacher), own, args)
    if teacher.max_position_embeddings is not None and teacher.seq_length > teacher.max_position_embeddings:
        raise MkdConfigError(
            f"{row_flag} {teacher.seq_length} is longer than the teacher's {teacher.max_position_embeddings} positions "
            "(max_position_embeddings in its config.json)"
        )
    return teacher


def true_vocabulary(args: Namespace) -> int:
    """Number of tokens that exist: the architecture's, or the tokenizer's where none is given."""
    return args.vocab_size or get_tokenizer().vocab_size
