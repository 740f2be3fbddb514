"""The records of a run in its --save folder: metrics, samples, run.yaml, plan, warnings, checkpoints.

Everything but the metrics may be absent. Nothing is trusted: only regular files of limited size are read, and damaged
lines are counted.
"""

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from mkd.errors import MkdDataError
from mkd.report.run_log import METRICS, METRICS_BYTES, RunLog, foreign_keys, not_metrics
from mkd.utils.json_files import parse_json
from mkd.utils.near_paths import near_path_hint

RUN_FILE, PLAN, LOG = "run.yaml", "kd_config.json", "mkd.log"
TEXT_BYTES = 1 << 20
"""Bytes of run.yaml and kd_config.json that are read."""
LOG_BYTES = 1 << 23
"""Bytes at the end of mkd.log that are read."""
LINE_BYTES = 1 << 22
"""Longest metrics line that is read."""
NAMES = 300
"""Metrics that are read; further names are left out."""
MAX_ITERATION = 1 << 52
"""Largest iteration that is read; a chart's coordinates are exact up to it."""
ERROR_SHOWN = 400
"""Characters of an error in the log that a message repeats."""
OTHER_JOBS = 20
"""Records of other jobs that are read."""
SAMPLES_KEPT = 2000
"""Newest samples that are read."""
_LOG_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\S* (\w+) +rank (\d+): (.*)")
_OTHER_JOB = re.compile(r"run-([1-9]\d{0,6})\.yaml")
_ITERATION = re.compile(r"iter_(\d{7,})")


@dataclass(frozen=True)
class WrittenSample:
    """A text that the student wrote for a held-out prompt."""

    iteration: int
    prompt: str
    text: str
    ended: bool
    """False if the text reached the limit of tokens."""


@dataclass
class LogWarning:
    """A warning or an error of mkd.log."""

    level: str
    text: str
    time: str
    """Time of its last occurrence."""
    count: int = 1


@dataclass(frozen=True)
class OtherJob:
    """The record of a job that is not the latest one with a step: an earlier one, or one without a step."""

    name: str
    """File name of its run.yaml."""
    run_yaml: str
    plan: dict[str, str]
    """Entries of its plan that differ from the run's."""


