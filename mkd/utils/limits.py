"""A limit of time and memory for code of a model folder that cannot be trusted to end, such as a chat template."""

import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_PAGE = resource.getpagesize()


@contextmanager
def limited(seconds: float, nbytes: int = 3 << 29) -> Iterator[None]:
    """End the `with` block by TimeoutError after some time, and by MemoryError when it takes `nbytes` more than now.

    The limit is one of writable memory: reserved addresses, such as those of threads, do not count. The time is
    measured by SIGALRM between two steps of the Python interpreter, in the main thread of a process; other
    threads have no limit of time.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = int(Path("/proc/self/statm").read_text().split()[5]) * _PAGE + nbytes
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGALRM, _raise_timeout) if is_main else None
    try:
        if is_main:
            left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
        if most < min(value for value in (soft, hard, most + 1) if value != resource.RLIM_INFINITY):
            resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        if is_main:
            signal.setitimer(signal.ITIMER_REAL, left)
            signal.signal(signal.SIGALRM, before)


def call_within[Result](seconds: float, function: Callable[[], Result]) -> Result:
    """The result of a function that runs in another thread, or its exception.

    For compiled code, which no signal interrupts: after a timeout the thread runs on until the process ends. The
    function must release the interpreter's lock, as tokenizers do.

    Raises:
        TimeoutError: the function did not end in time.
        RuntimeError: it panicked; exceptions of Rust are not Exceptions.
    """
    done: list[tuple[Result | None, BaseException | None]] = []

    def run() -> None:
        try:
            done.append((function(), None))
        except BaseException as error:
            done.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not done:
        raise TimeoutError(f"it did not end in {seconds:g} s")
    result, error = done[0]
    if error is None:
        return result
    if isinstance(error, Exception):
        raise error
    raise RuntimeError(" ".join(str(error).split())) from error


def _raise_timeout(number: int, frame: FrameType | None) -> None:
    raise TimeoutError("it took too long")
