"""A `python` for shell scripts that need not import torch and megatron: each call is a fork of a process that has.

`serving` starts that process and puts an executable `python` into a folder; with the folder first in PATH, a script's
`python pretrain_kd.py ...` has its own arguments, environment, folder, streams and exit status as usual. Signals that
the executable gets reach the fork.
"""

import ctypes
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

from tests.support.fork_server import fork_server

CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
served = socket.socket(socket.AF_UNIX)
served.connect({address!r})
call = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
socket.send_fds(served, [len(call).to_bytes(4)], [0, 1, 2])
served.sendall(call)
child = int.from_bytes(served.recv(4))
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: os.kill(child, number))
answer = served.recv(4)
status = int.from_bytes(answer, signed=True) if answer else 1  # the server is gone
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


@contextmanager
def serving(folder: Path) -> Iterator[Path]:
    """Inside, `python` in the folder that is given back is quick.

    Args:
        folder: an existing one, for the socket and the executable.
    """
    address = str(folder / "python.socket")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    server = fork_server().Process(target=_serve, args=(listener,))
    server.start()
    listener.close()
    executables = folder / "bin"
    executables.mkdir()
    client = executables / "python"
    client.write_text(CLIENT.format(python=sys.executable, address=address))
    client.chmod(0o755)
    try:
        yield executables
    finally:
        server.terminate()
        server.join()


def _serve(listener: socket.socket) -> None:
    multiprocessing.set_start_method("fork", force=True)  # as for a Python of its own
    running = {}
    while True:
        for ready in wait([listener, *running]):
            if ready is listener:
                caller, _ = listener.accept()
                length, streams, _, _ = socket.recv_fds(caller, 4, 3)
                words, environment, folder = json.loads(_read(caller, int.from_bytes(length)))
                child = multiprocessing.Process(target=_become, args=(words, environment, folder, streams))
                child.start()
                for stream in streams:
                    os.close(stream)
                caller.sendall(child.pid.to_bytes(4))
                running[child.sentinel] = child, caller
            else:
                child, caller = running.pop(ready)
                child.join()
                caller.sendall(child.exitcode.to_bytes(4, signed=True))
                caller.close()


def _read(caller: socket.socket, length: int) -> bytes:
    seen = b""
    while len(seen) < length:
        seen += caller.recv(length - len(seen))
    return seen


def _become(words: list[str], environment: dict[str, str], folder: str, streams: list[int]) -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)  # nothing is left of a test that failed
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = words
    sys.path[0] = str(Path(words[0]).resolve().parent)
    runpy.run_path(words[0], run_name="__main__")
