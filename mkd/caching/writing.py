"""The teacher reads, its answers are stored."""

import time
from collections import deque
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.training.training import get_train_valid_test_num_samples
from torch.utils.data import default_collate

from mkd.caching.answers import Answers
from mkd.caching.job import CacheJob
from mkd.caching.texts import Ledger, Row, Rows, windows
from mkd.data.batch import KDBatch, check_same_batch, draw
from mkd.errors import MkdCacheError, MkdDataError
from mkd.groups import Groups
from mkd.stopping import StopSignals
from mkd.teacher.base import Teacher
from mkd.teacher.store import META
from mkd.teacher.store_writer import StoreWriter

FLUSH_SECONDS = 600.0
"""A shard is closed after so long, however small it is."""
SAY_SECONDS = 10.0


def rows_of(job: CacheJob) -> Rows:
    """All that a training run with these flags reads: validation and test set first, then the training set.

    Collective over all ranks.
    """
    args, (train, valid, test) = job.args, job.data.sets()
    evaluated = args.eval_iters * args.eval_global_batch_size
    trained = len(train) if args.dataloader_type == "cyclic" else get_train_valid_test_num_samples()[0]
    sets = [(valid, evaluated), (test, evaluated), (train, trained)]
    return Rows([(samples, min(count, len(samples))) for samples, count in sets if samples], job.meta.true_vocab)


def open_store(folder: Path, job: CacheJob, answers: Answers) -> tuple[StoreWriter | None, set[bytes]]:
    """This rank's writer, None where there are no answers; and the keys that are stored, the same on all ranks.

    Collective over all ranks.

    Raises:
        MkdCacheError: see `StoreWriter`; or this rank does not see the first rank's folder.
    """
    first = StoreWriter(folder, job.meta) if dist.get_rank() == 0 else None
    known = [None if first is None else first.known]
    dist.broadcast_object_list(known, src=0)
    if not answers.are_here:
        return None, known[0]
    if not (folder / META).is_file():
        raise MkdCacheError(f"--out {folder} is not there on every rank: give a folder that all nodes share")
    return first or StoreWriter(folder, job.meta), known[0]


