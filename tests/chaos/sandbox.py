"""Runs the project's scripts as forks of a process that has imported everything, each job in its own process group.

A fork costs milliseconds, a Python that imports torch and megatron 8 s. This process starts no threads and no process
groups of torch, so that its forks are like fresh processes.
"""

import contextlib
import ctypes
import gc
import os
import resource
import runpy
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from tests.support.e2e.small_job import environment, free_port

GROWTH = 2 * 2**30
"""Bytes that a rank may hold beyond what this process holds. More is a finding."""
ADDRESS_SPACE = 4 * 2**30
"""Bytes of address space beyond this process's own, a hard limit that protects the machine: threads reserve more than
they use."""
_PATIENCE = 4
_POLL_S = 0.004
_ARENAS = -8
"""mallopt's M_ARENA_MAX: every arena of a thread reserves 64 MiB of address space."""


def prepare() -> None:
    """Import everything that a script needs. Called once, before the first fork."""
    from mkd import cpu

    cpu.activate()
    from tests.support.dist import preload  # noqa: F401

    for name in ("cache", "convert", "preprocess", "build_projection", "plot", "doctor", "train_job"):
        import_module(f"mkd.cli.{name}")
    for name in ("mkd.job.launch", "mkd.job.plan.plan", "transformers.models.llama.modeling_llama"):
        import_module(name)
    from transformers.utils import logging

    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    ctypes.CDLL(None).mallopt(_ARENAS, 1)
    gc.collect()
    gc.freeze()


@dataclass
class Ended:
    """A job that ended, or was ended."""

    statuses: list[int]
    """Exit status by rank; negative for a signal."""
    output: str
    errors: str
    seconds: float
    growth: int
    """Bytes of memory of the largest rank, beyond those of the parent."""
    timed_out: bool = False

    @property
    def status(self) -> int:
        """0, or the first status that is not."""
        return next((status for status in self.statuses if status), 0)


