"""The content of the page: key figures, tables and lists as text, from the records of a run."""

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from typing import Any

from mkd.config.kd_fields import KDFields
from mkd.report.console import clock, perplexity
from mkd.report.html.charts import Panel, panels_of
from mkd.report.html.run_folder import LogWarning, OtherJob, RunFolder, WrittenSample

WARNINGS_SHOWN = 100
PROMPTS_SHOWN = 40
TEXT_SHOWN = 6000
"""Characters of a sample."""
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that are not displayed, or reorder others; also halves of surrogate pairs."""


@dataclass(frozen=True)
class Tile:
    """A key figure."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Column names, and one list of cells per table row."""

    columns: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class PromptSamples:
    """A prompt, and what the student wrote for it; the newest text first."""

    prompt: str
    texts: list[tuple[int, str, bool]]
    """Step, text, and whether the student has ended it."""


@dataclass(frozen=True)
class Content:
    """Everything that the page shows."""

    name: str
    folder: str
    made: str
    status: str
    finished: bool
    subtitle: str
    tiles: list[Tile]
    results: Table
    panels: list[Panel]
    other_panels: list[Panel]
    calibration: Table | None
    prompts: list[PromptSamples]
    prompts_left_out: int
    plan: list[tuple[str, str]]
    options: list[tuple[str, str]]
    run_yaml: str | None
    other_jobs: list[OtherJob]
    environment: list[tuple[str, str]]
    records: list[tuple[str, str]]
    warnings: list[LogWarning]
    warnings_left_out: int
    notes: list[str]


def content_of(run: RunFolder, environment: Sequence[tuple[str, str]], now: datetime) -> Content:
    """Assemble the page of a run.

    Args:
        run: its records.
        environment: name -> text, from its run.yaml.
        now: when the report is made.
    """
    last, planned = run.last_iteration, run.planned_iterations
    finished = planned is not None and last >= planned
    main, others = panels_of(run.log)
    prompts = prompts_of(run.samples)
    return Content(
        name=run.path.resolve().name,
        folder=str(run.path.resolve()),
        made=f"{now:%Y-%m-%d %H:%M}",
        status=f"{last:,} of {planned:,} steps" if planned else f"{last:,} steps",
        finished=finished,
        subtitle=run.plan.get("loss", "").partition(", computed by ")[0],
        tiles=tiles_of(run),
        results=results_of(run),
        panels=main,
        other_panels=others,
        calibration=calibration_table(run.calibration),
        prompts=prompts[:PROMPTS_SHOWN],
        prompts_left_out=max(0, len(prompts) - PROMPTS_SHOWN),
        plan=list(run.plan.items()),
        options=changed_options(run.kd),
        run_yaml=run.run_yaml,
        other_jobs=run.other_jobs,
        environment=list(environment),
        records=records_of(run),
        warnings=run.warnings[-WARNINGS_SHOWN:],
        warnings_left_out=max(0, len(run.warnings) - WARNINGS_SHOWN),
        notes=run.notes,
    )


def tiles_of(run: RunFolder) -> list[Tile]:
    """The key figures that the run has."""
    log, tiles = run.log, []
    if (ce := log.last("valid_ce")) is not None:
        first, teacher = log.first("valid_ce"), log.last("valid_teacher_ce")
        tiles.append(Tile("validation cross-entropy", f"{ce:.4f}", _from(first, ce, ".3f")))
        note = "" if teacher is None else f"teacher {perplexity(teacher):,.2f}"
        tiles.append(Tile("validation perplexity", f"{perplexity(ce):,.2f}", note))
    elif (ce := log.last("ce")) is not None:
        tiles.append(Tile("training cross-entropy", f"{ce:.4f}", _from(log.first("ce"), ce, ".3f")))
    for name, label, spec in (("kd", "validation KD", ".4f"), ("agreement", "top-1 agreement", ".1%")):
        if (value := log.last(f"valid_{name}")) is not None:
            note = _from(log.first(f"valid_{name}"), value, ".3f" if name == "kd" else ".1%")
            tiles.append(Tile(label, format(value, spec), note))
    tokens, seconds = (sum(log.series.get(name, {}).values()) for name in ("tokens", "step_s"))
    if tokens:
        tiles.append(Tile("tokens trained", _amount(tokens), ""))
    speeds = list(log.series.get("tokens_per_s", {}).values())
    if speeds:
        tiles.append(Tile("tokens per second", f"{statistics.median(speeds):,.0f}", "median of all steps"))
    if seconds:
        tiles.append(Tile("time in training steps", clock(seconds), "h:mm:ss, without evaluations and saves"))
    if (memory := log.series.get("peak_memory_gib")) is not None:
        tiles.append(Tile("peak memory", f"{max(memory.values()):.2f} GiB", "fullest rank"))
    return tiles


def _from(first: float | None, last: float, spec: str) -> str:
    return "" if first is None or first == last else f"from {first:{spec}}"


def _amount(value: float) -> str:
    for unit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= unit:
            return f"{value / unit:.3g} {suffix}"
    return f"{value:,.0f}"


_COLUMNS = {
    "cross-entropy": ("ce", lambda value: f"{value:.4f}"),
    "perplexity": ("ce", lambda value: f"{perplexity(value):,.2f}"),
    "bits per byte": ("bits_per_byte", lambda value: f"{value:.4f}"),
    "KD": ("kd", lambda value: f"{value:.4f}"),
    "agreement": ("agreement", lambda value: f"{value:.1%}"),
    "entropy": ("student_entropy", lambda value: f"{value:.3f}"),
    "calibration error": ("calibration_error", lambda value: f"{value:.3f}"),
}
"""Column -> metric without its prefix, and its text."""


