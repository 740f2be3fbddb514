"""Format of the lines and tables that a run prints."""

import math
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from mkd.utils.logging import EVERY_RANK, FILE_ONLY, logger

COMPARED = ("agreement", "student_entropy", "teacher_entropy")
"""Metrics with a text of their own, not shown as losses."""
TASKS = ("accuracy", "cut_off")
"""Measurements of the answers to --kd-eval-tasks."""
WRITTEN = ("tokens", "cut_off", "repeated", "age", "tokens_per_s", "aligned", "entropy", "overlap")
"""Measurements of texts that the student has written for a step, without their prefix `written_`."""
WRITTEN_KD = ("kd_first_64", "kd_next_256", "kd_rest")
"""Mean divergence of written tokens by their position."""
_POSITIONS = ("1-64", "65-320", "321-")
"""Positions of `WRITTEN_KD` in a written text, for the console."""
LEADING = ("loss", "ce", "kd")
"""Losses that come first; the others follow in the order in which they are reported."""
WAITS = ("data", "teacher", "cache", "rollout")
"""Causes of waiting in a step; its JSON line has the seconds of each as <name>_s."""
CALIBRATION_TOKENS = 10_000
"""Fewest tokens for a calibration table: with a tenth of them in a bin, the standard error of a share is 0.016."""
FIRST_STEPS = 10
"""Steps at the beginning of a job that have a line each."""
SHORT_RUN = 100
"""A run of at most this many iterations has a line per step."""
LONGEST_WAIT_S = 30.0
"""Seconds between two lines at most, if no step takes longer."""
_NAMES = {"valid": "validation", "test": "test"}


@dataclass
class LinePlan:
    """Decides which iterations have a line in the console.

    With --log-interval, its multiples and the last iteration. Without it there are more lines: each step at the
    beginning of a job and of a short run, and one at least every 30 seconds.
    """

    train_iters: int
    """The last iteration."""
    log_interval: int
    is_given: bool = True
    """True if the user chose the interval: there are no further lines."""
    _first: int = 0
    _last_line: float = field(default_factory=time.monotonic)

    def start(self, iteration: int) -> None:
        """A job starts at this iteration, which is 0 for a new run."""
        self._first, self._last_line = iteration, time.monotonic()

    def measures(self, iteration: int) -> bool:
        """True if the ranks measure what takes communication, such as the peak memory over all of them. Equal on all
        ranks: it does not depend on the time."""
        is_early = iteration <= self._first + FIRST_STEPS or self.train_iters <= SHORT_RUN
        is_due = iteration % self.log_interval == 0 or iteration == self.train_iters
        return is_due or (is_early and not self.is_given)

    def is_due(self, iteration: int) -> bool:
        """True if this iteration has a line; called once per iteration, on the rank that prints."""
        now = time.monotonic()
        is_late = not self.is_given and now - self._last_line >= LONGEST_WAIT_S
        is_due = is_late or self.measures(iteration)
        if is_due:
            self._last_line = now
        return is_due


def perplexity(cross_entropy: float) -> float:
    """exp of a mean cross-entropy in nats; infinity if that overflows, NaN for NaN."""
    return math.inf if cross_entropy >= 700.0 else math.exp(cross_entropy)


def clock(seconds: float) -> str:
    """A duration as h:mm:ss; a question mark for none, as of a damaged metrics file."""
    if not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"


def number(value: float) -> str:
    """A value in nats with a fixed width: four decimals, or two digits for a very small value."""
    return f"{value:8.1e}" if 0.0 < abs(value) < 1e-3 else f"{value:8.4f}"


