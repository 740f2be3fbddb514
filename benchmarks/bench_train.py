"""Measure real trainings of pretrain_kd.py in parallel layouts, each beside the student alone and the teacher alone.

    python benchmarks/bench_train.py --gpus 4 --json train.json
    python benchmarks/bench_train.py --small

Models with random weights are made on the spot (30 s for 8B and 1B). Each layout is trained with the teacher, and once
for all its teachers with --kd-ratio 0, the student alone. Rows of "Model-Optimizer" train the same models on the same
data with its distillation for megatron-core (train_modelopt.py; pip install nvidia-modelopt). "Teacher alone" is the
teacher's time for the same number of tokens per GPU in the fastest layout of the table, and

    efficiency = (student alone in this layout + teacher alone) / step.

A training that fails is listed with the reason and does not stop the others. The estimate of memory is that of
`mkd doctor`.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mkd.cpu
from mkd.job.doctor.environment import cards, lowest_capability

if not mkd.cpu.is_active():
    # This process only computes estimates and must not allocate memory on the cards.
    mkd.cpu.activate(not mkd.cpu.wanted(), lowest_capability(cards()))

from bench_common import Row, commit_of_checkout, installed_versions, markdown, number

from benchmarks.inputs import llama, make_random, write_tokens
from benchmarks.trainings import (
    B1,
    B8,
    B70,
    OVERLAP,
    add_training_options,
    card_name,
    check_training_options,
    last_error,
    lines_of_steps,
    short_reason,
    training_flags,
    write_rows,
)
from mkd.compat.startup import use_prebuilt_dataset_helpers
from mkd.job.doctor.findings import Findings
from mkd.job.doctor.run import Launch, examine
from mkd.job.memory import estimate, fullest
from mkd.job.plan.memory_table import workload
from tests.support.gpu.rank_server import TIMED_OUT, RankServer

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
VARIABLES = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1"}
"""Environment variables of all ranks."""
WARMUP = 4
"""Steps at the beginning that are not counted."""


class Pair(NamedTuple):
    """config.json of a teacher and of its student."""

    teacher: dict[str, Any]
    student: dict[str, Any]


def qwen3_experts(layers: int, width: int, experts: int, expert_ffn: int, vocab: int) -> dict[str, Any]:
    """config.json of a Qwen3 mixture of experts."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "moe_intermediate_size": expert_ffn,
        "num_experts": experts,
        "num_experts_per_tok": min(8, experts),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_attention_heads": 32 if width >= 1024 else 4,
        "num_key_value_heads": 4 if width >= 1024 else 2,
        "head_dim": 128 if width >= 1024 else 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_bias": False,
    }


LONG = {"max_position_embeddings": 131072}
PAIRS = {
    "8B to 1B": Pair(B8, B1),
    "8B to 1B, long": Pair(B8 | LONG, B1 | LONG),
    "70B to 8B": Pair(B70, B8),
    "30B-A3B to 1B": Pair(qwen3_experts(48, 2048, 128, 768, 128256), B1),
    "8 to 4 layers of 30B-A3B": Pair(*(qwen3_experts(n, 2048, 128, 768, 128256) for n in (8, 4))),
    "8B to 8 layers of 30B-A3B": Pair(B8, qwen3_experts(8, 2048, 128, 768, 128256)),
}
"""Shapes of Llama and Qwen3, all with the vocabulary of Llama 3."""
SMALL_PAIRS = {
    "small": Pair(llama(4, 64, 96, 8, 4, 512, False), llama(4, 32, 64, 4, 4, 512, True)),
    "small, experts": Pair(qwen3_experts(2, 64, 4, 32, 512), qwen3_experts(2, 32, 4, 16, 512)),
}


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    gpus: int
    pair: str = "8B to 1B"
    layout: tuple[str, ...] = ()
    """Flags of the parallel layout of the job."""
    teacher: tuple[str, ...] = ()
    """Flags of the teacher alone: its layout, its precision."""
    micro_batch: int = 2
    rows: int = 8
    """Rows per GPU and step."""
    seq_length: int = 4096
    peer: bool = False
    """Model-Optimizer's distillation (train_modelopt.py) in place of mkd's."""


def parallel(**sizes: int) -> tuple[str, ...]:
    """Flags of parallel sizes by the first letters of their names: tp, pp, cp, ep."""
    flag = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}
    words = []
    for name, size in sizes.items():
        model = "" if name == "cp" else "model-"
        words += [f"--{flag[name]}-{model}parallel-size", str(size)]
    return (*words, "--sequence-parallel") if sizes.get("tp", 1) > 1 else tuple(words)


