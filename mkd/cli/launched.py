"""Ranks that `mkd launch` has started end with it."""

import os
import signal
from pathlib import Path

from mkd.utils.parent_process import signal_at_end_of_parent

LAUNCHER = "MKD_LAUNCHER"
"""Environment variable of these ranks with the process id of `mkd launch`."""


def end_with_launcher() -> None:
    """Receive SIGTERM when `mkd launch`, if it has started this process, ends; also if it is killed."""
    launcher = int(os.environ.pop(LAUNCHER, "0"))
    if not launcher:
        return
    is_child = os.getppid() == launcher
    if is_child:
        signal_at_end_of_parent(signal.SIGTERM)
    has_ended = os.getppid() != launcher if is_child else not Path(f"/proc/{launcher}").exists()
    if has_ended:
        os.kill(os.getpid(), signal.SIGTERM)
