"""Tokenize text for training: JSON lines, parquet or plain text to Megatron's .bin and .idx files.

    mkd preprocess --input corpus.jsonl --output-prefix data/corpus --tokenizer-model HF_DIR

writes data/corpus_text_document.{bin,idx,json}; train with `--data-path data/corpus_text_document`. No GPU is needed.
"""

import argparse
import sys
import time
from pathlib import Path

from mkd.cli.usage import command_parser
from mkd.compat.quiet import import_quietly

import_quietly()

from mkd.checkpoint.tokenizer_hash import tokenizer_hash  # noqa: E402
from mkd.data.sources.indexed import IndexedText, dataset_prefix, default_workers, write_indexed_text  # noqa: E402
from mkd.data.sources.text import BadRecords, Encoding, input_files  # noqa: E402
from mkd.errors import MkdConfigError, exit_status  # noqa: E402

ESCAPES = {r"\n": "\n", r"\t": "\t", r"\f": "\f"}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = command_parser(__doc__)
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSON lines or arrays (.jsonl, .json), parquet, or text (.txt), also .gz or .zst; a folder of such files, "
        "or one of datasets.save_to_disk; or a glob in quotes",
    )
    parser.add_argument("--output-prefix", required=True, metavar="P", help="writes P_KEY_document.bin, .idx and .json")
    parser.add_argument("--tokenizer-model", required=True, metavar="HF_DIR", help="folder of a Hugging Face tokenizer")
    parser.add_argument("--json-key", default="text", metavar="KEY", help="key of the text in each record (text)")
    parser.add_argument(
        "--split-on",
        metavar="STRING",
        help=r"separator of documents in a text file; \n, \t, \f are escapes (default: one document per file)",
    )
    parser.add_argument(
        "--bad-records",
        choices=["error", "skip"],
        default="error",
        help="broken records: the first one ends the job (default), or they are left out and counted",
    )
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one per core, or fewer)")
    parser.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end each document with the tokenizer's eos token",
    )
    args = parser.parse_args(argv)
    for escape, character in ESCAPES.items():
        args.split_on = args.split_on and args.split_on.replace(escape, character)
    return args


def check_arguments(args: argparse.Namespace) -> list[str]:
    """Check the arguments before the first document is read, and list the files. Raises MkdConfigError or
    MkdDataError."""
    if args.workers is not None and args.workers < 1:
        raise MkdConfigError(f"--workers is {args.workers}; it must be at least 1")
    if args.split_on == "":
        raise MkdConfigError("--split-on is empty; leave it out to make each file one document")
    return input_files(args.input)


class ProgressLine:
    """A progress line: rewritten in place on a terminal, a new line every 10 s in a log file."""

    def __init__(self, total_bytes: int) -> None:
        self.total = total_bytes
        self.start = self.last = time.monotonic()
        self.on_terminal = sys.stderr.isatty()

    def __call__(self, documents: int, tokens: int, size: int) -> None:
        """Show the progress; `size` is the input bytes done, 0 at the start."""
        now = time.monotonic()
        if size == 0:
            self.start = self.last = now
        if size in (0, self.total) or now - self.last < (0.2 if self.on_terminal else 10.0):
            return
        self.last, elapsed = now, now - self.start
        eta = time.strftime("%H:%M:%S", time.gmtime(elapsed * (self.total - size) / size))
        line = (
            f"{100 * size / self.total:5.1f}%  {documents:,} documents ({documents / elapsed:,.0f}/s)  "
            f"{tokens:,} tokens  {size / elapsed / 1e6:.2f} MB/s  ETA {eta}"
        )
        before, end = ("\r", "\033[K") if self.on_terminal else ("", "\n")
        print(before + line, end=end, file=sys.stderr, flush=True)

    def close(self) -> float:
        """Clear the line and return the seconds since the start."""
        if self.on_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        return time.monotonic() - self.start


def print_summary(prefix: str, facts: IndexedText, bad: BadRecords, seconds: float) -> None:
    """Print a summary of the written files, after the broken records that were left out."""
    if bad.count:
        print(f"warning: {bad}", file=sys.stderr)
    skipped = f", {facts.skipped:,} empty ones skipped" if facts.skipped else ""
    print(
        f"{prefix}.bin and .idx: {facts.documents:,} documents{skipped}, {facts.tokens:,} tokens of {facts.dtype}, "
        f"{seconds:.1f} s, {facts.tokens / seconds:,.0f} tokens/s"
    )


def preprocess(args: argparse.Namespace) -> None:
    """Check, tokenize, and print a summary."""
    files, bad = check_arguments(args), BadRecords()
    line = ProgressLine(sum(Path(path).stat().st_size for path in files))
    prefix = dataset_prefix(args.output_prefix, args.json_key)
    facts = write_indexed_text(
        files,
        prefix,
        Encoding(args.tokenizer_model, args.json_key, args.append_eod, args.bad_records == "skip"),
        workers=args.workers or default_workers(files),
        tokenizer_hash=tokenizer_hash(Path(args.tokenizer_model), "--tokenizer-model"),
        split_on=args.split_on,
        progress=line,
        bad=bad,
    )
    print_summary(prefix, facts, bad, line.close())


def main(argv: list[str] | None = None) -> int:
    """Run the tool; a user error prints one line and exits with status 1."""
    args = parse_arguments(argv)
    return exit_status(lambda: preprocess(args))
