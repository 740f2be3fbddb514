"""What a run takes from a teacher cache: some of the stored columns, at its temperature, as tensors of fixed width."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mkd.errors import MkdCacheError
from mkd.teacher.cache.lookup import Request
from mkd.teacher.cache.record_format import TokenRows
from mkd.teacher.cache.store import TeacherStore
from mkd.teacher.interface import TopKSignal

SILENT = -30.0
"""A logit below which a record, whose largest it is, answers nothing: the most probable of V tokens has 1 / V or more,
and what is stored instead of an answer (`mkd.cache_build.import_axolotl`) is far below."""


@dataclass(frozen=True)
class CacheReader:
    """Reads tokens, and makes the loss's tensors of what was read. Between the two it is one tensor of 32-bit words."""

    store: TeacherStore
    top_k: int
    """Columns that the run looks at, the most probable ones of those that are stored."""
    temperature: float
    """Of the sums: one that is stored."""

    @property
    def width(self) -> int:
        """Words a token: K ids, K logits, logsumexp, that of the tail, the label's log-probability."""
        return 2 * self.top_k + 3

    def read(self, request: Request) -> Tensor:
        """[b, s/cp, width] int32 on the host; tokens that were not requested are 0.

        Raises:
            MkdCacheError: a record is damaged, not finite, or of a token without an answer.
        """
        words = np.zeros((request.shape[0] * request.shape[1], self.width), dtype=np.int32)
        if len(request.rows):
            words[request.rows] = self._words(request)
        return torch.from_numpy(words).view(*request.shape, self.width)

    def _words(self, request: Request) -> np.ndarray:
        """[n, width] int32 of the requested tokens."""
        # Draws stand at their own temperature already: their shares are stored as if they were logits.
        temperature = 1.0 if self.store.meta.samples else self.temperature
        rows = self.store.read(request.keys, request.segments, request.places, temperature)
        if self.store.meta.labels_only:
            self._require_answers(rows, request)
        if self.top_k < self.store.meta.top_k:
            rows = keep_largest(rows, self.top_k, temperature)
        k, words = self.top_k, np.empty((len(rows.ids), self.width), dtype=np.int32)
        words[:, :k], numbers = rows.ids, words[:, k:].view(np.float32)
        numbers[:, :k], numbers[:, k + 2] = rows.logits, rows.label_log_prob
        numbers[:, k : k + 1], numbers[:, k + 1 : k + 2] = rows.lse, rows.tail_lse
        return words

    def _require_answers(self, rows: TokenRows, request: Request) -> None:
        silent = rows.logits.max(axis=1, initial=-np.inf) < SILENT
        if silent.any():
            first = int(silent.argmax())
            number = np.repeat(np.arange(len(request.keys)), [len(part) for part in request.places])[first]
            raise MkdCacheError(
                f"{self.store.flag} {self.store.folder}: segment {request.keys[number].hex()} has no answer about the "
                f"token at place {np.concatenate(request.places)[first]}, which this job is to learn: what was "
                "imported has a label of -100 there"
            )

    def signal(self, words: Tensor) -> TopKSignal:
        """From [b, s/cp, width] int32 on any device."""
        k, samples = self.top_k, self.store.meta.samples
        ids, numbers = words[..., :k], words[..., k:].contiguous().view(torch.float32)
        logits, lse, tail_lse, label = numbers[..., :k], numbers[..., k], numbers[..., k + 1], numbers[..., k + 2]
        if not samples:
            return TopKSignal(ids, logits, lse, tail_lse, self.temperature, None, label)
        counts = torch.round(logits.exp() * samples).int()
        # ln of the shares takes the place of ln p: the teacher's own probabilities are not stored.
        return TopKSignal(ids, logits * self.temperature, torch.zeros_like(lse), None, self.temperature, counts, label)


def keep_largest(rows: TokenRows, top_k: int, temperature: float) -> TokenRows:
    """The rows with their `top_k` largest logits alone, from the largest down; of equal ones the lowest id stays first.

    The others go to the tail: its mass grows by theirs, which are known.

    Args:
        rows: of `RecordFormat.decode`, ids ascending.
        top_k: at most those that there are.
        temperature: of the rows' sums.
    """
    order = np.argsort(-rows.logits, axis=1, kind="stable")
    logits = np.take_along_axis(rows.logits, order, axis=1)
    others = logits[:, top_k:] / np.float32(temperature)
    tail = np.logaddexp(rows.tail_lse, np.logaddexp.reduce(others, axis=1, keepdims=True))
    ids = np.take_along_axis(rows.ids, order[:, :top_k], axis=1)
    return TokenRows(ids, logits[:, :top_k], rows.lse, rows.label_log_prob, tail)