@dataclass
class RunFolder:
    """The records of a run."""

    path: Path
    log: RunLog
    samples: list[WrittenSample] = field(default_factory=list)
    calibration: dict[str, list[float | None]] | None = None
    """The last one of an evaluation, see `mkd.report.calibration`."""
    run_yaml: str | None = None
    kd: dict[str, Any] = field(default_factory=dict)
    """Fields of `KDConfig`."""
    plan: dict[str, str] = field(default_factory=dict)
    other_jobs: list[OtherJob] = field(default_factory=list)
    """Newest first."""
    warnings: list[LogWarning] = field(default_factory=list)
    jobs: int | None = None
    """Launched commands of the run, as far as mkd.log shows them."""
    skipped_steps: int = 0
    checkpoints: list[int] = field(default_factory=list)
    snapshots: list[int] = field(default_factory=list)
    """Iterations of Hugging Face folders."""
    notes: list[str] = field(default_factory=list)
    """Problems found while reading."""

    @classmethod
    def read(cls, path: Path, metrics: Path | None = None) -> "RunFolder":
        """Read a --save folder.

        Args:
            path: the folder.
            metrics: its --kd-metrics-file, if that is elsewhere.

        Raises:
            MkdDataError: the folder or its metrics are missing, empty, too large, or not regular files.
        """
        if not path.is_dir():
            raise MkdDataError(
                f"{path} is not a folder: give the --save folder of a run{near_path_hint(path, Path.is_dir)}"
            )
        run = cls(path, RunLog(str(path)))
        run._read_plan()
        file = metrics or path / METRICS
        if metrics is None and not file.exists():
            elsewhere = run.kd.get("metrics_file")
            if not isinstance(elsewhere, str) or not Path(elsewhere).is_file():
                raise MkdDataError(
                    f"{path} has no {METRICS}{run._ending()}: give the --save folder of a run, or its metrics file "
                    "with --metrics-file"
                )
            file = Path(elsewhere)
        try:
            run._read_metrics(file)
        except FileNotFoundError:
            raise MkdDataError(f"metrics file {file} does not exist; give the --kd-metrics-file of a run") from None
        run.run_yaml = run._text(RUN_FILE)
        run._read_other_jobs()
        run._read_log()
        run.checkpoints, run.snapshots = _iterations(path), _iterations(path / "hf")
        return run

    @property
    def last_iteration(self) -> int:
        """The last iteration that was trained or evaluated."""
        return max(max(points) for points in self.log.series.values())

    @property
    def planned_iterations(self) -> int | None:
        """The number of iterations of the plan; None if it is unknown."""
        found = re.match(r"(\d{1,15}) iterations", self.plan.get("steps", ""))
        return int(found[1]) if found else None

    def _read_metrics(self, file: Path) -> None:
        damaged, foreign = 0, ""
        samples: dict[tuple[int, str], WrittenSample] = {}
        with regular_file(file, "metrics file") as (lines, size):
            if size > METRICS_BYTES:
                raise MkdDataError(f"metrics file {file} has {size:,} bytes; at most {METRICS_BYTES:,} are read")
            while line := lines.readline(LINE_BYTES):
                record = _record(line)
                if record is None:
                    damaged += bool(line.strip())
                    continue
                self._add(record)
                foreign = foreign or foreign_keys(record)
                for sample in samples_of(record):
                    samples[sample.iteration, sample.prompt] = sample
        if not self.log.series and foreign:
            raise not_metrics(file, foreign)
        if not self.log.series:
            raise MkdDataError(f"metrics file {file} holds no iteration yet{self._ending()}")
        self.samples = list(samples.values())[-SAMPLES_KEPT:]
        if damaged:
            self.notes.append(f"{damaged} damaged lines of {file.name} are left out")

    def _add(self, record: dict[str, Any]) -> None:
        known = {"iteration", *self.log.series}
        new = [name for name in record if name not in known]
        self.log.add(
            {name: record[name] for name in record if name in known}
            | {name: record[name] for name in new[: max(0, NAMES - len(known))]}
        )
        self.skipped_steps += record.get("skipped") is True
        if (table := calibration_of(record.get("valid_calibration"))) is not None:
            self.calibration = table

    def _read_plan(self) -> None:
        self.kd, self.plan = self._settings(PLAN)

    def _settings(self, name: str) -> tuple[dict[str, Any], dict[str, str]]:
        """Settings of distillation and plan of a file; empty if there is none."""
        text = self._text(name)
        try:
            content = {} if text is None else parse_json(text)
            kd = {str(name): value for name, value in content.get("kd", {}).items()}
            return kd, {str(name): str(value) for name, value in content.get("plan", {}).items()}
        except (ValueError, AttributeError, RecursionError):
            self.notes.append(f"{name} is damaged and left out")
            return {}, {}

    def _read_other_jobs(self) -> None:
        found = (_OTHER_JOB.fullmatch(name) for name in os.listdir(self.path))
        numbers = sorted((int(match[1]) for match in found if match), reverse=True)
        for number in numbers[:OTHER_JOBS]:
            if (text := self._text(name := f"run-{number}.yaml")) is not None:
                _, plan = self._settings(f"kd_config-{number}.json")
                differs = {label: value for label, value in plan.items() if self.plan.get(label) != value}
                self.other_jobs.append(OtherJob(name, text, differs))
        if len(numbers) > OTHER_JOBS:
            self.notes.append(f"{len(numbers) - OTHER_JOBS} earlier files run-N.yaml are left out")

    def _text(self, name: str) -> str | None:
        """The start of a small file; None if there is none."""
        path = self.path / name
        try:
            with regular_file(path, name) as (file, size):
                text = file.read(TEXT_BYTES).decode(errors="replace")
        except FileNotFoundError:
            return None
        except (MkdDataError, OSError) as error:
            self.notes.append(f"{name} is left out: {error}")
            return None
        if size > TEXT_BYTES:
            self.notes.append(f"{name} has {size:,} bytes; only its start is shown")
        return text

    def _ending(self) -> str:
        """The reason why a run has no metrics, as far as its log shows it; for messages."""
        self._read_log()
        errors = [warning.text for warning in self.warnings if warning.level != "WARNING"]
        if not errors:
            return ""
        text = "".join(sign if sign.isprintable() else " " for sign in errors[-1][:ERROR_SHOWN])
        return f" (its last job ended before the first evaluation and step: {text})"

    def _read_log(self) -> None:
        path = self.path / LOG
        try:
            with regular_file(path, LOG) as (file, size):
                file.seek(max(0, size - LOG_BYTES))
                lines = file.read(LOG_BYTES).decode(errors="replace").splitlines()
        except FileNotFoundError:
            return
        except (MkdDataError, OSError) as error:
            self.notes.append(f"{LOG} is left out: {error}")
            return
        if size > LOG_BYTES:
            self.notes.append(f"{LOG} has {size:,} bytes; warnings are those of its last {LOG_BYTES:,}")
        found: dict[tuple[str, str], LogWarning] = {}
        jobs = 0
        for time, level, text in _log_lines(lines):
            jobs += text.startswith("teacher    ") and level == "INFO"
            if level == "INFO" and text.startswith("warning: "):
                level, text = "WARNING", text.removeprefix("warning: ")
            if level in ("WARNING", "ERROR", "CRITICAL"):
                seen = found.setdefault((level, text), LogWarning(level, text, time, 0))
                seen.count, seen.time = seen.count + 1, time
        self.warnings = sorted(found.values(), key=lambda warning: warning.time)
        self.jobs = jobs or None


