"""The teacher whose most probable tokens an inference server computes; nothing of it is in memory."""

from collections.abc import Sequence
from concurrent.futures import Future
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from mkd.data.batch import KDBatch
from mkd.data.lookahead import Lookahead
from mkd.distributed.groups import Groups
from mkd.errors import MkdCacheError
from mkd.teacher.cache.meta import CacheMeta
from mkd.teacher.cache.reader import signal_of, words_of, words_per_token
from mkd.teacher.elsewhere import TeacherElsewhere
from mkd.teacher.inference.pool import ScoringPool
from mkd.teacher.inference.texts import BatchOfTexts, TextStore
from mkd.teacher.interface import TopKSignal
from mkd.teacher.run_ahead import AllRanks, PendingRequest, RunAhead
from mkd.teacher.service.answers import distribute_words
from mkd.utils.logging import EVERY_RANK, logger

_TEMPERATURE = 1.0
"""Servers return log-probabilities at this temperature, and the mass of the tail is known at this one only."""


class InferenceTeacher(TeacherElsewhere[BatchOfTexts]):
    """Answers are converted to records of the cache at once, so numbers from an answer and from --kd-teacher-cache are
    the same.
    """

    def __init__(
        self,
        pool: ScoringPool | None,
        store: TextStore | None,
        meta: CacheMeta,
        groups: Groups,
        ranks: AllRanks,
        ahead: RunAhead,
    ) -> None:
        """No text is sent yet.

        Args:
            pool, store: on the ranks that send texts (`Groups.leads_replica`), else None.
            meta: properties of the records.
            groups: the student's layout.
            ranks: how ranks wait and fail together.
            ahead: options of running ahead.
        """
        super().__init__(pool is not None, ranks, ahead)
        self._pool, self._store, self._meta, self._groups = pool, store, meta, groups
        self._words: list[Tensor] = []
        self._sent: WeakValueDictionary[bytes, Future[np.ndarray]] = WeakValueDictionary()
        """Answers that a step still needs, by text: the same text may be sent ahead for two steps, as at the end of an
        epoch."""
        self._counts = {"sent": 0, "found": 0}

    def fingerprint(self) -> str:
        """See `Teacher.fingerprint`."""
        return self._meta.teacher

    def close(self) -> None:
        """Write what is not in the folder of --kd-teacher-cache yet, and end the threads."""
        if self._pool is None:
            return
        self._pool.close()
        sent, found = self._counts["sent"], self._counts["found"]
        logger.info(f"teacher    {sent:,} texts were sent to the server, {found:,} were in the cache")
        try:
            self._store.flush(now=True)
        except MkdCacheError as error:  # what ends the job is not replaced by it
            logger.warning(f"{error}; the answers of the last minute are not in it", extra=EVERY_RANK)

    def prepare(self, batches: Sequence[KDBatch], upcoming: Lookahead) -> list[KDBatch]:
        """See `Teacher.prepare`.

        Raises:
            MkdTeacherTimeout: on all ranks, if no answer has come for the time limit.
            MkdTeacherError, MkdNumericError: on all ranks, if an answer cannot be used.
            MkdCacheError: on all ranks, if --kd-teacher-cache cannot be read or written.
            WaitAborted: on all ranks, if one of them is stopping and one of them has no answer yet.
        """
        self._whole = list(batches)
        pending = self._ranks.attempt(lambda: self._queue.send(batches, upcoming) if self._sends else [])
        self._ranks.wait(pending, lambda _: None, self._check_silence, upcoming.is_stopping)
        self._words = self._ranks.attempt(lambda: self._take(pending))
        return self._whole

    def _check_silence(self, began: float) -> None:
        self._pool.check_silence(began, self._ahead.timeout_s)

    def _request(self, batch: KDBatch) -> BatchOfTexts:
        return BatchOfTexts.of(batch, self._meta.records.dtype.itemsize)

    def _send(self, request: BatchOfTexts) -> list[Future[np.ndarray]]:
        found, answers = self._store.find(request.texts), []
        for text in request.texts:
            if text.key in found:
                answers.append(Future())
                answers[-1].set_result(found[text.key])
            elif (answer := self._sent.get(text.key)) is not None:
                answers.append(answer)
            else:
                answers.append(self._pool.submit(text.ids))
                self._sent[text.key] = answers[-1]
                self._counts["sent"] += 1
        self._counts["found"] += len(found)
        return answers

    def _take(self, pending: Sequence[PendingRequest[BatchOfTexts]]) -> list[Tensor]:
        """Keep the answers of the step, and make the words of its microbatches: [b, s, words] int32 on the host."""
        for one in pending:
            for text, answer in zip(one.request.texts, one.answers, strict=True):
                self._store.add(text.key, answer.result())
        if pending:
            self._store.flush()
        return [self._words_of(batch, one) for batch, one in zip(self._whole, pending, strict=False)]

    def _words_of(self, batch: KDBatch, pending: PendingRequest[BatchOfTexts]) -> Tensor:
        mask, top_k = batch.kd_mask.flatten().numpy() != 0.0, self._meta.top_k
        words = np.zeros((len(mask), words_per_token(top_k)), dtype=np.int32)
        places, records = [], []
        for text, answer in zip(pending.request.texts, pending.answers, strict=True):
            wanted = np.flatnonzero(mask[text.positions])
            places.append(text.positions.start + wanted)
            records.append(answer.result()[wanted])
        if places:
            targets = self._meta.records.decode(np.concatenate(records), _TEMPERATURE)
            words[np.concatenate(places)] = words_of(targets, top_k, _TEMPERATURE)
        return torch.from_numpy(words).view(*batch.tokens.shape, -1)

    def signals(self, batches: Sequence[KDBatch]) -> list[TopKSignal]:
        """See `Teacher.signals`. `prepare` has had the same microbatches."""
        return [self._signal(batch) for batch in batches] if self._groups.is_last_stage else []

    def _signal(self, batch: KDBatch) -> TopKSignal:
        """The signal of this rank's part of a microbatch."""
        words, top_k = None, self._meta.top_k
        if self._pool is not None:
            words = self._words[batch.number].pin_memory().to("cuda", non_blocking=True)
        own = distribute_words(words, self._whole[batch.number], words_per_token(top_k), self._groups)
        return signal_of(own, top_k, _TEMPERATURE)
