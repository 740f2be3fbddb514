"""Compare losses from hidden states, forward and backward: time, memory and error.

    python benchmarks/bench_loss.py --json loss.json
    torchrun --nproc-per-node 2 benchmarks/bench_loss.py --rows-of ours,modelopt,mcore

Each table row is an implementation that computes the gradients of the student's hidden states and LM head. One whose
package is missing or that fails is listed with the reason. With torchrun the vocabulary is sharded over all ranks. The
table is printed to stdout, progress to stderr. benchmarks/bench_peers.py describes what each implementation computes.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mkd.cpu

if mkd.cpu.wanted():
    mkd.cpu.activate()  # before anything imports megatron

import torch
from bench_common import (
    DTYPES,
    GIB,
    MASKS,
    Card,
    Report,
    Row,
    add_common_flags,
    add_supervised_flag,
    free_memory,
    header,
    largest_on_any_rank,
    markdown,
    names,
    number,
    peak_bytes,
    quiet,
    supervised_columns,
    supervised_mask,
    tensor_parallel_ranks,
    time_calls,
    title,
)
from bench_heads import (
    CE_ONLY,
    Contender,
    Gradients,
    Inputs,
    Objective,
    Run,
    kd_only,
    reference_gradients,
    relative_error,
    with_ce,
)
from bench_peers import peers

from mkd.config.loss_spec import Divergence
from mkd.data.supervised import SupervisedTokens
from mkd.losses import (
    LinearLogits,
    LossOptions,
    SparseTeacher,
    TokenWeights,
    VocabLayout,
    fused_linear_loss,
    loss_from_hidden,
)
from mkd.train.supervised import select_hidden

COMPETITORS = ["ours", "sparse", "eager", "compile", "liger", "modelopt", "mcore"]
TOP_K = 64
"""Columns of the sparse teacher."""
ONE_PASS = ("forward_kl", "reverse_kl")
"""Divergences that need one pass over the logits; the others need two."""


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192, metavar="N", help="tokens (default: 8192)")
    parser.add_argument("--student-width", type=int, default=2048, metavar="H", help="hidden size (default: 2048)")
    parser.add_argument("--teacher-width", type=int, default=4096, metavar="H", help="hidden size (default: 4096)")
    parser.add_argument("--vocab", type=int, default=128256, metavar="V", help="(default: 128256)")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bf16", help="dtype of hidden states and weights (default: bf16)"
    )
    parser.add_argument(
        "--losses",
        type=names,
        default=list(get_args(Divergence)),
        metavar="A,B",
        help="divergences, ours only (default: all six)",
    )
    parser.add_argument(
        "--rows-of",
        type=names,
        default=COMPETITORS,
        metavar="A,B",
        help=f"implementations, out of {','.join(COMPETITORS)} (default: all)",
    )
    parser.add_argument(
        *("--logits-dtype",),
        type=names,
        default=["bf16", "fp32"],
        metavar="A,B",
        help="ours: auto, bf16, fp32 (default: bf16,fp32)",
    )
    parser.add_argument("--impl", default="auto", help="ours: auto, eager or triton")
    parser.add_argument("--chunk-rows", type=int, metavar="N", help="ours: tokens per loss chunk")
    parser.add_argument(
        "--teacher-gap",
        type=float,
        metavar="X",
        help="make the teacher's logits the student's plus noise of this standard deviation",
    )
    add_supervised_flag(parser)
    add_common_flags(parser)
    args = parser.parse_args(argv)
    for flag, given, legal in (
        ("--losses", args.losses, get_args(Divergence)),
        ("--rows-of", args.rows_of, COMPETITORS),
        ("--logits-dtype", args.logits_dtype, ["auto", *DTYPES]),
    ):
        if unknown := set(given) - set(legal):
            parser.error(f"{flag}: {', '.join(sorted(unknown))} is not one of {', '.join(legal)}")
    if args.teacher_gap is not None and args.teacher_width <= args.student_width:
        parser.error("--teacher-gap needs a --teacher-width above --student-width")
    return args


def ours(inputs: Inputs, objective: Objective, *, main_grad: bool, options: dict[str, Any]) -> Run:
    """`mkd.losses.fused_linear_loss`, with the LM head's gradient in its own dtype or added to an fp32 `main_grad`."""
    options = {name: value for name, value in options.items() if value is not None}
    hidden, weight = inputs.hidden, inputs.weight.detach().requires_grad_()
    if main_grad:
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        options["upstream"] = 1.0
    count = len(inputs.labels)
    ce_weight, kd_weight = (
        torch.full((count,), share / count, device="cuda") if share else None for share in (objective.ce, objective.kd)
    )

    def run() -> Gradients:
        output = fused_linear_loss(
            hidden,
            weight,
            inputs.teacher_hidden,
            inputs.teacher_weight,
            inputs.labels,
            ce_weight,
            kd_weight,
            spec=objective.spec,
            true_vocab=inputs.vocab,
            tp_group=inputs.group,
            **options,
        )
        d_hidden, d_weight = torch.autograd.grad(output.loss, (hidden, weight), allow_unused=True)
        return Gradients(output.loss.detach(), d_hidden, weight.main_grad if main_grad else d_weight)

    return run