def results_of(run: RunFolder) -> Table:
    """The final table: teacher, student at the first and the last evaluation, and at a test."""
    series = run.log.series
    rows: dict[str, dict[str, float]] = {}
    evaluated = sorted(series.get("valid_ce", {}))
    numbers = sorted(int(name[1]) for key in series if (name := re.fullmatch(r"valid_teacher_ce_(\d{1,4})", key)))
    for suffix in ("", *(f"_{number}" for number in numbers)):
        if f"valid_teacher_ce{suffix}" in series:
            last = {name: run.log.last(f"valid_teacher_{name}{suffix}") for name in ("ce", "bits_per_byte", "entropy")}
            last["student_entropy"] = last.pop("entropy")
            known = {name: value for name, value in last.items() if value is not None}
            rows[f"teacher{suffix.replace('_', ' ')}, validation"] = known
    for iteration in dict.fromkeys(evaluated[:1] + evaluated[-1:]):
        rows[f"student, validation at step {iteration:,}"] = _values_at(series, "valid_", iteration)
    for iteration in sorted(series.get("test_ce", {}))[-1:]:
        rows[f"student, test at step {iteration:,}"] = _values_at(series, "test_", iteration)
    if not rows and (trained := sorted(series.get("ce") or series.get("loss", {}))):
        rows[f"student, training at step {trained[-1]:,}"] = _values_at(series, "", trained[-1])
    columns = {
        name: ["" if metric not in row else text(row[metric]) for row in rows.values()]
        for name, (metric, text) in _COLUMNS.items()
    }
    kept = {name: cells for name, cells in columns.items() if any(cells)}
    return Table(["model", *kept], [list(cells) for cells in zip(rows, *kept.values(), strict=True)])


def _values_at(series: dict[str, dict[int, float]], prefix: str, iteration: int) -> dict[str, float]:
    names = {metric for metric, _ in _COLUMNS.values()}
    return {name: series[prefix + name][iteration] for name in names if iteration in series.get(prefix + name, {})}


def calibration_table(table: dict[str, list[float | None]] | None) -> Table | None:
    """Probabilities of the teacher's most probable token, by the teacher's own probability; without empty bins."""
    if table is None:
        return None
    bins = len(table["share"])
    rows = [
        [f"{i / bins:.1f} to {(i + 1) / bins:.1f}", f"{share:.1%}"]
        + ["" if (value := table[name][i]) is None else f"{value:.3f}" for name in ("teacher", "student")]
        + ["" if (value := table["agreement"][i]) is None else f"{value:.1%}"]
        for i, share in enumerate(table["share"])
        if share
    ]
    return Table(["teacher's top-1 probability", "tokens", "teacher", "student", "agreement"], rows) if rows else None


def prompts_of(samples: Sequence[WrittenSample]) -> list[PromptSamples]:
    """Samples by prompt, in the order of the prompts; the newest text first."""
    order = {prompt: i for i, prompt in enumerate(dict.fromkeys(sample.prompt for sample in samples))}
    by_prompt = sorted(samples, key=lambda sample: (order[sample.prompt], -sample.iteration))
    return [
        PromptSamples(
            _shortened(prompt), [(sample.iteration, _shortened(sample.text), sample.ended) for sample in group]
        )
        for prompt, group in groupby(by_prompt, key=lambda sample: sample.prompt)
    ]


def visible(text: str) -> str:
    """The text with control characters as symbols, which have no effect."""
    return _CONTROL.sub(_symbol, text.replace("\r\n", "\n"))


def _shortened(text: str) -> str:
    return text if len(text) <= TEXT_SHOWN else f"{text[:TEXT_SHOWN]} … ({len(text):,} characters)"


def _symbol(found: re.Match[str]) -> str:
    code = ord(found[0])
    return chr(0x2400 + code) if code < 0x20 else f"⟨U+{code:04X}⟩"


def changed_options(kd: dict[str, Any]) -> list[tuple[str, str]]:
    """Flags whose values are not the defaults, and their values."""
    defaults = {name: getattr(KDFields, name, None) for name in KDFields.__dataclass_fields__}
    found = []
    for name, value in kd.items():
        if name in defaults and value == defaults[name]:
            continue
        if value is None or isinstance(value, dict):
            continue
        flag = "--kd-" + name.replace("_", "-")
        if value is False:
            flag, value = "--kd-no-" + name.replace("_", "-"), ""
        words = value if isinstance(value, list) else ["" if value is True else value]
        found.append((flag, " ".join(map(str, words))))
    return found


def records_of(run: RunFolder) -> list[tuple[str, str]]:
    """Facts about the run's files."""
    facts = [("folder", str(run.path.resolve()))]
    if run.checkpoints:
        facts.append(("checkpoints", ", ".join(f"{iteration:,}" for iteration in run.checkpoints[-12:])))
    if run.snapshots:
        facts.append(("Hugging Face folders", ", ".join(f"{iteration:,}" for iteration in run.snapshots[-12:])))
    if run.jobs is not None:
        facts.append(("jobs", f"{run.jobs}, the first one and its restarts" if run.jobs > 1 else "1"))
    if run.skipped_steps:
        facts.append(("skipped steps", f"{run.skipped_steps} (the gradient overflowed)"))
    return facts
