"""Trainings that receive random signals at random times, on random ranks, until they are finished."""

import random
import signal
import time
from pathlib import Path

from tests.chaos.jobs import LAYOUTS, ONE_RANK, Trainings, describe
from tests.chaos.lab import Lab, Outcome
from tests.chaos.sandbox import Ended, Job
from tests.chaos.verdicts import HANG, UNCLEAR, Verdict

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL, signal.SIGINT, signal.SIGSTOP)
ATTEMPTS = 2
"""Disturbed attempts before one that is left alone."""
LIMIT_S = 120.0


class RandomSignals:
    """Every layout in turn."""

    name = "signals"
    cases = 200

    def __init__(self, lab: Lab, trainings: Trainings) -> None:
        self.lab, self.trainings = lab, trainings
        self._layouts = [name for name in LAYOUTS if name != ONE_RANK]

    def case(self, number: int) -> Outcome:
        draw = self.lab.random(self.name, number)
        layout = ONE_RANK if self.lab.is_small else self._layouts[number % len(self._layouts)]
        _, _, seconds = self.trainings.whole(layout)
        save = self.lab.fresh("signals") / "save"
        history: list[str] = []
        ended: Ended | None = None
        for attempt in range(ATTEMPTS + 1):
            job = self.trainings.start(LAYOUTS[layout], save)
            if attempt < ATTEMPTS:
                history += _disturb(job, draw, seconds, LAYOUTS[layout].ranks)
            ended = job.wait(LIMIT_S)
            if ended.timed_out:
                return Outcome(layout, "; ".join(history), Verdict(HANG, describe(ended)))
            if ended.status == 0 and _is_finished(save):
                break
        case = "; ".join(history)
        if ended.status != 0:
            return Outcome(layout, case, Verdict(UNCLEAR, describe(ended)))
        return Outcome(layout, case, self.trainings.compare(layout, save))


def _is_finished(save: Path) -> bool:
    """True if the last step is saved. A training that a signal stopped earlier has status 0 too."""
    from mkd.checkpoint.megatron.folder import TRACKER
    from tests.chaos.jobs import STEPS

    return (save / TRACKER).is_file() and (save / TRACKER).read_text() == str(STEPS)


def _disturb(job: Job, draw: random.Random, seconds: float, ranks: int) -> list[str]:
    """Send one or two signals to a running job. A killed rank takes the others along, as a machine would."""
    history = []
    for _ in range(draw.choice([1, 1, 2])):
        number, rank, moment = draw.choice(SIGNALS), draw.randrange(ranks), draw.uniform(0.0, 1.1 * seconds)
        to_all = draw.random() < 0.4
        until = max(job.started + moment, time.monotonic() + 0.05)
        while not job.poll() and time.monotonic() < until:
            time.sleep(0.005)
        if job.poll():
            break
        history.append(f"{number.name} to {'all' if to_all else f'rank {rank}'} after {moment:.2f} s")
        job.signal(number, None if to_all else rank)
        if number == signal.SIGKILL:
            time.sleep(draw.choice([0.0, 0.02, 0.3]))
            job.signal(signal.SIGKILL)
            break
        if number == signal.SIGSTOP:
            time.sleep(draw.uniform(0.1, 0.5))
            job.signal(signal.SIGCONT)
    return history
