"""Compare whole distillation steps, forward and backward without the optimizer: time, its parts, and memory.

    python benchmarks/bench_step.py --json step.json
    python benchmarks/bench_step.py --small

By default a teacher with the shape of Llama-3.1-8B, a student with the shape of Llama-3.2-1B, 2 x 4096 tokens, bf16,
random weights. An implementation whose package is missing or that fails is listed with the reason. The table is printed
to stdout, progress to stderr. benchmarks/bench_models.py describes what each implementation computes.
"""

import argparse
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mkd.cpu

if mkd.cpu.wanted():
    mkd.cpu.activate()  # before anything imports megatron

import torch
from bench_common import (
    DTYPES,
    GIB,
    Report,
    Row,
    Stopwatch,
    add_common_flags,
    add_supervised_flag,
    free_memory,
    header,
    markdown,
    names,
    number,
    peak_bytes,
    quiet,
    supervised_columns,
    tensor_parallel_ranks,
    title,
)
from bench_heads import CE_ONLY, Objective, kd_only, with_ce
from bench_models import (
    BACKWARD,
    HEADS,
    STUDENT_LAYERS,
    SUPERVISED,
    TEACHER_LAYERS,
    HuggingFaceModels,
    MegatronModels,
    Sizes,
    Step,
    cached_rows,
    liger_chunked_jsd,
    liger_fused_jsd,
    our_rows,
)

from mkd.config.loss_spec import Divergence

FULL = {"teacher": Sizes(32, 4096, 14336, 32, 8, False, 8.0), "student": Sizes(16, 2048, 8192, 32, 8, True, 32.0)}
SMALL = {"teacher": Sizes(2, 64, 96, 4, 2, False, 8.0), "student": Sizes(2, 32, 48, 4, 2, True, 32.0)}
SIZE_FLAGS = ("layers", "width", "ffn", "heads", "groups")
COMPETITORS = ["ours", "fp8", "cached", "mcore", "modelopt", "hf", "liger"]
PARTS = (TEACHER_LAYERS, STUDENT_LAYERS, BACKWARD, HEADS)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; `teacher` and `student` in the result are `Sizes`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for model, sizes in FULL.items():
        for name in SIZE_FLAGS:
            parser.add_argument(f"--{model}-{name}", type=int, help=f"(default: {getattr(sizes, name)})")
    parser.add_argument("--samples", type=int, help="samples per microbatch (default: 2)")
    parser.add_argument("--seq-length", type=int, help="tokens per sample (default: 4096)")
    parser.add_argument("--vocab", type=int, help="(default: 128256)")
    parser.add_argument("--small", action="store_true", help="use small default sizes, for a CPU")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bf16", help="dtype of weights and activations (default: bf16)"
    )
    parser.add_argument("--chunk-rows", type=int, metavar="N", help="ours: tokens per loss chunk")
    parser.add_argument(
        "--losses",
        type=names,
        default=["forward_kl", "jsd"],
        metavar="A,B",
        help="divergences, ours only (default: forward_kl,jsd)",
    )
    parser.add_argument(
        "--rows-of",
        type=names,
        default=COMPETITORS,
        metavar="A,B",
        help=f"implementations, out of {','.join(COMPETITORS)} (default: all)",
    )
    add_supervised_flag(parser)
    add_common_flags(parser)
    args = parser.parse_args(argv)
    for flag, given, legal in (
        ("--losses", args.losses, get_args(Divergence)),
        ("--rows-of", args.rows_of, COMPETITORS),
    ):
        if unknown := set(given) - set(legal):
            parser.error(f"{flag}: {', '.join(sorted(unknown))} is not one of {', '.join(legal)}")
    shape = {"samples": 2, "seq_length": 16, "vocab": 256} if args.small else {}
    for name, value in ({"samples": 2, "seq_length": 4096, "vocab": 128256} | shape).items():
        setattr(args, name, getattr(args, name) or value)
    for model, sizes in (SMALL if args.small else FULL).items():
        given = {name: getattr(args, f"{model}_{name}") for name in SIZE_FLAGS}
        setattr(args, model, sizes._replace(**{name: value for name, value in given.items() if value}))
    return args


class Family(NamedTuple):
    """Table rows that share one pair of models."""

    build: Callable[[], AbstractContextManager]
    rows: list[tuple[str, Objective, Callable[[Any], Step]]]
    """Name, objective, and the step from the models."""


