"""Plot the curves of one or several runs: losses, agreement, speed, memory.

    mkd plot runs/a runs/b --labels "KD" "CE only" --out loss.png
    mkd plot runs/a/metrics.jsonl --panels ce kd valid_ce tokens_per_s --smooth 50 --out run.svg

Reads metrics.jsonl in the --save folder of a run, or the file of --kd-metrics-file. The suffix of --out selects the
format: .png, .svg or .pdf.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mkd.cli.usage import command_parser
from mkd.config.loss_spec import divergence_text
from mkd.errors import MkdConfigError, exit_status
from mkd.report.curves import smooth
from mkd.report.run_log import METRICS, RunLog
from mkd.utils.atomic_files import regular_target, write_bytes
from mkd.utils.json_files import read_json

SUFFIXES = (".png", ".svg", ".pdf")
PANELS = {
    "loss": "Total loss, training",
    "ce": "Cross-entropy, training",
    "kd": "KD divergence, training",
    "hidden": "Hidden states, training",
    "valid_ce": "Cross-entropy, validation",
    "valid_bits_per_byte": "Bits per byte, validation",
    "valid_kd": "KD divergence, validation",
    "valid_agreement": "Top-1 agreement with the teacher, validation",
    "grad_norm": "Gradient norm",
    "lr": "Learning rate",
    "tokens_per_s": "Speed",
    "mfu": "Model FLOPs utilization",
    "peak_memory_gib": "Peak memory, maximum over ranks",
}
"""Name in the metrics file -> panel title. Other names can be plotted too, with the name as title."""
DEFAULT = ("loss", "ce", "kd", "valid_ce", "tokens_per_s", "peak_memory_gib")
UNITS = {
    "valid_bits_per_byte": "bits per byte",
    "valid_agreement": "share of tokens",
    "grad_norm": "2-norm",
    "lr": "",
    "tokens_per_s": "tokens per second",
    "mfu": "share of the peak",
    "peak_memory_gib": "GiB",
}
"""Units other than nats per token."""
TEACHERS = {"valid_ce": "valid_teacher_ce", "valid_bits_per_byte": "valid_teacher_bits_per_byte"}
"""Metrics of the teacher shown in the same panel."""
OBJECTIVES = ("loss", "kd", "valid_loss", "valid_kd", "test_loss", "test_kd")
"""Metrics that are comparable between runs only if the runs minimize the same objective."""
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Distinguishable with any color vision: Okabe and Ito, "Color Universal Design" (2008)."""
GRAY = "#6b7280"


def objective(run: RunLog) -> str:
    """R, divergence and T of a run, as far as they are in its metrics and in the kd_config.json next to them."""
    ratio, temperature = (_over_time(run.curve(name)[1]) for name in ("ratio", "temperature"))
    if ratio == "0":
        return "R = 0"
    parts = [f"R = {ratio}" if ratio else "", _divergence(run), f"T = {temperature}" if temperature else ""]
    return ", ".join(part for part in parts if part)


def _over_time(values: list[float]) -> str:
    ends = [f"{values[i]:g}" for i in (0, -1)] if values else []
    return " to ".join(dict.fromkeys(ends))


def _divergence(run: RunLog) -> str:
    try:
        kd = read_json(Path(run.path).with_name("kd_config.json"))["kd"]
        loss = divergence_text(kd["loss"], kd["beta"], kd["skew"])
        loss += "" if kd["temperature_squared"] else ", without T^2"
        return f"{kd['xtoken_loss']}, {loss}" if kd["xtoken_loss"] else loss
    except (OSError, ValueError, KeyError, TypeError):  # a run without --save, or of another version of mkd
        return ""


def draw_panel(axes: Axes, name: str, runs: list[tuple[str, str, RunLog]], window: int | None) -> None:
    """Draw one metric for all runs that have it: (label, color, log); training curves are smoothed.

    If the metric depends on the objective and the runs differ in it, a legend names the objective of each run.
    """
    there = [(label, color, run) for label, color, run in runs if run.series.get(name)]
    objectives = [objective(run) for _, _, run in there]
    differ = name in OBJECTIVES and len(set(objectives)) > 1
    for (label, color, run), minimized in zip(there, objectives, strict=True):
        iterations, values = run.curve(name)
        legend = f"{label}: {minimized}" if differ else None
        if name.startswith("valid_"):
            last = f"{label}: {values[-1]:.3f}" + (f" ({minimized})" if differ else "")
            axes.plot(iterations, values, color=color, marker="o", markersize=4, linewidth=1.6, label=last)
            continue
        points = window or max(1, len(values) // 20)
        if points > 1:
            axes.plot(iterations, values, color=color, alpha=0.25, linewidth=0.8)
        axes.plot(iterations, smooth(values, points), color=color, linewidth=1.6, label=legend)
    if name in TEACHERS:
        draw_teachers(axes, TEACHERS[name], there)
    if differ or name.startswith("valid_"):
        title = "different losses" if differ else "last value"
        axes.legend(loc="best", frameon=False, fontsize=9, title=title, title_fontsize=9)
    axes.set_title(PANELS.get(name, name), loc="left", fontsize=11)
    axes.set_ylabel(UNITS.get(name, "nats per token"), color=GRAY, fontsize=9)
    if name in ("tokens_per_s", "peak_memory_gib"):
        axes.set_ylim(0.0, 1.1 * max(axes.dataLim.ymax, 1e-9))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, nbins=8, steps=(1, 2, 5, 10)))
    axes.tick_params(labelbottom=True)
    axes.grid(color="#e5e7eb", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRAY)
    axes.tick_params(colors=GRAY, labelsize=9)


