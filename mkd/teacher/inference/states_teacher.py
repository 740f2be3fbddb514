"""The teacher whose hidden states a vLLM server extracts; of its weights, final norm and LM head are on the student's
ranks."""

import hashlib
from concurrent.futures import Future
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from mkd.data.batch import KDBatch
from mkd.teacher.inference.pool import ScoringPool
from mkd.teacher.inference.states_model import StatesModel
from mkd.teacher.run_ahead import AllRanks, PendingRequest, RunAhead
from mkd.teacher.service.answers import HiddenAnswers, Received
from mkd.teacher.service.whole_rows import WholeRowTeacher
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


class StatesTeacher(WholeRowTeacher[BatchOfStates]):
    """The rank that sends texts applies the final norm to their states before it distributes them."""

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
        super().__init__(pool is not None, answers, ranks, ahead, view=None)
        self._pool, self._fingerprint, self._bytes_per_token = pool, fingerprint, bytes_per_token
        self._sent: WeakValueDictionary[bytes, Future[Tensor]] = WeakValueDictionary()
        """Answers that a step still needs, by text."""
        self._count = 0

    def fingerprint(self) -> str:
        """See `Teacher.fingerprint`."""
        return self._fingerprint

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.close()
            logger.info(f"teacher    {self._count:,} texts were sent to the server")

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

    def _receive(self, pending: PendingRequest[BatchOfStates]) -> Received:
        parts = [answer.result() for answer in pending.answers]
        states = torch.cat(parts) if parts else torch.empty(0, self._answers.columns, dtype=self._answers.dtype)
        return pending.request.wanted, states
