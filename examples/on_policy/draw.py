"""Draw the accuracy of the students of run.sh over updates and over time.

python examples/on_policy/draw.py runs/on_policy/results.json --out accuracy.png
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from collect import LABELS
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

COLORS = {
    "text": "#000000",
    "given": "#0072B2",
    "given_reverse": "#56B4E9",
    "written": "#D55E00",
    "written_jsd": "#CC79A7",
    "mixed": "#009E73",
}
"""Distinguishable with any color vision: Okabe and Ito, "Color Universal Design" (2008)."""


def mean_curve(trainings: list[dict], x: str) -> tuple[list[float], list[float]]:
    """`x` and accuracy at the evaluations that all seeds have, averaged over the seeds."""
    count = min(len(training["accuracy"]) for training in trainings)
    xs, ys = (
        [sum(training[name][i] for training in trainings) / len(trainings) for i in range(count)]
        for name in (x, "accuracy")
    )
    return xs, ys


def draw_panel(axis: Axes, found: dict, x: str) -> None:
    """One line per method, and a thin one per seed."""
    for method, trainings in found["methods"].items():
        if not trainings:
            continue
        color = COLORS[method]
        for training in trainings.values():
            axis.plot(training[x], training["accuracy"], color=color, linewidth=0.8, alpha=0.3)
        points = mean_curve(list(trainings.values()), x)
        axis.plot(*points, marker="o", markersize=3.5, color=color, label=LABELS[method])
    axis.axhline(found["teacher"]["accuracy"][-1], color="gray", linewidth=1.2, linestyle="--", label="teacher")
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    axis.set_ylim(-0.02, 1.04)
    axis.grid(alpha=0.3)


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    found = json.loads(args.results.read_text())
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained", sharey=True)
    for axis, (x, label) in zip(
        axes, (("iterations", "update"), ("seconds", "seconds of the updates, without evaluations")), strict=True
    ):
        draw_panel(axis, found, x)
        axis.set_xlabel(label)
    axes[0].set_ylabel("held-out problems solved")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle("Accuracy of the student: mean over seeds, and each seed")
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
