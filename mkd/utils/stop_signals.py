"""The signals that request the end of a job, and how the other processes of a rank ignore them."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Sent by schedulers before they kill a job, and by Ctrl-C."""
_ANY_EXIT_SIGNAL = (*SIGNALS, signal.SIGUSR2)
"""The same, and what else `--exit-signal` may name."""


def ignore_stop_signals() -> None:
    """Ignore them in this process from now on. Called in its main thread.

    torchrun, SLURM and a terminal send a signal to all processes of a rank. The rank completes its step and saves; a
    process that it needs for this must not end first.
    """
    for number in _ANY_EXIT_SIGNAL:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def blocked() -> Iterator[None]:
    """Deliver stop signals to this thread after the block. Processes that start in it have them blocked."""
    # A process that starts by "spawn" needs it, and its own start unblocks SIGTERM and SIGINT.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ANY_EXIT_SIGNAL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