@dataclass
class Job:
    """A command line on one or more ranks, running in the background.

    words: the script's path and its arguments.
    folder: where stdout and stderr are kept.
    """

    words: Sequence[str]
    folder: Path
    ranks: int = 1
    cwd: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    before: Callable[[int], None] | None = None
    """Called in each rank's process before the script, with the rank."""

    pids: list[int] = field(default_factory=list)
    started: float = 0.0
    _statuses: dict[int, int] = field(default_factory=dict)
    _peak: int = 0

    def start(self) -> "Job":
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("stdout", "stderr"):
            (self.folder / name).write_bytes(b"")
        port = free_port()
        sys.stdout.flush()
        sys.stderr.flush()
        self.started = time.monotonic()
        for rank in range(self.ranks):
            pid = os.fork()
            if pid == 0:
                self._become(rank, port)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.setpgid(pid, self.pids[0] if self.pids else pid)
            self.pids.append(pid)
        return self

    def _become(self, rank: int, port: int) -> None:
        """In the fork: become the script. Does not return."""
        try:
            os.setpgid(0, self.pids[0] if self.pids else 0)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            limit = psutil.Process().memory_info().vms + ADDRESS_SPACE
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.environ.update(environment(port, rank, self.ranks) | dict(self.variables))
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            for number, name in ((1, "stdout"), (2, "stderr")):
                file = os.open(self.folder / name, os.O_WRONLY | os.O_APPEND)
                os.dup2(file, number)
                os.close(file)
            if self.cwd is not None:
                os.chdir(self.cwd)
            if self.before is not None:
                self.before(rank)
            os._exit(_run(list(map(str, self.words))))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(97)

    def poll(self) -> bool:
        """True if all ranks have ended."""
        for pid in self.pids:
            if pid not in self._statuses:
                ended, status, usage = os.wait4(pid, os.WNOHANG)
                if ended:
                    self._statuses[pid] = os.waitstatus_to_exitcode(status)
                    self._peak = max(self._peak, usage.ru_maxrss * 1024)
        return len(self._statuses) == len(self.pids)

    def failed(self) -> bool:
        return any(self._statuses.values())

    def signal(self, number: int, rank: int | None = None) -> None:
        """Send a signal to one rank that still runs, or to the whole process group."""
        with contextlib.suppress(ProcessLookupError):
            if rank is None:
                os.killpg(self.pids[0], number)
            elif self.pids[rank] not in self._statuses:
                os.kill(self.pids[rank], number)

    def _is_hanging(self, timeout: float) -> bool:
        """True if the job has computed for longer than `timeout`, or lives for `_PATIENCE` times that: on a busy
        machine a job that waits for a processor is not one that hangs."""
        lived = time.monotonic() - self.started
        if lived <= timeout:
            return False
        computed = 0.0
        for pid in self.pids:
            with contextlib.suppress(psutil.Error):
                times = psutil.Process(pid).cpu_times()
                computed += times.user + times.system + times.children_user + times.children_system
        return computed > timeout or lived > _PATIENCE * timeout

    def wait(self, timeout: float, grace: float = 5.0) -> Ended:
        """Wait until all ranks have ended; after a failed rank the others have `grace` seconds, as under torchrun.

        Args:
            timeout: seconds of computing after which the job is ended; see `_is_hanging`.
            grace: seconds that other ranks have after one has failed.
        """
        timed_out = False
        failed_at: float | None = None
        while not self.poll():
            now = time.monotonic()
            if failed_at is None and self.failed():
                failed_at = now
            if self._is_hanging(timeout) or (failed_at is not None and now > failed_at + grace):
                timed_out = failed_at is None
                self.signal(signal.SIGCONT)
                self.signal(signal.SIGKILL)
            time.sleep(_POLL_S)
        seconds = time.monotonic() - self.started
        self.signal(signal.SIGKILL)  # processes that the ranks started
        texts = [(self.folder / name).read_text(errors="replace") for name in ("stdout", "stderr")]
        growth = self._peak - psutil.Process().memory_info().rss
        return Ended([self._statuses[pid] for pid in self.pids], *texts, seconds, growth, timed_out)


def _run(words: list[str]) -> int:
    """Run a script as `__main__`; returns the exit status that Python would."""
    sys.argv = words
    sys.path[0] = str(Path(words[0]).resolve().parent)
    status: Any = 0
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        status = ended.code
        if status is not None and not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except KeyboardInterrupt:
        traceback.print_exc()
        status = 130
    except BaseException:
        traceback.print_exc()
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    from multiprocessing import util

    with contextlib.suppress(BaseException):
        util._exit_function()
    import atexit

    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    return status or 0


def run(words: Sequence[Any], folder: Path, timeout: float = 30.0, **options: Any) -> Ended:
    """Run a command line to its end."""
    return Job([str(word) for word in words], folder, **options).start().wait(timeout)


class Faults(ctypes.Structure):
    """`struct state` of faults.c."""

    _fields_ = (
        ("count", ctypes.c_long),
        ("at", ctypes.c_long),
        ("action", ctypes.c_long),
        ("error", ctypes.c_long),
        ("clock_step", ctypes.c_long),
        ("folder", ctypes.c_char * 1024),
        ("seen", ctypes.c_char * 1024),
    )
    COUNT, KILL, FAIL = 0, 1, 2

    def clear(self) -> None:
        self.count = self.at = self.action = self.error = self.clock_step = 0
        self.folder = self.seen = b""

    def arm(self, folder: Path, at: int = 0, action: int = COUNT, error: int = 0) -> None:
        """Disturb the `at`-th call that changes files below a folder, in the jobs that start from now on."""
        self.clear()
        self.at, self.action, self.error = at, action, error
        self.folder = str(folder.resolve()).encode()


def faults() -> Faults | None:
    """The shared state of faults.c; None if the library is not preloaded."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "chaos_state"):
        return None
    library.chaos_state.restype = ctypes.POINTER(Faults)
    return library.chaos_state().contents
