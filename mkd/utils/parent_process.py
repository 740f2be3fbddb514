"""Processes that end with the one that started them."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
"""See prctl(2)."""


def signal_at_end_of_parent(number: int) -> None:
    """Receive the signal `number` when the parent of this process ends, also if it is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def exit_with(parent: int) -> None:
    """Kill this process when its parent `parent` ends."""
    signal_at_end_of_parent(signal.SIGKILL)
    try:
        os.kill(parent, 0)
    except ProcessLookupError:  # it ended before the call of prctl
        os._exit(1)
