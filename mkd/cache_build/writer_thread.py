"""Answers into the folder, beside the teacher that goes on reading."""

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch.distributed as dist

from mkd.cache_build.targets import Answers
from mkd.errors import MkdCacheError
from mkd.teacher.cache.store import META, CacheMeta
from mkd.teacher.cache.writer import StoreWriter

FLUSH_SECONDS = 600.0
"""A shard is closed after so long, however small it is."""
WAITING = 4
"""Microbatches whose answers wait to be stored; with more of them the teacher waits."""


def open_store(folder: Path, meta: CacheMeta, answers: Answers) -> tuple[StoreWriter | None, set[bytes]]:
    """This rank's writer, None where there are no answers; and the keys that are stored, the same on all ranks.

    Collective over all ranks.

    Raises:
        MkdCacheError: see `StoreWriter`; or this rank does not see the first rank's folder.
    """
    first = StoreWriter(folder, meta) if dist.get_rank() == 0 else None
    known = [None if first is None else first.known]
    dist.broadcast_object_list(known, src=0)
    if not answers.are_here:
        return None, known[0]
    if not (folder / META).is_file():
        raise MkdCacheError(f"--out {folder} is not there on every rank: give a folder that all nodes share")
    return first or StoreWriter(folder, meta), known[0]


class Storing:
    """Turns answers into records and writes them, in a thread beside the teacher."""

    def __init__(self, writer: StoreWriter, answers: Answers) -> None:
        """Take a writer, which is this thread's alone from now on."""
        self._writer, self._answers = writer, answers
        self._thread = ThreadPoolExecutor(1)
        self._pending: deque[Future] = deque()
        self._flushed = time.monotonic()
        self.label_log_prob, self.tokens = 0.0, 0
        """Sum over all tokens that were stored, and their number; read them after `wait`."""

    def add(self, texts: list[tuple[bytes, slice]], table: np.ndarray) -> None:
        """Store texts.

        Args:
            texts: key and places in the table.
            table: see `Answers.of`.

        Raises:
            MkdCacheError: of an earlier call: the answers are not finite.
        """
        self._pending.append(self._thread.submit(self._add, texts, table))
        while len(self._pending) > WAITING:
            self._pending.popleft().result()

    def _add(self, texts: list[tuple[bytes, slice]], table: np.ndarray) -> None:
        rows = self._answers.token_rows(np.concatenate([table[places] for _, places in texts]))
        records = self._writer.meta.records.encode(rows)
        self.label_log_prob += float(rows.label_log_prob.sum(dtype=np.float64))
        self.tokens += len(records)
        end = 0
        for key, places in texts:
            begin, end = end, end + places.stop - places.start
            self._writer.add_records(key, records[begin:end])
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self._writer.flush()
            self._flushed = time.monotonic()

    def wait(self) -> None:
        """Until all that was added is in the writer."""
        while self._pending:
            self._pending.popleft().result()

    def close(self) -> None:
        """Write what is left."""
        self.wait()
        self._thread.submit(self._writer.flush).result()
        self._thread.shutdown()
