"""Metrics of a run: one console line per log interval, one JSON line per iteration, and the same values to trackers."""

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from mkd.data.text_size import TextSize
from mkd.report.calibration import Calibration, calibration_error
from mkd.report.console import (
    CALIBRATION_TOKENS,
    LinePlan,
    calibration_line,
    calibration_rows,
    evaluation_line,
    evaluation_table,
    is_of_written_texts,
    of_teachers,
    perplexity,
    show,
    training_line,
)
from mkd.report.flops import FlopCounter
from mkd.report.samples import Sample, sample_line
from mkd.report.trackers import Tracker
from mkd.utils.atomic_files import naming, replacing
from mkd.utils.json_files import parse_json
from mkd.utils.logging import EVERY_RANK, WITHOUT_PREFIX, logger


@dataclass(frozen=True)
class IterationMetrics:
    """Measurements of one training iteration."""

    iteration: int
    """Counted from 1."""
    losses: Mapping[str, torch.Tensor]
    """name -> mean over the step's tokens of that term; empty on ranks that have none."""
    text: TextSize
    """Size of the text on all ranks."""
    lr: float | None
    grad_norm: float | None
    """Norm of the gradient before clipping."""
    skipped: bool
    """True if the optimizer step was skipped (overflow)."""
    ratio: float
    temperature: float
    seconds: Mapping[str, float]
    """Seconds of the step spent on `data`, `teacher`, `student`, `optimizer`, `cache` and `rollout`."""
    peak_memory_gib: float | None
    """Peak over all ranks; None if not measured."""


