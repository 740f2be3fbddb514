"""Reads records of a cache and converts them to signals, for the K and the temperature of a job."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mkd.errors import MkdCacheError
from mkd.losses import SparseTeacher
from mkd.teacher.cache.lookup import ReadRequest
from mkd.teacher.cache.record_format import TokenTargets
from mkd.teacher.cache.store import TeacherStore
from mkd.teacher.interface import TopKSignal

FILLER_LOGIT = -30.0
"""A record whose largest logit is below this is filler: the most probable of V tokens has at least probability 1 / V,
and filler (`mkd.job.cache_build.import_axolotl`) is far below."""


def words_per_token(top_k: int) -> int:
    """K ids, K logits, logsumexp, logsumexp of the tail, log-probability of the label."""
    return 2 * top_k + 3


@dataclass(frozen=True)
class CacheReader:
    """Reads the records of a microbatch into one tensor of 32-bit words per token (`read`, on the host), which can be
    sent to a device and to other ranks, and converts that tensor to a signal (`signal`)."""

    store: TeacherStore
    top_k: int
    """Top-k of the job, at most that of the cache."""
    temperature: float
    """Temperature of the logsumexp; one that is stored."""

    @property
    def width(self) -> int:
        """Words per token."""
        return words_per_token(self.top_k)

    def read(self, request: ReadRequest) -> Tensor:
        """[b, s/cp, width] int32 on the host; tokens that are not requested are 0.

        Raises:
            MkdCacheError: a record is damaged, not finite, or filler for a token without targets.
        """
        words = np.zeros((request.shape[0] * request.shape[1], self.width), dtype=np.int32)
        if len(request.tokens):
            words[request.tokens] = self._words(request)
        return torch.from_numpy(words).view(*request.shape, self.width)

    def _words(self, request: ReadRequest) -> np.ndarray:
        """[n, width] int32, one entry per requested token."""
        # Relative frequencies of samples are stored like logits, and already belong to the sampling temperature.
        temperature = 1.0 if self.store.meta.samples else self.temperature
        targets = self.store.read(request.keys, request.segments, request.positions, temperature)
        if self.store.meta.labels_only:
            self._refuse_filler(targets, request)
        return words_of(targets, self.top_k, temperature)

    def _refuse_filler(self, targets: TokenTargets, request: ReadRequest) -> None:
        is_filler = targets.logits.max(axis=1, initial=-np.inf) < FILLER_LOGIT
        if is_filler.any():
            first = int(is_filler.argmax())
            segment = np.repeat(np.arange(len(request.keys)), [len(part) for part in request.positions])[first]
            raise MkdCacheError(
                f"{self.store.origin}: segment {request.keys[segment].hex()} has no targets for the token at position "
                f"{np.concatenate(request.positions)[first]}, which is in this job's KD mask: the imported data set "
                "has a label of -100 there"
            )

    def signal(self, words: Tensor) -> TopKSignal:
        """[b, s/cp, width] int32 from `read`, on any device, as a signal."""
        return signal_of(words, self.top_k, self.temperature, self.store.meta.samples)


def signal_of(words: Tensor, top_k: int, temperature: float, samples: int = 0) -> TopKSignal:
    """A signal from words.

    Args:
        words: [b, s/cp, 2 K + 3] int32, from `words_of` per token, on any device.
        top_k, temperature: those of the words.
        samples: see `CacheMeta.samples`.
    """
    k = top_k
    ids, floats = words[..., :k], words[..., k:].contiguous().view(torch.float32)
    logits, lse, tail_lse, label = floats[..., :k], floats[..., k], floats[..., k + 1], floats[..., k + 2]
    if not samples:
        return TopKSignal(SparseTeacher(ids, logits, lse, tail_lse, temperature), label)
    counts = torch.round(logits.exp() * samples).int()
    # The log of the relative frequency stands in for ln p: the teacher's own probabilities are not stored.
    lse = torch.zeros_like(lse)
    return TopKSignal(SparseTeacher(ids, logits * temperature, lse, None, temperature, counts), label)


def words_of(targets: TokenTargets, top_k: int, temperature: float) -> np.ndarray:
    """[n, 2 K + 3] int32, one entry per token: ids, logits, logsumexp, logsumexp of the tail, log-probability of the
    label. A token with more ids keeps its `top_k` largest logits."""
    if top_k < targets.ids.shape[1]:
        targets = keep_largest(targets, top_k, temperature)
    k, words = top_k, np.empty((len(targets.ids), words_per_token(top_k)), dtype=np.int32)
    words[:, :k], floats = targets.ids, words[:, k:].view(np.float32)
    floats[:, :k], floats[:, k + 2] = targets.logits, targets.label_log_prob
    floats[:, k : k + 1], floats[:, k + 1 : k + 2] = targets.lse, targets.tail_lse
    return words


def keep_largest(targets: TokenTargets, top_k: int, temperature: float) -> TokenTargets:
    """Targets with their `top_k` largest logits only, in descending order; among equal logits the lowest id is first.

    The mass of the dropped ids is known, and is added to the tail.

    Args:
        targets: from `RecordFormat.decode`, ids ascending.
        top_k: at most the number of ids.
        temperature: temperature of the logsumexp of `targets`.
    """
    order = np.argsort(-targets.logits, axis=1, kind="stable")
    logits = np.take_along_axis(targets.logits, order, axis=1)
    dropped = logits[:, top_k:] / np.float32(temperature)
    tail = np.logaddexp(targets.tail_lse, np.logaddexp.reduce(dropped, axis=1, keepdims=True))
    ids = np.take_along_axis(targets.ids, order[:, :top_k], axis=1)
    return TokenTargets(ids, logits[:, :top_k], targets.lse, targets.label_log_prob, tail)
