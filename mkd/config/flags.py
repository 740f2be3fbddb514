"""The command line: `KDConfig` as `--kd-*` flags beside Megatron's own, and flags that contradict distillation."""

import sys
from argparse import Action, ArgumentParser, Namespace
from functools import cache
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn

from megatron.training.argument_utils import ArgumentGroupFactory
from megatron.training.arguments import add_megatron_arguments, parse_args

from mkd.compat.startup import repair_help, repair_types
from mkd.config.bounds import check_given
from mkd.config.command_words import read_settings, words_of
from mkd.config.flag_checks import KD, check_settings, unknown_words
from mkd.config.kd_config import KDConfig
from mkd.config.kd_fields import KDFields
from mkd.errors import MkdConfigError, MkdPackageError
from mkd.utils.encoding import require_text
from mkd.utils.model_folders.hub_folder import model_folder

# Prefixes of Megatron flags that conflict with distillation -> the flags to use instead.
# Checked on the command line itself: some of them exist only if further packages are installed.
CONTRADICTIONS: dict[str, str] = {
    "--logits-save-": "--kd-teacher-hf or --kd-teacher-load (mkd runs the teacher itself)",
    "--logits-load-": "--kd-teacher-hf or --kd-teacher-load (mkd runs the teacher itself)",
    "--export-kd-": "--kd-teacher-load, --kd-loss, --kd-temperature and --kd-ratio",
    "--freeze-all-layers": "--kd-ratio (the student is what is trained)",
    "--ddp-average-in-collective": "--kd-ratio (mkd divides once by the step's supervised tokens, over all ranks)",
    "--yaml-cfg": "--kd-config, a YAML file of flags",
    "--perform-rl-step": "--kd-ratio (mkd distills; it has no reinforcement learning)",
    "--rl-": "--kd-ratio (mkd distills; it has no reinforcement learning)",
    "--grpo-": "--kd-ratio (mkd distills; it has no reinforcement learning)",
    "--hybrid-layer-pattern": "--num-layers or --kd-student-hf (mkd trains GPT models)",
    "--mtp-num-layers": "--num-layers or --kd-student-hf (mkd has no loss for multi-token prediction)",
}


# Megatron flags that mkd does not support -> what to do instead.
UNSUPPORTED: dict[str, str] = {
    "--full-validation": "give --eval-iters (megatron-core 0.19 itself fails with it)",
    "--multiple-validation-sets": "give one set",
    "--reset-attention-mask": "give --kd-packing best_fit, where no document sees another",
    "--dataloader-inter-document-masking": "give --kd-packing best_fit, where no document sees another",
    "--sft": "leave it out and name the chat file in --data-path (docs/data.md)",
    "--exit-signal-handler-for-training": "leave it out (at SIGTERM and SIGUSR1 mkd saves and ends; docs/slurm.md)",
    "--trust-remote-code": "leave it out (no code of a tokenizer's folder runs; convert it to a tokenizer.json)",
    "--defer-embedding-wgrad-compute": "leave it out (mkd computes the LM head's gradient together with the loss)",
    "--init-model-with-meta-device": "leave it out (weights would not be initialized)",
    "--init-method-xavier-uniform": "leave it out (megatron-core 0.19 itself fails with it)",
    "--config-logger-dir": "leave it out (megatron-core 0.19 itself fails with it; run.yaml in --save has the flags)",
    "--heterogeneous-layers-config-path": "leave it out (mkd trains models with layers of one size)",
    "--heterogeneous-layers-config-encoded-json": "leave it out (mkd trains models with layers of one size)",
    "--adlr-autoresume": "leave it out (at SIGTERM and SIGUSR1 mkd saves and ends; docs/slurm.md)",
    "--enable-cuda-graph": "give --cuda-graph-impl transformer_engine (docs/layouts.md)",
    "--fake-process-group": "leave it out (mkd doctor checks a job for more GPUs than there are)",
    "--non-persistent-save-interval": "give --save-interval and --kd-keep-last, which removes older checkpoints",
    "--non-persistent-ckpt-type": "give --save-interval and --kd-keep-last, which removes older checkpoints",
    "--lazy-mpu-init": "leave it out (mkd's process groups exist before the models are built)",
    # Rows: mkd would read others than the flag promises, or none of its values.
    "--iterations-to-skip": "leave it out (tensor-parallel ranks would read different rows after a skipped step)",
    "--result-rejected-tracker-filename": "leave it out (it names iterations to skip, which mkd does not)",
    "--phase-transition-iterations": "give --train-iters and --data-path (docs/data.md) to one job per phase",
    "--validation-set-names": "give one validation set",
    "--allow-ambiguous-pad-tokens": "leave it out (mkd masks padding by position, and learns end tokens that equal it)",
    "--chat-template": "write the template into the folder of --tokenizer-model",
    "--fim-data": "leave it out (no row is rearranged for filling in the middle)",
    "--no-data-sharding": "leave it out (it belongs to --dataloader-type cyclic)",
    "--decoder-seq-length": "give --seq-length (mkd trains GPT models)",
    "--sample-rate": "leave it out (mkd reads every row; give --split or weights in --data-path)",
    "--mask-prob": "leave it out (it belongs to BERT)",
    "--short-seq-prob": "leave it out (it belongs to BERT)",
    "--sft-tokenizer-prompt-format": "leave it out and name the chat file in --data-path (docs/data.md)",
    # Losses and steps.
    "--rampup-batch-size": "give --step-batch-size-schedule (megatron-core 0.19 itself ignores this flag)",
    "--skip-train": "give a --train-iters that the checkpoint in --load has reached: such a job evaluates and ends",
    "--fp16-lm-cross-entropy": "leave it out (mkd computes losses in fp32)",
    "--check-for-spiky-loss": "leave it out (mkd repeats no step; a loss that is not finite ends the job)",
}

