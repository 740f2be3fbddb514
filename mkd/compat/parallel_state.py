"""Megatron's global parallel state, exchanged for that of another layout."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def parallel_state_of(layout: dict[str, Any]) -> Iterator[None]:
    """Set megatron's global parallel state to that of another layout inside the `with` block.

    megatron-core 0.19 takes process groups as arguments, and still reads the global ones in places: for the parts of a
    checkpoint on a rank, for groups that a caller omits, for the metrics of routers. A model in another layout would
    load or compute something else there.

    Args:
        layout: the values of that state; empty: nothing is initialized inside. Filled when the context ends.
    """
    from megatron.core import parallel_state

    names = [name for name in vars(parallel_state) if re.fullmatch("_[A-Z_]+", name)]
    outside = {name: getattr(parallel_state, name) for name in names}
    uninitialized = {name: {} if isinstance(value, dict) else None for name, value in outside.items()}
    vars(parallel_state).update(layout or uninitialized)
    try:
        yield
    finally:
        layout.update((name, getattr(parallel_state, name)) for name in names)
        vars(parallel_state).update(outside)
