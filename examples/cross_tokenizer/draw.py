"""Results of the training runs of run.sh: a markdown table and a figure.

    python examples/cross_tokenizer/draw.py runs/cross_tokenizer --losses ce p_kl --seeds 1 2 3 --out quality.png

Numbers are bits per byte of held-out text, which are comparable between tokenizers, averaged over seeds (orders of the
samples).
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

LABELS = {"ce": "text alone"}
COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7")
"""Distinguishable with any color vision: Okabe and Ito, "Color Universal Design" (2008)."""

Curve = list[tuple[int, float]]
"""(iteration, bits per byte) of each evaluation of a training."""


def curve(metrics: Path) -> Curve:
    """Read the curve of one training."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [(line["iteration"], line["valid_bits_per_byte"]) for line in lines if "valid_bits_per_byte" in line]


def mean(curves: Sequence[Curve]) -> Curve:
    """Average over training runs of the same length."""
    return [(points[0][0], sum(bits for _, bits in points) / len(points)) for points in zip(*curves, strict=True)]


def draw(trainings: dict[str, list[Curve]], out: Path) -> None:
    """Draw curves on the left, and final values on the right: a dot per training, a line for their mean."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained", width_ratios=(3, 2))
    for number, (loss, curves) in enumerate(trainings.items()):
        color, label = COLORS[number % len(COLORS)], LABELS.get(loss, loss)
        left.plot(*zip(*mean(curves)[1:], strict=True), marker="o", markersize=3.5, color=color, label=label)
        ends = [points[-1][1] for points in curves]
        right.plot([number] * len(ends), ends, "o", color=color, alpha=0.6)
        right.hlines(sum(ends) / len(ends), number - 0.3, number + 0.3, color=color, linewidth=2)
    right.set_xticks(range(len(trainings)), [LABELS.get(loss, loss) for loss in trainings], rotation=15)
    left.set(xlabel="optimizer step", ylabel="held-out bits per byte", title="mean over orders of the samples")
    right.set(ylabel="held-out bits per byte", title="after the last step, each order a dot")
    left.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for axis in (left, right):
        axis.grid(alpha=0.3)
    left.legend(frameon=False)
    figure.savefig(out, dpi=110)


def table(trainings: dict[str, list[Curve]]) -> str:
    """Final values as a markdown table."""
    seeds = len(next(iter(trainings.values())))
    head = ["loss", *(f"order {n + 1}" for n in range(seeds)), "mean"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for loss, curves in trainings.items():
        ends = [points[-1][1] for points in curves]
        numbers = [f"{bits:.3f}" for bits in (*ends, sum(ends) / len(ends))]
        lines.append(f"| {' | '.join([LABELS.get(loss, loss), *numbers])} |")
    return "\n".join(lines)


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--losses", nargs="+", required=True)
    parser.add_argument("--seeds", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    trainings = {loss: [curve(args.runs / loss / s / "metrics.jsonl") for s in args.seeds] for loss in args.losses}
    draw(trainings, args.out)
    print(table(trainings))
    print(f"figure: {args.out}")


if __name__ == "__main__":
    main()
