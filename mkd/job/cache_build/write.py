"""Runs the teacher over the texts of a job and stores its targets."""

import math
from collections import deque

import torch
import torch.distributed as dist
from torch.utils.data import default_collate

from mkd.compat.stopping import StopSignals
from mkd.data.batch import KDBatch
from mkd.data.microbatches import check_same_batch, next_microbatches
from mkd.data.packing.streams import BlendOfRows
from mkd.distributed.groups import Groups
from mkd.errors import MkdDataError
from mkd.job.cache_build.job import CacheJob
from mkd.job.cache_build.progress import CacheProgress
from mkd.job.cache_build.targets import TargetBuilder
from mkd.job.cache_build.texts import Ledger, RowDataset, TextRow, windows
from mkd.job.cache_build.writer_thread import WriterThread, open_store
from mkd.job.data import wanted_samples
from mkd.teacher.interface import Teacher
from mkd.utils.logging import logger


def rows_to_read(job: CacheJob) -> RowDataset:
    """All rows that a training run with these flags reads: validation and test set first, then the training set, at
    most one epoch of it. Collective over all ranks.
    """
    args, (train, valid, test) = job.args, job.data.sets()
    evaluated = args.eval_iters * args.eval_global_batch_size
    trained = wanted_samples(args)[0]
    epoch = train.one_epoch() if isinstance(train, BlendOfRows) else None
    if epoch is not None:
        train, trained = epoch, len(epoch) if job.reads_one_epoch else min(trained, len(epoch))
    sets = [(valid, evaluated), (test, evaluated), (train, trained)]
    return RowDataset([(samples, min(count, len(samples))) for samples, count in sets if samples], job.meta.true_vocab)


class CacheBuilder:
    """One pass over the rows of a job."""

    def __init__(self, job: CacheJob, groups: Groups, teacher: Teacher, rows: RowDataset, stop: StopSignals) -> None:
        """Open the store. Collective over all ranks."""
        self._job, self._groups, self._teacher, self._rows, self._stop = job, groups, teacher, rows, stop
        self._targets = TargetBuilder(job.meta, groups, job.teacher.config.sequence_parallel, job.kd.loss_chunk_rows)
        writer, known = open_store(job.out, job.meta, self._targets)
        self._writer = None if writer is None else WriterThread(writer, self._targets)
        self._stored = len(known)
        self._ledger = Ledger(known, groups.dp)
        self._queue: deque[TextRow] = deque()
        self._assigned: set[bytes] = set()
        self._is_first_step = True
        args = job.args
        self._row_batch = args.micro_batch_size
        self._microbatches = max(1, args.global_batch_size // (args.micro_batch_size * groups.dp.size()))

    def run(self) -> bool:
        """Compute and store all targets; False if a signal stopped it before the end. Collective over all ranks."""
        size, dp = self._row_batch * self._microbatches, self._groups.dp
        progress = CacheProgress(len(self._rows), self._stored)
        for window in windows(self._rows, size, dp.rank(), dp.size(), self._job.args.num_workers):
            if self._stop.anywhere():
                break
            rows, keys = self._ledger.claim(window)
            self._queue.extend(rows)
            self._assigned |= keys
            while max(self._ledger.waiting) >= size:
                self._step(self._microbatches)
            progress.rows(size * dp.size(), self._ledger)
        while max(self._ledger.waiting) and not self._stop.anywhere():
            self._step(min(-(-max(self._ledger.waiting) // self._row_batch), self._microbatches))
        if self._writer is not None:
            self._writer.close()
        dist.barrier()
        progress.end(self._ledger)
        return not self._stop.anywhere()

    def _step(self, microbatches: int) -> None:
        """Process equally many microbatches on every rank, because data-parallel ranks may share experts."""
        count, size, job = microbatches * self._row_batch, self._row_batch, self._job
        rows = [self._queue.popleft() for _ in range(min(count, len(self._queue)))]
        self._ledger.waiting = [max(0, waiting - count) for waiting in self._ledger.waiting]
        rows += [rows[-1] if rows else self._rows[0]] * (count - len(rows))
        collated = (default_collate([row.sample for row in rows[i : i + size]]) for i in range(0, count, size))
        batches = next_microbatches(collated, microbatches, job.meta.true_vocab, size, job.data.length_multiple)
        if self._is_first_step:
            check_same_batch(batches[0], self._groups.mp, self._groups.cp)
        # Pipeline stages need several microbatches in one call; otherwise one at a time holds less memory.
        rows = job.kd.teacher_micro_batch_size or size
        per_call = microbatches if self._groups.pp.size() > 1 else max(1, rows // size)
        for begin in range(0, microbatches, per_call):
            self._compute(batches[begin : begin + per_call])
        if self._is_first_step:
            self._print_teacher_loss()
            self._is_first_step = False

    def _compute(self, batches: list[KDBatch]) -> None:
        shapes = {tuple(batch.tokens.shape) for batch in batches}
        if len(shapes) > 1 and self._job.data.length_multiple is None:
            raise MkdDataError(f"microbatches have the shapes {sorted(shapes)}: give --kd-variable-seq-lengths")
        signals = self._teacher.signals([batch.on_rank(self._groups.cp) for batch in batches])
        for signal, whole in zip(signals, batches, strict=bool(signals)):
            table = self._targets.table(signal, whole)
            texts = {key: positions for key, positions in whole.segments() if key in self._assigned}
            self._assigned.difference_update(texts)
            if table is not None and texts:
                self._writer.add(list(texts.items()), table)

    def _print_teacher_loss(self) -> None:
        """Print the cross-entropy of the teacher on the texts of the first step."""
        sums = [0.0, 0.0]
        if self._writer is not None:
            self._writer.wait()
            sums = [-self._writer.label_log_prob, self._writer.tokens]
        total = torch.tensor(sums, dtype=torch.float64, device="cuda")
        dist.all_reduce(total)
        if total[1]:
            ce, vocab = (total[0] / total[1]).item(), self._job.meta.true_vocab
            logger.info(
                f"teacher {self._teacher.fingerprint()}: CE {ce:.4f} on the first {int(total[1])} tokens, "
                f"prompts included (uniform baseline: ln V = {math.log(vocab):.4f})"
            )
