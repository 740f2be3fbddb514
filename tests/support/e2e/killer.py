"""pretrain_kd.py as a job that loses its machine: it, and all processes that it has started, are killed at one point.

MKD_TEST_KILL is EVENT:N, to die at the N-th event of a kind (counted in each process), or EVENT:N:SIGNAL, to send this
signal to itself there:
    step    a forward step of the student
    write   a forward pass in which the student writes a token of each text
    score   a forward pass of the teacher
    shard   a tensor of a checkpoint's shard is to be written; in an asynchronous save by a process of its own
    hf      a tensor of a Hugging Face folder is to be written
    sync    a file or folder is to be made durable
    rename  a file or folder is to be given its final name
    remove  a folder is to be removed
MKD_TEST_KILL_RANK is the rank that dies, by default 0. With MKD_TEST_KILL_ALONE the processes that it started are left
alive, and the ids of the one that counted the event and of the job are in the file of that name.
Without MKD_TEST_KILL it is pretrain_kd.py.
"""

# ruff: noqa: E402 - the CPU backend must be in place before megatron is imported

import functools
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from mkd import cpu

cpu.activate()

from megatron.core.dist_checkpointing.strategies import filesystem_async

from mkd.checkpoint.hf.writer import WeightsWriter
from mkd.cli.train_job import run_job
from mkd.rollout.engine import cached
from mkd.teacher.online import OnlineTeacher
from mkd.train.step import ForwardStep

EVENTS: dict[str, list[tuple[Any, str]]] = {
    "step": [(ForwardStep, "__call__")],
    "write": [(cached._Writer, "_pass")],
    "score": [(OnlineTeacher, "signals")],
    "shard": [(filesystem_async, "_write_item")],
    "hf": [(WeightsWriter, "write")],
    "sync": [(os, "fsync")],
    "rename": [(os, "replace"), (os, "rename")],
    "remove": [(shutil, "rmtree")],
}


def die_at(event: str, number: int, warning: str | None = None) -> None:
    """Arrange for the end, or for a signal such as SIGTERM."""
    count, trainer = 0, os.getpid()

    def counted(call: Callable) -> Callable:
        @functools.wraps(call)  # megatron inspects signatures
        def count_and_call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                os.write(2, f"killed at {event}:{number}\n".encode())
                if warning is not None:
                    signal.raise_signal(signal.Signals[warning])
                elif "MKD_TEST_KILL_ALONE" in os.environ:
                    Path(os.environ["MKD_TEST_KILL_ALONE"]).write_text(f"{os.getpid()} {trainer}")
                    os.kill(trainer, signal.SIGKILL)
                    signal.pause()
                else:
                    os.killpg(0, signal.SIGKILL)
            return call(*args, **kwargs)

        return count_and_call

    for owner, name in EVENTS[event]:
        setattr(owner, name, counted(getattr(owner, name)))


if __name__ == "__main__":
    if os.getsid(0) != os.getpid():  # as under torchrun
        os.setsid()  # so that all processes of this job can be killed together
    # Megatron starts this process with "spawn", which imports everything once more.
    filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
    if "MKD_TEST_KILL" in os.environ and os.environ["RANK"] == os.environ.get("MKD_TEST_KILL_RANK", "0"):
        event, number, *warning = os.environ["MKD_TEST_KILL"].split(":")
        die_at(event, int(number), *warning)
    run_job()
