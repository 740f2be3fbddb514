"""Runs a script that must not reach the network: every attempt to leave the machine is recorded, and fails.

    offline.py RECORD SCRIPT [arguments of the script ...]

RECORD gets one line per attempt, also if the script survives it.
"""

import os
import runpy
import socket
import sys
from pathlib import Path
from typing import Any

ADDRESSES = {"socket.connect", "socket.sendto", "socket.sendmsg"}
NAMES = {"socket.getaddrinfo", "socket.gethostbyname", "http.client.connect"}
LOCAL = {None, "", "localhost", "::1", "0.0.0.0", "::", socket.gethostname()}


def destination(event: str, values: tuple[Any, ...]) -> Any:
    """The host of an event of `sys.addaudithook`; None for events and addresses that stay on the machine."""
    if event in ADDRESSES:
        address = values[1]
        host = address[0] if isinstance(address, tuple) else None  # a path is a socket of this machine
    elif event in NAMES:
        host = values[1] if event == "http.client.connect" else values[0]
    else:
        return None
    host = host.decode() if isinstance(host, bytes) else host
    is_local = host in LOCAL or str(host).startswith("127.") or str(host).startswith("::ffff:127.")
    return None if is_local else host


def guard(record: Path) -> None:
    """Refuse all connections of this process and its forks to other machines."""

    def watch(event: str, values: tuple[Any, ...]) -> None:
        if event.startswith(("socket.", "http.")) and (host := destination(event, values)) is not None:
            with record.open("a") as file:
                file.write(f"{event} {host}\n")
            raise ConnectionRefusedError(f"{event} {host}: no connection may leave this machine")

    sys.addaudithook(watch)


if __name__ == "__main__":
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ.pop(name, None)
    record, script, *words = sys.argv[1:]
    guard(Path(record))
    sys.argv = [script, *words]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")