class Writing:
    """One run over the rows of a job."""

    def __init__(self, job: CacheJob, groups: Groups, teacher: Teacher, rows: Rows, stop: StopSignals) -> None:
        """Open the store. Collective over all ranks."""
        self._job, self._groups, self._teacher, self._rows, self._stop = job, groups, teacher, rows, stop
        self._answers = Answers(job.meta, groups, job.teacher.config.sequence_parallel, job.kd.loss_chunk_rows)
        self._writer, known = open_store(job.out, job, self._answers)
        self._stored = len(known)
        self._ledger = Ledger(known, groups.dp)
        self._queue: deque[Row] = deque()
        self._tasks: set[bytes] = set()
        self._is_first_round = True
        self._flushed = time.monotonic()
        args = job.args
        self._row_batch = args.micro_batch_size
        self._micro_batches = max(1, args.global_batch_size // (args.micro_batch_size * groups.dp.size()))

    def run(self) -> bool:
        """Ask and store; whether everything is stored now. Collective over all ranks."""
        size, dp = self._row_batch * self._micro_batches, self._groups.dp
        say = Progress(len(self._rows), self._stored)
        for window in windows(self._rows, size, dp.rank(), dp.size(), self._job.args.num_workers):
            if self._stop.anywhere():
                break
            rows, keys = self._ledger.claim(window)
            self._queue.extend(rows)
            self._tasks |= keys
            while max(self._ledger.waiting) >= size:
                self._round(self._micro_batches)
            say.rows(size * dp.size(), self._ledger)
        while max(self._ledger.waiting) and not self._stop.anywhere():
            self._round(-(-max(self._ledger.waiting) // self._row_batch))
        if self._writer is not None:
            self._writer.flush()
        dist.barrier()
        say.end(self._ledger)
        return not self._stop.anywhere()

    def _round(self, micro_batches: int) -> None:
        """As many microbatches on every rank: experts may be shared by data-parallel ranks."""
        count = micro_batches * self._row_batch
        rows = [self._queue.popleft() for _ in range(min(count, len(self._queue)))]
        self._ledger.waiting = [max(0, waiting - count) for waiting in self._ledger.waiting]
        rows += [rows[-1] if rows else self._rows[0]] * (count - len(rows))
        size, job = self._row_batch, self._job
        collated = (default_collate([row.sample for row in rows[i : i + size]]) for i in range(0, count, size))
        batches = draw(collated, micro_batches, job.meta.true_vocab, size, job.data.length_multiple)
        if self._is_first_round:
            check_same_batch(batches[0], self._groups.mp, self._groups.cp)
            self._is_first_round = False
        # Without pipeline stages there is no reason to hold more than one microbatch's hidden states.
        at_once = micro_batches if self._groups.pp.size() > 1 else 1
        for begin in range(0, micro_batches, at_once):
            self._ask(batches[begin : begin + at_once])
        if self._writer is not None and time.monotonic() - self._flushed > FLUSH_SECONDS:
            self._writer.flush()
            self._flushed = time.monotonic()

    def _ask(self, batches: list[KDBatch]) -> None:
        shapes = {tuple(batch.tokens.shape) for batch in batches}
        if len(shapes) > 1 and self._job.data.length_multiple is None:
            raise MkdDataError(f"microbatches have the shapes {sorted(shapes)}: give --kd-variable-seq-lengths")
        signals = self._teacher.signals([batch.on_rank(self._groups.cp) for batch in batches])
        for signal, whole in zip(signals, batches, strict=bool(signals)):
            for key, rows in self._answers.of(signal, whole):
                if key in self._tasks:
                    self._writer.add(key, rows)
                    self._tasks.discard(key)


class Progress:
    """Lines of the first rank."""

    def __init__(self, total: int, stored: int) -> None:
        """Say how much there is.

        Args:
            total: rows.
            stored: segments that are in the folder already.
        """
        self._total, self._seen, self._skipped = total, 0, 0
        self._speaks = dist.get_rank() == 0
        self._begin = self._said = time.monotonic()
        self._say(f"{total:,} rows to read; {stored:,} segments are stored already")

    def rows(self, count: int, ledger: Ledger) -> None:
        """So many rows more are done."""
        self._seen = min(self._seen + count, self._total)
        now = time.monotonic()
        if not ledger.tokens:  # all of it is stored: the time to pass over it is not the teacher's
            self._begin, self._skipped = now, self._seen
        if now - self._said < SAY_SECONDS:
            return
        self._said, elapsed = now, max(now - self._begin, 1e-9)
        line = f"{self._seen:,} of {self._total:,} rows ({self._seen / self._total:.1%})"
        if self._seen > self._skipped:
            left = (self._total - self._seen) * elapsed / (self._seen - self._skipped)
            line += f", {ledger.tokens:,} tokens, {ledger.tokens / elapsed:,.0f} tokens/s, ETA {_clock(left)}"
        self._say(line)

    def end(self, ledger: Ledger) -> None:
        """Say what was added."""
        elapsed = max(time.monotonic() - self._begin, 1e-9)
        rate = f", {ledger.tokens / elapsed:,.0f} tokens/s" if ledger.tokens else ""
        self._say(f"{ledger.segments:,} segments of {ledger.tokens:,} tokens added in {_clock(elapsed)}{rate}")

    def _say(self, text: str) -> None:
        if self._speaks:
            print(f"mkd: cache      {text}", flush=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def print_plan(job: CacheJob) -> None:
    """What will happen, on rank 0, before any weight is loaded."""
    args, meta = job.args, job.meta
    what = f"{meta.samples} draws" if meta.samples else f"the {meta.top_k} most probable tokens, values {meta.values}"
    layout = f"TP {args.tensor_model_parallel_size}, PP {args.pipeline_model_parallel_size}"
    layout += f", CP {args.context_parallel_size}, DP {args.data_parallel_size}"
    plan: dict[str, Any] = {
        "teacher": job.teacher,
        "out": f"{job.out}: {what}, {meta.records.dtype.itemsize} bytes a token, at temperature "
        + ", ".join(f"{t:g}" for t in meta.temperatures),
        "layout": layout,
        "vocabulary": f"{meta.true_vocab} tokens, padded to {args.padded_vocab_size}",
    }
    if not job.data.has_own_rows:
        plan["keys"] = (
            "rows are concatenated documents: only training with the same data, --seed, --seq-length, --split and "
            "number of samples reads the same rows and finds them here; chats and --kd-packing best_fit do not depend "
            "on these"
        )
    for name, text in plan.items() if args.rank == 0 else ():
        print(f"mkd: {name:10s} {text}", flush=True)