# Megatron flags with values that mkd does not support -> value -> what to do instead.
UNSUPPORTED_VALUES: dict[str, dict[str, str]] = {
    "--dataloader-type": {
        "cyclic": "leave it out (rows are shuffled by --seed; cyclic evaluations and layouts read different rows)",
        "external": "leave it out and name the files in --data-path (docs/data.md)",
    },
    "--position-embedding-type": {"mrope": "give rope (text alone has one position per token)"},
    "--rerun-mode": {"report_stats": "leave it out (megatron-core 0.19 itself does not have it)"},
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

    Parser errors become an MkdConfigError of one line instead of a thousand lines of usage.
    """
    _KDFlags(KDFields).build_group(parser, title="knowledge distillation")
    repair_help(parser)
    repair_types(parser)

    def refuse(message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown == message:
            raise MkdConfigError(message.removeprefix("argument "))
        listed = "mkd train --help-all lists all flags"
        if unknown.startswith("--") and not unknown.startswith(KD):
            listed = f"megatron-core {version('megatron-core')} has no such flag, other versions may; {listed}"
        raise unknown_words(unknown, parser._option_string_actions, listed)

    parser.error = refuse
    return parser


@cache
def flag_parser() -> ArgumentParser:
    """A parser of all flags, Megatron's and mkd's."""
    return add_kd_flags(add_megatron_arguments(ArgumentParser(allow_abbrev=False)))


def flags_given(argv: list[str] | None = None) -> dict[str, str]:
    """The flags on the command line: Megatron's argument name -> the flag as it was written."""
    written = {word.split("=")[0] for word in (sys.argv[1:] if argv is None else argv)}
    given = {}
    for action in flag_parser()._actions:
        for flag in written.intersection(action.option_strings):
            given[action.dest] = flag
    return given


def parse_command_line() -> tuple[Namespace, KDConfig]:
    """Parse all flags and check those that contradict distillation or each other. Nothing global is set yet."""
    args, fields = parse_flags()
    return args, KDConfig(**fields)


def parse_flags() -> tuple[Namespace, dict[str, Any]]:
    """Parse all flags: Megatron's, with numbers within bounds, and the values of `KDConfig`'s fields, unchecked.

    The flags in files of --kd-config are put at the beginning of `sys.argv`, which is then the whole command line.
    """
    settings = read_settings(sys.argv[1:])
    if settings:
        check_settings(settings, flag_parser())
        sys.argv[1:] = [*words_of(settings), *sys.argv[1:]]
    require_text(sys.argv[1:])
    refuse_contradictions(sys.argv[1:])
    megatron_flags: list[Action] = []

    def add(parser: ArgumentParser) -> ArgumentParser:
        megatron_flags.extend(parser._actions)
        return add_kd_flags(parser)

    try:
        args = parse_args(add)
    except RuntimeError as error:  # --enable-msc without its package
        raise MkdPackageError(str(error)) from error
    check_given(megatron_flags, args, sys.argv[1:])
    if args.tokenizer_model is not None:
        args.tokenizer_model = _snapshot(args.tokenizer_model, "--tokenizer-model")
    prefix = "kd_"
    return args, {name.removeprefix(prefix): value for name, value in vars(args).items() if name.startswith(prefix)}


def _snapshot(folder: str, flag: str) -> str:
    """A folder as given, or its snapshot if it is one of the hub's cache."""
    found = model_folder(folder, flag)
    return folder if found == Path(folder) else str(found)


def refuse_contradictions(argv: list[str]) -> None:
    """Raise MkdConfigError for a Megatron flag or value that contradicts distillation or is not supported."""
    for word, following in zip_longest(argv, argv[1:], fillvalue=""):
        for prefix, instead in CONTRADICTIONS.items():
            if word.startswith(prefix):
                raise MkdConfigError(f"{word.split('=')[0]} contradicts distillation: use {instead} instead")
        flag, equals, value = word.partition("=")
        if flag in UNSUPPORTED:
            raise MkdConfigError(f"{flag} is not supported: {UNSUPPORTED[flag]}")
        value = value if equals else following
        if flag == "--spec":
            raise MkdConfigError(
                f"--spec {value} is not supported: leave it out (it names code of other layers, which mkd does not "
                "run; the layers are those of --kd-student-hf, or of Megatron's size flags)"
            )
        if value in UNSUPPORTED_VALUES.get(flag, ()):
            raise MkdConfigError(f"{flag} {value} is not supported: {UNSUPPORTED_VALUES[flag][value]}")


def default_arguments() -> Namespace:
    """Megatron's arguments if no flag is given."""
    return add_megatron_arguments(ArgumentParser(allow_abbrev=False)).parse_args([])