def families(args: argparse.Namespace, watch: Stopwatch) -> list[Family]:
    """All selected table rows."""
    forward_kl = kd_only("forward_kl")
    fused = [
        (f"megatron-core, teacher's logits unused, {kind} CE", CE_ONLY, lambda models, kind=kind: models.fused_ce(kind))
        for kind in ("te", "native")
    ]
    eager = ("megatron-core, eager KL", forward_kl, lambda models: models.eager(forward_kl))
    megatron_rows = {
        "ours": our_rows(args.losses, supervised=args.supervised),
        "mcore": [*fused, eager],
        "modelopt": [("megatron-core, Model-Optimizer KL", forward_kl, MegatronModels.model_optimizer)],
    }
    liger_rows = [
        ("HF, Liger layers, Liger chunked JSD + CE", with_ce("jsd"), lambda models: models.liger(liger_chunked_jsd)),
        ("HF, Liger layers, Liger fused-linear JSD", kd_only("jsd"), lambda models: models.liger(liger_fused_jsd)),
    ]
    plain = [("HF, eager KL", forward_kl, lambda models: models.eager(forward_kl))]
    hugging_face = partial(HuggingFaceModels.built, args, watch)
    every = [
        Family(
            partial(MegatronModels.built, args, watch),
            [row for name, rows in megatron_rows.items() if name in args.rows_of for row in rows],
        ),
        Family(
            partial(MegatronModels.built, args, watch, fp8=True),
            our_rows(args.losses, "mkd, FP8 teacher") if "fp8" in args.rows_of else [],
        ),
        Family(
            partial(MegatronModels.built, args, watch, with_teacher=False),
            cached_rows(args.losses) if "cached" in args.rows_of else [],
        ),
        Family(partial(hugging_face, liger_layers=False), plain if "hf" in args.rows_of else []),
        Family(partial(hugging_face, liger_layers=True), liger_rows if "liger" in args.rows_of else []),
    ]
    return [family for family in every if family.rows]


def time_steps(step: Step, watch: Stopwatch, warmup: int, iterations: int) -> list[dict[str, float]]:
    """Milliseconds of each part of each timed step; their sum is the step. Everything before the teacher's layers is
    "begin"."""
    for count in (warmup, iterations):
        watch.take()
        for _ in range(count):
            step.prepare()
            watch.mark("begin")
            step.run()
            watch.mark("between steps")
    steps: list[dict[str, float]] = [{}]
    for name, ms in watch.take():
        if name == "between steps":
            steps.append({})
        else:
            steps[-1][name] = steps[-1].get(name, 0.0) + ms
    return steps


def measure(step: Step, watch: Stopwatch, args: argparse.Namespace) -> Row:
    """Figures of one table row."""
    steps = time_steps(step, watch, args.warmup, args.iterations)
    totals = [sum(parts.values()) for parts in steps]
    ms = median(totals)
    step.prepare()
    peak = peak_bytes(step.run)
    parts_ms = {name: median(parts.get(name, 0.0) for parts in steps) for name in PARTS}
    return {
        "ms": ms,
        "ms_all": totals,
        "peak_gib": None if peak is None else peak / GIB,
        "tokens_per_s": args.samples * args.seq_length / ms * 1e3,
        "parts_ms": parts_ms,
        "heads_ms": parts_ms[HEADS],
    }


def measure_family(family: Family, report: Report, watch: Stopwatch, args: argparse.Namespace) -> None:
    """Build the models at the first row, measure all rows, and free the models."""
    with ExitStack() as stack:
        built: list[Any] = []

        def work(make: Callable[[Any], Step]) -> Row:
            if not built:
                built.append(stack.enter_context(family.build()))
            return measure(make(built[0]), watch, args)

        for name, objective, make in family.rows:
            shown, _, tokens = name.partition(SUPERVISED)
            report.attempt({"name": shown, "loss": str(objective), "tokens": tokens or "all"}, partial(work, make))
        built.clear()
    free_memory()


def table(rows: list[Row]) -> str:
    """The rows in markdown."""

    def part(name: str) -> Callable[[Row], str]:
        return lambda row: format(row["parts_ms"][name], ".1f")

    columns = [
        ("implementation", lambda row: row["name"]),
        ("loss", lambda row: row["loss"]),
        ("ms per step", lambda row: number(row, "ms", ".1f")),
        ("peak GiB", lambda row: number(row, "peak_gib", ".1f")),
        ("tokens/s", lambda row: number(row, "tokens_per_s", ",.0f")),
        *((f"{name} ms", part(name)) for name in PARTS),
    ]
    if any(row["tokens"] != "all" for row in rows):
        columns[2:2] = supervised_columns(rows, [("ms", "ms"), ("heads and loss", "heads_ms"), ("peak", "peak_gib")])
    return markdown(columns, rows)


def run(args: argparse.Namespace) -> tuple[Report, str]:
    """Measure all rows; returns the report and its printed text."""
    with tensor_parallel_ranks(args.seed) as group:
        if group.size() > 1:
            raise SystemExit("bench_step measures one device: start it as a single process")
        torch.manual_seed(args.seed)
        watch = Stopwatch()
        wanted = families(args, watch)
        head = header("bench_step", args)
        report = Report(head, args.json, is_writer=True, total=sum(len(family.rows) for family in wanted))
        for family in wanted:
            measure_family(family, report, watch, args)
        shape = f"teacher {_text(args.teacher)}, student {_text(args.student)}, V={args.vocab}, "
        shape += f"{args.samples} x {args.seq_length} tokens, {args.dtype}"
        return report, f"{title(head, shape)}\n\n{table(report.rows)}"


def _text(sizes: Sizes) -> str:
    return f"{sizes.layers} layers x {sizes.width}"


def main(argv: list[str] | None = None) -> int:
    """Run the tool."""
    args = parse_arguments(argv)
    with quiet():
        _, text = run(args)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
