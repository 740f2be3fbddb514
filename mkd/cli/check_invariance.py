"""Check that a launch line trains the same model on one rank and in its parallel layout.

    mkd check-invariance --ranks 4 -- FLAGS OF mkd train

Runs mkd train twice for a few steps: on one rank without the flags that describe a layout, and on --ranks ranks of
this machine with them. Both start from the weights of --kd-student-hf or --pretrained-checkpoint; --load is omitted.
Compares the loss, its terms and the gradient norm of every step, and the change of every parameter. The exit status is
1 if they differ.

So that only the layout differs, both run in fp32 (--keep-precision keeps --bf16 and similar flags), without dropout,
and write only to a temporary folder. docs/layouts.md explains the result.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from mkd.cli.usage import command_parser
from mkd.config.command_words import read_settings, without_files, words_of
from mkd.errors import MkdConfigError, exit_status
from mkd.report.run_log import RunLog

IMPORTED_FROM = Path(__file__).resolve().parents[2]
"""The folder that holds the package mkd."""
LAYOUT = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
    "--sequence-parallel",
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--microbatch-group-size-per-virtual-pipeline-stage",
    "--pipeline-model-parallel-layout",
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
    "--overlap-p2p-communication-warmup-flush",
    "--no-overlap-p2p-communication",
    "--num-distributed-optimizer-instances",
    "--cp-comm-type",
    "--tp-comm-overlap",
    "--kd-teacher-tensor-model-parallel-size",
    "--kd-teacher-pipeline-model-parallel-size",
    "--kd-teacher-context-parallel-size",
    "--kd-teacher-expert-model-parallel-size",
    "--kd-teacher-expert-tensor-parallel-size",
)
"""Flags omitted in the run on one rank."""
PRECISION = ("--bf16", "--fp16", "--fp8-", "--fp4-", "--kd-logits-dtype", "--kd-teacher-dtype", "--grad-reduce-in-bf16")
OUTPUT = (
    "--save",
    "--save-interval",
    "--load",
    "--async-save",
    "--kd-metrics-file",
    "--tensorboard-dir",
    "--wandb-project",
    "--exit-interval",
    "--exit-duration-in-mins",
    "--eval-iters",
    "--log-interval",
    "--attention-dropout",
    "--hidden-dropout",
)
"""Flags that are set for both runs, or not needed in them."""
PARAMETERS = 100.0
"""Factor on the tolerance for the change of a parameter: Adam divides the gradient of each element by its magnitude,
which amplifies rounding where the gradient is small."""


@dataclass(frozen=True)
class Difference:
    """A value in both runs."""

    name: str
    one_rank: float
    layout: float
    relative: float
    """NaN if one of them is NaN."""
    allowed: float

    @property
    def is_too_large(self) -> bool:
        return not self.relative <= self.allowed


def without(flags: list[str], names: tuple[str, ...]) -> list[str]:
    """`flags` without the named flags and their values; a name that ends in - is a prefix."""
    kept, dropping = [], False
    for word in flags:
        if word.startswith("--"):
            flag = word.split("=")[0]
            dropping = any(flag.startswith(name) if name.endswith("-") else flag == name for name in names)
        if not dropping:
            kept.append(word)
    return kept


def common_flags(flags: list[str], steps: int, keep_precision: bool) -> list[str]:
    """Flags common to both runs, apart from layout and output folder.

    Raises:
        MkdConfigError: the initial weights would be random, or `steps` is not a positive even number.
    """
    if steps < 2 or steps % 2:
        raise MkdConfigError(
            f"--steps is {steps}; it must be even and positive: parameters are compared after half the steps"
        )
    if not any(word.split("=")[0] in ("--kd-student-hf", "--pretrained-checkpoint") for word in flags):
        raise MkdConfigError(
            "neither --kd-student-hf nor --pretrained-checkpoint is given: random initial weights depend on the layout"
        )
    flags = [*words_of(read_settings(flags)), *without_files(flags)]
    flags = without(flags, OUTPUT if keep_precision else OUTPUT + PRECISION)
    added = {
        "--exit-interval": steps,
        "--save-interval": steps // 2,
        "--eval-iters": 0,
        "--log-interval": 1,
        "--attention-dropout": 0.0,
        "--hidden-dropout": 0.0,
    }
    return [*flags, "--no-save-optim", "--no-save-rng", *(str(w) for pair in added.items() for w in pair)]


def torchrun(flags: list[str], ranks: int) -> tuple[int, str]:
    """Run `mkd train` on ranks of this machine; returns (exit status, output)."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    path = os.pathsep.join(filter(None, [str(IMPORTED_FROM), os.environ.get("PYTHONPATH")]))
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [*launcher, "-m", "mkd", "train", *flags],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def compare_logs(one_rank: RunLog, layout: RunLog, tolerance: float) -> list[Difference]:
    """Loss, terms and gradient norm of every step of either run."""
    found = []
    for iteration in sorted({*one_rank.series["loss"], *layout.series.get("loss", {})}):
        for name in ("loss", "ce", "kd", "hidden", "grad_norm"):
            if name in one_rank.series:
                a, b = (run.series.get(name, {}).get(iteration, float("nan")) for run in (one_rank, layout))
                found.append(Difference(f"step {iteration}: {name}", a, b, abs(a - b) / max(abs(a), 1e-6), tolerance))
    return found