def ours_supervised(
    inputs: Inputs, objective: Objective, *, main_grad: bool, options: LossOptions, tokens: SupervisedTokens
) -> Run:
    """mkd as in training with supervised tokens: the teacher returns its hidden states of those, the student's are
    selected in each call, and the gradient of the others is 0."""
    weight = inputs.weight.detach().requires_grad_()
    if main_grad:
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    tokens = tokens.to_device()
    count = len(tokens.index)
    teacher = LinearLogits(tokens.take(inputs.teacher_hidden), inputs.teacher_weight)
    weights = (
        torch.full((count,), share / count, device="cuda") if share else None for share in (objective.ce, objective.kd)
    )
    of_tokens = TokenWeights(inputs.labels[tokens.index], *weights)

    def run() -> Gradients:
        selected = select_hidden(inputs.hidden, tokens, inputs.group, sequence_parallel=False)
        output = loss_from_hidden(
            LinearLogits(selected, weight),
            teacher,
            of_tokens,
            spec=objective.spec,
            vocab=VocabLayout(inputs.vocab, inputs.group),
            options=options,
            upstream=1.0 if main_grad else None,
        )
        d_hidden, d_weight = torch.autograd.grad(output.loss, (inputs.hidden, weight), allow_unused=True)
        return Gradients(output.loss.detach(), d_hidden, weight.main_grad if main_grad else d_weight)

    return run


def supervised_contenders(args: argparse.Namespace) -> list[Contender]:
    """With --supervised below 1: for each precision of logits and kind of mask, every divergence with CE and CE alone,
    with a gradient buffer."""
    rows = []
    for logits in args.logits_dtype if args.supervised < 1 else ():
        for kind in MASKS:
            tokens = SupervisedTokens.of(supervised_mask(kind, args.supervised, 1, args.rows))
            options = LossOptions(args.chunk_rows, DTYPES.get(logits), args.impl, share=tokens.share)
            build = partial(ours_supervised, main_grad=True, options=options, tokens=tokens)
            for objective in (*map(with_ce, args.losses), CE_ONLY):
                rows.append(
                    Contender(
                        f"mkd, {logits} logits, main_grad",
                        objective,
                        lambda i, o=objective, build=build: build(i, o),
                        tokens.index,
                        f"{tokens.share:.0%} {kind}",
                    )
                )
    return rows


def our_contenders(args: argparse.Namespace) -> list[Contender]:
    """For each precision of logits, with and without a gradient buffer: every divergence with CE, and CE alone;
    without a buffer also forward_kl and jsd alone, which show the precision of the logits."""
    rows = []
    for logits in args.logits_dtype:
        options = {"impl": None if args.impl == "auto" else args.impl, "chunk_rows": args.chunk_rows}
        options["logits_dtype"] = DTYPES.get(logits)
        for main_grad in (False, True):
            name = f"mkd, {logits} logits" + (", main_grad" if main_grad else "")
            build = partial(ours, main_grad=main_grad, options=options)
            alone = [] if main_grad else [kd_only(d) for d in args.losses if d in ("forward_kl", "jsd")]
            for objective in (*map(with_ce, args.losses), CE_ONLY, *alone):
                rows.append(Contender(name, objective, lambda i, o=objective, build=build: build(i, o)))
    return rows


