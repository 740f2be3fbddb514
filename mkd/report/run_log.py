"""Reads the JSON lines of a training run (`--kd-metrics-file`), for plots and tables."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from mkd.errors import MkdDataError
from mkd.utils.json_files import parse_json, read_regular
from mkd.utils.near_paths import near_path_hint

METRICS = "metrics.jsonl"
"""Name of the metrics file in a --save folder."""
METRICS_BYTES = 1 << 29
"""Largest metrics file that is read."""
_MAX_ITERATION = 1 << 52
"""Coordinates of a plot are exact up to it."""
_MOST_KEYS = 5
"""Keys of a line that an error lists."""
_REMEDY = "give the --kd-metrics-file of a run"


@dataclass
class RunLog:
    """Values of one run, by name and iteration."""

    path: str
    series: dict[str, dict[int, float]] = field(default_factory=dict)
    """name -> iteration -> value; validation names begin with `valid_`."""
    torn: bool = False
    """True if the last line was incomplete: the run is writing it, or was killed."""

    @classmethod
    def read(cls, path: str) -> "RunLog":
        """Read a metrics file. If an iteration occurs twice (a resumed run), the later line is used.

        Raises MkdDataError when the file is missing, holds no iteration, or has a broken line before the last.
        """
        if Path(path).is_dir():
            raise MkdDataError(f"metrics file {path} is a folder; give the file in it, {METRICS} in a --save folder")
        if not Path(path).is_file():
            near = near_path_hint(path, Path.is_file)
            raise MkdDataError(f"metrics file {path} does not exist; {_REMEDY}{near}")
        run, foreign = cls(path), ""
        try:
            text = read_regular(Path(path), METRICS_BYTES).decode(errors="replace")
        except ValueError as error:
            raise MkdDataError(f"metrics file {path}: {error}") from None
        for number, line in enumerate(text.splitlines(keepends=True), start=1):
            try:
                record = parse_json(line)
            except ValueError as error:
                if not line.endswith("\n"):
                    run.torn = True
                    break
                hint = "" if run.series else f"; {_REMEDY}"
                raise MkdDataError(f"metrics file {path}, line {number}: broken JSON ({error}){hint}") from None
            if not isinstance(record, dict):
                hint = "" if run.series else f"; {_REMEDY}"
                raise MkdDataError(f"metrics file {path}, line {number}: not a JSON object{hint}")
            if isinstance(iteration := record.get("iteration"), int) and abs(iteration) > _MAX_ITERATION:
                raise MkdDataError(f"metrics file {path}, line {number}: the iteration is larger than 2^52")
            run.add(record)
            foreign = foreign or foreign_keys(record)
        if not run.series and foreign:
            raise not_metrics(path, foreign)
        if not run.series:
            raise MkdDataError(f"metrics file {path} holds no iteration yet")
        return run

    def add(self, record: dict) -> None:
        """Add the numbers of a line; a line without an iteration is an event and has none."""
        iteration = record.get("iteration")
        if not isinstance(iteration, int) or isinstance(iteration, bool):
            return
        for name, value in record.items():
            if name != "iteration" and isinstance(value, int | float) and not isinstance(value, bool):
                self.series.setdefault(name, {})[iteration] = _as_float(value)

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Iterations and values of a name, in order; both empty if the run has none."""
        points = sorted(self.series.get(name, {}).items())
        return [iteration for iteration, _ in points], [value for _, value in points]

    def first(self, name: str) -> float | None:
        """The earliest value of a name, or None."""
        values = self.curve(name)[1]
        return values[0] if values else None

    def last(self, name: str) -> float | None:
        """The latest value of a name, or None."""
        values = self.curve(name)[1]
        return values[-1] if values else None


def foreign_keys(record: Mapping[str, Any]) -> str:
    """The first keys of a line that has neither an iteration nor an event; empty for a line of a metrics file."""
    if not record or "iteration" in record or "event" in record:
        return ""
    return ", ".join([*islice(record, _MOST_KEYS), *(["..."] if len(record) > _MOST_KEYS else [])])


def not_metrics(path: str | os.PathLike, keys: str) -> MkdDataError:
    """The error of a file whose lines have no iteration; `keys` is from `foreign_keys`."""
    return MkdDataError(f"{path} is not a metrics file: no line has an iteration (keys there: {keys}); {_REMEDY}")


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