@dataclass
class MetricsLog:
    """Writes the metrics, on the one rank that has the losses."""

    train_iters: int
    log_interval: int
    """Iterations between two console lines; see `LinePlan`."""
    file: Path | None
    """JSON lines; None writes none."""
    writes: bool
    """True on the rank that writes: the last one, which has the last pipeline stage."""
    flops: FlopCounter
    ranks: int
    on_gpus: bool
    peak_tflops: float | None = None
    """Peak of one GPU; None omits MFU."""
    trackers: Sequence[Tracker] = ()
    vocabulary: int | None = None
    """Size V of the student's vocabulary; None disables the comparison with ln V."""
    tracker_interval: int = 1
    """Iterations between two writes to the trackers."""
    log_interval_is_given: bool = True
    """True if the user chose `log_interval`; without it there are more console lines, see `LinePlan`."""
    _started: float = field(default_factory=time.monotonic)
    _step_began: float = field(default_factory=time.monotonic)
    _first_iteration: int | None = None
    _window: list[dict[str, Any]] = field(default_factory=list)
    _terms: list[str] = field(default_factory=list)
    """Names of the losses in the window, in order of appearance."""
    _before: dict[str, float] | None = None
    """The first evaluation, name -> value, and `iteration`."""
    _out: BinaryIO | None = None
    """The open file; while it is open, no other file can have its number."""
    _is_lost: bool = False
    """True if another job has replaced the file, and this one must not write."""
    _lines: LinePlan = field(init=False)

    def __post_init__(self) -> None:
        self._lines = LinePlan(self.train_iters, self.log_interval, self.log_interval_is_given)

    def start(self, iteration: int) -> None:
        """Start at an iteration; lines of later iterations, which a killed attempt wrote, are removed from the file."""
        self._started = self._step_began = time.monotonic()
        self._first_iteration = iteration
        self._lines.start(iteration)
        if not self.writes or self.file is None:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        kept = self._until(iteration) if iteration > 0 and self.file.is_file() else {}
        with replacing(self.file) as out:  # a job killed here loses no history
            out.writelines(kept)
        self._out, self._is_lost = self.file.open("ab", buffering=0), False
        evaluations = (record for record in kept.values() if "valid_ce" in record)
        if (first := next(evaluations, None)) is not None:
            self._before = {name.removeprefix("valid_"): value for name, value in first.items()}

    def _until(self, iteration: int) -> dict[str, dict[str, Any]]:
        """Line of the file -> its record, up to an iteration. Damaged lines, as after a crash of the machine, are
        skipped."""
        kept, damaged = {}, 0
        for line in self.file.read_text(errors="replace").splitlines(keepends=True):
            record = _record(line)
            if record is None:
                damaged += line.endswith("\n")  # the last one was being written
            elif record["iteration"] <= iteration:
                kept[line] = record
        if damaged:
            logger.warning(f"{self.file}: {damaged} damaged lines are skipped", extra=EVERY_RANK)
        return kept

    def step_begins(self) -> None:
        """Start the clock of one training step, which excludes checkpoints and evaluations."""
        self._step_began = time.monotonic()

    def measures(self, iteration: int) -> bool:
        """True if the ranks measure their peak memory in this iteration; equal on all ranks."""
        return self._lines.measures(iteration)

    def iteration(self, step: IterationMetrics) -> None:
        """Record one training iteration."""
        now = time.monotonic()
        if not self.writes:
            return
        seconds = now - self._step_began
        losses = {name: float(value) for name, value in step.losses.items()}
        # Means over no token, such as those of positions that no written text has.
        losses = {n: value for n, value in losses.items() if not (is_of_written_texts(n) and math.isnan(value))}
        line = {
            "iteration": step.iteration,
            **losses,
            "grad_norm": None if step.grad_norm is None else float(step.grad_norm),
            "lr": step.lr,
            "tokens": step.text.tokens,
            "padding_tokens": step.text.positions - step.text.tokens,
            **self._speed(step, seconds),
            **{f"{what}_s": value for what, value in step.seconds.items()},
            "elapsed_s": now - self._started,
            "skipped": bool(step.skipped),
            "ratio": step.ratio,
            "temperature": step.temperature,
        }
        if step.peak_memory_gib is not None:
            line["peak_memory_gib"] = step.peak_memory_gib
        self._append(line)
        if step.iteration % self.tracker_interval == 0:
            self._track(line)
        self._window.append(line)
        self._terms += [name for name in losses if name not in self._terms]
        if self._lines.is_due(step.iteration):
            gpus = self.ranks if self.on_gpus else 0
            eta = self._eta(step.iteration)
            line = training_line(self._window, self._terms, self.train_iters, gpus, eta)
            logger.info(line, extra=EVERY_RANK | WITHOUT_PREFIX)
            self._window, self._terms = [], []

    def _speed(self, step: IterationMetrics, seconds: float) -> dict[str, float]:
        """tokens_per_s and derived values. Padding does not count; the teacher counts in steps in which it ran."""
        per_rank = seconds * self.ranks
        student = self.flops.of_student(step.text) / per_rank / 1e12
        teacher = self.flops.of_teachers(step.text) / per_rank / 1e12 if step.ratio > 0.0 else 0.0
        speed = {
            "step_s": seconds,
            "tokens_per_s": step.text.tokens / seconds,
            "tokens_per_s_per_gpu": step.text.tokens / per_rank,
            "student_tflops_per_gpu": student,
            "teacher_tflops_per_gpu": teacher,
        }
        return speed if self.peak_tflops is None else {**speed, "mfu": (student + teacher) / self.peak_tflops}

    def _eta(self, iteration: int) -> float:
        """Seconds to the end at the mean rate so far, evaluations and checkpoints included."""
        done = iteration - (self._first_iteration or 0)
        return (time.monotonic() - self._started) / max(done, 1) * (self.train_iters - iteration)

    def evaluation(
        self, split: str, iteration: int, losses: Mapping[str, torch.Tensor], calibration: Calibration | None = None
    ) -> None:
        """Record an evaluation, and after the last one compare the student before and after training.

        Args:
            split: valid or test.
            iteration: the last iteration before it.
            losses: name -> mean over the split's tokens. Perplexities, exp of the mean cross-entropies, are added.
            calibration: see `mkd.report.calibration.calibration_table`.
        """
        if not self.writes or not losses:
            return
        values = {name: float(value) for name, value in losses.items()}
        for name in ("ce", "teacher_ce"):
            if name in values:
                values[name.replace("ce", "perplexity")] = perplexity(values[name])
        if calibration is not None:
            values["calibration_error"] = calibration_error(calibration)
        logger.info(evaluation_line(split, iteration, values), extra=EVERY_RANK | WITHOUT_PREFIX)
        line: dict[str, Any] = {"iteration": iteration, **{f"{split}_{name}": v for name, v in values.items()}}
        if calibration is not None:
            line[f"{split}_calibration"] = calibration
        self._append(line)
        self._track(line)
        if split != "valid":
            return
        values["iteration"] = iteration
        if self._before is None:
            self._before = values
        if iteration == 0:
            self._compare_with_uniform(values)
        if iteration >= self.train_iters:
            self._print_comparison(values, calibration)

    def samples(self, iteration: int, samples: list[Sample]) -> None:
        """Record texts that the student has written after an evaluation."""
        if not self.writes:
            return
        for number, sample in enumerate(samples, start=1):
            logger.info(sample_line(number, iteration, sample), extra=EVERY_RANK | WITHOUT_PREFIX)
        self._append({"iteration": iteration, "samples": [asdict(sample) for sample in samples]})
        for tracker in self.trackers:
            tracker.write_samples(samples, iteration)

    def _compare_with_uniform(self, before: Mapping[str, float]) -> None:
        """Print a hint if the student's CE is above that of a uniform distribution, ln V."""
        if self.vocabulary is not None and (ce := before.get("ce", 0.0)) > (uniform := math.log(self.vocabulary)):
            logger.info(
                f"the student's ce {ce:.2f} is above ln V = {uniform:.2f}, that of a uniform distribution: expected "
                "with random weights or after pruning without training; otherwise check the student's folder",
                extra=EVERY_RANK,
            )

    def _print_comparison(self, after: Mapping[str, float], calibration: Calibration | None) -> None:
        """Print a table of the teacher, and of the student before and after training."""
        rows = {}
        names = {"ce": "teacher_ce", "bits_per_byte": "teacher_bits_per_byte", "entropy": "teacher_entropy"}
        if "teacher_ce" in after:
            rows["teacher"] = {column: after[name] for column, name in names.items() if name in after}
        for number in of_teachers(after, "teacher_ce"):
            found = {column: after.get(f"{name}_{number}") for column, name in names.items()}
            rows[f"teacher {number}"] = {column: value for column, value in found.items() if value is not None}
        for values in (self._before, after):
            entropies = of_teachers(values, "student_entropy")  # equal up to the teachers' own masks
            row = {**values, "entropy": values.get("student_entropy", next(iter(entropies.values()), None))}
            rows[f"student at iteration {values['iteration']:.0f}"] = row
        show("validation", evaluation_table(rows))
        if calibration is None:
            return
        logger.info(calibration_line(calibration, after["calibration_error"]), extra=EVERY_RANK)
        if sum(calibration["tokens"]) >= CALIBRATION_TOKENS:
            show("the student's probability of the teacher's most probable token", calibration_rows(calibration))

    def _append(self, line: Mapping[str, Any]) -> None:
        if self.file is None or not self._owns_file():
            return
        rest = (json.dumps(_finite(line), allow_nan=False) + "\n").encode()
        with naming(self.file):
            while rest:
                rest = rest[self._out.write(rest) :]

    def _owns_file(self) -> bool:
        """Open the file if it is not open or was removed; False if another job has replaced it, as each does at its
        start: it resumed the run, and lines of this one would be mixed with its own."""
        if self._is_lost:
            return False
        try:
            is_same = self._out is not None and os.path.samestat(os.fstat(self._out.fileno()), self.file.stat())
            if not is_same and self._out is not None:
                self._is_lost = True
                logger.warning(
                    f"{self.file} was replaced by another job: this one writes no more lines there", extra=EVERY_RANK
                )
                return False
        except FileNotFoundError:
            is_same = False
        if not is_same:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._out = self.file.open("ab", buffering=0)
        return True

    def _track(self, line: Mapping[str, Any]) -> None:
        numbers = {
            name: float(value)
            for name, value in line.items()
            if name != "iteration" and isinstance(value, int | float) and not isinstance(value, bool)
        }
        for tracker in self.trackers:
            tracker.write(numbers, line["iteration"])


def _record(line: str) -> dict[str, Any] | None:
    """The record of a complete line of a metrics file; None for a damaged one."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    whole = line.endswith("\n") and isinstance(record, dict) and isinstance(record.get("iteration"), int)
    return record if whole else None


def _finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON lacks, by None."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
