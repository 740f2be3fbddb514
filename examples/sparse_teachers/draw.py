"""Results of the training runs of run.sh: a markdown table and a figure.

    python examples/sparse_teachers/draw.py runs/sparse_teachers --out quality.png

Numbers are those of the last evaluation, on held-out pages: cross-entropy, and top-1 agreement of student and teacher,
which a cache of sampled targets does not provide.
"""

import argparse
import json
import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SERIES = {
    "sampled": "K samples",
    "top": "K most probable, the others in a bucket",
    "renormalize": "K most probable, renormalized",
}
COLORS = ("#009E73", "#0072B2", "#D55E00")
"""Distinguishable with any color vision: Okabe and Ito, "Color Universal Design" (2008)."""


def last_evaluations(runs: Path) -> dict[str, dict]:
    """Name -> last evaluation line of each training that has finished."""
    found = {}
    for file in sorted(runs.glob("*/metrics.jsonl")):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        evaluations = [line for line in lines if "valid_ce" in line]
        if evaluations and evaluations[-1]["iteration"] > 0:
            found[file.parent.name] = evaluations[-1]
    return found


def series(rows: dict[str, dict], prefix: str) -> list[tuple[int, dict]]:
    """(K, evaluation) of one kind, sorted by K."""
    found = ((int(name.rsplit("_", 1)[1]), row) for name, row in rows.items() if name.startswith(f"{prefix}_"))
    return sorted(found, key=lambda item: item[0])


def draw(rows: dict[str, dict], out: Path) -> None:
    """Draw held-out cross-entropy against K; the renormalized variants are far above, in a second panel."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained", width_ratios=(3, 2))
    for axis, kinds in zip(axes, (("sampled", "top"), ("sampled", "top", "renormalize")), strict=True):
        for kind in kinds:
            points = series(rows, kind)
            color = COLORS[list(SERIES).index(kind)]
            values = [row["valid_ce"] for _, row in points]
            axis.plot([k for k, _ in points], values, marker="o", color=color, label=SERIES[kind])
        axis.axhline(rows["full"]["valid_ce"], color="black", linewidth=1.2, label="full distribution")
        axis.set_xscale("log", base=4)
        axis.set_xticks(ticks := [1, 4, 16, 64, 256], [str(k) for k in ticks])
        axis.set(xlabel="K, tokens or samples kept", ylabel="held-out cross-entropy, nats per token")
        axis.grid(alpha=0.3)
    axes[1].axhline(rows["ce"]["valid_ce"], color="gray", linewidth=1.2, linestyle="--", label="text alone, no teacher")
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(out, dpi=110)


def table(rows: dict[str, dict]) -> str:
    """The evaluations as a markdown table."""
    lines = ["| teacher | K | held-out CE | perplexity | agreement |", "|---|---|---|---|---|"]
    named = [(kind, k, row) for kind in SERIES for k, row in series(rows, kind)]
    whole = [(label, "", rows[name]) for name, label in (("full", "full distribution"), ("ce", "text alone"))]
    for kind, k, row in (*whole, *named):
        agreement = f"{row['valid_agreement']:.1%}" if row.get("valid_agreement") is not None else ""
        ce = row["valid_ce"]
        lines.append(f"| {SERIES.get(kind, kind)} | {k} | {ce:.3f} | {math.exp(ce):,.1f} | {agreement} |")
    return "\n".join(lines)


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = last_evaluations(args.runs)
    draw(rows, args.out)
    print(table(rows))


if __name__ == "__main__":
    main()
