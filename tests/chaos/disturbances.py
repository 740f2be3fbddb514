"""Trainings on a small disk, in a folder that disappears, beside a second job, and under a clock that jumps."""

import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.chaos.file_calls import LIMIT_S
from tests.chaos.jobs import LAYOUTS, ONE_RANK, Trainings, describe
from tests.chaos.lab import Lab, Outcome
from tests.chaos.sandbox import Ended, Job
from tests.chaos.verdicts import HANG, REFUSED, UNCLEAR, Verdict, failure, refusal


class Disturbances:
    """One kind after the other."""

    name = "places"
    cases = 80

    def __init__(self, lab: Lab, trainings: Trainings) -> None:
        self.lab, self.trainings = lab, trainings
        self._kinds: dict[str, Callable[[random.Random, Path, dict[str, Any]], tuple[str, Verdict]]] = {
            "two jobs, one folder": self._two_jobs,
            "folder removed": self._removed,
        }
        if lab.faults is not None:
            self._kinds["clock steps"] = self._clock
        if _can_mount(lab.fresh("mount")):
            self._kinds["small disk"] = self._small_disk

    def case(self, number: int) -> Outcome:
        draw = self.lab.random(self.name, number)
        kind = list(self._kinds)[number % len(self._kinds)]
        changes = {} if self.lab.is_small else draw.choice([{}, {"--async-save": True}])
        save = self.lab.fresh("places") / "save"
        case, verdict = self._kinds[kind](draw, save, changes)
        return Outcome(kind, f"{case}{' asynchronous' if changes else ''}", verdict)

    def _attempt(self, save: Path, changes: dict[str, Any]) -> Ended:
        streams = self.lab.root / "places" / "streams"  # not on a small disk
        return self.trainings.start(LAYOUTS[ONE_RANK], save, changes, streams).wait(LIMIT_S)

    def _finish(self, save: Path, changes: dict[str, Any], *, has_metrics: bool = True) -> Verdict:
        """The next attempt, undisturbed, is bit-equal."""
        ended = self._attempt(save, changes)
        if ended.timed_out or ended.status != 0:
            return Verdict(HANG if ended.timed_out else UNCLEAR, f"the next attempt: {describe(ended)}")
        return self.trainings.compare(ONE_RANK, save, changes, has_metrics=has_metrics)

    def _two_jobs(self, draw: random.Random, save: Path, changes: dict[str, Any]) -> tuple[str, Verdict]:
        _, _, seconds = self.trainings.whole(ONE_RANK, changes)
        moment = draw.uniform(0.0, seconds)
        words = self.trainings.flags(LAYOUTS[ONE_RANK], save, changes)
        first = Job(words, save.with_name("first")).start()
        time.sleep(moment)
        second = Job(words, save.with_name("second")).start()
        results = [first.wait(2 * LIMIT_S), second.wait(2 * LIMIT_S)]
        case = f"the second starts after {moment:.2f} s"
        for ended in results:
            if (found := failure(ended)) is not None:
                return case, found
            if ended.status != 0 and (found := refusal(ended)).kind != REFUSED:
                return case, found
        # Both are refused if the second sets a save of the first aside which is not finished. Steps are not lost, but
        # neither has all lines of the metrics.
        has_metrics = any(ended.status == 0 for ended in results)
        return case, self._finish(save, changes, has_metrics=has_metrics)

    def _removed(self, draw: random.Random, save: Path, changes: dict[str, Any]) -> tuple[str, Verdict]:
        _, _, seconds = self.trainings.whole(ONE_RANK, changes)
        job = self.trainings.start(LAYOUTS[ONE_RANK], save, changes)
        moment = draw.uniform(0.3, 1.0) * seconds
        time.sleep(moment)
        shutil.rmtree(save, ignore_errors=True)
        ended = job.wait(LIMIT_S)
        case = f"after {moment:.2f} s"
        found = failure(ended)
        if found is None and ended.status != 0 and (found := refusal(ended)).kind == REFUSED:
            found = None
        return case, found or self._finish(save, changes, has_metrics=False)

    def _clock(self, draw: random.Random, save: Path, changes: dict[str, Any]) -> tuple[str, Verdict]:
        assert self.lab.faults is not None
        _, _, seconds = self.trainings.whole(ONE_RANK, changes)
        faults, steps = self.lab.faults, []
        faults.clear()
        job = self.trainings.start(LAYOUTS[ONE_RANK], save, changes)
        for _ in range(3):
            time.sleep(draw.uniform(0.0, seconds / 3))
            steps.append(draw.choice([-(10**9), -86_400, -3600, -1, 1, 3600, 86_400, 10**9]))
            faults.clock_step = steps[-1]
        ended = job.wait(LIMIT_S + 30)
        faults.clear()
        case = f"the clock jumps by {steps} s"
        if ended.timed_out or ended.status != 0:
            return case, Verdict(HANG if ended.timed_out else UNCLEAR, describe(ended))
        return case, self.trainings.compare(ONE_RANK, save, changes)

    def _small_disk(self, draw: random.Random, save: Path, changes: dict[str, Any]) -> tuple[str, Verdict]:
        """Too small at first, then large enough."""
        size = draw.randrange(64, 2500)
        with _mounted(save.parent / "disk", size) as disk:
            small = disk / "save"
            ended = self._attempt(small, changes)
            case = f"{size} KiB"
            found = failure(ended)
            if found is None and ended.status != 0 and (found := refusal(ended)).kind == REFUSED:
                found = None
            if found is None:
                subprocess.run(["mount", "-o", "remount,size=200m", str(disk)], check=True)
                found = self._finish(small, changes)
            return case, found


def _can_mount(folder: Path) -> bool:
    try:
        with _mounted(folder, 64):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


@contextmanager
def _mounted(folder: Path, kib: int) -> Iterator[Path]:
    """A small file system in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", str(folder)], check=True, capture_output=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
