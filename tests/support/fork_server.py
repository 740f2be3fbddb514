"""The process that every other process of the tests is forked from.

Importing torch, megatron, transformers and mkd costs 6 s of CPU; forked processes have it done. They also have the
library of tests/chaos/faults.c, where there is a C compiler, which changes nothing until a chaos session arms it.
"""

import atexit
import multiprocessing
import os
import shutil
import subprocess
import tempfile
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

FAULTS = Path(__file__).resolve().parents[1] / "chaos" / "faults.c"


def fork_server() -> ForkServerContext:
    """multiprocessing's context; the server starts with the first call and imports `tests.support.dist.preload`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.dist.preload"])
    _start()
    return context


@cache
def _start() -> None:
    """Start the server. `tests.support.dist.preload` removes the variable again."""
    library = _build()
    if library is not None:
        os.environ["LD_PRELOAD"] = str(library)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("LD_PRELOAD", None)


def _build() -> Path | None:
    """The compiled library, in a folder that this process removes at its end; None without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or "LD_PRELOAD" in os.environ:
        return None
    folder = Path(tempfile.mkdtemp(prefix="faults"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    words = [compiler, "-shared", "-fPIC", "-O1", "-o", str(folder / "faults.so"), str(FAULTS), "-ldl"]
    done = subprocess.run(words, capture_output=True)
    return folder / "faults.so" if done.returncode == 0 else None