def ours_sparse(inputs: Inputs, objective: Objective, *, options: LossOptions) -> Run:
    """mkd with the `TOP_K` most probable columns of the teacher, as from a cache, and an fp32 `main_grad`."""
    weight = inputs.weight.detach().requires_grad_()
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    found = []
    for part in inputs.teacher_hidden.split(512):
        logits = (part @ inputs.whole(inputs.teacher_weight)[: inputs.vocab].t()).float()
        top = logits.topk(min(TOP_K, logits.shape[1]), dim=1)
        lse = torch.logsumexp(logits, dim=1)
        tail = logits.scatter_(1, top.indices, -torch.inf)
        found.append((top.indices, top.values, lse, torch.logsumexp(tail, dim=1)))
    teacher = SparseTeacher(*(torch.cat(x) for x in zip(*found, strict=True)))
    count = len(inputs.labels)
    weights = (torch.full((count,), share / count, device="cuda") for share in (objective.ce, objective.kd))
    tokens = TokenWeights(inputs.labels, *weights)

    def run() -> Gradients:
        output = loss_from_hidden(
            LinearLogits(inputs.hidden, weight),
            teacher,
            tokens,
            spec=objective.spec,
            vocab=VocabLayout(inputs.vocab, inputs.group),
            options=options,
            upstream=1.0,
        )
        d_hidden, _ = torch.autograd.grad(output.loss, (inputs.hidden, weight), allow_unused=True)
        return Gradients(output.loss.detach(), d_hidden, weight.main_grad)

    return run


def sparse_contenders(args: argparse.Namespace) -> list[Contender]:
    """For each precision of logits, every divergence from a sparse teacher, with CE and a gradient buffer."""
    rows = []
    for logits in args.logits_dtype:
        options = LossOptions(args.chunk_rows, DTYPES.get(logits), args.impl)
        for objective in map(with_ce, args.losses):
            build = partial(ours_sparse, objective=objective, options=options)
            rows.append(Contender(f"mkd, sparse teacher (K = {TOP_K}), {logits} logits", objective, build, sparse=True))
    return rows


def floor(inputs: Inputs, with_teacher: bool) -> Callable[[], None]:
    """The matrix products alone, unchunked and into preallocated memory: student's logits, both gradients of the
    student, and the teacher's logits."""
    h, w = inputs.hidden.detach(), inputs.weight.detach()
    z = torch.empty(len(h), len(w), dtype=h.dtype, device=h.device)
    u = torch.empty_like(z) if with_teacher else None
    d_hidden, d_weight = torch.empty_like(h), torch.empty_like(w)

    def run() -> None:
        torch.mm(h, w.t(), out=z)
        if u is not None:
            torch.mm(inputs.teacher_hidden, inputs.teacher_weight.t(), out=u)
        torch.mm(z, w, out=d_hidden)
        torch.mm(z.t(), h, out=d_weight)

    return run


def timed(run: Callable[[], Any], args: argparse.Namespace) -> Row:
    """Median time of a call on the slowest rank."""
    times = time_calls(run, args.warmup, args.iterations)
    ms = largest_on_any_rank(median(times))
    return {"ms": ms, "ms_all": times}


def errors(seen: Gradients, inputs: Inputs, objective: Objective) -> Row:
    """Differences to the definitions."""
    right = reference_gradients(inputs, objective)
    return {
        "d_hidden_error": largest_on_any_rank(relative_error(seen.d_hidden, right.d_hidden)),
        "d_weight_error": largest_on_any_rank(relative_error(seen.d_weight, right.d_weight)),
        "value_error": abs(seen.loss.item() - right.loss.item()) / abs(right.loss.item()),
    }


