"""Imports without Python's garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside the `with` block Python's garbage collector is off; the objects that exist at its end are left out of all
    later collections.

    The imports of a training make half a million objects that stay. The collector goes through them again each time
    their number has grown by a quarter, and at the end of the process: a quarter of the time of a small job on CPU.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