def compare_parameters(one_rank: Path, layout: Path, steps: int, tolerance: float) -> list[Difference]:
    """Compare every parameter: the norm of its change in the second half of the steps, and the difference between the
    runs after the last step relative to that norm. One tensor of each checkpoint is in memory at a time."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from mkd.checkpoint.megatron.folder import MegatronFolder

    folders = [
        MegatronFolder(root / f"iter_{iteration:07d}", "--save")
        for root, iteration in ((one_rank, steps // 2), (one_rank, steps), (layout, steps))
    ]
    stored = [folder.metadata.state_dict_metadata for folder in folders]
    found = []
    for key, entry in stored[1].items():
        if not isinstance(entry, TensorStorageMetadata) or not entry.properties.dtype.is_floating_point:
            continue
        values = []
        for folder, index in zip(folders, stored, strict=True):
            state = {key: torch.empty(index[key].size, dtype=index[key].properties.dtype)}
            folder.load(state)
            values.append(state[key].double())
        if "embedding" in key or "output_layer" in key:  # padded to a different size if the vocabulary is sharded
            values = [value[: min(len(v) for v in values)] for value in values]
        half, end, seen = values
        change, other, off = (torch.linalg.vector_norm(v).item() for v in (end - half, seen - half, seen - end))
        scale = change or torch.linalg.vector_norm(end).item() or 1.0
        found.append(Difference(f"change of {key}", change, other, off / scale, PARAMETERS * tolerance))
    return found


def report(differences: list[Difference], ranks: int, shown: int = 8) -> bool:
    """Print every step and the parameters that differ most; returns True if all are within the tolerance."""
    steps = [d for d in differences if d.name.startswith("step")]
    parameters = sorted((d for d in differences if d not in steps), key=lambda d: -d.relative)
    width = max(len(d.name) for d in differences)
    print(f"{'':{width}s} {'1 rank':>14s} {f'{ranks} ranks':>14s} {'difference':>11s} {'allowed':>8s}")
    for d in steps + parameters[:shown]:
        mark = "  DIFFERS" if d.is_too_large else ""
        print(f"{d.name:{width}s} {d.one_rank:14.7g} {d.layout:14.7g} {d.relative:11.2e} {d.allowed:8.0e}{mark}")
    if len(parameters) > shown:
        print(f"({len(parameters) - shown} more parameters differ less)")
    wrong = sum(d.is_too_large for d in differences)
    print(f"{wrong} of {len(differences)} values differ" if wrong else f"the same: {len(differences)} values")
    return wrong == 0


def check(args: argparse.Namespace, start: Callable[[list[str], int], tuple[int, str]]) -> bool:
    """Run both and compare; returns True if they agree.

    Raises:
        MkdConfigError: a run failed, or did not take all steps.
    """
    flags = common_flags(args.flags, args.steps, args.keep_precision)
    tolerance = args.tolerance or (2e-2 if args.keep_precision else 1e-4)
    with tempfile.TemporaryDirectory(dir=args.work_dir) as work:
        folders = [Path(work) / name for name in ("one_rank", "layout")]
        for folder, ranks, words in zip(folders, (1, args.ranks), (without(flags, LAYOUT), flags), strict=True):
            print(f"running {args.steps} steps on {ranks} rank{'s' * (ranks > 1)}", flush=True)
            own = ["--save", str(folder), "--kd-metrics-file", str(folder / "metrics.jsonl")]
            status, output = start([*words, *own], ranks)
            if status != 0 or not (folder / "metrics.jsonl").is_file():
                print(output[-4000:], file=sys.stderr)
                raise MkdConfigError(f"the run on {ranks} ranks ended with status {status}; its output is above")
        logs = [RunLog.read(str(folder / "metrics.jsonl")) for folder in folders]
        done = min(len(log.series.get("loss", {})) for log in logs)
        if done != args.steps:
            raise MkdConfigError(f"a run took {done} steps, not the {args.steps} of --steps: raise --train-iters")
        differences = compare_logs(*logs, tolerance)
        differences += compare_parameters(*folders, args.steps, tolerance)
    return report(differences, args.ranks)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = command_parser(__doc__)
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="ranks of the layout, on this machine")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="training steps, an even number (4)")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="relative tolerance of losses and gradient norms (1e-4, or 2e-2 with --keep-precision); that of parameter "
        "changes is 100 times larger",
    )
    parser.add_argument("--keep-precision", action="store_true", help="keep --bf16, --fp16 and FP8 flags")
    parser.add_argument(
        "--work-dir", metavar="DIR", help="folder for temporary checkpoints, which are deleted at the end"
    )
    parser.add_argument("flags", nargs="+", metavar="FLAG", help="flags of mkd train, after --")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None, start: Callable[[list[str], int], tuple[int, str]] = torchrun) -> int:
    """Run the tool; returns exit status 1 if the runs differ or one failed."""
    args = parse_arguments(argv)
    warnings.filterwarnings("ignore")  # Megatron warns about packages needed only on GPUs
    same = []
    return exit_status(lambda: same.append(check(args, start))) or int(not same[0])
