"""Measure the teacher's forward passes over the microbatches of a step: sizes of passes, and CUDA graphs.

    python benchmarks/bench_teacher.py --json teacher.json
    python benchmarks/bench_teacher.py --small

Teachers with the shapes of Llama-3.1-8B (4 microbatches of 1 x 4096 tokens) and Llama-3.2-1B (16 of 1 x 512), random
weights, in bf16 and in FP8. Each is measured with passes of 1, 2, 4, ... microbatches, launched one by one and as CUDA
graphs. Columns: milliseconds per step, those until the host has launched everything, peak memory above the weights, the
difference of the hidden states from those of one pass per microbatch (norm-relative) and, with graphs, whether they
equal those without to the last bit; and whether anything waits for the device (torch.cuda.set_sync_debug_mode). The
rows "own layout" send hidden states as a teacher in a layout of its own does, on one rank.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import batched
from pathlib import Path
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mkd.cpu

if mkd.cpu.wanted():
    mkd.cpu.activate()  # before anything imports megatron

import torch
from bench_common import (
    GIB,
    Report,
    Row,
    add_common_flags,
    free_memory,
    header,
    markdown,
    number,
    quiet,
    tensor_parallel_ranks,
    title,
)
from bench_models import Sizes, model_arguments
from torch import Tensor

from mkd.config.megatron.fp8_teacher import compute_in_fp8
from mkd.data.batch import KDBatch
from mkd.data.lookahead import Lookahead
from mkd.data.microbatches import next_microbatches
from mkd.distributed.groups import Groups, ParallelLayout, ParallelSizes
from mkd.models.gpt import gpt_config
from mkd.teacher.captured_forward import CapturedForward
from mkd.teacher.forward_pass import PassSize
from mkd.teacher.online import ForwardOptions, OnlineTeacher
from mkd.teacher.resharded.teacher import ReshardedTeacher


class Case(NamedTuple):
    """A teacher and the microbatches of its step, one row each."""

    name: str
    sizes: Sizes
    fp8: bool
    seq_length: int
    microbatches: int
    own_layout: bool = False


LLAMA_8B, LLAMA_1B = Sizes(32, 4096, 14336, 32, 8, False, 8.0), Sizes(16, 2048, 8192, 32, 8, True, 32.0)
TINY = Sizes(2, 64, 96, 4, 2, False, 8.0)
FULL = (
    Case("1B", LLAMA_1B, False, 512, 16),
    Case("1B, FP8", LLAMA_1B, True, 512, 16),
    Case("8B, FP8", LLAMA_8B, True, 4096, 4),
    Case("8B", LLAMA_8B, False, 4096, 4),
    Case("1B, own layout", LLAMA_1B, False, 512, 16, own_layout=True),
)
SMALL = (Case("tiny", TINY, False, 16, 4), Case("tiny, own layout", TINY, False, 16, 4, own_layout=True))


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=128256, help="(default: 128256)")
    parser.add_argument("--small", action="store_true", help="a tiny teacher, for a CPU")
    add_common_flags(parser)
    args = parser.parse_args(argv)
    args.dtype, args.samples, args.vocab = "fp32" if args.small else "bf16", 1, 256 if args.small else args.vocab
    return args


@contextmanager
def built(case: Case, args: argparse.Namespace, groups: Groups) -> Iterator[tuple[OnlineTeacher, list[KDBatch]]]:
    """The teacher of a case, and the microbatches of its step on the device."""
    args.seq_length = case.seq_length
    sizes = model_arguments(case.sizes, args)
    if case.fp8:
        compute_in_fp8(sizes)
    config, shape = gpt_config(sizes), (1, case.seq_length)
    if case.own_layout:
        teacher: OnlineTeacher = ReshardedTeacher.build_in(
            ParallelLayout.create(ParallelSizes()),
            config,
            groups,
            lambda chunks: None,
            fingerprint="",
            head_columns=torch.arange(args.vocab),
            student_sequence_parallel=False,
        )
    else:
        teacher = OnlineTeacher.build(config, groups, load_weights=lambda chunks: None, fingerprint="")
    generator = torch.Generator().manual_seed(args.seed)
    samples = [
        {
            **{name: torch.randint(0, args.vocab, shape, generator=generator) for name in ("tokens", "labels")},
            "loss_mask": torch.ones(shape),
            "position_ids": torch.arange(case.seq_length).expand(shape),
        }
        for _ in range(case.microbatches)
    ]
    batches = teacher.prepare(next_microbatches(iter(samples), len(samples), args.vocab), Lookahead.empty())
    yield teacher, [batch.on_rank(groups.cp) for batch in batches]


def with_options(teacher: OnlineTeacher, options: ForwardOptions) -> OnlineTeacher:
    """The same model with other options."""
    other = copy(teacher)
    other._options = options
    other._captured = CapturedForward(other.model, other._compute) if options.captures else None
    return other


def run_step(teacher: OnlineTeacher, batches: Sequence[KDBatch], together: int) -> list[Tensor]:
    """Hidden states of all microbatches; those of a pass are computed by one call, as in training."""
    count = len(batches) if isinstance(teacher, ReshardedTeacher) else together
    return [signal.hidden for some in batched(batches, count) for signal in teacher.signals(list(some))]


def measure(teacher: OnlineTeacher, batches: Sequence[KDBatch], together: int, args: argparse.Namespace) -> Row:
    """Times and memory of a step."""

    def step() -> None:
        run_step(teacher, batches, together)

    for _ in range(args.warmup):
        step()
    times, launches = [], []
    for _ in range(args.iterations):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        launches.append((time.perf_counter() - began) * 1e3)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return {
        "ms": median(times),
        "launched_ms": median(launches),
        "reserved_gib": torch.cuda.memory_reserved() / GIB,
        "extra_gib": (torch.cuda.max_memory_allocated() - before) / GIB,
        "waits": waits(step),
    }


def waits(step: Callable[[], None]) -> str:
    """The first wait for the device in a step: "none", or the error; empty on a CPU."""
    if mkd.cpu.is_active():
        return ""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "none"


def measure_case(case: Case, args: argparse.Namespace, groups: Groups, report: Report) -> None:
    """All rows of a teacher."""
    with built(case, args, groups) as (teacher, batches):
        first: list[Tensor] = []
        for together in sizes_of_passes(case):
            plain: list[Tensor] = []
            for captures in (False,) if mkd.cpu.is_active() else (False, True):
                size = PassSize(together, case.seq_length)
                other = with_options(teacher, ForwardOptions(size, captures))

                def work(other: OnlineTeacher = other, together: int = together, plain: list = plain) -> Row:
                    row = measure(other, batches, together, args)
                    seen = torch.stack(run_step(other, batches, together)).float()
                    if not first:
                        first.append(seen)
                    row["difference"] = ((seen - first[0]).norm() / first[0].norm()).item()
                    row["equal"] = torch.equal(seen, plain[0]) if plain else ""
                    plain.append(seen)
                    return row

                tokens = f"{case.microbatches} x {case.seq_length}"
                about = {"teacher": case.name, "tokens": tokens, "together": together, "graph": captures}
                report.attempt(about, work)
                del other
    free_memory()


def failure(error: Exception) -> Callable[[], Row]:
    """The row of a teacher that could not be built."""

    def fail() -> Row:
        raise error

    return fail


def sizes_of_passes(case: Case) -> list[int]:
    """Microbatches of a pass: 1, 2, 4 and all."""
    return sorted({size for size in (1, 2, 4, case.microbatches) if size <= case.microbatches})


def table(rows: list[Row]) -> str:
    """The rows in markdown."""
    one = {
        row["teacher"]: row["ms"] for row in reversed(rows) if row["together"] == 1 and not row["graph"] and "ms" in row
    }
    columns = [
        ("teacher", lambda row: row["teacher"]),
        ("microbatches x tokens", lambda row: row["tokens"]),
        ("joined", lambda row: str(row["together"])),
        ("CUDA graph", lambda row: "yes" if row["graph"] else "no"),
        ("ms per step", lambda row: number(row, "ms", ".2f")),
        ("/ one by one", lambda row: f"{row['ms'] / one[row['teacher']]:.2f}"),
        ("launched ms", lambda row: number(row, "launched_ms", ".2f")),
        ("extra GiB", lambda row: number(row, "extra_gib", ".2f")),
        ("reserved GiB", lambda row: number(row, "reserved_gib", ".2f")),
        ("difference", lambda row: number(row, "difference", ".1e")),
        ("equal to no graph", lambda row: str(row["equal"])),
        ("waits", lambda row: row["waits"]),
    ]
    return markdown(columns, rows)


def run(args: argparse.Namespace) -> tuple[Report, str]:
    """Measure all rows; returns the report and its printed text."""
    cases = SMALL if args.small else FULL
    with tensor_parallel_ranks(args.seed):
        head = header("bench_teacher", args)
        per_size = 1 if mkd.cpu.is_active() else 2
        total = per_size * sum(len(sizes_of_passes(case)) for case in cases)
        report = Report(head, args.json, is_writer=True, total=total)
        groups = Groups.from_megatron()
        for case in cases:
            torch.manual_seed(args.seed)
            try:
                measure_case(case, args, groups, report)
            except Exception as error:  # the other teachers are still measured
                report.attempt({"teacher": case.name, "tokens": "", "together": 0, "graph": False}, failure(error))
        return report, f"{title(head, f'V={args.vocab}')}\n\n{table(report.rows)}"


def main(argv: list[str] | None = None) -> int:
    """Run the tool."""
    args = parse_arguments(argv)
    with quiet():
        _, text = run(args)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
