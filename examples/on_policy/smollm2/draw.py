"""Draw how the students of run.sh answer: sampled answers at the end, and repetition of greedy ones over the updates.

python examples/on_policy/smollm2/draw.py runs/smollm2/results.json --out smollm2.png
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

COLORS = {"text": "#000000", "given": "#0072B2", "given_reverse": "#56B4E9", "written": "#D55E00", "mixed": "#009E73"}
"""Distinguishable with any color vision: Okabe and Ito, "Color Universal Design" (2008)."""
BARS = {
    "perplexity": "teacher's perplexity",
    "repeated": "repeated 4-grams",
    "ended": "answers that ended",
}
"""Measurements of the sampled answers, a panel each."""


def draw_bars(axis: Axes, found: dict, value: str) -> None:
    """One bar per method; lines for the teacher, and for the student before the methods."""
    methods = found["methods"]
    heights = [run["sampled"][value] for run in methods.values()]
    axis.bar(range(len(methods)), heights, color=[COLORS[method] for method in methods])
    axis.axhline(found["start"]["sampled"][value], color="gray", linewidth=1.2, linestyle=":", label="student before")
    axis.axhline(found["teacher"]["sampled"][value], color="gray", linewidth=1.2, linestyle="--", label="teacher")
    axis.set_xticks([])
    axis.set_title(f"sampled: {BARS[value]}", fontsize="medium")
    if value != "perplexity":
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))


def draw_repetition(axis: Axes, found: dict) -> None:
    """Repetition of the greedy answers over the updates, one line per method."""
    for method, run in found["methods"].items():
        updates, ys = list(map(int, run["greedy"])), [scores["repeated"] for scores in run["greedy"].values()]
        axis.plot(updates, ys, marker="o", markersize=3.5, color=COLORS[method], label=LABELS[method])
    axis.axhline(found["teacher"]["greedy"]["repeated"], color="gray", linewidth=1.2, linestyle="--")
    axis.set_title("greedy: repeated 4-grams over the updates", fontsize="medium")
    axis.set_ylim(bottom=0.0)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    axis.grid(alpha=0.3)


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    found = json.loads(args.results.read_text())
    figure, axes = plt.subplots(1, len(BARS) + 1, figsize=(14, 4.2), layout="constrained", width_ratios=[1, 1, 1, 1.6])
    for axis, value in zip(axes, BARS, strict=False):
        draw_bars(axis, found, value)
    draw_repetition(axes[-1], found)
    lines, labels = axes[-1].get_legend_handles_labels()
    levels, names = axes[0].get_legend_handles_labels()
    figure.legend([*lines, *levels], [*labels, *names], loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle("Answers to held-out questions")
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
