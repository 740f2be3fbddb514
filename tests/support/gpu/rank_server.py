"""Jobs whose ranks are forks of a process that has imported everything.

The imports of a training with Transformer Engine take 35 s per process on a machine with GPUs, more than its steps. A
`RankServer` has them done and does not touch CUDA, so that its forks can. If an import touches CUDA after all, as that
of flash-linear-attention does, the forks replace themselves with new interpreters: slower, and the same otherwise.
"""

import importlib
import json
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import cache
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

from tests.support.e2e.small_job import free_port

ROOT = Path(__file__).parents[3]
GRACE_S = 5.0
"""Seconds that the other ranks have to end after the first one that failed."""
TIMED_OUT = 124
"""Exit status of a job that was ended at its time limit."""
_START_S = 300.0
"""Seconds that the imports may take."""


class RankServer:
    """A server process, and jobs on it.

    Args:
        variables: environment variables of the server, which read at import affect all its jobs.
    """

    def __init__(self, **variables: str) -> None:
        self._variables = variables
        self._folder = tempfile.TemporaryDirectory(prefix="ranks")
        self._address = str(Path(self._folder.name) / "socket")
        # Without NVML, asking for the number of GPUs would initialize CUDA.
        environment = {**os.environ, **variables, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        command = [sys.executable, "-m", "tests.support.gpu.rank_server", self._address]
        # The server ends when the other end of its standard input is closed.
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE)

    def run(
        self, words: list[str], log: Path, ranks: int = 1, timeout: float = 300.0, **variables: str
    ) -> tuple[int, str]:
        """Run a script on several ranks of this machine, and wait for it. Threads may call this at the same time.

        Args:
            words: the script's path and its arguments.
            log: file of the output of all ranks; replaced.
            ranks: their number.
            timeout: seconds until the ranks are killed.
            variables: environment variables beside those of the server.

        Returns:
            (0, TIMED_OUT or the status of the first rank that failed; the output).
        """
        common = {**os.environ, **self._variables, **variables, "WORLD_SIZE": str(ranks)}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_WORLD_SIZE": str(ranks)}
        environments = [{**common, "RANK": str(i), "LOCAL_RANK": str(i)} for i in range(ranks)]
        log.write_bytes(b"")
        job = {"words": words, "environments": environments, "log": str(log), "timeout": timeout}
        with self._connect() as connection:
            connection.send_bytes(json.dumps(job).encode())
            status = json.loads(connection.recv_bytes())
        return status, log.read_text(errors="replace")

    def _connect(self) -> Connection:
        """Raises RuntimeError if the server has ended or does not start in time."""
        end = time.monotonic() + _START_S
        while True:
            try:
                return Client(self._address, "AF_UNIX")
            except (FileNotFoundError, ConnectionRefusedError):
                if self._process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"the server of ranks has not started: {self._process.poll()}") from None
                time.sleep(0.1)


@cache
def rank_server(variables: frozenset[tuple[str, str]] = frozenset()) -> RankServer:
    """The server with these environment variables, started with the first call."""
    return RankServer(**dict(variables))


def serve(address: str) -> None:
    """Fork a process for each job that is requested, until standard input is closed."""
    _import_everything()
    listener = Listener(address, "AF_UNIX", backlog=64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended jobs leave no zombies
    server = os.getpid()
    if os.fork() == 0:
        sys.stdin.read()
        if os.getppid() == server:  # else the server has ended, and the parent is another process
            os.kill(server, signal.SIGTERM)
        os._exit(0)
    while True:
        connection = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            job = json.loads(connection.recv_bytes())
            connection.send_bytes(json.dumps(_run_job(**job)).encode())
            os._exit(0)
        connection.close()


def _import_everything() -> None:
    import mkd
    import mkd.cpu

    if mkd.cpu.wanted():
        mkd.cpu.activate()
    import megatron.training  # noqa: F401
    import transformers  # noqa: F401

    for found in pkgutil.walk_packages(mkd.__path__, "mkd."):
        importlib.import_module(found.name)


def _run_job(words: list[str], environments: list[dict[str, str]], log: str, timeout: float) -> int:
    """As torchrun's agent: the status of the first rank that fails ends the others."""
    ranks = {}
    for environment in environments:
        if (pid := os.fork()) == 0:
            _become(words, environment, log)
        ranks[pid] = environment["RANK"]
    status, end = 0, time.monotonic() + timeout
    while ranks:
        pid, ended = os.waitpid(-1, os.WNOHANG)
        if pid in ranks:
            del ranks[pid]
            if (code := os.waitstatus_to_exitcode(ended)) and not status:
                status, end = code, min(end, time.monotonic() + GRACE_S)
        elif time.monotonic() > end:
            status = status or TIMED_OUT
            for rank in ranks:
                os.kill(rank, signal.SIGKILL)
            end = time.monotonic() + GRACE_S
        else:
            time.sleep(0.02)
    return status


def _become(words: list[str], environment: Mapping[str, str], log: str) -> None:
    """Run the script in this fork, and end with its status."""
    import torch

    os.environ.clear()
    os.environ.update(environment)
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if torch.cuda._is_in_bad_fork():
        os.execv(sys.executable, [sys.executable, *words])
    sys.argv = words
    sys.path[0] = str(Path(words[0]).parent)
    status: int | str | None = 1
    try:
        runpy.run_path(words[0], run_name="__main__")
        status = 0
    except SystemExit as error:
        status = error.code
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))


if __name__ == "__main__":
    serve(sys.argv[1])
