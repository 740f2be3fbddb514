"""Collect the metrics of the trainings of run.sh in one JSON file and print a markdown table.

python examples/on_policy/collect.py runs/on_policy --methods text given written --seeds 1 2 3 --out results.json
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mkd.errors import MkdDataError, MkdError
from mkd.report.run_log import RunLog

LABELS = {
    "text": "text alone (CE)",
    "given": "given texts, forward KL",
    "given_reverse": "given texts, reverse KL",
    "written": "written texts, reverse KL",
    "written_jsd": "written texts, JSD",
    "mixed": "half given, half written, reverse KL",
}
"""Method -> its name in table and figure."""
SECONDS = ("median_step_s", "median_rollout_s")


def training(metrics: Path) -> dict:
    """Curve of the accuracy and totals of one training.

    Raises:
        MkdDataError: the metrics hold no evaluation.
    """
    log = RunLog.read(str(metrics))
    iterations, accuracy = log.curve("valid_accuracy")
    steps, step_s = log.curve("step_s")
    tokens = dict(zip(*log.curve("tokens"), strict=True))
    if not iterations or not steps:
        raise MkdDataError(f"{metrics} has no step or no evaluation with accuracy: see the log of the training")
    found = {
        "iterations": iterations,
        "accuracy": accuracy,
        "seconds": [sum(s for step, s in zip(steps, step_s, strict=True) if step <= end) for end in iterations],
        "median_step_s": statistics.median(step_s),
        "tokens": sum(tokens.values()),
        "steps": steps[-1],
    }
    for name in ("written_tokens", "written_cut_off", "written_repeated"):
        if (last := log.last(name)) is not None:
            found[name] = last
    for name in ("rollout_s", "teacher_s"):
        if values := log.curve(name)[1]:
            found[f"median_{name}"] = statistics.median(values)
    return found


def collect(runs: Path, methods: Sequence[str], seeds: Sequence[int]) -> dict:
    """All trainings that have an evaluation: the teacher, the students on text, and method -> seed -> training."""
    found = {"teacher": training(runs / "teacher/metrics.jsonl"), "start": {}, "methods": {}}
    for seed in seeds:
        found["start"][str(seed)] = training(runs / f"student-{seed}/metrics.jsonl")
    for method in methods:
        found["methods"][method] = {}
        for seed in seeds:
            try:
                found["methods"][method][str(seed)] = training(runs / f"{method}-{seed}/metrics.jsonl")
            except MkdError as error:
                print(f"collect: {method}, seed {seed} is left out: {error}", file=sys.stderr)
    return found


def table(found: dict) -> str:
    """Final values as a markdown table."""
    lines = [
        "| method | updates | tokens | accuracy of each seed | mean | seconds per update, median | of these writing |",
        "|---|---|---|---|---|---|---|",
    ]
    for method, trainings in found["methods"].items():
        if not trainings:
            continue
        runs = list(trainings.values())
        ends = [run["accuracy"][-1] for run in runs]
        values = (
            LABELS[method],
            min(run["steps"] for run in runs),
            f"{statistics.mean(run['tokens'] for run in runs):,.0f}",
            ", ".join(f"{end:.1%}" for end in ends),
            f"{statistics.mean(ends):.1%}",
            *(f"{statistics.mean(run.get(name, 0.0) for run in runs):.3f}" for name in SECONDS),
        )
        lines.append(f"| {' | '.join(map(str, values))} |")
    start = ", ".join(f"{run['accuracy'][-1]:.1%}" for run in found["start"].values())
    return "\n".join([f"teacher: {found['teacher']['accuracy'][-1]:.1%}; students at the start: {start}", "", *lines])


def main() -> int:
    """Run the script; a user error prints one line and returns exit status 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--form", default="small", help="form of run.sh, noted in the file")
    parser.add_argument("--methods", nargs="+", required=True, choices=LABELS)
    parser.add_argument("--seeds", nargs="+", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    try:
        found = {"form": args.form, **collect(args.runs, args.methods, args.seeds)}
    except MkdError as error:
        print(f"collect: {error}", file=sys.stderr)
        return 1
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
