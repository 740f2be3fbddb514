"""Compare cross-tokenizer losses with that of one tokenizer, from hidden states, forward and backward: time and memory.

    python benchmarks/bench_xtoken.py --json xtoken.json
    python benchmarks/bench_xtoken.py --kinds p_kl,gold --impl auto,eager --check --profile 15
    torchrun --nproc-per-node 2 benchmarks/bench_xtoken.py
    python benchmarks/bench_xtoken.py --smoke

Each table row computes half cross-entropy and half a divergence, the gradient of the student's hidden states, and that
of its LM head in an fp32 buffer. The text is random: --single percent of the text chunks have one token in both views,
the others 1 to 4 in either. With torchrun the vocabularies are sharded over all ranks. The table is printed to stdout,
progress to stderr.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mkd.cpu

if mkd.cpu.wanted():
    mkd.cpu.activate()  # before anything imports megatron

import torch
import torch.distributed as dist
from bench_common import (
    DTYPES,
    GIB,
    Report,
    Row,
    add_common_flags,
    free_memory,
    header,
    largest_on_any_rank,
    markdown,
    names,
    number,
    peak_bytes,
    quiet,
    tensor_parallel_ranks,
    time_behind_work,
    time_calls,
    title,
)
from torch import Tensor

from mkd.config.loss_spec import Divergence, LossSpec
from mkd.config.values import LossImplementation, XTokenLoss
from mkd.losses import LinearLogits, LossOptions, TokenWeights, VocabLayout, fused_linear_loss
from mkd.xtoken.loss.chunks import HostTokens, TokenChunks
from mkd.xtoken.loss.xtoken_loss import xtoken_loss
from mkd.xtoken.vocabulary.cross_vocabulary import CrossVocabulary

SMOKE = {
    "rows": 64,
    "student_width": 16,
    "teacher_width": 24,
    "student_vocab": 61,
    "teacher_vocab": 73,
    "common": 40,
    "dtype": "fp32",
    "warmup": 1,
    "iterations": 1,
}
LARGEST_ERROR = 1e-2
"""Norm-relative difference of gradients between two implementations that round them to bf16. gold's sorted
probabilities have many equal ones with bf16 logits, and either of two may have a sign."""
MOST_TOKENS = 4
"""Largest number of tokens of a text chunk in either view."""


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096, metavar="N", help="tokens of each model (default: 4096)")
    parser.add_argument("--student-width", type=int, default=2048, metavar="H", help="hidden size (default: 2048)")
    parser.add_argument("--teacher-width", type=int, default=4096, metavar="H", help="hidden size (default: 4096)")
    parser.add_argument("--student-vocab", type=int, default=128256, metavar="V", help="(default: 128256)")
    parser.add_argument("--teacher-vocab", type=int, default=151936, metavar="V", help="(default: 151936)")
    parser.add_argument(
        "--common", type=int, default=100000, metavar="N", help="tokens in both vocabularies (default: 100000)"
    )
    parser.add_argument(
        "--single",
        type=float,
        default=80.0,
        metavar="PERCENT",
        help="text chunks with one token in both views (default: 80)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="dtype of hidden states and weights")
    parser.add_argument("--kinds", type=names, default=list(get_args(XTokenLoss)), metavar="A,B", help="(default: all)")
    parser.add_argument("--losses", type=names, default=["forward_kl", "jsd"], metavar="A,B", help="divergences")
    parser.add_argument(
        "--impl", type=names, default=["auto"], metavar="A,B", help="auto, eager or triton (default: auto)"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare loss and gradients of the losses between tokenizers with those of eager torch; fails above "
        f"{LARGEST_ERROR:g}",
    )
    parser.add_argument(
        "--profile", type=int, metavar="N", help="print the N operations that take the GPU longest, for each row"
    )
    parser.add_argument("--chunk-rows", type=int, metavar="N", help="tokens per loss chunk")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, a smoke test that also runs on a CPU")
    add_common_flags(parser)
    parser.set_defaults(warmup=2, iterations=7)
    args = parser.parse_args(argv)
    if args.smoke:
        vars(args).update(SMOKE)
    for flag, given, legal in (
        ("--kinds", args.kinds, get_args(XTokenLoss)),
        ("--losses", args.losses, get_args(Divergence)),
        ("--impl", args.impl, get_args(LossImplementation)),
    ):
        if unknown := set(given) - set(legal):
            parser.error(f"{flag}: {', '.join(sorted(unknown))} is not one of {', '.join(legal)}")
    if not 0 < args.common <= min(args.student_vocab, args.teacher_vocab):
        parser.error("--common must be above 0 and at most the smaller vocabulary")
    return args


@dataclass(frozen=True)
class Inputs:
    """Both models and a text, equal on all ranks; LM heads are not sharded."""

    hidden: Tensor
    weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    labels: Tensor
    chunks: TokenChunks
    ids: Tensor
    shares: Tensor
    pairs: Tensor
    group: dist.ProcessGroup

    @classmethod
    def random(cls, args: argparse.Namespace, group: dist.ProcessGroup) -> "Inputs":
        """Random inputs, with logits of standard deviation 2."""
        dtype, size = DTYPES[args.dtype], group.size()

        def model(width: int, vocab: int) -> tuple[Tensor, Tensor]:
            padded = vocab + -vocab % size
            hidden, weight = (torch.randn(n, width, device="cuda", dtype=torch.float32) for n in (args.rows, padded))
            return hidden.to(dtype), (weight * (2.0 / width**0.5)).to(dtype)

        vocabularies = args.student_vocab, args.teacher_vocab
        pairs = torch.stack([torch.randperm(v, device="cpu")[: args.common] for v in vocabularies], dim=1)
        labels, chunks = _text(args, pairs)
        ids = torch.randint(0, args.teacher_vocab, (args.student_vocab, 3), device="cpu")
        shares = torch.tensor([0.9, 0.09, 0.01], device="cpu").repeat(args.student_vocab, 1)
        ids[pairs[:, 0]] = torch.nn.functional.pad(pairs[:, 1:], (0, 2), value=-1)
        shares[pairs[:, 0]] = torch.tensor([1.0, 0.0, 0.0], device="cpu")
        (hidden, weight), teacher = (
            model(*s) for s in zip((args.student_width, args.teacher_width), vocabularies, strict=True)
        )
        return cls(hidden, weight, *teacher, labels.cuda(), chunks, ids, shares, pairs, group)

    @property
    def sharded_weight(self) -> Tensor:
        """This rank's vocabulary shard of the student's LM head, with an fp32 gradient buffer."""
        weight = self.weight.chunk(self.group.size())[self.group.rank()].detach().clone().requires_grad_()
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        return weight


def _text(args: argparse.Namespace, pairs: Tensor) -> tuple[Tensor, TokenChunks]:
    """(student labels, text chunks) on the host; chunks of one token are pairs of common tokens."""
    many = torch.rand(args.rows, 1, device="cpu") >= args.single / 100
    sizes = torch.where(many, torch.randint(1, MOST_TOKENS + 1, (args.rows, 2), device="cpu"), 1)
    fits = (sizes.cumsum(0) <= args.rows).all(dim=1)
    sizes = sizes[fits]
    numbers = torch.arange(len(sizes), device="cpu")
    views = []
    for view, vocab in enumerate((args.student_vocab, args.teacher_vocab)):
        chunk = torch.nn.functional.pad(numbers.repeat_interleave(sizes[:, view]), (0, args.rows), value=-1)[
            : args.rows
        ]
        first = torch.nn.functional.pad(chunk[:-1], (1, 0), value=-1) != chunk
        labels = torch.randint(0, vocab, (args.rows,), device="cpu")
        single = (chunk >= 0) & (sizes == 1).all(dim=1)[chunk]
        labels[single] = pairs[chunk[single] % len(pairs), view]
        views.append((labels, chunk, first & (chunk >= 0)))
    (labels, student, student_first), (teacher_labels, teacher, teacher_first) = views
    weight = torch.full((len(sizes),), 0.5 / len(sizes), device="cpu")
    return labels, TokenChunks(student, student_first, teacher, teacher_first, teacher_labels, weight)


@dataclass(frozen=True)
class Call:
    """A loss with its backward pass."""

    run: Callable[[], tuple[Tensor, Tensor]]
    """Returns the loss and the gradient of the hidden states; that of the LM head is added to `main_grad`."""
    main_grad: Tensor


def across_tokenizers(inputs: Inputs, kind: str, loss: str, impl: str, args: argparse.Namespace) -> Call:
    """A call of `xtoken_loss`."""
    weight, hidden, group = inputs.sharded_weight, inputs.hidden.detach().requires_grad_(), inputs.group
    vocabulary = CrossVocabulary.of(
        kind,
        inputs.ids,
        inputs.shares,
        inputs.pairs,
        student_vocab=args.student_vocab,
        teacher_vocab=args.teacher_vocab,
        student_width=len(weight),
        rank=group.rank(),
        size=group.size(),
        device="cuda",
    )
    teacher_weight = inputs.teacher_weight[vocabulary.teacher_columns]
    ce_weight = torch.full((args.rows,), 0.5 / args.rows, device="cuda")
    # On the device, as in training: a copy from the host within the call would wait for the device.
    chunks = replace(
        inputs.chunks, teacher_labels=inputs.chunks.teacher_labels.cuda(), weight=inputs.chunks.weight.cuda()
    )
    chunks = replace(chunks, on_host=HostTokens.copied(chunks, inputs.labels, ce_weight))

    def run() -> tuple[Tensor, Tensor]:
        output = xtoken_loss(
            LinearLogits(hidden, weight),
            LinearLogits(inputs.teacher_hidden, teacher_weight),
            TokenWeights(inputs.labels, ce_weight, None),
            chunks,
            vocabulary=vocabulary,
            spec=LossSpec(divergence=loss),
            vocab=VocabLayout(args.student_vocab, group),
            options=LossOptions(chunk_rows=args.chunk_rows, impl=impl),
            upstream=1.0,
        )
        return output.loss.detach(), *torch.autograd.grad(output.loss, hidden)

    return Call(run, weight.main_grad)


def one_tokenizer(inputs: Inputs, loss: str, impl: str, args: argparse.Namespace) -> Call:
    """A call of `fused_linear_loss` with a teacher of the student's vocabulary."""
    weight, hidden, group = inputs.sharded_weight, inputs.hidden.detach().requires_grad_(), inputs.group
    whole = inputs.teacher_weight[torch.arange(len(inputs.weight), device="cuda") % len(inputs.teacher_weight)]
    teacher_weight = whole.chunk(group.size())[group.rank()].contiguous()
    row_weight = torch.full((args.rows,), 0.5 / args.rows, device="cuda")

    def run() -> tuple[Tensor, Tensor]:
        output = fused_linear_loss(
            hidden,
            weight,
            inputs.teacher_hidden,
            teacher_weight,
            inputs.labels,
            row_weight,
            row_weight,
            spec=LossSpec(divergence=loss),
            true_vocab=args.student_vocab,
            tp_group=group,
            chunk_rows=args.chunk_rows,
            impl=impl,
            upstream=1.0,
        )
        return output.loss.detach(), *torch.autograd.grad(output.loss, hidden)

    return Call(run, weight.main_grad)


