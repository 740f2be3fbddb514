"""Ranks that `mkd launch` has started end with it."""

import ctypes
import os
import signal
from pathlib import Path

LAUNCHER = "MKD_LAUNCHER"
"""Environment variable of these ranks with the process id of `mkd launch`."""
_PR_SET_PDEATHSIG = 1
"""See prctl(2)."""


def end_with_launcher() -> None:
    """Receive SIGTERM when `mkd launch`, if it has started this process, ends; also if it is killed."""
    launcher = int(os.environ.pop(LAUNCHER, "0"))
    if not launcher:
        return
    is_child = os.getppid() == launcher
    if is_child:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    has_ended = os.getppid() != launcher if is_child else not Path(f"/proc/{launcher}").exists()
    if has_ended:
        os.kill(os.getpid(), signal.SIGTERM)
