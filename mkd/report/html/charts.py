"""Panels of curves in pixel coordinates, which the page draws as SVG."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from mkd.report.curves import smooth, thin
from mkd.report.run_log import RunLog

WIDTH, HEIGHT = 460.0, 230.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 12.0, 12.0, 26.0
"""Margins, inside which axes and their labels are."""
POINTS = 600
"""Most points of a drawn curve."""
SMOOTHED = ", smoothed"
"""End of the label of a smoothed curve."""
SMOOTHED_FROM = 40
"""Points from which a training curve is smoothed."""
LARGEST = 1e100
"""Values from here on are not drawn."""
OTHER_PANELS = 24
"""Most panels of metrics that have none of their own."""

Style = Literal["raw", "line", "marked", "level"]
Color = Literal["train", "valid", "test", "teacher", "extra"]


@dataclass(frozen=True)
class Series:
    """A metric in a panel."""

    metric: str
    label: str
    color: Color
    style: Style


@dataclass(frozen=True)
class PanelSpec:
    """The metrics of a panel."""

    title: str
    unit: str
    series: tuple[Series, ...]
    from_zero: bool = False
    """True for amounts, whose axis begins at 0."""
    percent: bool = False


def _pair(title: str, unit: str, name: str, teacher: str | None = None, percent: bool = False) -> PanelSpec:
    """Training, validation and test values of one metric."""
    series = [
        Series(name, "training", "train", "line"),
        Series(f"valid_{name}", "validation", "valid", "marked"),
        Series(f"test_{name}", "test", "test", "marked"),
    ]
    if teacher is not None:
        series.append(Series(teacher, "teacher, validation", "teacher", "level"))
    return PanelSpec(title, unit, tuple(series), percent=percent)


def _single(title: str, unit: str, name: str, from_zero: bool = False, percent: bool = False) -> PanelSpec:
    return PanelSpec(title, unit, (Series(name, "training", "train", "line"),), from_zero, percent)


PANELS = (
    _pair("Cross-entropy", "nats per token", "ce", "valid_teacher_ce"),
    _pair("KD divergence", "nats per token", "kd"),
    _pair("Top-1 agreement with the teacher", "share of tokens", "agreement", percent=True),
    _pair("Total loss", "nats per token", "loss"),
    _pair("Bits per byte", "bits per byte", "bits_per_byte", "valid_teacher_bits_per_byte"),
    _pair("Entropy of the student", "nats per token", "student_entropy", "valid_teacher_entropy"),
    _pair("Hidden states", "distance", "hidden"),
    _pair("Accuracy on tasks", "share of answers", "accuracy", percent=True),
    PanelSpec(
        "KD in written texts, by position",
        "nats per token",
        (
            Series("kd_first_64", "first 64 tokens", "train", "line"),
            Series("kd_next_256", "next 256", "valid", "line"),
            Series("kd_rest", "rest", "teacher", "line"),
        ),
    ),
    _single("Length of written texts", "tokens", "written_tokens", from_zero=True),
    PanelSpec(
        "Written texts",
        "share",
        (
            Series("written_cut_off", "cut off", "train", "line"),
            Series("written_repeated", "repeated 4-grams", "valid", "line"),
            Series("written_overlap", "top-16 overlap", "teacher", "marked"),
        ),
        from_zero=True,
        percent=True,
    ),
    _single("Gradient norm", "2-norm before clipping", "grad_norm"),
    _single("Learning rate", "", "lr", from_zero=True),
    _single("Ratio R", "weight of KD", "ratio"),
    _single("Temperature T", "", "temperature"),
    _single("Speed", "tokens per second", "tokens_per_s", from_zero=True),
    _single("Model FLOPs utilization", "share of the peak", "mfu", from_zero=True, percent=True),
    _single("Peak memory, maximum over ranks", "GiB", "peak_memory_gib", from_zero=True),
)
"""Panels in their order; those without values are left out."""
CONSTANT_IS_DULL = ("ratio", "temperature")
"""Metrics that are not drawn while they have one value."""
NOT_DRAWN = {
    *("tokens", "padding_tokens", "step_s", "tokens_per_s_per_gpu", "student_tflops_per_gpu", "teacher_tflops_per_gpu"),
    *("elapsed_s", "data_s", "teacher_s", "cache_s", "valid_perplexity", "test_perplexity", "teacher_entropy"),
    *("valid_teacher_perplexity", "test_teacher_perplexity", "test_teacher_ce", "test_teacher_bits_per_byte"),
    *("test_teacher_entropy", "rollout_s", "student_s", "optimizer_s"),
}
"""Metrics that repeat others, or are summed up in the table."""


@dataclass(frozen=True)
class Tick:
    """A mark of an axis."""

    at: float
    """Pixels."""
    label: str


@dataclass(frozen=True)
class DrawnLine:
    """A curve in pixels."""

    label: str
    color: Color
    style: Style
    path: str
    """The `d` of an SVG path."""
    marks: tuple[tuple[float, float], ...]
    """Centers of markers."""


@dataclass(frozen=True)
class Panel:
    """A drawn panel, and the values that the page shows under the pointer."""

    title: str
    unit: str
    lines: tuple[DrawnLine, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    bounds: tuple[float, float, float, float]
    """Iterations at the left and right edge, values at the bottom and top."""
    values: tuple[dict, ...]
    """label, color, x, y of each curve."""
    percent: bool = False
    legend: tuple[tuple[str, Color], ...] = field(default=())


def panels_of(log: RunLog) -> tuple[list[Panel], list[Panel]]:
    """The panels of a run: those of `PANELS`, and those of metrics that have none."""
    drawn = {series.metric for spec in PANELS for series in spec.series} | NOT_DRAWN
    main = [spec for spec in PANELS if not _is_dull(spec, log)]
    others = [
        _pair(base, "", base) if f"valid_{base}" in log.series else _single(base, "", base)
        for base in dict.fromkeys(name.removeprefix("valid_").removeprefix("test_") for name in log.series)
        if base not in drawn and f"valid_{base}" not in drawn
    ]
    span = _span(log)
    return [p for p in (draw(spec, log, span) for spec in main) if p is not None], [
        p for p in (draw(spec, log, span) for spec in others[:OTHER_PANELS]) if p is not None
    ]


def _is_dull(spec: PanelSpec, log: RunLog) -> bool:
    name = spec.series[0].metric
    return name in CONSTANT_IS_DULL and len(set(log.series.get(name, {}).values())) < 2


def _span(log: RunLog) -> tuple[float, float]:
    """First and last iteration of all metrics."""
    ends = [end for points in log.series.values() for end in (min(points), max(points))]
    first, last = float(min(ends)), float(max(ends))
    return (first, last) if last > first else (first, first + 1.0)


def draw(spec: PanelSpec, log: RunLog, span: tuple[float, float]) -> Panel | None:
    """Draw the metrics of a panel; None if the run has none of them.

    Args:
        spec: the panel.
        log: the run.
        span: iterations at the left and right edge.
    """
    curves = [curve for series in spec.series for curve in _curves(series, log)]
    finite = [y for series, points in curves for _, y in points if math.isfinite(y)]
    if not finite:
        return None
    low, high = _value_range(curves, spec.from_zero)
    high = min(high, 1.0) if spec.percent and max(finite) <= 1.0 else high
    y_ticks = nice_ticks(low, high, 5)
    low, high = min(low, y_ticks[0]), max(high, y_ticks[-1])
    scale = _Scale(span, (low, high))
    named = {series.color: series.label.removesuffix(SMOOTHED) for series, _ in curves}
    return Panel(
        title=spec.title,
        unit=spec.unit,
        lines=tuple(_draw_line(series, points, scale) for series, points in curves),
        x_ticks=tuple(Tick(scale.x(tick), short(tick)) for tick in nice_ticks(*span, 5, whole=True)),
        y_ticks=tuple(Tick(scale.y(tick), short(tick, spec.percent)) for tick in y_ticks),
        bounds=(*span, low, high),
        values=tuple(
            {"label": series.label, "color": series.color, "x": [x for x, _ in points], "y": [y for _, y in points]}
            for series, points in curves
            if series.style != "level"
        ),
        percent=spec.percent,
        legend=tuple((label, color) for color, label in named.items()) if len(named) > 1 else (),
    )


def _curves(series: Series, log: RunLog) -> list[tuple[Series, list[tuple[float, float]]]]:
    """The curve of a metric, thinned; a long training curve also in a smoothed form, above the raw one."""
    iterations, values = log.curve(series.metric)
    values = [value if abs(value) < LARGEST else math.nan for value in values]
    if not any(math.isfinite(value) for value in values):
        return []
    if series.style == "level":
        last = next(value for value in reversed(values) if math.isfinite(value))
        return [(series, [(float(iterations[-1]), last)])]
    raw = thin([float(i) for i in iterations], values, POINTS)
    if series.style != "line" or len(values) < SMOOTHED_FROM:
        return [(series, raw)]
    smoothed = smooth(values, len(values) // 20)
    step = max(1, len(values) // POINTS)
    kept = sorted({*range(0, len(values), step), len(values) - 1})
    line = [(float(iterations[i]), smoothed[i]) for i in kept if math.isfinite(smoothed[i])]
    behind = Series(series.metric, series.label, series.color, "raw")
    return [(behind, raw), (Series(series.metric, series.label + SMOOTHED, series.color, "line"), line)]


def _value_range(curves: Sequence[tuple[Series, list[tuple[float, float]]]], from_zero: bool) -> tuple[float, float]:
    """Lowest and highest value to show; single outliers of noisy curves are cut off."""
    shown: list[float] = []
    for series, points in curves:
        values = sorted(y for _, y in points if math.isfinite(y))
        cut = len(values) // 50 if series.style == "raw" else 0
        shown += values[cut : len(values) - cut]
    low, high = min(shown), max(shown)
    low = min(low, 0.0) if from_zero else low
    if high - low < 1e-9 * max(abs(high), abs(low), 1e-30):
        margin = 0.5 * abs(high) or 0.5
        return (low if from_zero else low - margin), high + margin
    margin = 0.06 * (high - low)
    return (low if from_zero or low == 0.0 else low - margin), high + margin


@dataclass(frozen=True)
class _Scale:
    """From iterations and values to pixels."""

    across: tuple[float, float]
    up: tuple[float, float]

    def x(self, value: float) -> float:
        share = (value - self.across[0]) / (self.across[1] - self.across[0])
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        share = (value - self.up[0]) / (self.up[1] - self.up[0])
        pixel = HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
        return round(min(max(pixel, -1e4), 1e4), 1)


def _draw_line(series: Series, points: Sequence[tuple[float, float]], scale: _Scale) -> DrawnLine:
    if series.style == "level":
        y = scale.y(points[0][1])
        return DrawnLine(series.label, series.color, series.style, f"M{LEFT} {y}H{WIDTH - RIGHT}", ())
    pixels = [(scale.x(x), scale.y(y)) for x, y in points]
    path = "M" + "L".join(f"{x} {y}" for x, y in pixels)
    few = series.style == "marked" or len(pixels) == 1
    return DrawnLine(series.label, series.color, series.style, path, tuple(pixels) if few else ())


def nice_ticks(low: float, high: float, about: int, whole: bool = False) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten between two values, about as many as given.

    Args:
        low, high: the range; high is larger.
        about: number of ticks.
        whole: only whole numbers.
    """
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    if whole:
        step = max(step, 1.0)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12 - math.floor(math.log10(step))) + 0.0 for i in range(first, last + 1)] or [low, high]


def short(value: float, percent: bool = False) -> str:
    """A number for an axis: 12k, 1.5M, 2e-4, 35%."""
    if percent:
        return f"{100 * value:g}%"
    size = abs(value)
    for unit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= unit:
            return f"{value / (1e3 if suffix == 'k' else unit):g}{suffix}"
    text = f"{value:g}"
    return text.replace("e-0", "e-").replace("e+0", "e")