def measure(contender: Contender, inputs: Inputs, args: argparse.Namespace) -> Row:
    """Figures of one contender. Errors are measured in the first call, in which kernels may still be autotuned."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    run = contender.build(inputs)
    first, read = run(), inputs
    if contender.tokens is not None:
        tokens = contender.tokens.to(inputs.hidden.device)
        others = torch.ones(len(inputs.labels), dtype=torch.bool, device=tokens.device).index_fill_(0, tokens, False)
        if first.d_hidden[others].any():
            raise ValueError("hidden states of unsupervised tokens have a gradient")
        first, read = first._replace(d_hidden=first.d_hidden[tokens]), inputs.only(tokens)
    figures = {} if contender.sparse else errors(first, read, contender.objective)
    del first
    torch.cuda.empty_cache()
    figures |= timed(run, args)
    resting = torch.cuda.memory_allocated()
    peak, card = peak_bytes(run), Card.current()
    for name, base in (("extra_gib", before), ("call_gib", resting)):
        figures[name] = None if peak is None else largest_on_any_rank((peak - base) / GIB)
    if contender.sparse:
        return figures
    return figures | {"roofline_ms": None if card is None else roofline_ms(contender.objective, read, card)}


def roofline_ms(objective: Objective, inputs: Inputs, card: Card) -> float:
    """The card's time for matrix products at its peak, and for the passes over bf16 logits with separate kernels for
    statistics and gradient: 6 bytes per element for CE, 10 with a divergence, 14 with one that needs two passes."""
    per_element = 6 if not objective.kd else 10 if objective.spec.divergence in ONE_PASS else 14
    seconds = inputs.flop(with_teacher=objective.kd > 0) / card.flop_per_s
    return 1e3 * (seconds + per_element * inputs.elements() / card.bytes_per_s)


def floors(report: Report, inputs: Inputs, args: argparse.Namespace, when: str) -> None:
    """Add two rows: lower bounds for a loss with and without a teacher."""
    for with_teacher, count in ((True, "four"), (False, "three")):
        about = {"name": f"floor: the {count} GEMMs, {when}", "loss": "with teacher" if with_teacher else "CE"}
        report.attempt(about, lambda t=with_teacher: {**timed(floor(inputs, t), args), "floor": t})


def table(rows: list[Row]) -> str:
    """The rows in markdown; ratios are relative to the mean of the floors at the beginning and the end."""
    lowest: dict[bool, float] = {}
    for with_teacher in (True, False):
        seen = [row["ms"] for row in rows if row.get("floor") is with_teacher]
        if seen:
            lowest[with_teacher] = fmean(seen)
    columns = [
        ("implementation", lambda row: row["name"]),
        ("loss", lambda row: row["loss"]),
        ("ms", lambda row: number(row, "ms", ".2f")),
        ("x floor", lambda row: f"{row['ms'] / lowest[row['loss'] != 'CE' and not row.get('sparse')]:.2f}"),
        ("roofline ms", lambda row: number(row, "roofline_ms", ".1f")),
        ("extra GiB", lambda row: number(row, "extra_gib", ".2f")),
        ("error of d hidden", lambda row: number(row, "d_hidden_error", ".1e")),
        ("error of d weight", lambda row: number(row, "d_weight_error", ".1e")),
        ("error of value", lambda row: number(row, "value_error", ".1e")),
    ]
    if any(row.get("tokens", "all") != "all" for row in rows):
        figures = [("ms", "ms"), ("GiB in a call", "call_gib")]
        columns[2:2] = [
            *supervised_columns(rows, figures),
            ("GiB in a call", lambda row: number(row, "call_gib", ".3f")),
        ]
    return markdown(columns, rows)


def bounds_text(inputs: Inputs, card: Card | None) -> str:
    """One sentence on the limits of the hardware."""
    flop, elements = inputs.flop(with_teacher=True), inputs.elements()
    text = f"Matrix products with a teacher: {flop / 1e12:.2f} TFLOP on each of {inputs.group.size()} rank(s)"
    if card is None:
        return f"{text}; the card's peak rates are not known, so there is no roofline."
    passes = ", ".join(f"{n} bytes {1e3 * n * elements / card.bytes_per_s:.2f} ms" for n in (4, 6, 10, 14))
    return (
        f"{text}, {1e3 * flop / card.flop_per_s:.1f} ms at {card.flop_per_s / 1e12:.0f} TFLOP/s. Passes over bf16 "
        f"logits at {card.bytes_per_s / 1e12:.2f} TB/s, by bytes per element: {passes}."
    )


def run(args: argparse.Namespace) -> tuple[Report, str]:
    """Measure all rows; returns the report and its printed text."""
    with tensor_parallel_ranks(args.seed) as group:
        torch.manual_seed(args.seed)
        inputs = Inputs.random(
            args.rows,
            (args.student_width, args.teacher_width),
            args.vocab,
            DTYPES[args.dtype],
            group,
            args.teacher_gap,
        )
        free_memory()
        own = [*our_contenders(args), *supervised_contenders(args)] if "ours" in args.rows_of else []
        wanted = [*own, *(sparse_contenders(args) if "sparse" in args.rows_of else []), *peers(args.rows_of)]
        head = header("bench_loss", args)
        report = Report(head, args.json, is_writer=group.rank() == 0, total=len(wanted) + 4)
        floors(report, inputs, args, "at the beginning")
        for contender in wanted:
            about = {"name": contender.name, "loss": str(contender.objective), "tokens": contender.about_tokens}
            if contender.sparse:
                about["sparse"] = True
            report.attempt(about, lambda c=contender: measure(c, inputs, args))
        floors(report, inputs, args, "at the end")
        shape = f"N={args.rows}, Hs={args.student_width}, Ht={args.teacher_width}, V={args.vocab}, {args.dtype}"
        return report, "\n\n".join([title(head, shape), bounds_text(inputs, Card.current()), table(report.rows)])


def main(argv: list[str] | None = None) -> int:
    """Run the tool."""
    args = parse_arguments(argv)
    with quiet():
        report, text = run(args)
    if report.is_writer:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
