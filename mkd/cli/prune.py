"""Prune a teacher to a smaller student.

    mkd prune depth --hf TEACHER --out STUDENT --every 2          # layers 0, 2, 4, ...
    mkd prune depth --hf TEACHER --out STUDENT --layers 0,1,5,11  # these layers
    mkd prune width --hf TEACHER --out STUDENT --hidden-size 1024 --ffn-hidden-size 4096
    mkd prune width --hf TEACHER --out STUDENT --num-attention-heads 16 --num-query-groups 4 \\
        --importance activation --data SAMPLES.jsonl --every 2                # heads, and layers in the same call

Writes a Hugging Face folder with the teacher's embeddings, LM head and tokenizer, for --kd-student-hf.
"""

import argparse
from pathlib import Path

from mkd.checkpoint.hf.writer import check_output
from mkd.checkpoint.prune.depth import PrunableTeacher, select_layers
from mkd.checkpoint.prune.width import Importance, WidthChoice, student_dims
from mkd.cli.usage import command_parser
from mkd.errors import MkdConfigError, exit_status

SAMPLES, SEQ_LENGTH = 128, 1024
WIDTHS = ("hidden", "ffn", "heads", "groups")


def prune_depth(args: argparse.Namespace) -> None:
    """Keep some layers, renumbered."""
    check_output(args.out, "--out")
    teacher = PrunableTeacher(args.hf)
    count = teacher.args["num_layers"]
    layers = select_layers(count, args.every, args.layers)
    nbytes = teacher.write_student(args.out, layers)
    print(f"wrote {args.out}: {describe_layers(layers, count)}, {nbytes / 1e6:.1f} MB")


def prune_width(args: argparse.Namespace) -> None:
    """Keep the most important channels and heads, in all layers or in a selection."""
    check_output(args.out, "--out")
    check_importance(args)
    teacher = PrunableTeacher(args.hf)
    if teacher.args["num_experts"] is not None:
        raise teacher.folder.error(
            f"{teacher.family.architectures[0]} is a mixture of experts, which is only pruned in depth"
        )
    if teacher.args["multi_latent_attention"]:
        raise teacher.folder.error(
            f"{teacher.family.architectures[0]} has latent attention, which is only pruned in depth"
        )
    if teacher.args["experimental_attention_variant"] is not None:
        raise teacher.folder.error(
            f"{teacher.family.architectures[0]} has gated delta nets, which are only pruned in depth"
        )
    if teacher.args.get("layer_mixers") is not None:
        raise teacher.folder.error(
            f"{teacher.family.architectures[0]} has layers with one mixer each, which are only pruned in depth"
        )
    count, old = teacher.args["num_layers"], teacher.dims
    layers = select_layers(count, args.every, args.layers)
    new = student_dims(old, args.hidden_size, args.ffn_hidden_size, args.num_attention_heads, args.num_query_groups)
    teacher.student_config(layers, new)  # fails here, not after the activations
    choice = WidthChoice.best(importance(teacher, args), old, new)
    nbytes = teacher.write_student(args.out, layers, choice)
    sizes = ", ".join(f"{name} {getattr(new, name)} of {getattr(old, name)}" for name in WIDTHS)
    print(f"wrote {args.out}: {sizes}, {describe_layers(layers, count)}, {nbytes / 1e6:.1f} MB")


def check_importance(args: argparse.Namespace) -> None:
    """Raise `MkdConfigError` unless --data and related flags are given exactly with --importance activation."""
    if args.importance == "activation" and args.data is None:
        raise MkdConfigError("--importance activation needs --data FILE.jsonl")
    given = [name for name in ("data", "samples", "seq_length", "device") if getattr(args, name) is not None]
    if args.importance == "magnitude" and given:
        raise MkdConfigError(f"--{given[0].replace('_', '-')} requires --importance activation, which is not given")


def importance(teacher: PrunableTeacher, args: argparse.Namespace) -> Importance:
    """Importance in all layers, including those that are dropped: activations depend on the whole teacher."""
    from mkd.checkpoint.prune.importance import activation_importance, magnitude_importance, read_samples

    model = (teacher.folder, teacher.family, teacher.args)
    if args.importance == "magnitude":
        return magnitude_importance(*model)
    length = SEQ_LENGTH if args.seq_length is None else args.seq_length
    length = min(length, teacher.args["max_position_embeddings"])
    samples = read_samples(teacher.folder, args.data, SAMPLES if args.samples is None else args.samples, length)
    print(f"measuring activations on {len(samples)} samples, {sum(map(len, samples)):,} tokens", flush=True)
    return activation_importance(*model, samples, args.device or "cpu")


def describe_layers(layers: list[int], count: int) -> str:
    """The kept layers in words, of `count` layers of the teacher."""
    return f"all {count} layers" if len(layers) == count else f"layers {', '.join(map(str, layers))} of {count}"


def add_folders(parser: argparse.ArgumentParser) -> None:
    """Flags of all commands."""
    parser.add_argument("--hf", required=True, metavar="TEACHER", help="folder with config.json and safetensors")
    parser.add_argument("--out", required=True, type=Path, metavar="STUDENT", help="output folder: new or empty")


def add_layers(parser: argparse.ArgumentParser, required: bool) -> None:
    """Flags that select layers."""
    choice = parser.add_mutually_exclusive_group(required=required)
    choice.add_argument("--every", type=int, metavar="N", help="keep layers 0, N, 2N, ...")
    choice.add_argument("--layers", metavar="LIST", help="keep these layers, counted from 0")


def add_widths(parser: argparse.ArgumentParser) -> None:
    """Flags for sizes and for the importance measure."""
    parser.add_argument("--hidden-size", type=int, metavar="N", help="width of the residual stream (the teacher's)")
    parser.add_argument("--ffn-hidden-size", type=int, metavar="N", help="width inside each MLP (the teacher's)")
    parser.add_argument("--num-attention-heads", type=int, metavar="N", help="query heads per layer (the teacher's)")
    parser.add_argument(
        "--num-query-groups", type=int, metavar="N", help="key-value heads per layer (the teacher's, or one per head)"
    )
    parser.add_argument(
        "--importance",
        choices=["magnitude", "activation"],
        default="magnitude",
        help="keep channels and heads with the largest weights (default), or with the largest activations on --data",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE.jsonl",
        help="records with text or conversations, for --importance activation",
    )
    parser.add_argument("--samples", type=int, metavar="N", help=f"lines of --data to read ({SAMPLES})")
    parser.add_argument(
        "--seq-length",
        type=int,
        metavar="N",
        help=f"first tokens of each line ({SEQ_LENGTH}; at most the model's max_position_embeddings)",
    )
    parser.add_argument("--device", metavar="D", help="device that runs the teacher on --data, such as cuda (cpu)")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = command_parser(__doc__)
    commands = parser.add_subparsers(required=True, metavar="depth|width")
    depth = commands.add_parser("depth", help="keep some of the layers")
    add_folders(depth)
    add_layers(depth, required=True)
    depth.set_defaults(command=prune_depth)
    width = commands.add_parser("width", help="keep some of the channels and heads, and optionally some of the layers")
    add_folders(width)
    add_widths(width)
    add_layers(width, required=False)
    width.set_defaults(command=prune_width)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 1 after a message on stderr."""
    args = parse_arguments(argv)
    return exit_status(lambda: args.command(args))
