"""The table and the picture of evaluate.py's numbers.

python examples/sparse_teachers/draw.py runs/sparse_teachers/quality.json --out quality.png
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SERIES = {"top": "K most probable and one bucket for the others", "renormalize": "K most probable, renormalized",
          "sampled": "K draws"}  # fmt: skip
COLOURS = ("#0072B2", "#D55E00", "#009E73")
"""Told apart with any colour vision: Okabe and Ito, "Color Universal Design" (2008)."""
PANELS = {"kl": "KL(teacher || student), nats a token", "ce": "Cross-entropy, nats a token",
          "agreement": "Same most probable token"}  # fmt: skip


def series(rows: dict[str, dict], prefix: str) -> tuple[list[int], list[dict]]:
    """K and rows of one kind, by K."""
    found = sorted((int(name.rsplit("_", 1)[1]), row) for name, row in rows.items() if name.startswith(prefix + "_"))
    return [k for k, _ in found], [row for _, row in found]


def draw(rows: dict[str, dict], out: Path) -> None:
    """A panel for each measure."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(13, 4.2), layout="constrained")
    for axis, (name, title) in zip(axes, PANELS.items(), strict=True):
        for (prefix, label), colour in zip(SERIES.items(), COLOURS, strict=True):
            k, found = series(rows, prefix)
            axis.plot(k, [row[name] for row in found], marker="o", color=colour, label=label)
        axis.axhline(rows["full"][name], color="black", linewidth=1.2, label="whole distribution")
        axis.axhline(rows["ce"][name], color="grey", linewidth=1.2, linestyle="--", label="no teacher (cross-entropy)")
        axis.set_xscale("log", base=4)
        axis.set(title=title, xlabel="K")
        axis.grid(alpha=0.3)
    axes[0].set_yscale("log")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(out, dpi=130)


def table(rows: dict[str, dict]) -> str:
    """In markdown."""
    lines = ["| learns from | KL to the teacher | cross-entropy | same token |", "|---|---|---|---|"]
    for name, row in rows.items():
        lines.append(f"| {name.replace('_', ' ')} | {row['kl']:.4f} | {row['ce']:.4f} | {row['agreement']:.1%} |")
    return "\n".join(lines)


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quality", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = json.loads(args.quality.read_text())["rows"]
    draw(rows, args.out)
    print(table(rows))


if __name__ == "__main__":
    main()
