"""The jobs of teachers and of a student on one node: started together, watched, and ended together."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from mkd.cli.launched import LAUNCHER
from mkd.utils.logging import close_file, log_to_existing_file, logger

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Passed on to the student, which saves and ends."""
_POLL_S = 0.1
_GRACE_S = 15.0
"""Seconds for the other ranks of a job after one has failed: they may report their own errors."""
_SHORT_GRACE_S = 1.0
"""The same after the first rank has failed: errors that all ranks find alike are printed by the first one, and later by
the others (`mkd.cli.job_process`)."""
_TEACHER_S = 60.0
"""Seconds for a teacher to end after SIGTERM."""


@dataclass(frozen=True)
class NodeJob:
    """A job of mkd on ranks of this node."""

    name: str
    """Name in messages, and the prefix of each line of a teacher's output."""
    words: tuple[str, ...]
    """The words after `mkd`."""
    ranks: int
    devices: tuple[str, ...] | None
    """CUDA_VISIBLE_DEVICES, one for each rank; None on CPU."""

    def environments(self, common: Mapping[str, str], port: int) -> list[dict[str, str]]:
        """The environment of each rank.

        Args:
            common: variables of all of them.
            port: a free one, for the rendezvous.
        """
        devices = {} if self.devices is None else {"CUDA_VISIBLE_DEVICES": ",".join(self.devices)}
        job = {
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            **devices,
        }
        job[LAUNCHER] = str(os.getpid())
        return [{**common, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(self.ranks)]


class _RunningJob:
    """The processes of a job."""

    def __init__(self, job: NodeJob, common: Mapping[str, str], port: int, *, labels: bool) -> None:
        """Start them.

        Args:
            job: what to run.
            common, port: see `NodeJob.environments`.
            labels: print the job's name before each line.
        """
        self.name = job.name
        # A session of their own: Ctrl-C of a terminal reaches them through this process only, and once.
        options: dict[str, Any] = {"start_new_session": True}
        if labels:
            options |= dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        command = [sys.executable, "-m", "mkd", *job.words]
        self._ranks = [subprocess.Popen(command, env=env, **options) for env in job.environments(common, port)]
        self._printers = [threading.Thread(target=self._print, args=(rank.stdout,)) for rank in self._ranks if labels]
        for printer in self._printers:
            printer.start()

    @property
    def has_ended(self) -> bool:
        """True if a rank has failed, or all have ended."""
        return self.failure is not None or all(rank.poll() is not None for rank in self._ranks)

    @property
    def failure(self) -> int | None:
        """Exit status of the first rank that has failed, by number; of a signal 128 + its number. None if none has."""
        statuses = [status for rank in self._ranks if (status := rank.poll())]
        return None if not statuses else statuses[0] if statuses[0] > 0 else 128 - statuses[0]

    @property
    def grace_s(self) -> float:
        """Seconds for the other ranks after one has failed."""
        return _SHORT_GRACE_S if self._ranks[0].poll() else _GRACE_S

    def send(self, number: int) -> None:
        """Send a signal to all ranks that run."""
        for rank in self._ranks:
            with suppress(ProcessLookupError):
                rank.send_signal(number)

    def end(self, limit_s: float) -> None:
        """Wait for all ranks, and kill those that still run after the limit."""
        deadline = time.monotonic() + limit_s
        for rank in self._ranks:
            with suppress(subprocess.TimeoutExpired):
                rank.wait(max(0.0, deadline - time.monotonic()))
        self.send(signal.SIGKILL)
        for rank in self._ranks:
            rank.wait()
        for printer in self._printers:
            printer.join()

    def _print(self, stream: Any) -> None:
        for line in stream:
            with suppress(OSError):  # nobody reads the output of this process; a full pipe would block the job
                sys.stdout.buffer.write(f"{self.name} | ".encode() + line)
                sys.stdout.buffer.flush()


class _Signals:
    """Signals that this process receives, in their order."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._before = {number: signal.signal(number, self._record) for number in SIGNALS}

    def __enter__(self) -> "_Signals":
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)


def run_jobs(teachers: Sequence[NodeJob], student: NodeJob, environ: Mapping[str, str], log: Path | None = None) -> int:
    """Run teachers and a student until the student ends; the teachers end with it, and it with a teacher.

    Args:
        teachers: services.
        student: the job that they teach.
        environ: variables of all ranks.
        log: the student's log, which holds the reason too if a teacher ends it.

    Returns:
        The student's exit status; that of a teacher, or 1, if a teacher has ended before.
    """
    ports = free_ports(1 + len(teachers))
    with _Signals() as signals, ExitStack() as stack:
        services = []
        for job, port in zip(teachers, ports[1:], strict=True):
            services.append(_RunningJob(job, environ, port, labels=True))
            stack.callback(services[-1].end, _TEACHER_S)
            stack.callback(services[-1].send, signal.SIGTERM)
        pupil = _RunningJob(student, environ, ports[0], labels=False)
        stack.callback(pupil.end, 0.0)
        ended = None
        while not pupil.has_ended:
            while signals.received:
                pupil.send(signals.received.pop(0))
            if ended is None and (ended := next((one for one in services if one.has_ended), None)) is not None:
                if log is not None:
                    log_to_existing_file(log, "warning")
                logger.warning(f"{ended.name} has ended with status {ended.failure or 0}: the student saves and ends")
                close_file()
                pupil.send(signal.SIGTERM)
            time.sleep(_POLL_S)
        status = pupil.failure or 0
        pupil.end(pupil.grace_s)
        for one in services:
            one.send(signal.SIGTERM)
        return status if ended is None else ended.failure or 1


def free_ports(count: int) -> list[int]:
    """Different free ports of 127.0.0.1."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def ranks_environment(ranks: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """This process's variables with defaults for `ranks` ranks.

    Args:
        ranks: of all jobs.
        environ: of this process.
    """
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    return {"OMP_NUM_THREADS": threads, **environ}
