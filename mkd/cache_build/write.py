"""The teacher reads, its answers are stored."""

import math
from collections import deque

import torch
import torch.distributed as dist
from megatron.training.training import get_train_valid_test_num_samples
from torch.utils.data import default_collate

from mkd.cache_build.job import CacheJob
from mkd.cache_build.progress import Progress
from mkd.cache_build.targets import Answers
from mkd.cache_build.texts import Ledger, Row, Rows, windows
from mkd.cache_build.writer_thread import Storing, open_store
from mkd.compat.stopping import StopSignals
from mkd.data.batch import KDBatch, check_same_batch, next_microbatches
from mkd.data.packing.streams import BlendOfRows
from mkd.distributed.groups import Groups
from mkd.errors import MkdDataError
from mkd.teacher.interface import Teacher
from mkd.utils.logging import logger


def rows_of(job: CacheJob) -> Rows:
    """All that a training run with these flags reads: validation and test set first, then the training set, at most
    once. Collective over all ranks.
    """
    args, (train, valid, test) = job.args, job.data.sets()
    evaluated = args.eval_iters * args.eval_global_batch_size
    trained = len(train) if args.dataloader_type == "cyclic" else get_train_valid_test_num_samples()[0]
    epoch = train.one_epoch() if isinstance(train, BlendOfRows) else None
    if epoch is not None:
        train, trained = epoch, len(epoch) if job.reads_one_epoch else min(trained, len(epoch))
    sets = [(valid, evaluated), (test, evaluated), (train, trained)]
    return Rows([(samples, min(count, len(samples))) for samples, count in sets if samples], job.meta.true_vocab)


class Writing:
    """One run over the rows of a job."""

    def __init__(self, job: CacheJob, groups: Groups, teacher: Teacher, rows: Rows, stop: StopSignals) -> None:
        """Open the store. Collective over all ranks."""
        self._job, self._groups, self._teacher, self._rows, self._stop = job, groups, teacher, rows, stop
        self._answers = Answers(job.meta, groups, job.teacher.config.sequence_parallel, job.kd.loss_chunk_rows)
        writer, known = open_store(job.out, job.meta, self._answers)
        self._storing = None if writer is None else Storing(writer, self._answers)
        self._stored = len(known)
        self._ledger = Ledger(known, groups.dp)
        self._queue: deque[Row] = deque()
        self._tasks: set[bytes] = set()
        self._is_first_round = True
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
            self._round(min(-(-max(self._ledger.waiting) // self._row_batch), self._micro_batches))
        if self._storing is not None:
            self._storing.close()
        dist.barrier()
        say.end(self._ledger)
        return not self._stop.anywhere()

    def _round(self, micro_batches: int) -> None:
        """As many microbatches on every rank: experts may be shared by data-parallel ranks."""
        count, size, job = micro_batches * self._row_batch, self._row_batch, self._job
        rows = [self._queue.popleft() for _ in range(min(count, len(self._queue)))]
        self._ledger.waiting = [max(0, waiting - count) for waiting in self._ledger.waiting]
        rows += [rows[-1] if rows else self._rows[0]] * (count - len(rows))
        collated = (default_collate([row.sample for row in rows[i : i + size]]) for i in range(0, count, size))
        batches = next_microbatches(collated, micro_batches, job.meta.true_vocab, size, job.data.length_multiple)
        if self._is_first_round:
            check_same_batch(batches[0], self._groups.mp, self._groups.cp)
        # Without pipeline stages there is no reason to hold more than one microbatch's hidden states.
        per_call = micro_batches if self._groups.pp.size() > 1 else 1
        for begin in range(0, micro_batches, per_call):
            self._ask(batches[begin : begin + per_call])
        if self._is_first_round:
            self._introduce_teacher()
            self._is_first_round = False

    def _ask(self, batches: list[KDBatch]) -> None:
        shapes = {tuple(batch.tokens.shape) for batch in batches}
        if len(shapes) > 1 and self._job.data.length_multiple is None:
            raise MkdDataError(f"microbatches have the shapes {sorted(shapes)}: give --kd-variable-seq-lengths")
        signals = self._teacher.signals([batch.on_rank(self._groups.cp) for batch in batches])
        for signal, whole in zip(signals, batches, strict=bool(signals)):
            table = self._answers.of(signal, whole)
            texts = {key: places for key, places in whole.segments() if key in self._tasks}
            self._tasks.difference_update(texts)
            if table is not None and texts:
                self._storing.add(list(texts.items()), table)

    def _introduce_teacher(self) -> None:
        """Say what it knows of what it has read first."""
        sums = [0.0, 0.0]
        if self._storing is not None:
            self._storing.wait()
            sums = [-self._storing.label_log_prob, self._storing.tokens]
        total = torch.tensor(sums, dtype=torch.float64, device="cuda")
        dist.all_reduce(total)
        if total[1]:
            ce, vocab = (total[0] / total[1]).item(), self._job.meta.true_vocab
            logger.info(
                f"teacher {self._teacher.fingerprint()}: CE {ce:.4f} on the first {int(total[1])} tokens, of "
                f"prompts too (knowing nothing: ln V = {math.log(vocab):.4f})"
            )
