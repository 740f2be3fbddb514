"""Show the alignment of a text in a student's and a teacher's tokens, side by side in the terminal.

    mkd show-alignment --student HF_DIR --teacher HF_DIR "Some text."
    mkd show-alignment --student HF_DIR --teacher HF_DIR --file chat.jsonl --row 3

A text chunk has the same color in both columns; | separates tokens of one chunk, and <<token>> is in no chunk: it has
no counterpart, no position predicts it, or it is not part of an assistant message.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mkd.cli.usage import command_parser
from mkd.compat.quiet import import_quietly

import_quietly()

import numpy as np  # noqa: E402

from mkd.data.sources.conversation import Conversation  # noqa: E402
from mkd.data.sources.data_files import TEXTS, FileFormat, data_files  # noqa: E402
from mkd.data.sources.record_forms import is_conversation  # noqa: E402
from mkd.data.sources.text import decode, json_object, parse, read_batches, require_unicode  # noqa: E402
from mkd.errors import MkdConfigError, MkdDataError, exit_status  # noqa: E402
from mkd.xtoken.text.alignment import NO_CHUNK  # noqa: E402
from mkd.xtoken.text.samples import AlignedPair, Passage, align_sample  # noqa: E402
from mkd.xtoken.text.token_bytes import read_token_bytes  # noqa: E402
from mkd.xtoken.text.tokens import SpanTokenizer  # noqa: E402

COLORS = ("black on cyan", "black on green", "black on yellow", "white on blue", "white on magenta")
NO_COUNTERPART = "bold red"
VISIBLE = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = command_parser(__doc__)
    parser.add_argument("--student", required=True, metavar="HF_DIR", help="folder with the student's tokenizer")
    parser.add_argument("--teacher", required=True, metavar="HF_DIR", help="folder with the teacher's tokenizer")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("text", nargs="?", metavar="TEXT", help="text to align")
    source.add_argument("--file", type=Path, metavar="FILE", help="text file, or records with texts or conversations")
    parser.add_argument("--row", type=int, default=1, metavar="N", help="line, record or row of the file, from 1 (1)")
    parser.add_argument("--json-key", default="text", metavar="KEY", help="key of the text in a JSON line (text)")
    parser.add_argument("--all-messages", action="store_true", help="align the messages of all roles")
    return parser.parse_args(argv)


def sample_of(args: argparse.Namespace) -> str | Conversation:
    """The text or conversation to show.

    Raises:
        MkdConfigError: --row is not a line of the file.
        MkdDataError: the file cannot be read as text, or the line as JSON with a text or a conversation.
    """
    if args.text is not None:
        require_unicode(args.text, "TEXT")
        return args.text
    if args.file.is_file() and FileFormat.of(str(args.file)) is None:
        return decode(args.file.read_bytes(), f"--file {args.file}", "file")
    count = 0
    for batch in read_batches(data_files(str(args.file), "--file", TEXTS)):
        if not batch.is_json:
            return decode(batch.documents[0], f"--file {args.file}", "file")
        offset = args.row - count - 1
        if 0 <= offset < len(batch.documents):
            batch = replace(batch, first=batch.first + offset, documents=batch.documents[offset : offset + 1])
            break
        count += len(batch.documents)
    else:
        raise MkdConfigError(f"--row is {args.row}, and --file {args.file} has {count} lines")
    ((where, line),) = batch.located()
    if is_conversation(json_object(decode(line, where), where)):
        return Conversation.parse(line, where)
    texts = parse(batch, args.json_key)
    if not texts:
        raise MkdDataError(f"{where}: the text is empty")
    return texts[0]


def token_texts(tokenizer: SpanTokenizer, ids: np.ndarray) -> list[str]:
    """Text of each token ([n] ids), with visible whitespace; bytes that are not UTF-8 as hexadecimal numbers."""
    bytes_of = read_token_bytes(tokenizer).of_id
    found = []
    for number in ids.tolist():
        string = bytes_of[number]
        text = tokenizer.tokenizer.convert_ids_to_tokens(number) if string is None else _readable(string)
        found.append("".join(VISIBLE.get(c, c if c.isprintable() else f"\\x{ord(c):02x}") for c in text))
    return found


def _readable(string: bytes) -> str:
    try:
        return string.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in string)


def colored(tokens: list[str], chunks: np.ndarray) -> Text:
    """One column: tokens in the colors of their chunks ([n] numbers)."""
    text = Text(overflow="fold")
    before = NO_CHUNK
    for token, chunk in zip(tokens, chunks.tolist(), strict=True):
        if chunk == NO_CHUNK:
            text.append(f" <<{token}>>", NO_COUNTERPART)
        else:
            color = COLORS[chunk % len(COLORS)]
            text.append("|" if chunk == before else " ", color if chunk == before else "")
            text.append(token, color)
        before = chunk
    return text


def show(sample: AlignedPair, student: SpanTokenizer, teacher: SpanTokenizer, console: Console) -> None:
    """Print both columns, and the number of aligned tokens."""
    table = Table("student", "teacher", expand=True, padding=(0, 1))
    views = (
        ("student", token_texts(student, sample.student_ids), sample.alignment.student_chunk),
        ("teacher", token_texts(teacher, sample.teacher_ids), sample.alignment.teacher_chunk),
    )
    table.add_row(*(colored(tokens, chunks) for _, tokens, chunks in views))
    console.print(table)
    for name, tokens, chunks in views:
        inside = int((chunks != NO_CHUNK).sum())
        console.print(f"{name}: {len(tokens):,} tokens, {inside:,} of them in {sample.alignment.count:,} chunks")
    if sample.not_found:
        console.print(f"{sample.not_found} messages could not be located in the output of the chat templates")


def run(args: argparse.Namespace) -> None:
    """Read, align, and show."""
    sample = sample_of(args)
    student, teacher = SpanTokenizer(args.student, "--student"), SpanTokenizer(args.teacher, "--teacher")
    if isinstance(sample, str):
        sample = [Passage(sample, ends=None not in (student.tokenizer.eos_token_id, teacher.tokenizer.eos_token_id))]
    aligned = align_sample(student, teacher, sample, all_messages=args.all_messages)
    show(aligned, student, teacher, Console(highlight=False))


def main(argv: list[str] | None = None) -> int:
    """Run the tool; a user error prints one line and exits with status 1."""
    args = parse_arguments(argv)
    return exit_status(lambda: run(args))
