"""A save is disturbed at each call that changes a file: the job is killed there, or the disk is full from there on."""

import errno
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mkd.checkpoint.megatron.folder import TRACKER
from tests.chaos.jobs import LAYOUTS, ONE_RANK, STEPS, Trainings, describe
from tests.chaos.lab import Lab, Outcome
from tests.chaos.sandbox import Faults
from tests.chaos.verdicts import EQUAL, HANG, REFUSED, SILENT, UNCLEAR, Verdict, failure, refusal

LIMIT_S = 60.0
VARIANTS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "asynchronous": {"--async-save": True},
    "with Hugging Face folders": {"--kd-save-hf-interval": 2, "--kd-save-hf-keep": 2},
}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


@dataclass(frozen=True)
class Prepared:
    """A folder after step 4 of 6, and the number of calls that change files in it until the end."""

    cut: Path
    calls: int


_PREPARED: dict[str, Prepared] = {}
"""Variant -> folders, shared by the two experiments."""


class FileCalls:
    """Case n of each variant disturbs call n; all cases together are every call of every variant."""

    def __init__(self, lab: Lab, trainings: Trainings, action: int) -> None:
        assert lab.faults is not None
        self.lab, self.trainings, self.faults, self.action = lab, trainings, lab.faults, action
        self.name = "calls" if action == Faults.KILL else "disk"
        variants = dict(list(VARIANTS.items())[:1]) if lab.is_small else VARIANTS
        self._variants = {name: self._prepare(name, changes) for name, changes in variants.items()}
        self._cases = [(name, call) for name, found in self._variants.items() for call in range(1, found.calls + 1)]
        lab.random(self.name, 0).shuffle(self._cases)
        self.cases = len(self._cases)

    def _prepare(self, name: str, changes: dict[str, Any]) -> Prepared:
        if name in _PREPARED:
            return _PREPARED[name]
        self.trainings.whole(ONE_RANK, changes)
        folder = self.lab.fresh(f"prepared-{name}".replace(" ", "-"))
        save = folder / "save"
        stop = {**changes, "--exit-interval": STEPS - 2}
        ended = self.trainings.start(LAYOUTS[ONE_RANK], save, stop).wait(LIMIT_S)
        assert ended.status == 0 and (save / TRACKER).read_text() == str(STEPS - 2), ended.errors[-3000:]
        cut = Path(shutil.copytree(save, folder / "cut"))
        self.faults.arm(save)
        ended = self.trainings.start(LAYOUTS[ONE_RANK], save, changes).wait(LIMIT_S)
        calls = self.faults.count
        self.faults.clear()
        verdict = self.trainings.compare(ONE_RANK, save, changes)
        assert ended.status == 0 and verdict.kind == EQUAL, f"{verdict} {ended.errors[-3000:]}"
        return _PREPARED.setdefault(name, Prepared(cut, calls))

    def case(self, number: int) -> Outcome | None:
        if number >= len(self._cases):
            return None
        name, call = self._cases[number]
        changes, draw = VARIANTS[name], self.lab.random(self.name, number)
        folder = self.lab.fresh(self.name)
        save = Path(shutil.copytree(self._variants[name].cut, folder / "save"))
        error = draw.choice(_FULL) if self.action == Faults.FAIL else 0
        self.faults.arm(save, call, self.action, error)
        ended = self.trainings.start(LAYOUTS[ONE_RANK], save, changes).wait(LIMIT_S)
        where = self.faults.seen.decode(errors="replace").replace(str(save), "")
        self.faults.clear()
        case = f"call {call}: {where}" + (f" fails with {errno.errorcode[error]}" if error else "")
        verdict = self._disturbed(ended)
        if verdict is None:
            ended = self.trainings.start(LAYOUTS[ONE_RANK], save, changes).wait(LIMIT_S)
            if ended.timed_out or ended.status != 0:
                verdict = Verdict(HANG if ended.timed_out else UNCLEAR, f"the next attempt: {describe(ended)}")
            else:
                verdict = self.trainings.compare(ONE_RANK, save, changes)
        if verdict.kind == SILENT or verdict.is_finding:
            shutil.copytree(folder, self.lab.root / f"finding-{self.name}-{number}", dirs_exist_ok=True)
        return Outcome(name, case, verdict)

    def _disturbed(self, ended: Any) -> Verdict | None:
        """None if the disturbed attempt ended as it may."""
        if ended.timed_out:
            return Verdict(HANG, describe(ended))
        if self.action == Faults.KILL:
            fine = all(status in (-signal.SIGKILL, 0) for status in ended.statuses)
            return None if fine else Verdict(UNCLEAR, f"not killed: {describe(ended)}")
        if ended.status == 0:  # a call that the job does without
            return None
        found = failure(ended) or refusal(ended)
        return None if found.kind == REFUSED else found