@contextmanager
def regular_file(path: Path, what: str) -> Iterator[tuple[BinaryIO, int]]:
    """A regular file, or one that a link leads to, and its size.

    Raises:
        MkdDataError: it is a folder, a device, a pipe or a socket.
        FileNotFoundError: it does not exist.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer is not waited for
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise MkdDataError(f"{what} {path} is not a regular file: give the path of a file")
        with open(descriptor, "rb", closefd=False) as file:
            yield file, found.st_size
    finally:
        os.close(descriptor)


def _record(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line with an iteration, or of an event; None for a damaged line."""
    try:
        record = parse_json(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    iteration = record.get("iteration")
    is_in_range = not isinstance(iteration, int) or 0 <= iteration <= MAX_ITERATION
    return record if is_in_range else None


def calibration_of(value: Any) -> dict[str, list[float | None]] | None:
    """A calibration table of a metrics line; None if it is not one."""
    names = ("share", "teacher", "student", "agreement")
    if not isinstance(value, dict) or not all(isinstance(value.get(name), list) for name in names):
        return None
    columns = {name: [_number(cell) for cell in value[name]] for name in names}
    lengths = {len(column) for column in columns.values()}
    return columns if len(lengths) == 1 and 0 < lengths.pop() <= 100 else None


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e300 else None


def samples_of(record: dict[str, Any]) -> Iterator[WrittenSample]:
    """The samples of a metrics line."""
    iteration, samples = record.get("iteration"), record.get("samples")
    if not isinstance(iteration, int) or isinstance(iteration, bool) or not isinstance(samples, list):
        return
    for sample in samples:
        if isinstance(sample, dict) and isinstance(sample.get("text"), str):
            prompt = sample.get("prompt")
            prompt = prompt if isinstance(prompt, str) else json.dumps(prompt)
            yield WrittenSample(iteration, prompt, sample["text"], sample.get("ended") is not False)


def _log_lines(lines: list[str]) -> Iterator[tuple[str, str, str]]:
    """(time, level, text) of each line of mkd.log; others are left out."""
    for line in lines:
        if (found := _LOG_LINE.fullmatch(line)) is not None:
            yield found[1], found[2], found[4]


def _iterations(folder: Path) -> list[int]:
    """Iterations of the folders iter_XXXXXXX in a folder."""
    if not folder.is_dir():
        return []
    found = (_ITERATION.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in found if match)