def mean_of(lines: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The mean over the lines that have the name; None if none has."""
    values = [line[name] for line in lines if line.get(name) is not None]
    return sum(values) / len(values) if values else None


def training_line(
    window: Sequence[Mapping[str, Any]], terms: Sequence[str], train_iters: int, gpus: int, eta_s: float
) -> str:
    """The line of a log interval: means over it, and the last values of lr, R and T.

    Args:
        window: the JSON lines of the interval's iterations.
        terms: names of the losses, which are averaged over tokens.
        train_iters: the last iteration.
        gpus: ranks on GPUs; 0 on CPU.
        eta_s: seconds to the end.
    """
    last, taken = window[-1], [line for line in window if not line["skipped"]]
    parts = [f"iteration {last['iteration']:{len(str(train_iters))}d}/{train_iters}"]
    hidden = (*LEADING, *COMPARED)
    others = [n for n in terms if n not in hidden and _unnumbered(n) not in COMPARED and not is_of_written_texts(n)]
    ordered = [name for name in LEADING if name in terms] + others
    means = {name: mean_of(taken, name) for name in (*ordered, *COMPARED)}
    parts += [f"{name} {number(means[name])}" for name in ordered if means[name] is not None]
    if means["student_entropy"] is not None:
        theirs = "" if means["teacher_entropy"] is None else f" (teacher {means['teacher_entropy']:.3f})"
        parts.append(f"entropy {means['student_entropy']:.3f}{theirs}")
    if means["agreement"] is not None:
        parts.append(f"agreement {means['agreement']:6.1%}")
    parts += _compared_with_several({name: mean for name in terms if (mean := mean_of(taken, name)) is not None})
    parts += _written(taken)
    if last["grad_norm"] is not None:
        parts.append(f"grad norm {last['grad_norm']:7.3f}")
    if last["lr"] is not None:
        parts.append(f"lr {last['lr']:.2e}")
    parts += [f"R {last['ratio']:g}", f"T {last['temperature']:g}"]
    if len(taken) < len(window):
        parts.append(f"skipped {len(window) - len(taken)}")
    return " | ".join([*parts, *_speed(window, gpus), f"ETA {clock(eta_s)}"])


def is_of_written_texts(name: str) -> bool:
    """True for a measurement of texts that the student has written, also if it is of one of several teachers."""
    names = {name, re.sub(r"_\d+$", "", name)}
    return any(one in WRITTEN_KD or one.removeprefix("written_") in WRITTEN for one in names)


def _written(window: Sequence[Mapping[str, Any]]) -> list[str]:
    """Means of texts that the student has written; empty without them."""
    mean = {name: mean_of(window, f"written_{name}") for name in WRITTEN}
    if mean["tokens"] is None:
        return []
    text = f"written {mean['tokens']:.1f} tokens, {mean['cut_off']:.0%} cut off, {mean['repeated']:.0%} repeated"
    text += f", {mean['tokens_per_s']:,.0f} tokens/s" if mean["tokens_per_s"] is not None else ""
    text += f", age {mean['age']:.1f}" if mean["age"] else ""
    text += f", {mean['aligned']:.0%} aligned" if mean["aligned"] is not None else ""
    text += f", entropy {mean['entropy']:.3f}" if mean["entropy"] is not None else ""
    text += f", top-16 overlap {mean['overlap']:.0%}" if mean["overlap"] is not None else ""
    kd = [mean_of(window, name) for name in WRITTEN_KD]
    if not any(value is not None for value in kd):
        return [text]
    known = [f"{at}: {number(value).strip()}" for at, value in zip(_POSITIONS, kd, strict=True) if value is not None]
    return [text, f"kd at written tokens {', '.join(known)}"]


def _speed(window: Sequence[Mapping[str, Any]], gpus: int) -> list[str]:
    seconds = sum(line["step_s"] for line in window)

    def rate(name: str) -> float:
        """Mean of a rate, weighted with the time of the steps."""
        return sum(line[name] * line["step_s"] for line in window) / seconds

    tokens = rate("tokens_per_s")
    parts = [f"{tokens:9,.0f} tokens/s" + (f" ({tokens / gpus:,.0f} per GPU)" if gpus > 1 else "")]
    if gpus:
        student, teacher = rate("student_tflops_per_gpu"), rate("teacher_tflops_per_gpu")
        parts.append(f"{student:5.1f}" + (f" + {teacher:5.1f} teacher" if teacher else "") + " TFLOP/s per GPU")
    if "mfu" in window[-1]:
        parts.append(f"MFU {rate('mfu'):5.1%}")
    if "peak_memory_gib" in window[-1]:
        parts.append(f"{window[-1]['peak_memory_gib']:6.2f} GiB")
    waits = {what: sum(line.get(f"{what}_s", 0.0) for line in window) / seconds for what in WAITS}
    parts.append(
        "time: "
        + ", ".join(f"{what} {share:3.0%}" for what, share in waits.items() if share >= 0.005 or what == "data")
    )
    return parts


def evaluation_line(split: str, iteration: int, values: Mapping[str, float]) -> str:
    """The line of an evaluation; the split is "valid" or "test"."""
    parts = [f"{_NAMES[split]} at iteration {iteration}"]
    if "ce" in values:
        parts.append(f"ce {values['ce']:.4f} (ppl {values['perplexity']:.2f}{_bits(values, 'bits_per_byte')})")
    shown = {"loss", "ce", "teacher_ce", "perplexity", "teacher_perplexity", "calibration_error", *COMPARED, *TASKS}
    numbered = {"teacher_ce", *COMPARED}
    others = [n for n in values if n not in shown and _unnumbered(n) not in numbered]
    others = [name for name in others if not _unnumbered(name).endswith("bits_per_byte")]
    parts += [f"{name} {number(values[name]).strip()}" for name in others]
    if "teacher_ce" in values:
        bits = _bits(values, "teacher_bits_per_byte")
        parts.append(f"teacher ce {values['teacher_ce']:.4f} (ppl {values['teacher_perplexity']:.2f}{bits})")
    if "student_entropy" in values:
        theirs = f" (teacher {values['teacher_entropy']:.3f})" if "teacher_entropy" in values else ""
        parts.append(f"entropy {values['student_entropy']:.3f}{theirs}")
    if "agreement" in values:
        parts.append(f"top-1 agreement {values['agreement']:.1%}")
    for teacher, ce in of_teachers(values, "teacher_ce").items():
        bits = _bits(values, f"teacher_bits_per_byte_{teacher}")
        parts.append(f"teacher {teacher} ce {ce:.4f} (ppl {perplexity(ce):.2f}{bits})")
    parts += _compared_with_several(values)
    if "accuracy" in values:
        parts.append(f"accuracy {values['accuracy']:.1%} ({values['cut_off']:.1%} of the answers cut off)")
    return " | ".join(parts)


def of_teachers(values: Mapping[str, float], name: str) -> dict[int, float]:
    """Number of a teacher -> its value of a metric; empty unless there are several teachers."""
    own = (key for key in values if key != name and _unnumbered(key) == name)
    return {int(key.rpartition("_")[2]): values[key] for key in own}


def _unnumbered(name: str) -> str:
    """The name of a metric without the number of one of several teachers."""
    return re.sub(r"_\d+$", "", name)


def _compared_with_several(values: Mapping[str, float]) -> list[str]:
    """The student's entropy and agreement next to those of several teachers; empty with a single one."""
    parts = []
    if student := of_teachers(values, "student_entropy"):
        theirs = [f"teacher {number} {value:.3f}" for number, value in of_teachers(values, "teacher_entropy").items()]
        parts.append(f"entropy {next(iter(student.values())):.3f}" + (f" ({', '.join(theirs)})" if theirs else ""))
    if agreement := of_teachers(values, "agreement"):
        parts.append("agreement " + ", ".join(f"teacher {number} {value:.1%}" for number, value in agreement.items()))
    return parts


def _bits(values: Mapping[str, float], name: str) -> str:
    return f", {values[name]:.4f} bits/byte" if name in values else ""


def evaluation_table(rows: Mapping[str, Mapping[str, float]]) -> Table:
    """Table of models; columns without a value are omitted.

    Args:
        rows: name of a model -> those of its `ce`, `bits_per_byte`, `kd`, `agreement`, `entropy` and `accuracy` that
            are known; with several teachers `agreement_1` and so on.
    """
    teachers = sorted({teacher for row in rows.values() for teacher in of_teachers(row, "agreement")})
    columns = {
        "cross-entropy": lambda row: _text(row.get("ce"), ".4f"),
        "perplexity": lambda row: _text(None if row.get("ce") is None else perplexity(row["ce"]), ",.2f"),
        "bits/byte": lambda row: _text(row.get("bits_per_byte"), ".4f"),
        "KD": lambda row: _text(row.get("kd"), ".4f"),
        "entropy": lambda row: _text(row.get("entropy"), ".3f"),
        "agreement": lambda row: _text(row.get("agreement"), ".1%"),
        **{f"agreement {teacher}": _agreement_column(teacher) for teacher in teachers},
        "accuracy": lambda row: _text(row.get("accuracy"), ".1%"),
    }
    cells = {name: [column(row) for row in rows.values()] for name, column in columns.items()}
    kept = {name: values for name, values in cells.items() if any(values)}
    return _table(["model", *kept], [list(row) for row in zip(rows, *kept.values(), strict=True)])


def _agreement_column(teacher: int) -> Callable[[Mapping[str, float]], str]:
    return lambda row: _text(row.get(f"agreement_{teacher}"), ".1%")


def calibration_rows(table: Mapping[str, Sequence[float | None]]) -> Table:
    """Table of the student's and the teacher's probabilities, without empty bins; see
    `mkd.report.calibration.calibration_table`."""
    bins = len(table["share"])
    rows = [
        [f"{i / bins:.1f} to {(i + 1) / bins:.1f}", f"{share:.1%}"]
        + [_text(table[name][i], spec) for name, spec in (("teacher", ".3f"), ("student", ".3f"), ("agreement", ".1%"))]
        for i, share in enumerate(table["share"])
        if share
    ]
    return _table(["teacher's top-1 probability", "tokens", "teacher", "student", "agreement"], rows)


def calibration_line(table: Mapping[str, Sequence[float | None]], error: float) -> str:
    """Summary of `calibration_rows` in one line; `error` is from `mkd.report.calibration.calibration_error`."""
    teacher, student = (
        sum(share * value for share, value in zip(table["share"], table[name], strict=True) if share)
        for name in ("teacher", "student")
    )
    tokens = sum(table["tokens"])
    few = f"; a table of bins from {CALIBRATION_TOKENS:,} on" if tokens < CALIBRATION_TOKENS else ""
    return (
        f"the teacher's most probable token: probability {teacher:.3f} from the teacher, {student:.3f} from the "
        f"student; calibration error {error:.3f} ({tokens:,.0f} tokens{few})"
    )


def _text(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def show(title: str, table: Table) -> None:
    """Print a table: drawn on a terminal, else logged as plain lines. The log file has the plain lines in both cases.

    The calling rank prints, whatever its number.
    """
    drawn = sys.stdout.isatty()
    if drawn:
        Console().print(title, table)
    table.box, text = None, StringIO()
    Console(file=text, width=120, color_system=None).print(table)
    lines = [title, *(f" {line.rstrip()}" for line in text.getvalue().splitlines() if line.strip())]
    logger.info("\n".join(lines), extra=EVERY_RANK | (FILE_ONLY if drawn else {}))