def first_call(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, gradient of the hidden states, gradient of the LM head) of one call."""
    call.main_grad.zero_()
    loss, d_hidden = call.run()
    return loss, d_hidden, call.main_grad.clone()


def check(call: Call, eager: Call) -> float:
    """The largest difference of loss and gradients, relative to the norm. Raises ValueError above `LARGEST_ERROR`."""
    seen, wanted = first_call(call), first_call(eager)
    errors = [
        largest_on_any_rank(((a - b).double().norm() / b.double().norm().clamp_min(1e-30)).item())
        for a, b in zip(seen, wanted, strict=True)
    ]
    text = ", ".join(
        f"{name} {error:.1e}" for name, error in zip(("loss", "d_hidden", "d_weight"), errors, strict=True)
    )
    print(f"difference to eager: {text}", file=sys.stderr)
    if not max(errors) <= LARGEST_ERROR:
        raise ValueError(f"differs from eager torch: {text}")
    return max(errors)


def profile(call: Call, count: int) -> str:
    """The operations that take the GPU longest in one call."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if not mkd.cpu.is_active():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as seen:
        call.run()
        torch.cuda.synchronize()
    events = [e for e in seen.key_averages() if e.device_type != torch.autograd.DeviceType.CPU] or seen.key_averages()
    events = sorted(events, key=lambda e: -(e.self_device_time_total or e.self_cpu_time_total))
    lines = [
        f"{(e.self_device_time_total or e.self_cpu_time_total) / 1e3:9.3f} ms {e.count:6d} x  {e.key[:110]}"
        for e in events[:count]
    ]
    total = sum(e.self_device_time_total for e in events) / 1e3
    return "\n".join([*lines, f"{total:9.3f} ms on the GPU, {sum(e.count for e in events)} operations"])