def teacher_parallel(size: int, kind: str = "tensor") -> tuple[str, ...]:
    """Flags of a teacher that has a tensor-, pipeline- or expert-parallel size of its own."""
    return (f"--kd-teacher-{kind}-model-parallel-size", str(size))


RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
LAST_OF_5 = ("--decoder-last-pipeline-num-layers", "5")
"""Fewer layers of the student on the stage that computes the LM heads and the loss; the teacher's stages are even."""
FP8 = ("--kd-teacher-dtype", "fp8")
GRAPH = ("--kd-teacher-micro-batch-size", "8", "--kd-teacher-cuda-graph")
"""Larger forward passes of the teacher, launched as CUDA graphs."""
STUDENT_GRAPHS = ("--cuda-graph-impl", "transformer_engine")
"""Megatron's CUDA graphs of the student's layers."""
EXPERTS = ("--moe-grouped-gemm", "--moe-token-dispatcher-type", "alltoall")
"""Without them Megatron computes experts one after another, and gathers all tokens on all ranks."""
PEER_LOSS = ("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "native")
"""The fastest CE of megatron-core 0.19, which refuses that of Transformer Engine."""


def cases_for(gpus: int) -> list[Case]:
    """The table of one node with this many GPUs; layouts that need more or do not divide it are left out."""
    shared = [
        Case("DP", gpus, layout=OVERLAP),
        Case("DP, FP8 teacher", gpus, layout=OVERLAP, teacher=FP8),
        Case("Model-Optimizer, DP", gpus, layout=OVERLAP, peer=True),
    ]
    if gpus >= 2:
        tp2, long = (*parallel(tp=2), *OVERLAP), (*parallel(cp=2), *OVERLAP, *RECOMPUTE)
        shared += [
            Case("DP, teacher TP2", gpus, layout=OVERLAP, teacher=teacher_parallel(2)),
            Case("DP, teacher TP2, graph", gpus, layout=OVERLAP, teacher=(*teacher_parallel(2), *GRAPH)),
            Case("TP2 SP", gpus, layout=tp2),
            Case("Model-Optimizer, TP2 SP", gpus, layout=tp2, peer=True),
            Case("TP2 SP, graph", gpus, layout=tp2, teacher=GRAPH),
            Case("TP2 SP, graphs of both models", gpus, layout=(*tp2, *STUDENT_GRAPHS), teacher=GRAPH),
            Case("TP2 SP, graphs, teacher DP", gpus, layout=(*tp2, *STUDENT_GRAPHS), teacher=teacher_parallel(1)),
            Case("TP2 SP, FP8 teacher", gpus, layout=tp2, teacher=FP8),
            Case("TP2 SP, FP8 teacher, graph", gpus, layout=tp2, teacher=(*FP8, *GRAPH)),
            Case("TP2 SP, teacher DP", gpus, layout=tp2, teacher=teacher_parallel(1)),
            Case("PP2", gpus, layout=(*parallel(pp=2), *OVERLAP)),
            Case("PP2, teacher DP", gpus, layout=(*parallel(pp=2), *OVERLAP), teacher=teacher_parallel(1, "pipeline")),
            Case("CP2, 32k", gpus, "8B to 1B, long", long, micro_batch=1, rows=1, seq_length=32768),
            Case("CP2, 128k", gpus, "8B to 1B, long", long, micro_batch=1, rows=1, seq_length=131072),
            Case("EP2 teacher", gpus, "30B-A3B to 1B", (*OVERLAP, *EXPERTS), teacher_parallel(2, "expert")),
            Case("EP2 student", gpus, "8B to 8 layers of 30B-A3B", (*parallel(ep=2), *OVERLAP, *EXPERTS)),
        ]
    if gpus == 2:
        experts = "8 to 4 layers of 30B-A3B"
        shared += [
            Case("TP2 SP, microbatch 4", gpus, layout=tp2, micro_batch=4),
            Case("PP2, 11 and 5 layers", gpus, layout=(*parallel(pp=2), *LAST_OF_5, *OVERLAP)),
            Case(
                "PP2, graphs, teacher DP",
                gpus,
                layout=(*parallel(pp=2), *OVERLAP, *STUDENT_GRAPHS),
                teacher=teacher_parallel(1, "pipeline"),
            ),
            # The same data in three layouts, whose losses are compared.
            Case("experts on one GPU", 1, experts, EXPERTS, rows=16),
            Case("experts, EP2", gpus, experts, (*parallel(ep=2), *OVERLAP, *EXPERTS)),
            Case("experts, DP, EP2 teacher", gpus, experts, (*OVERLAP, *EXPERTS), teacher_parallel(2, "expert")),
        ]
    if gpus >= 4:
        long = (*parallel(cp=4), *OVERLAP, *RECOMPUTE)
        shared += [
            Case("DP, teacher TP4", gpus, layout=OVERLAP, teacher=teacher_parallel(4)),
            Case("DP, FP8 teacher TP4", gpus, layout=OVERLAP, teacher=(*teacher_parallel(4), *FP8)),
            Case("TP2 SP x PP2", gpus, layout=(*parallel(tp=2, pp=2), *OVERLAP)),
            Case("PP4", gpus, layout=(*parallel(pp=4), *OVERLAP)),
            Case("CP4, 32k", gpus, "8B to 1B, long", long, micro_batch=1, rows=1, seq_length=32768),
            Case("CP4, 128k", gpus, "8B to 1B, long", long, micro_batch=1, rows=1, seq_length=131072),
            Case("EP4 teacher", gpus, "30B-A3B to 1B", (*OVERLAP, *EXPERTS), teacher_parallel(4, "expert")),
            Case("EP4 student", gpus, "8B to 8 layers of 30B-A3B", (*parallel(ep=4), *OVERLAP, *EXPERTS)),
        ]
    if gpus >= 8:
        long = (*parallel(cp=8), *OVERLAP, *RECOMPUTE)
        shared += [
            Case("DP, teacher TP8", gpus, layout=OVERLAP, teacher=teacher_parallel(8)),
            Case("TP2 SP x PP2 x DP2", gpus, layout=(*parallel(tp=2, pp=2), *OVERLAP)),
            Case("70B TP8, student DP", gpus, "70B to 8B", (*OVERLAP, *RECOMPUTE), teacher_parallel(8)),
            Case("70B TP8 FP8, student DP", gpus, "70B to 8B", (*OVERLAP, *RECOMPUTE), (*teacher_parallel(8), *FP8)),
            Case("70B TP8, student TP2", gpus, "70B to 8B", (*parallel(tp=2), *OVERLAP), teacher_parallel(8)),
            Case("CP8, 128k", gpus, "8B to 1B, long", long, micro_batch=1, rows=1, seq_length=131072),
            Case("EP8 teacher", gpus, "30B-A3B to 1B", (*OVERLAP, *EXPERTS), teacher_parallel(8, "expert")),
        ]
    return shared


def small_cases() -> list[Case]:
    """The kinds of rows on two CPU processes."""
    small = dict(micro_batch=1, rows=2, seq_length=64)
    return [
        Case("one rank", 1, "small", **small),
        Case("DP", 2, "small", **small),
        Case("DP, teacher TP2", 2, "small", teacher=teacher_parallel(2), **small),
        Case("TP2 SP", 2, "small", parallel(tp=2), **small),
        Case("EP2", 2, "small, experts", parallel(ep=2), **small),
    ]


def flags_of(case: Case, folder: Path, steps: int) -> list[str]:
    """The command line of a case after `pretrain_kd.py`, without --kd-ratio and --kd-metrics-file."""
    pair = folder / case.pair
    models = ("--kd-teacher-hf", str(pair / "teacher"), "--kd-student-hf", str(pair / "student"))
    text, rows = folder / f"text{case.seq_length}", max(1, _model_parallel_rows(case))
    common = training_flags(folder, text, steps, rows, case.micro_batch, case.seq_length)
    return [*models, *common, *case.layout, *case.teacher]


def _model_parallel_rows(case: Case) -> int:
    """Rows per step: `rows` for each GPU, or for each context-parallel group, whose ranks share their rows."""
    sizes = dict(zip(case.layout, case.layout[1:], strict=False))
    return case.rows * case.gpus // int(sizes.get("--context-parallel-size", 1))


def prepare(case: Case, pairs: dict[str, Pair], folder: Path, steps: int) -> None:
    """Make the models and the data of a case, unless an earlier one has."""
    pair = pairs[case.pair]
    for name, config in pair._asdict().items():
        if not (folder / case.pair / name).exists():
            log(f"makes the {name} of {case.pair}")
            make_random(folder / case.pair / name, config)
    prefix = folder / f"text{case.seq_length}"
    if not prefix.with_suffix(".idx").exists():
        write_tokens(prefix, max(64, case.rows * case.gpus * (steps + 1)), case.seq_length, 512)


@dataclass(frozen=True)
class Training:
    """Measurements of one training."""

    step_s: float
    """Median of the steps after the first `WARMUP`."""
    teacher_s: float | None
    tokens_per_s_per_gpu: float
    mfu: float | None
    peak_gib: float | None
    first_step_s: float
    """Seconds from the command to the end of the first step."""
    loss: float
    """That of the last step."""

    @classmethod
    def of(cls, lines: Sequence[dict[str, Any]], first_step_s: float) -> "Training":
        """Args:
        lines: of the metrics file, one per step.
        first_step_s: see above.
        """

        def middle(name: str) -> float | None:
            values = [line[name] for line in lines[WARMUP:] if line.get(name) is not None]
            return median(values) if values else None

        peaks = [line["peak_memory_gib"] for line in lines if "peak_memory_gib" in line]
        rate = middle("tokens_per_s_per_gpu")
        peak = max(peaks, default=None)
        return cls(middle("step_s"), middle("teacher_s"), rate, middle("mfu"), peak, first_step_s, lines[-1]["loss"])


Start = Callable[[list[str], Path, int, float], tuple[int, str]]
"""Runs a script on ranks of this node: its path and arguments, a file for the output, the number of ranks, a limit in
seconds; (exit status, output)."""


def torchrun(words: list[str], log: Path, ranks: int, limit_s: float) -> tuple[int, str]:
    """A `Start` with new processes; the status is `TIMED_OUT` after the limit."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with log.open("w") as output:
        streams = {"stdout": output, "stderr": subprocess.STDOUT}
        job = subprocess.Popen([*launcher, *words], env={**VARIABLES, **os.environ}, cwd=ROOT, **streams)
        try:
            status = job.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = TIMED_OUT
        finally:
            job.terminate()
            job.wait()
    return status, log.read_text(errors="replace")


class FirstStep(Thread):
    """Waits for the first step in a metrics file."""

    def __init__(self, metrics: Path) -> None:
        super().__init__(daemon=True)
        self._metrics, self._began, self._ended = metrics, time.monotonic(), Event()
        self._seconds: float | None = None

    def run(self) -> None:
        while self._seconds is None and not self._ended.wait(0.1):
            if self._metrics.exists() and '"loss"' in self._metrics.read_text():
                self._seconds = time.monotonic() - self._began

    def seconds(self) -> float:
        """Seconds from the start to the end of the first step, or until now if nothing was seen of it."""
        self._ended.set()
        self.join()
        return self._seconds or time.monotonic() - self._began


def train(
    flags: list[str],
    gpus: int,
    metrics: Path,
    limit_s: float,
    script: Path = ROOT / "pretrain_kd.py",
    start: Start = torchrun,
) -> Training:
    """Run one training.

    Raises:
        RuntimeError: it failed or took too long; the message has the last error that it printed.
    """
    metrics.unlink(missing_ok=True)
    first = FirstStep(metrics)
    first.start()
    words = [str(script), *flags, "--kd-metrics-file", str(metrics)]
    status, output = start(words, metrics.with_suffix(".log"), gpus, limit_s)
    first_step_s = first.seconds()
    if status == TIMED_OUT:
        raise RuntimeError(f"not ended after {limit_s:g} s")
    if status:
        raise RuntimeError(last_error(output))
    return Training.of(lines_of_steps(metrics), first_step_s)


def estimated_gib(flags: list[str], gpus: int) -> float:
    """Peak that `mkd doctor` estimates for the fullest rank."""
    findings = Findings()
    job = examine(Launch([*flags, "--kd-ratio", "0.5"], gpus), findings)
    if job is None:
        raise RuntimeError("; ".join(findings.problems))
    return fullest(estimate(workload(job))).peak / GIB


def measure(case: Case, folder: Path, steps: int, limit_s: float, start: Start, alone: dict[Case, float]) -> Row:
    """Figures of one row.

    Args:
        case: the row.
        folder, steps, limit_s, start: see `flags_of` and `train`.
        alone: seconds per step of the student alone, by the case without its name and teacher; added to.
    """
    flags, metrics = flags_of(case, folder, steps), folder / "metrics.jsonl"
    run = partial(train, gpus=case.gpus, metrics=metrics, limit_s=limit_s, start=start)
    if case.peer:
        words = [*flags, *(() if mkd.cpu.is_target() else PEER_LOSS), "--kd-ratio", "0"]
        training = run(words, script=ROOT / "benchmarks" / "train_modelopt.py")
        return vars(training) | {"mfu": None}  # its metrics do not count the teacher's operations
    row: Row = {"estimated_gib": estimated_gib(flags, case.gpus)}
    row |= vars(run([*flags, "--kd-ratio", "0.5"]))
    student = replace(case, name="", teacher=())
    if student not in alone:
        alone[student] = run([*flags_of(student, folder, steps), "--kd-ratio", "0"]).step_s
    return row | {"student_s": alone[student]}


def add_efficiency(rows: list[Row], cases: Sequence[Case]) -> None:
    """Add `teacher_alone_s` and `efficiency` to the rows that were measured."""
    fastest: dict[tuple[Any, ...], float] = {}
    measured = [(row, case) for row, case in zip(rows, cases, strict=True) if row.get("teacher_s")]
    for row, case in measured:
        fastest[_work(case)] = min(row["teacher_s"], fastest.get(_work(case), row["teacher_s"]))
    for row, case in measured:
        row["teacher_alone_s"] = fastest[_work(case)]
        row["efficiency"] = (row["student_s"] + row["teacher_alone_s"]) / row["step_s"]


def _work(case: Case) -> tuple[Any, ...]:
    """Equal for cases whose teachers do the same work per GPU in the same precision."""
    return case.pair, case.rows, case.seq_length, _model_parallel_rows(case) / case.gpus, "fp8" in case.teacher


COLUMNS = [
    ("layout", lambda row: row["name"]),
    ("models", lambda row: row["pair"]),
    ("s per step", lambda row: number(row, "step_s", ".3f")),
    ("student alone", lambda row: number(row, "student_s", ".3f")),
    ("teacher", lambda row: number(row, "teacher_s", ".3f")),
    ("teacher alone", lambda row: number(row, "teacher_alone_s", ".3f")),
    ("efficiency", lambda row: number(row, "efficiency", ".2f")),
    ("tokens/s per GPU", lambda row: number(row, "tokens_per_s_per_gpu", ",.0f")),
    ("MFU", lambda row: number(row, "mfu", ".2f")),
    ("peak GiB", lambda row: number(row, "peak_gib", ".1f")),
    ("estimated GiB", lambda row: number(row, "estimated_gib", ".1f")),
    ("first step, s", lambda row: number(row, "first_step_s", ".0f")),
    ("last loss", lambda row: number(row, "loss", ".4f")),
]


def log(text: str) -> None:
    print(f"bench_train: {text}", file=sys.stderr, flush=True)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="GPUs of this node to use (default: 1)")
    add_training_options(parser, steps=10, warmup=WARMUP)
    forks = "ranks are forks of a process with all imports: first steps are without them"
    parser.add_argument("--fork", action="store_true", help=forks)
    args = parser.parse_args(argv)
    args.cases = small_cases() if args.small else cases_for(args.gpus)
    check_training_options(parser, args, WARMUP, "layouts", [case.name for case in args.cases])
    if args.rows_of:
        args.cases = [case for case in args.cases if case.name in args.rows_of]
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the tool."""
    args = parse(argv)
    use_prebuilt_dataset_helpers()
    pairs = SMALL_PAIRS if args.small else PAIRS
    rows: list[Row] = []
    alone: dict[Case, float] = {}
    start = RankServer(**VARIABLES).run if args.fork else torchrun
    head = {"commit": args.commit or commit_of_checkout(), "versions": installed_versions(), "gpus": args.gpus}
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        for count, case in enumerate(args.cases, start=1):
            log(f"row {count} of {len(args.cases)}: {case.name}, {case.pair}")
            row: Row = {"name": case.name, "pair": case.pair, "gpus": case.gpus, "flags": [*case.layout, *case.teacher]}
            try:
                prepare(case, pairs, folder, args.steps)
                row |= measure(case, folder, args.steps, args.limit, start, alone)
            except (RuntimeError, OSError) as error:
                row["failed"] = short_reason(error)
                log(f"  {row['failed']}")
            rows.append(row)
            add_efficiency(rows, args.cases[:count])
            write_rows(args.json, head, rows)
    card = "CPU" if mkd.cpu.wanted() else f"{args.gpus} x {card_name()}"
    print(f"{card}, commit {head['commit']}\n\n{markdown(COLUMNS, rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
