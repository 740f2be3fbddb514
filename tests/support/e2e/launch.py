"""Command lines of the project's scripts, each rank a fork of the process that has imported everything already.

The script runs as `__main__`, with its own arguments, environment, stdout and stderr, as a command of its own would.
Only the imports, and torchrun's agent, are left out: at least one test of each script runs it for real.
"""

import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.support.fork_server import fork_server

GRACE_S = 5.0
"""After the first rank that failed: how long the others may take to end by themselves."""


def launch(
    words: Sequence[str], environments: Sequence[Mapping[str, str]], folder: Path, timeout: float
) -> tuple[int, str, str]:
    """Run a script on one rank or more, and wait for it.

    Args:
        words: the script's path and its arguments.
        environments: of each rank, whole.
        folder: an existing one, for the files `stdout` and `stderr`.
        timeout: seconds until the ranks that still run are killed.

    Returns:
        (0 or the status of the first rank that failed, stdout, stderr); ranks write to the same two streams.

    Raises:
        TimeoutError: it did not end in time.
    """
    streams = [folder / "stdout", folder / "stderr"]
    for stream in streams:
        stream.write_bytes(b"")
    context = fork_server()
    ranks = [context.Process(target=_rank, args=(list(words), dict(env), streams)) for env in environments]
    for rank in ranks:
        rank.start()
    try:
        status = _wait(ranks, timeout)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    output, errors = (stream.read_text(errors="replace") for stream in streams)
    if status is None:
        raise TimeoutError(f"{' '.join(words)} still ran after {timeout:g} s\n{output[-2000:]}\n{errors[-6000:]}")
    return status, output, errors


def _wait(ranks: list[BaseProcess], timeout: float) -> int | None:
    """The status of the first rank that failed, else 0; None if there is none in time."""
    deadline, status = time.monotonic() + timeout, 0
    running = list(ranks)
    while running:
        ended = wait([rank.sentinel for rank in running], timeout=max(deadline - time.monotonic(), 0))
        if not ended:
            return status or None
        for rank in [rank for rank in running if rank.sentinel in ended]:
            rank.join()
            running.remove(rank)
            if rank.exitcode and not status:
                status = rank.exitcode
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return status


def _rank(words: list[str], environment: dict[str, str], streams: list[Path]) -> None:
    """In the fork: become the script."""
    multiprocessing.set_start_method("fork", force=True)  # as for a Python of its own
    os.environ.clear()
    os.environ.update(environment)
    for number, stream in enumerate(streams, start=1):
        file = os.open(stream, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.argv = words
    sys.path[0] = str(Path(words[0]).parent)
    runpy.run_path(words[0], run_name="__main__")
