"""Compare the memory estimate with the peak that PyTorch reports in real training steps of pretrain_kd.py on one GPU.

    python benchmarks/bench_memory.py --json memory.json
    python benchmarks/bench_memory.py --adapters --json adapters.json
    python benchmarks/bench_memory.py --smoke

Weights are zeros in sparse files that are created for each run; their values do not affect memory. Prints one table per
configuration, part by part; the estimate is that of tools/doctor.py. With --smoke everything is tiny and runs on CPU,
where memory is not measured.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mkd.cpu
from mkd.job.doctor.environment import cards, lowest_capability

if not mkd.cpu.is_active():
    # This process only computes estimates and must not allocate memory on the card.
    mkd.cpu.activate(not mkd.cpu.wanted(), lowest_capability(cards()))

import torch
from bench_common import markdown

from benchmarks.inputs import llama, make_sparse, write_tokens
from benchmarks.memory_probe import FILE, HELD, LOSS, STUDENT, TEACHER, TOTAL
from mkd.compat.startup import use_prebuilt_dataset_helpers
from mkd.job.doctor.findings import Findings
from mkd.job.doctor.run import Launch, examine
from mkd.job.memory import StageMemory, estimate
from mkd.job.memory.estimate import LOGITS, WORKING
from mkd.job.plan.memory_table import workload

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A configuration to measure."""

    name: str
    teacher: dict[str, Any]
    student: dict[str, Any]
    seq_length: int
    micro_batch: int
    flags: tuple[str, ...] = ()
    is_one_model: bool = False
    """Teacher and student are one folder."""


B8, B1 = llama(32, 4096, 14336, 32, 8, 128256, False), llama(16, 2048, 8192, 32, 8, 128256, True)
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
FULL = [
    Case("Llama-3.1-8B teacher, Llama-3.2-1B student", B8, B1, 4096, 1),
    Case(
        "Llama-3.2-1B teacher, student of half its depth, recomputation, distributed optimizer",
        B1,
        B1 | {"num_hidden_layers": 8},
        4096,
        4,
        (*RECOMPUTE, "--use-distributed-optimizer"),
    ),
]
LORA = ("--kd-lora", "16")
ADAPTERS = [
    Case("Llama-3.1-8B with adapters, the teacher is the model without them", B8, B8, 4096, 1, LORA, is_one_model=True),
    # Another epsilon, because equal weights would be shared.
    Case("Llama-3.1-8B teacher, student of its shape with adapters", B8 | {"rms_norm_eps": 1e-6}, B8, 4096, 1, LORA),
]
TINY = llama(2, 32, 64, 4, 2, 256, True)
SMOKE = [
    Case("tiny", TINY, TINY, 32, 2),
    Case("tiny, recomputation", TINY, TINY, 32, 2, FULL[1].flags),
    Case("tiny, adapters", TINY, TINY, 32, 2, LORA, is_one_model=True),
]


def estimated(stage: StageMemory) -> dict[str, float]:
    """Estimates of the quantities that `Probe` measures."""
    loss, teacher = stage.phases["loss"], stage.phases["teacher forward"]
    held = sum(stage.held.values())
    return {
        HELD: held,
        TEACHER: sum(teacher.values()),
        # Includes input and output of the last norm; the gradient of its output is allocated with the loss.
        STUDENT: sum(loss.values()) - loss[LOGITS] - loss[WORKING],
        LOSS: loss[LOGITS] + loss[WORKING],
        TOTAL: stage.peak,
    }


def flags_of(case: Case, folder: Path) -> list[str]:
    """The command line of a case; creates models and data in `folder`."""
    make_sparse(folder / "student", case.student)
    teacher = folder / "student" if case.is_one_model else make_sparse(folder / "teacher", case.teacher)
    data = write_tokens(folder / "text", 64, case.seq_length, case.student["vocab_size"])
    steps, micro = 3, case.micro_batch
    words = {
        "--kd-teacher-hf": teacher,
        "--kd-student-hf": folder / "student",
        "--kd-ratio": 0.5,
        "--data-path": data,
        "--tokenizer-type": "NullTokenizer",
        "--split": "100,0,0",
        "--eval-iters": 0,
        "--eval-interval": steps,
        "--seq-length": case.seq_length,
        "--micro-batch-size": micro,
        "--global-batch-size": 2 * micro,
        "--train-iters": steps,
        "--lr": 1e-4,
    }
    flat = [str(word) for pair in words.items() for word in pair]
    return [*flat, "--bf16", *case.flags, *(("--no-rope-fusion",) if mkd.cpu.is_target() else ())]


def measure(flags: list[str], file: Path) -> dict[str, float]:
    """Train in a separate process and return the measurements of its probe."""
    environ = {**os.environ, FILE: str(file), "CUDA_DEVICE_MAX_CONNECTIONS": "1", "RANK": "0", "WORLD_SIZE": "1"}
    environ |= {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29871"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/memory_probe.py"), *flags],
        env=environ,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    if done.returncode:
        raise SystemExit(f"bench_memory: the run failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(file.read_text())


def run_case(case: Case, folder: Path) -> dict[str, Any]:
    """Estimate and measurement of every part, in GiB."""
    flags, findings = flags_of(case, folder), Findings()
    job = examine(Launch(flags, 1), findings)
    if job is None:
        raise SystemExit(f"bench_memory: {'; '.join(findings.problems)}")
    estimates = estimated(estimate(workload(job))[-1])
    measured = measure(flags, folder / "probe.json")
    if mkd.cpu.is_target():
        measured = {}
    rows = [
        {"part": part, "estimated": nbytes / GIB, "measured": measured.get(part, 0) / GIB}
        for part, nbytes in estimates.items()
    ]
    return {**asdict(case), "rows": rows}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown table of one case."""

    def error(row: dict[str, Any]) -> str:
        return f"{row['estimated'] / row['measured'] - 1.0:+.1%}" if row["measured"] else "-"

    columns = [
        ("GiB", lambda row: row["part"]),
        ("estimated", lambda row: f"{row['estimated']:.2f}"),
        ("measured", lambda row: f"{row['measured']:.2f}" if row["measured"] else "-"),
        ("error", error),
    ]
    return markdown(columns, rows)


def main(argv: list[str] | None = None) -> int:
    """Run the tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny models")
    parser.add_argument("--adapters", action="store_true", help="the cases with --kd-lora, in place of the others")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    args, results = parser.parse_args(argv), []
    use_prebuilt_dataset_helpers()
    for case in SMOKE if args.smoke else ADAPTERS if args.adapters else FULL:
        with tempfile.TemporaryDirectory() as folder:
            results.append(run_case(case, Path(folder)))
        print(f"{case.name}, {case.micro_batch} x {case.seq_length} tokens {' '.join(case.flags)}\n", flush=True)
        print(table(results[-1]["rows"]) + "\n", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps({"torch": torch.__version__, "cases": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
