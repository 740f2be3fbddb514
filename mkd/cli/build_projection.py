"""Project a student's vocabulary into the vocabulary of a teacher with a different tokenizer, for --kd-projection.

    mkd build-projection --student HF_DIR --teacher HF_DIR --out projection.safetensors

Each student token maps to the teacher token with the same bytes, or else to the teacher's tokens for its bytes, with
decaying weights. Only the two tokenizers are read. See docs/cross_tokenizer.md.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from mkd.cli.usage import command_parser
from mkd.compat.quiet import import_quietly

import_quietly()

from mkd.errors import MkdConfigError, exit_status  # noqa: E402
from mkd.utils.atomic_files import regular_target  # noqa: E402
from mkd.xtoken.text.conversations import ends_of_turn  # noqa: E402
from mkd.xtoken.text.tokens import SpanTokenizer  # noqa: E402
from mkd.xtoken.vocabulary.build import build_projection  # noqa: E402
from mkd.xtoken.vocabulary.projection import Projection, ProjectionOptions  # noqa: E402


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = command_parser(__doc__)
    parser.add_argument("--student", required=True, metavar="HF_DIR", help="folder with the student's tokenizer")
    parser.add_argument("--teacher", required=True, metavar="HF_DIR", help="folder with the teacher's tokenizer")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="safetensors file to write")
    parser.add_argument(
        "--top-k",
        type=int,
        default=ProjectionOptions.k,
        metavar="K",
        help=f"maximum number of teacher tokens per student token ({ProjectionOptions.k})",
    )
    parser.add_argument(
        "--decay",
        type=float,
        default=ProjectionOptions.decay,
        metavar="D",
        help="weight of each teacher token relative to the one before it; 0 keeps the first one only "
        f"({ProjectionOptions.decay})",
    )
    parser.add_argument(
        "--pair",
        action="append",
        default=[],
        metavar="STUDENT=TEACHER",
        help="equivalent special tokens, such as '<|im_end|>=<end_of_turn>'; repeatable",
    )
    return parser.parse_args(argv)


def options_of(args: argparse.Namespace) -> ProjectionOptions:
    """Check the options before any tokenizer is read. Raises MkdConfigError."""
    pairs = tuple(tuple(pair.split("=", 1)) for pair in args.pair)
    for pair, parts in zip(args.pair, pairs, strict=True):
        if len(parts) != 2 or not all(parts):
            raise MkdConfigError(f"--pair {pair} is not of the form STUDENT=TEACHER, two special tokens")
    if not args.out.absolute().parent.is_dir():
        raise MkdConfigError(f"--out {args.out}: {args.out.absolute().parent} is not a folder")
    regular_target(args.out, "--out")
    return ProjectionOptions(args.top_k, args.decay, pairs)


class Rate(TextColumn):
    """Student tokens per second."""

    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.0f} tokens/s" if task.speed else "")


def print_summary(found: Projection, args: argparse.Namespace, console: Console) -> None:
    """Print a summary of the written projection."""
    counts = found.summary()
    total = counts["student tokens"]
    console.print(f"{args.out}: {total:,} student tokens to {counts['teacher tokens']:,} teacher tokens")
    explained = {
        "exact": "a teacher token with the same bytes or the same role, one-to-one",
        "one token": "one teacher token with other bytes or for several student tokens",
        "several tokens": f"weights that decay by {args.decay}",
        "empty": "no counterpart: excluded from the loss",
    }
    for name, meaning in explained.items():
        console.print(f"  {name:15} {counts[name]:9,} {counts[name] / total:6.1%}  {meaning}")
    for ours, theirs in found.options.pairs:
        console.print(Text(f"  equivalent special tokens: {ours} = {theirs}"))
    if counts["cut"]:
        console.print(f"  {counts['cut']:,} of them are cut to their first {args.top_k} teacher tokens (--top-k)")


def run(args: argparse.Namespace) -> None:
    """Check, build, save, and print a summary."""
    options = options_of(args)
    student, teacher = SpanTokenizer(args.student, "--student"), SpanTokenizer(args.teacher, "--teacher")
    options = replace(options, pairs=(*options.pairs, *ends_of_turn(student, teacher)))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Rate(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("projecting", total=None)
        found = build_projection(
            student, teacher, options, lambda done, total: progress.update(task, completed=done, total=total)
        )
    found.save(args.out)
    print_summary(found, args, Console(highlight=False, soft_wrap=True))


def main(argv: list[str] | None = None) -> int:
    """Run the tool; a user error prints one line and exits with status 1."""
    args = parse_arguments(argv)
    return exit_status(lambda: run(args))
