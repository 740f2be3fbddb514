"""How rows are cut into chunks, and in which order the work on chunks is done."""

from collections import deque
from collections.abc import Generator, Iterable

import torch

CHUNK_BYTES = 192 * 2**20
"""Default size of one chunk of one model's logits."""
MIN_CHUNK_TOKENS = 768
"""Default least rows of a chunk on a GPU: with fewer, the products of the LM heads wait for their weights."""


def loss_chunks(rows: int, columns: int, dtype: torch.dtype, chunk_rows: int | None, least: int = 1) -> list[slice]:
    """Cut rows into chunks; no rows are one empty chunk.

    Args:
        rows: how many there are.
        columns, dtype: of the logits.
        chunk_rows: rows a chunk; None: as many as `CHUNK_BYTES` of logits, but at least `least`, in chunks of about
            equal size and a multiple of 128 rows where there are that many.
        least: see chunk_rows.

    Raises:
        ValueError: chunk_rows below 1.
    """
    if chunk_rows is None:
        most = max(least, 1, CHUNK_BYTES // (max(columns, 1) * dtype.itemsize))
        if most >= 128:
            most -= most % 128
        parts = -(-max(rows, 1) // most)
        chunk_rows = -(-max(rows, 1) // parts)
        if parts > 1 and most >= 128:
            chunk_rows += -chunk_rows % 128
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows is {chunk_rows}; it must be at least 1")
    return [slice(first, min(first + chunk_rows, rows)) for first in range(0, max(rows, 1), chunk_rows)]


def interleave(tasks: Iterable[Generator[None, None, None]], at_a_time: int) -> None:
    """Run generators to their ends, at most `at_a_time` of them alive, each advancing one step in turn.

    A task yields where it would wait for other ranks; the next step of another task then fills the time. The order of
    steps depends on nothing but the number of tasks and steps, so it is the same on all ranks.
    """
    waiting = iter(tasks)
    alive: deque[Generator[None, None, None]] = deque()
    while True:
        while len(alive) < at_a_time and (task := next(waiting, None)) is not None:
            alive.append(task)
        if not alive:
            return
        task = alive.popleft()
        try:
            next(task)
        except StopIteration:
            continue
        alive.append(task)
