"""Flags that every run needs, and its length: iterations or samples, and intervals of them."""

from argparse import Namespace

from mkd.config.megatron.epochs import iterations_are_unknown
from mkd.errors import MkdConfigError

REQUIRED: dict[str, tuple[tuple[str, ...], str]] = {
    "--num-layers": (("num_layers",), "the student's size; or give --kd-student-hf"),
    "--seq-length": (("seq_length",), "tokens per row"),
    "--micro-batch-size": (("micro_batch_size",), "rows that a rank computes at once"),
    "--train-iters": (("train_iters", "train_samples"), "iterations to train; or give --train-samples or --kd-epochs"),
    "--lr": (("lr",), "peak learning rate"),
    "--eval-interval": (("eval_interval",), "iterations between evaluations; of any size with --eval-iters 0"),
}
"""Flag without a sensible default -> (arguments of which one must be given, meaning)."""


def check_required(args: Namespace, flag: str) -> None:
    """Refuse a command line that lacks a flag of `REQUIRED`; the error of the first names the others too."""
    missing = [each for each, (names, _) in REQUIRED.items() if all(getattr(args, name) is None for name in names)]
    if flag not in missing:
        return
    others = missing[1:] if flag == missing[0] else []
    also = f"; also missing: {', '.join(others)}" if others else ""
    raise MkdConfigError(f"{flag} is missing ({REQUIRED[flag][1]}){also}")


def check_intervals(args: Namespace) -> None:
    """Refuse intervals and numbers of iterations below 1, and a save folder without the interval of its checkpoints."""
    if args.eval_interval < 1:
        raise MkdConfigError(f"--eval-interval is {args.eval_interval}; it must be at least 1 (--eval-iters 0: never)")
    if args.eval_iters < 0:
        raise MkdConfigError(
            f"--eval-iters is {args.eval_iters}; it must be at least 0, which never evaluates. An evaluation of the "
            "whole validation set is the number of its rows divided by --global-batch-size (the plan prints the rows)"
        )
    for flag in ("--log-interval", "--tensorboard-log-interval", "--train-iters", "--train-samples", "--save-interval"):
        value = getattr(args, flag.removeprefix("--").replace("-", "_"))
        if value is not None and value < 1:
            raise MkdConfigError(f"{flag} is {value}; it must be at least 1")
    if args.save is not None and not (args.save_interval or args.save_retain_interval):
        raise MkdConfigError(f"--save {args.save} needs --save-interval (iterations between checkpoints)")


def check_alternatives(args: Namespace) -> None:
    """Refuse lengths in iterations beside others in samples, two sources of data, and two precisions; megatron's
    messages name no flag."""
    if args.bf16 and args.fp16:
        raise MkdConfigError("--bf16 and --fp16 both set the precision: give one of them")
    unit, other = ("iters", "samples") if args.train_iters else ("samples", "iters")
    lengths = {f"--{name}-{other}": getattr(args, f"{name.replace('-', '_')}_{other}") for name in _LENGTHS}
    if (beside := next((f"{flag} {value}" for flag, value in lengths.items() if value), None)) is not None:
        length = f"--train-{unit} {getattr(args, f'train_{unit}')}"
        if iterations_are_unknown(args):
            length = "--kd-epochs, which sets --train-iters"
        raise MkdConfigError(
            f"{beside} and {length}: lengths are all in iterations or all in samples: leave one of them out"
        )
    parts = [f"--{name}-data-path" for name in ("train", "valid", "test") if getattr(args, f"{name}_data_path")]
    sources = ["--mock-data"] * args.mock_data + ["--data-path"] * bool(args.data_path) + parts[:1]
    if len(sources) > 1:
        raise MkdConfigError(f"{' and '.join(sources)} are two sources of data: leave one of them out")


_LENGTHS = ("train", "lr-decay", "lr-warmup")