def measure(build: Callable[[], Call], args: argparse.Namespace, eager: Callable[[], Call] | None = None) -> Row:
    """Figures of one table row; with `eager`, compared with it. Raises ValueError for a gradient that is not finite."""
    call = build()
    loss, d_hidden, _ = first_call(call)
    if not (torch.isfinite(d_hidden).all() and torch.isfinite(loss)):
        raise ValueError("the gradient is not finite")
    error = None if eager is None else check(call, eager())
    del loss, d_hidden
    free_memory()
    torch.cuda.synchronize()
    before = 0 if mkd.cpu.is_active() else torch.cuda.memory_allocated()
    run = call.run
    times = time_calls(run, args.warmup, args.iterations)
    peak = peak_bytes(run)
    if args.profile:
        print(profile(call, args.profile), file=sys.stderr)
    extra = behind = None
    if peak is not None:
        extra = largest_on_any_rank((peak - before) / GIB)
        behind = largest_on_any_rank(median(time_behind_work(run, args.iterations)))
    return {
        "ms": largest_on_any_rank(median(times)),
        "ms_all": times,
        "behind_ms": behind,
        "extra_gib": extra,
        "error": error,
    }


def table(rows: list[Row]) -> str:
    """The rows in markdown; ratios are relative to one tokenizer with the same divergence.

    `ms` is the time of a call on an idle GPU; "behind other work" comes from `time_behind_work`.
    """
    key = "behind_ms" if any(row.get("behind_ms") is not None for row in rows) else "ms"
    plain = {row["loss"]: row[key] for row in rows if row["name"] == "one tokenizer" and key in row}
    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("implementation", lambda row: row["name"]),
        ("CE and", lambda row: row["loss"]),
        ("ms", lambda row: number(row, "ms", ".2f")),
        ("ms behind other work", lambda row: number(row, "behind_ms", ".2f")),
        ("x one tokenizer", lambda row: f"{row[key] / plain[row['loss']]:.2f}"),
        ("extra GiB", lambda row: number(row, "extra_gib", ".2f")),
    ]
    if any(row.get("error") is not None for row in rows):
        columns.append(("difference to eager", lambda row: number(row, "error", ".1e")))
    return markdown(columns, rows)


