"""Shared by the benchmarks: table rows measured one by one, device time, memory, and the table."""

import argparse
import gc
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

import mkd.cpu

GIB = 2**30
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PACKAGES = ["torch", "triton", "megatron-core", "transformer-engine", "transformers", "liger-kernel", "nvidia-modelopt"]
REASON_LENGTH = 160
BUSY_CYCLES = 600_000_000
"""A third of a second of a GPU's clock."""

Row = dict[str, Any]
"""One row of a table. A row that could not be measured has `failed`, the reason, and no figures."""


@dataclass(frozen=True)
class Card:
    """Peak rates of a card from the vendor's data sheet."""

    bytes_per_s: float
    flop_per_s: float
    """Dense bf16 with fp32 accumulation."""

    @classmethod
    def current(cls) -> "Card | None":
        """The card of this process's device; None if it is not in the list."""
        name = torch.cuda.get_device_name()
        known = {"H100": cls(3.35e12, 989e12), "H200": cls(4.8e12, 989e12)}
        return next((card for key, card in known.items() if key in name), None)


@contextmanager
def tensor_parallel_ranks(seed: int) -> Iterator[dist.ProcessGroup]:
    """Megatron's groups with all of torchrun's ranks tensor parallel; one rank without torchrun."""
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl")
    else:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    ps.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(seed)
    try:
        yield ps.get_tensor_model_parallel_group()
    finally:
        ps.destroy_model_parallel()
        dist.destroy_process_group()


@contextmanager
def quiet() -> Iterator[None]:
    """Send the output of other packages to stderr and log only errors: stdout is for the table."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        logging.disable(before)


class Stopwatch:
    """Time marks on the device's clock: CUDA events, or the host's clock if the device is the CPU."""

    def __init__(self) -> None:
        self._on_gpu = not mkd.cpu.is_active()
        self._marks: list[tuple[str, Any]] = []

    def mark(self, name: str) -> None:
        """Record the current time; does not wait for a GPU."""
        moment: Any = time.perf_counter()
        if self._on_gpu:
            moment = torch.cuda.Event(enable_timing=True)
            moment.record()
        self._marks.append((name, moment))

    def take(self) -> list[tuple[str, float]]:
        """(name, milliseconds) from each mark to the next one, named after the first of the two. Clears the marks."""
        torch.cuda.synchronize()
        marks, self._marks = self._marks, []
        return [(name, a.elapsed_time(b) if self._on_gpu else (b - a) * 1e3) for (name, a), (_, b) in pairwise(marks)]


def time_calls(run: Callable[[], Any], warmup: int, iterations: int) -> list[float]:
    """Milliseconds of each of `iterations` calls, back to back, after `warmup` calls. Caches are not flushed."""
    for _ in range(warmup):
        run()
    watch = Stopwatch()
    for _ in range(iterations):
        watch.mark("call")
        run()
        watch.mark("pause")
    return [ms for name, ms in watch.take() if name == "call"]


def time_behind_work(run: Callable[[], Any], iterations: int) -> list[float]:
    """Milliseconds of each call on a GPU that is busy while the host launches the call's kernels, as in training.
    Call it after a warm-up."""
    watch = Stopwatch()
    for _ in range(iterations):
        torch.cuda._sleep(BUSY_CYCLES)
        watch.mark("call")
        run()
        watch.mark("pause")
        torch.cuda.synchronize()
    return [ms for name, ms in watch.take() if name == "call"]


def peak_bytes(run: Callable[[], Any]) -> int | None:
    """Peak memory during one call, including its results; None on CPU, where torch does not count it."""
    if mkd.cpu.is_active():
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result = run()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated()


@dataclass
class Report:
    """The rows measured so far; each is logged to stderr and written to the file as soon as it is measured."""

    head: dict[str, Any]
    """Fields of the JSON file that are common to all rows."""
    file: Path | None
    is_writer: bool
    """True on the rank that logs and writes the file."""
    total: int
    rows: list[Row] = field(default_factory=list)
    _started: float = field(default_factory=time.monotonic)

    def attempt(self, about: Row, work: Callable[[], Row]) -> Row:
        """Add the row `about` with the figures that `work` returns, or with the reason of its failure."""
        name = " | ".join(str(value) for value in about.values())
        self.log(f"row {len(self.rows) + 1} of {self.total}: {name}")
        try:
            figures = work()
        except Exception as error:  # any error of another package; the other rows are still measured
            figures = {"failed": reason_of(error)}
        # Not in the handler, where the error still references the tensors of its frames.
        free_memory()
        if _on_any_rank("failed" in figures) and "failed" not in figures:
            figures = {"failed": "on another rank"}
        row = {**about, **figures}
        self.rows.append(row)
        self.log(f"  {row['failed']}" if "failed" in row else f"  {row['ms']:.2f} ms")
        self.write()
        return row

    def log(self, text: str) -> None:
        """Print a line to stderr with the elapsed time."""
        if self.is_writer:
            print(f"[{time.monotonic() - self._started:7.1f} s] {text}", file=sys.stderr, flush=True)

    def write(self) -> None:
        if self.is_writer and self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps({**self.head, "rows": self.rows}, indent=1) + "\n")


def reason_of(error: Exception) -> str:
    """One short line that describes an error."""
    text = " ".join(str(error).split())
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"package {error.name.split('.')[0]} is missing"
    return f"{type(error).__name__}: {text}"[:REASON_LENGTH].replace("|", "/")


def free_memory() -> None:
    """Free what the previous row left: compiled code, reference cycles, cached blocks."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def _on_any_rank(flag: bool) -> bool:
    if dist.get_world_size() == 1:
        return flag
    seen = torch.tensor([float(flag)], device="cuda")
    dist.all_reduce(seen, op=dist.ReduceOp.MAX)
    return bool(seen.item())


