"""The outcome of a disturbed job: bit-equal to the undisturbed one, refused in one line, or a finding."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.sandbox import GROWTH, Ended

CLOCK = re.compile(r"_s$|_per_gpu$|^peak_memory_gib$|^mfu$|^time$")
"""Fields of the metrics that depend on the clock."""
REFUSAL = re.compile(r"^(?:[\w./-]+\.py: )?(?:[\w-]+: )?error: \S")
"""The line that ends a refused command."""

EQUAL, REFUSED, OTHER = "bit-equal", "refused", "other input by rule"
SILENT, TRACEBACK, HANG, GREW, DIED, UNCLEAR = (
    "SILENT CHANGE",
    "TRACEBACK",
    "HANG",
    "GROWTH",
    "DIED OF A SIGNAL",
    "UNCLEAR REFUSAL",
)
FINDINGS = (SILENT, TRACEBACK, HANG, GREW, DIED, UNCLEAR)


@dataclass(frozen=True)
class Verdict:
    """kind: one of the constants above; detail: reason, one line."""

    kind: str
    detail: str = ""

    @property
    def is_finding(self) -> bool:
        return self.kind in FINDINGS


def failure(ended: Ended) -> Verdict | None:
    """A finding that does not depend on what the job computed, or None."""
    if ended.timed_out:
        return Verdict(HANG, f"{ended.seconds:.0f} s")
    if ended.growth > GROWTH:
        return Verdict(GREW, f"{ended.growth / 2**30:.1f} GiB")
    if signals := [status for status in ended.statuses if status < 0 and (status != -9 or len(ended.statuses) == 1)]:
        return Verdict(DIED, f"signal {-signals[0]}: {last_line(ended)[:200]}")
    if "Traceback (most recent call last)" in ended.errors + ended.output:
        return Verdict(TRACEBACK, last_line(ended)[:300])
    return None


def last_line(ended: Ended) -> str:
    lines = [line for line in ended.errors.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def refusal(ended: Ended) -> Verdict:
    """The verdict on a job that ended with a status other than 0."""
    line = last_line(ended)
    return Verdict(REFUSED if REFUSAL.match(line) else UNCLEAR, line[:300])


def metrics(file: Path) -> list[dict[str, Any]]:
    """Lines of a metrics file without the fields that depend on the clock; a broken line is kept as text."""
    found = []
    for line in file.read_text(errors="replace").splitlines() if file.is_file() else []:
        try:
            record = json.loads(line)
        except ValueError:
            found.append({"broken": line})
            continue
        found.append({key: value for key, value in record.items() if not CLOCK.search(key)})
    return found


def differing(seen: list[dict[str, Any]], expected: list[dict[str, Any]]) -> str:
    """The first difference between two lists of metrics lines; "" if there is none."""
    if json.dumps(seen) == json.dumps(expected):
        return ""
    if len(seen) != len(expected):
        return f"{len(seen)} lines of metrics instead of {len(expected)}"
    for one, other in zip(seen, expected, strict=True):
        for key in sorted({*one, *other}):
            if json.dumps(one.get(key)) != json.dumps(other.get(key)):
                return f"iteration {one.get('iteration')}: {key} is {one.get(key)!r} instead of {other.get(key)!r}"
    return "the order of keys"