def run(args: argparse.Namespace) -> tuple[Report, str]:
    """Measure all rows; returns the report and its printed text."""
    with tensor_parallel_ranks(args.seed) as group:
        torch.manual_seed(args.seed)
        inputs = Inputs.random(args, group)
        free_memory()
        wanted: list[tuple[str, str, Callable[[], Call], Callable[[], Call] | None]] = [
            ("one tokenizer", d, partial(one_tokenizer, inputs, d, args.impl[0], args), None) for d in args.losses
        ]
        for kind, impl, d in product(args.kinds, args.impl, args.losses):
            name = kind if len(args.impl) == 1 else f"{kind}, {impl}"
            eager = partial(across_tokenizers, inputs, kind, d, "eager", args) if args.check else None
            build = partial(across_tokenizers, inputs, kind, d, impl, args)
            wanted.append((name, d, build, None if impl == "eager" else eager))
        head = header("bench_xtoken", args)
        report = Report(head, args.json, is_writer=group.rank() == 0, total=len(wanted))
        for name, loss, build, eager in wanted:
            report.attempt({"name": name, "loss": loss}, partial(measure, build, args, eager))
        shape = (
            f"N={args.rows}, Hs={args.student_width}, Ht={args.teacher_width}, Vs={args.student_vocab}, "
            f"Vt={args.teacher_vocab}, {args.common} common, {len(inputs.chunks.weight)} chunks, {args.dtype}"
        )
        return report, "\n\n".join([title(head, shape), table(report.rows)])


def main(argv: list[str] | None = None) -> int:
    """Run the tool; returns 1 if a row could not be measured."""
    args = parse_arguments(argv)
    with quiet():
        report, text = run(args)
    if report.is_writer:
        print(text)
    return int(any("failed" in row for row in report.rows))


if __name__ == "__main__":
    sys.exit(main())
