"""The parts that all experiments share: folders, random numbers, the report."""

import json
import random
import shutil
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tests.chaos.sandbox import Faults
from tests.chaos.verdicts import EQUAL, FINDINGS, OTHER, REFUSED, Verdict


@dataclass
class Lab:
    """The facts of a session.

    root: its folder.
    seed: of all random numbers.
    faults: None without the preloaded library.
    is_small: True to prepare only what a few cases need.
    """

    root: Path
    seed: int
    faults: Faults | None
    is_small: bool = False

    def random(self, experiment: str, number: int) -> random.Random:
        """The random numbers of one case: the same whichever cases ran before it."""
        return random.Random(f"{self.seed} {experiment} {number}")

    def fresh(self, name: str) -> Path:
        """An empty folder."""
        folder = self.root / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder


@dataclass(frozen=True)
class Outcome:
    """group: a table row of the report; case: what was done, in one line."""

    group: str
    case: str
    verdict: Verdict


class Experiment(Protocol):
    """One kind of disturbance. Cases are numbered from 0 and independent of one another."""

    name: str
    cases: int
    """The number of cases in a whole session by default."""

    def case(self, number: int) -> Outcome | None:
        """Run one case; None if there are no more."""
        ...


@dataclass
class Report:
    """Counts of verdicts by experiment and group, and all findings."""

    seed: int
    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    findings: list[dict[str, str]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    reasons: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Group -> beginning of a refusal -> count."""

    def add(self, experiment: str, number: int, outcome: Outcome, seconds: float) -> None:
        row = f"{experiment}: {outcome.group}"
        self.counts[row][outcome.verdict.kind] += 1
        self.seconds[row] += seconds
        if outcome.verdict.kind == OTHER:
            self.reasons[row][outcome.verdict.detail] += 1
        if outcome.verdict.is_finding:
            self.findings.append(
                {
                    "kind": outcome.verdict.kind,
                    "detail": outcome.verdict.detail,
                    "group": row,
                    "case": outcome.case,
                    "again": f"bash tests/chaos/run.sh --seed {self.seed} --only {experiment} --case {number}",
                }
            )

    def write(self, file: Path) -> None:
        content = {
            "seed": self.seed,
            "counts": {row: dict(kinds) for row, kinds in self.counts.items()},
            "seconds": {row: round(seconds, 1) for row, seconds in self.seconds.items()},
            "other": {row: dict(kinds) for row, kinds in self.reasons.items()},
            "findings": self.findings,
        }
        file.write_text(json.dumps(content, indent=1) + "\n")

    def table(self) -> str:
        kinds = [EQUAL, REFUSED, OTHER]
        head = f"{'':<44} {'cases':>6} {'equal':>6} {'refused':>8} {'other':>6} {'findings':>9} {'s/case':>7}"
        lines = [head]
        total: Counter[str] = Counter()
        for row, found in self.counts.items():
            total += found
            bad = sum(found[kind] for kind in FINDINGS)
            cases = sum(found.values())
            numbers = [found[kind] for kind in kinds]
            lines.append(
                f"{row:<44} {cases:>6} {numbers[0]:>6} {numbers[1]:>8} {numbers[2]:>6} {bad:>9} "
                f"{self.seconds[row] / cases:>7.2f}"
            )
        bad = sum(total[kind] for kind in FINDINGS)
        numbers = [total[kind] for kind in kinds]
        lines.append(f"{'all':<44} {sum(total.values()):>6} {numbers[0]:>6} {numbers[1]:>8} {numbers[2]:>6} {bad:>9}")
        return "\n".join(lines)


def run_experiments(
    experiments: list[Experiment],
    report: Report,
    deadline: float,
    file: Path,
    *,
    counts: dict[str, int],
    first: int = 0,
) -> None:
    """Run the cases of all experiments in turn, in proportion to their numbers, until they or the time are used up.

    Args:
        experiments, report: what runs, and what it gives.
        deadline: of `time.monotonic`; no case starts after it.
        file: the report is written there.
        counts: experiment -> number of its last case plus 1.
        first: number of the first case of each.
    """
    done = {experiment.name: first for experiment in experiments}
    left = list(experiments)
    written = time.monotonic()
    while left and time.monotonic() < deadline:
        experiment = min(left, key=lambda e: done[e.name] / counts[e.name])
        number = done[experiment.name]
        started = time.monotonic()
        outcome = experiment.case(number)
        done[experiment.name] += 1
        if outcome is None or done[experiment.name] >= counts[experiment.name]:
            left.remove(experiment)
        if outcome is None:
            continue
        report.add(experiment.name, number, outcome, time.monotonic() - started)
        if outcome.verdict.is_finding:
            print(
                f"{outcome.verdict.kind}: {experiment.name} {number}: {outcome.case}: {outcome.verdict.detail}",
                flush=True,
            )
        if time.monotonic() - written > 20:
            report.write(file)
            written = time.monotonic()
    report.write(file)
