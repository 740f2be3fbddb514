"""The teacher whose hidden states a vLLM server extracts; of its weights, final norm and LM head are on the student's
ranks."""

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from mkd.data.batch import KDBatch
from mkd.data.lookahead import Lookahead
from mkd.distributed.groups import Groups
from mkd.teacher.elsewhere import TeacherElsewhere
from mkd.teacher.inference.pool import ScoringPool
from mkd.teacher.inference.states_model import StatesModel
from mkd.teacher.interface import HiddenSignal
from mkd.teacher.run_ahead import AllRanks, PendingRequest, RunAhead
from mkd.teacher.service.answers import HiddenAnswers, Received, Uploads
from mkd.utils.logging import logger


@dataclass(frozen=True)
class WantedStates:
    """A text, and those of its tokens whose states the loss reads."""

    ids: tuple[int, ...]
    wanted: Tensor
    """[k] int64"""

    def of(self, model: StatesModel) -> Tensor:
        """[k, H] states, requested from a model."""
        return model.states(self.ids).index_select(0, self.wanted)

    @property
    def key(self) -> bytes:
        """16-byte hash."""
        digest = hashlib.blake2b(repr(self.ids).encode(), digest_size=16)
        digest.update(self.wanted.numpy())
        return digest.digest()


@dataclass(frozen=True)
class BatchOfStates:
    """The texts of a whole microbatch. See `mkd.teacher.run_ahead.BatchRequest`."""

    texts: tuple[WantedStates, ...]
    wanted: Tensor
    """[k] int64 positions of their wanted tokens in the flattened microbatch."""
    key: bytes
    answer_bytes: int

    @classmethod
    def of(cls, batch: KDBatch, bytes_per_token: int) -> "BatchOfStates":
        """The texts of a microbatch on the host that have tokens in the CE mask or in the KD mask."""
        tokens, mask = batch.tokens.flatten(), ((batch.ce_mask != 0.0) | (batch.kd_mask != 0.0)).flatten()
        texts, positions = [], [torch.empty(0, dtype=torch.int64)]
        for _, part in batch.segments():
            own = mask[part].nonzero().flatten()
            if len(own):
                texts.append(WantedStates(tuple(tokens[part].tolist()), own))
                positions.append(part.start + own)
        wanted, digest = torch.cat(positions), hashlib.blake2b(repr(batch.bounds).encode(), digest_size=16)
        for text in texts:
            digest.update(text.key)
        digest.update(wanted.numpy())
        return cls(tuple(texts), wanted, digest.digest(), len(wanted) * bytes_per_token)


StatesPool = ScoringPool[StatesModel, WantedStates, Tensor]


class StatesTeacher(TeacherElsewhere[BatchOfStates]):
    """The rank that sends texts receives the states of whole rows, applies the final norm, and distributes them as a
    teacher service's.
    """

    def __init__(
        self,
        pool: StatesPool | None,
        answers: HiddenAnswers,
        fingerprint: str,
        ranks: AllRanks,
        ahead: RunAhead,
        *,
        bytes_per_token: int,
    ) -> None:
        """No text is sent yet.

        Args:
            pool: on the ranks that send texts (`Groups.leads_replica`), else None.
            answers: from states to signals.
            fingerprint: see `Teacher.fingerprint`.
            ranks: how ranks wait and fail together.
            ahead: options of running ahead.
            bytes_per_token: host memory of the states of a token.
        """
        super().__init__(pool is not None, ranks, ahead)
        self._pool, self._answers, self._fingerprint = pool, answers, fingerprint
        self._bytes_per_token = bytes_per_token
        self._step: list[PendingRequest[BatchOfStates]] = []
        self._sent: WeakValueDictionary[bytes, Future[Tensor]] = WeakValueDictionary()
        """Answers that a step still needs, by text."""
        self._uploads = Uploads()
        self._count = 0

    @property
    def groups(self) -> Groups:
        """The student's layout."""
        return self._answers.groups

    def fingerprint(self) -> str:
        """See `Teacher.fingerprint`."""
        return self._fingerprint

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.close()
            logger.info(f"teacher    {self._count:,} texts were sent to the server")

    def prepare(self, batches: Sequence[KDBatch], upcoming: Lookahead) -> list[KDBatch]:
        """See `Teacher.prepare`.

        Raises:
            MkdTeacherTimeout: on all ranks, if no answer has come for the time limit.
            MkdTeacherError, MkdNumericError: on all ranks, if an answer cannot be used.
            WaitAborted: on all ranks, if one of them is stopping and one of them has no answer yet.
        """
        self._whole = list(batches)
        step = self._queue.send(batches, upcoming) if self._sends else []
        self._ranks.wait(step, lambda _: None, self._check_silence, upcoming.is_stopping)
        self._step = step
        self._uploads.begin(len(step), self._received)
        return self._whole

    def _check_silence(self, began: float) -> None:
        self._pool.check_silence(began, self._ahead.timeout_s)

    def _request(self, batch: KDBatch) -> BatchOfStates:
        return BatchOfStates.of(batch, self._bytes_per_token)

    def _send(self, request: BatchOfStates) -> list[Future[Tensor]]:
        answers = []
        for text in request.texts:
            if (answer := self._sent.get(text.key)) is None:
                self._sent[text.key] = answer = self._pool.submit(text)
                self._count += 1
            answers.append(answer)
        return answers

    def signals(self, batches: Sequence[KDBatch]) -> list[HiddenSignal]:
        """See `Teacher.signals`. `prepare` has had the same microbatches."""
        return [self._signal(batch.number) for batch in batches] if self.groups.is_last_stage else []

    def _signal(self, number: int) -> HiddenSignal:
        """The signal of this rank's part of a microbatch."""
        return self._answers.signal(self._whole[number], None if self._pool is None else self._uploads.take(number))

    def _received(self, number: int) -> Received:
        """The answers for a microbatch of the step."""
        pending = self._step[number]
        parts = [answer.result() for answer in pending.answers]
        states = torch.cat(parts) if parts else torch.empty(0, self._answers.columns, dtype=self._answers.dtype)
        return pending.request.wanted, states
