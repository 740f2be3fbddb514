"""Shared by the benchmarks of whole trainings, bench_train and bench_service: models, flags, options, failures."""

import argparse
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_common import REASON_LENGTH, Row

import mkd.cpu
from benchmarks.inputs import llama

B70 = llama(80, 8192, 28672, 64, 8, 128256, False)
B8 = llama(32, 4096, 14336, 32, 8, 128256, False)
B1 = llama(16, 2048, 8192, 32, 8, 128256, True)
"""Shapes of Llama-3.1 and Llama-3.2."""
OVERLAP = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")


def training_flags(folder: Path, text: Path, steps: int, rows: int, micro_batch: int, seq_length: int) -> list[str]:
    """Flags of a training on random tokens, without those of models and layout.

    Args:
        folder: keeps the data cache.
        text: prefix of the token files.
        steps: of the training.
        rows: per step.
        micro_batch: rows per microbatch.
        seq_length: tokens per row.
    """
    words = {
        "--data-path": text,
        "--data-cache-path": folder / "cache",
        "--tokenizer-type": "NullTokenizer",
        "--split": "100,0,0",
        "--eval-iters": 0,
        "--eval-interval": steps,
        "--seq-length": seq_length,
        "--micro-batch-size": micro_batch,
        "--global-batch-size": rows,
        "--train-iters": steps,
        "--lr": 1e-5,
        "--log-interval": 1,
    }
    flat = [str(word) for pair in words.items() for word in pair]
    return [*flat, *([] if mkd.cpu.is_target() else ["--bf16"])]


def lines_of_steps(metrics: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file that are about a training step."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def last_error(output: str) -> str:
    """The reason in the output of a job that has failed: the first line with an error, or the last line."""
    lines = [line for line in output.splitlines() if "rror" in line] or output.splitlines()[-1:]
    return lines[0] if lines else "no output"


def short_reason(error: Exception) -> str:
    """The message of an error as one cell of a table."""
    return " ".join(str(error).split())[:REASON_LENGTH].replace("|", "/") or type(error).__name__


def write_rows(file: Path | None, head: dict[str, Any], rows: Sequence[Row]) -> None:
    """Write what is measured so far to the file of --json, if there is one."""
    if file is not None:
        file.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


def card_name() -> str:
    """Name of the first GPU, read without a CUDA context in this process."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "GPU"


def add_training_options(parser: argparse.ArgumentParser, steps: int, warmup: int) -> None:
    """Add the options common to these benchmarks; see `check_training_options`.

    Args:
        parser: of the tool.
        steps: default number per training.
        warmup: steps at the beginning that are not counted.
    """
    parser.add_argument("--steps", type=int, default=steps, metavar="N", help=f"steps per training, above {warmup}")
    listed = dict(type=lambda text: text.split(";"), metavar="A;B")
    parser.add_argument("--rows-of", help="rows by name, separated by semicolons", **listed)
    parser.add_argument("--limit", type=float, default=600.0, metavar="S", help="seconds per job (default: 600)")
    parser.add_argument("--folder", type=Path, help="for models and data, kept (default: temporary)")
    parser.add_argument("--small", action="store_true", help="small models on two CPU processes, a smoke test")
    parser.add_argument("--commit", metavar="TEXT", help="the measured commit, if this is not a git checkout")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here, after each measurement")


def check_training_options(
    parser: argparse.ArgumentParser, args: argparse.Namespace, warmup: int, rows: str, known: Sequence[str]
) -> None:
    """End the tool with an error of the parser unless steps are counted and the rows exist.

    Args:
        parser: of the tool.
        args: the options.
        warmup: steps at the beginning that are not counted.
        rows: what the rows are, for the message.
        known: their names.
    """
    if args.steps <= warmup:
        parser.error(f"--steps is {args.steps}; the first {warmup} are not counted")
    if unknown := [name for name in args.rows_of or [] if name not in known]:
        parser.error(f"--rows-of {unknown[0]!r}: the {rows} are {'; '.join(known)}")