def draw_teachers(axes: Axes, name: str, runs: list[tuple[str, str, RunLog]]) -> None:
    """Draw a dashed line at the teacher's value; if runs have different teachers, one per run in its color."""
    levels = [(label, color, level) for label, color, run in runs if (level := run.last(name)) is not None]
    same = len({f"{level:.3f}" for _, _, level in levels}) == 1
    for label, color, level in levels[:1] if same else levels:
        name = "teacher" if same else f"teacher of {label}"
        axes.axhline(level, color=GRAY if same else color, linestyle="--", linewidth=1.2, label=f"{name}: {level:.3f}")


def draw(runs: list[RunLog], labels: list[str], panels: Sequence[str] = DEFAULT, window: int | None = None) -> Figure:
    """One panel per metric that any of the runs has; `window` as in `draw_panel`."""
    colored = [(label, COLORS[i % len(COLORS)], run) for i, (label, run) in enumerate(zip(labels, runs, strict=True))]
    names = [name for name in panels if any(run.series.get(name) for run in runs)]
    columns = 2 if len(names) > 1 else 1
    rows = math.ceil(len(names) / columns)
    figure, grid = plt.subplots(rows, columns, figsize=(5.2 * columns, 0.6 + 3.3 * rows), squeeze=False, sharex=True)
    for axes, name in zip(grid.flat, names, strict=False):
        draw_panel(axes, name, colored, window)
    for axes in grid.flat[len(names) :]:
        axes.set_visible(False)
    for axes in grid[-1]:
        axes.set_xlabel("iteration", color=GRAY)
    handles = [plt.Line2D([], [], color=color, linewidth=2, label=label) for label, color, _ in colored]
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.01, 1.0), ncols=min(4, len(runs)), frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.35 / figure.get_figheight()))
    return figure


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = command_parser(__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE", help="--save folder of a run, or its metrics file")
    parser.add_argument("--out", required=True, metavar="FILE", help=f"output file ({', '.join(SUFFIXES)})")
    parser.add_argument(
        "--labels", nargs="+", metavar="NAME", help="one label per FILE (default: the name of its folder)"
    )
    parser.add_argument(
        "--panels", nargs="+", default=DEFAULT, metavar="NAME", help=f"metrics to plot (default: {' '.join(DEFAULT)})"
    )
    parser.add_argument(
        "--smooth",
        type=int,
        metavar="N",
        help="smooth training curves over N points around each one (default: 1/20 of the points; 1: off)",
    )
    return parser.parse_args(argv)


def plot(
    files: list[str],
    labels: list[str] | None,
    out: str,
    panels: Sequence[str] = DEFAULT,
    window: int | None = None,
) -> None:
    """Read the files and write the figure.

    Raises:
        MkdConfigError, MkdDataError: a flag or a file is invalid.
    """
    if Path(out).suffix not in SUFFIXES:
        raise MkdConfigError(f"--out {out} must end in {', '.join(SUFFIXES)}")
    regular_target(Path(out), "--out")
    if labels is not None and len(labels) != len(files):
        raise MkdConfigError(f"--labels has {len(labels)} names for {len(files)} files; give one per file")
    if window is not None and window < 1:
        raise MkdConfigError(f"--smooth is {window}; it must be at least 1")
    files = [str(Path(path) / METRICS) if Path(path).is_dir() else path for path in files]
    runs = [RunLog.read(path) for path in files]
    for run in runs:
        if not any(name in run.series for name in panels):
            raise MkdConfigError(f"{run.path} has none of {', '.join(panels)} (--panels), or is not a metrics file")
        if run.torn:
            print(f"plot: {run.path}: the last line is incomplete and ignored", file=sys.stderr)
    matplotlib.rcParams["text.parse_math"] = False  # names of folders and metrics may have $
    figure = draw(runs, labels or [Path(path).resolve().parent.name for path in files], panels, window)
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    image = BytesIO()
    figure.savefig(image, format=Path(out).suffix[1:], dpi=150)
    write_bytes(Path(out), image.getvalue())
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Run the tool; a user error prints one line and returns exit status 1."""
    args = parse_arguments(argv)
    status = exit_status(lambda: plot(args.files, args.labels, args.out, args.panels, args.smooth))
    if status == 0:
        print(args.out)
    return status
