"""Writes targets to disk in a background thread, while the teacher computes the next ones."""

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch.distributed as dist

from mkd.errors import MkdCacheError
from mkd.job.cache_build.targets import TargetBuilder
from mkd.teacher.cache.meta import META, CacheMeta
from mkd.teacher.cache.writer import StoreWriter

FLUSH_SECONDS = 600.0
"""Age at which a shard is closed, whatever its size."""
QUEUED = 4
"""Microbatches that may wait to be stored; the teacher waits if there are more."""


def open_store(folder: Path, meta: CacheMeta, builder: TargetBuilder) -> tuple[StoreWriter | None, set[bytes]]:
    """This rank's writer (None unless it collects targets), and the keys of the stored texts, the same on all ranks.

    Collective over all ranks.

    Raises:
        MkdCacheError: see `StoreWriter`; or this rank does not see the folder of rank 0.
    """
    first = StoreWriter(folder, meta) if dist.get_rank() == 0 else None
    known = [None if first is None else first.known]
    dist.broadcast_object_list(known, src=0)
    if not builder.collects:
        return None, known[0]
    if not (folder / META).is_file():
        raise MkdCacheError(f"--out {folder} does not exist on every rank: give a folder that all nodes share")
    return first or StoreWriter(folder, meta), known[0]


class WriterThread:
    """Encodes and writes targets in one thread."""

    def __init__(self, writer: StoreWriter, builder: TargetBuilder) -> None:
        """Start the thread, which is the only user of `writer` from now on."""
        self._writer, self._builder = writer, builder
        self._thread = ThreadPoolExecutor(1)
        self._pending: deque[Future] = deque()
        self._flushed = time.monotonic()
        self.label_log_prob, self.tokens = 0.0, 0
        """Sum over all stored tokens, and their number; valid after `wait`."""

    def add(self, texts: list[tuple[bytes, slice]], table: np.ndarray) -> None:
        """Store texts.

        Args:
            texts: key of each text and its positions in the table.
            table: from `TargetBuilder.table`.

        Raises:
            MkdCacheError: the targets of an earlier call are not finite.
        """
        self._pending.append(self._thread.submit(self._add, texts, table))
        while len(self._pending) > QUEUED:
            self._pending.popleft().result()

    def _add(self, texts: list[tuple[bytes, slice]], table: np.ndarray) -> None:
        targets = self._builder.token_targets(np.concatenate([table[positions] for _, positions in texts]))
        records = self._writer.meta.records.encode(targets)
        self.label_log_prob += float(targets.label_log_prob.sum(dtype=np.float64))
        self.tokens += len(records)
        end = 0
        for key, positions in texts:
            begin, end = end, end + positions.stop - positions.start
            self._writer.add_records(key, records[begin:end])
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self._writer.flush()
            self._flushed = time.monotonic()

    def wait(self) -> None:
        """Wait until the writer has all added texts."""
        while self._pending:
            self._pending.popleft().result()

    def close(self) -> None:
        """Write the last shard and end the thread."""
        self.wait()
        self._thread.submit(self._writer.flush).result()
        self._thread.shutdown()