def largest_on_any_rank(value: float) -> float:
    """The maximum over all ranks. Collective."""
    if dist.get_world_size() == 1:
        return value
    seen = torch.tensor([value], device="cuda", dtype=torch.float64)
    dist.all_reduce(seen, op=dist.ReduceOp.MAX)
    return seen.item()


def header(tool: str, args: argparse.Namespace) -> dict[str, Any]:
    """Card, versions, commit and flags of a measurement."""
    return {
        "tool": tool,
        "card": torch.cuda.get_device_name(),
        "ranks": dist.get_world_size(),
        "commit": args.commit or commit_of_checkout(),
        "versions": installed_versions(),
        "cuda": torch.version.cuda,
        "flags": {name: str(value) for name, value in vars(args).items() if name != "commit"},
    }


def title(head: dict[str, Any], shape: str) -> str:
    """Caption of a table."""
    versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items() if version)
    return f"{head['ranks']} x {head['card']}, {shape}; commit {head['commit']}, {versions}"


def installed_versions() -> dict[str, str | None]:
    """Package -> version; None for one that is not installed."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def commit_of_checkout() -> str:
    """Abbreviated hash of the checkout, with a + if files differ from it; "unknown" outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def add_common_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags common to the benchmarks."""
    parser.add_argument("--warmup", type=int, default=5, metavar="N", help="calls before the timed calls (default: 5)")
    parser.add_argument("--iterations", type=int, default=20, metavar="N", help="timed calls; the median is reported")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here, after each measurement")
    parser.add_argument("--commit", metavar="TEXT", help="the measured commit, if this is not a git checkout")
    parser.add_argument("--seed", type=int, default=1234)


MASKS = ("random", "contiguous")
"""Kinds of `supervised_mask`."""


def add_supervised_flag(parser: argparse.ArgumentParser) -> None:
    """Add --supervised."""
    parser.add_argument(
        "--supervised",
        type=_fraction,
        default=1.0,
        metavar="FRACTION",
        help="also measure mkd with this fraction of the tokens supervised, at random positions and in one run per row "
        "(default: 1.0, all tokens only)",
    )


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0 and at most 1")
    return value


def supervised_mask(kind: str, fraction: float, rows: int, length: int) -> torch.Tensor:
    """[rows, length] fp32 mask of 0 and 1, on the host.

    Args:
        kind: random positions in all rows, or contiguous: the last tokens of each row, an answer after its prompt.
        fraction: share of the tokens with 1.
        rows, length: its shape.
    """
    mask = torch.zeros(rows, length)
    if kind == "random":
        generator = torch.Generator().manual_seed(0)
        mask.view(-1)[torch.randperm(rows * length, generator=generator)[: round(fraction * rows * length)]] = 1.0
    else:
        mask[:, length - round(fraction * length) :] = 1.0
    return mask


def supervised_columns(rows: Sequence["Row"], figures: Sequence[tuple[str, str]]) -> list[tuple[str, Callable]]:
    """Columns of a table in which rows with `tokens` are compared with the row of all tokens with the same name and
    loss.

    Args:
        rows: all rows.
        figures: (title, figure).
    """
    every = {(row["name"], row["loss"]): row for row in rows if row.get("tokens") == "all"}

    def ratio(figure: str) -> Callable[["Row"], str]:
        return lambda row: f"{row[figure] / every[row['name'], row['loss']][figure]:.3f}" if row[figure] else ""

    return [("tokens", lambda row: row["tokens"]), *((f"{title} / all", ratio(figure)) for title, figure in figures)]


def names(text: str) -> list[str]:
    """Argument type of a comma-separated list."""
    return [name for name in text.split(",") if name]


def markdown(columns: Sequence[tuple[str, Callable[[Row], str]]], rows: Sequence[Row]) -> str:
    """A markdown table. A row that failed has the reason in place of its first figure.

    Args:
        columns: (title, function from a row to its text, which raises KeyError if the row has no such figure).
        rows: table rows.
    """
    lines = [[title for title, _ in columns], ["---"] * len(columns)]
    for row in rows:
        cells, reported = [], "failed" not in row
        for _, text in columns:
            try:
                cells.append(text(row))
            except KeyError:
                cells.append("" if reported else f"not measured: {row['failed']}")
                reported = True
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def number(row: Row, key: str, form: str) -> str:
    """A figure as text; "-" if it is None. Raises KeyError if the row does not have it."""
    return "-" if row[key] is None else format(row[key], form)
