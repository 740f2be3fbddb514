"""Targets that a service computes in place of final hidden states: K entries per token instead of Ht numbers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.losses import LinearLogits, SparseTeacher, VocabLayout, teacher_top_k
from mkd.losses.inputs import tempered_dtype
from mkd.losses.measure.sampling import label_logits, sample_teacher_tokens
from mkd.teacher.cache.record_format import MAX_COUNT
from mkd.teacher.cache.sampling import stratified_uniforms
from mkd.teacher.interface import TopKSignal
from mkd.teacher.service.facts import TeacherFacts
from mkd.teacher.service.messages import ProtocolError

_SUMS = 3
"""Float64 numbers beside the entries: logsumexp, logsumexp of the tail, log-probability of the label."""


@dataclass(frozen=True)
class TopKTargets:
    """The targets that a request is for, and their encoding.

    A token has `columns` int32 words: K ids from the most probable down, K logits as the bits of fp32, and the three
    sums as the bits of float64. Nothing is rounded, so losses are those of --kd-top-k with the teacher in process.
    """

    top_k: int
    vocab: int
    """Ids are below it; at most the teacher's vocabulary."""
    temperature: float
    """Temperature of the logsumexps."""

    name = "top-k targets"

    @property
    def entries(self) -> int:
        """Entries per token."""
        return self.top_k

    def values(self) -> Mapping[str, Any]:
        """The targets for a message."""
        return asdict(self)

    @property
    def columns(self) -> int:
        """Words per token."""
        return 2 * self.top_k + 2 * _SUMS

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the answer for one token."""
        return 4 * self.columns

    def compute(
        self, teacher: LinearLogits, labels: Tensor, uniforms: Tensor | None, tp: dist.ProcessGroup | None
    ) -> Tensor:
        """[n, columns] int32. Collective over the tensor-parallel group of a service.

        Args:
            teacher: hidden states of n tokens, whole on each rank, and this rank's shard of the LM head.
            labels: [n] ids.
            uniforms: for sampled targets [n, samples] float64, see `stratified_uniforms`.
            tp: the group.
        """
        if not len(labels):
            return labels.new_empty((0, self.columns), dtype=torch.int32)
        vocab, temperatures = VocabLayout(self.vocab, tp), tuple(dict.fromkeys((self.temperature, 1.0)))
        found = teacher_top_k(teacher, self.top_k, temperatures=temperatures, vocab=vocab)
        label = label_logits(teacher, labels, vocab=vocab) - found[-1].lse  # at temperature 1
        first = found[0]
        sums = torch.stack((first.lse, first.tail_lse, label), dim=1).double()
        return torch.cat((first.ids, first.logits.view(torch.int32), sums.view(torch.int32)), dim=1)

    def is_finite(self, words: Tensor) -> bool:
        """True if the numbers of an answer, [n, columns] int32, are finite; the logsumexp of an empty tail is -inf."""
        _, logits, sums = self._split(words)
        lse, tail_lse, label = sums.unbind(-1)
        return all(bool(one.isfinite().all()) for one in (logits, lse, label)) and bool((tail_lse < math.inf).all())

    def have_valid_ids(self, words: Tensor) -> bool:
        """True if the ids of an answer are of the vocabulary: others would be in no rank's part of it."""
        return _are_below(words[:, : self.top_k], self.vocab)

    def signal(self, words: Tensor) -> TopKSignal:
        """The signal of a microbatch, from [b, s/cp, columns] int32 on any device."""
        ids, logits, sums = self._split(words)
        lse, tail_lse = (one.to(tempered_dtype(torch.float32, self.temperature)) for one in sums.unbind(-1)[:2])
        return TopKSignal(SparseTeacher(ids, logits, lse, tail_lse, self.temperature), sums[..., 2].float())

    def _split(self, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ids, logits, sums = words.split([self.top_k, self.top_k, 2 * _SUMS], dim=-1)
        return ids, logits.contiguous().view(torch.float32), sums.contiguous().view(torch.float64)


@dataclass(frozen=True)
class SampledTargets:
    """Tokens sampled from the teacher, those of `mkd cache write --sample`. The methods are those of `TopKTargets`.

    A token has the sampled ids in ascending order, and the log-probability of its label as the bits of float64. Random
    numbers depend on the text only, so that a text has the same samples in every layout, and in a cache.
    """

    samples: int
    vocab: int
    temperature: float
    """Temperature of the sampling."""

    name = "sampled targets"

    @property
    def entries(self) -> int:
        return self.samples

    def values(self) -> Mapping[str, Any]:
        return asdict(self)

    @property
    def columns(self) -> int:
        return self.samples + 2

    @property
    def bytes_per_token(self) -> int:
        return 4 * self.columns

    def uniforms(self, keys: Sequence[bytes], bounds: Sequence[int]) -> Tensor:
        """[tokens, samples] float64 of all tokens of a microbatch.

        Args:
            keys: hash of each segment (`KDBatch.segment_hashes`).
            bounds: [segments + 1] bounds of the segments, padding included.
        """
        parts = zip(keys, pairwise(bounds), strict=True)
        return torch.cat([stratified_uniforms(key, end - start, self.samples) for key, (start, end) in parts])

    def compute(
        self, teacher: LinearLogits, labels: Tensor, uniforms: Tensor | None, tp: dist.ProcessGroup | None
    ) -> Tensor:
        if not len(labels):
            return labels.new_empty((0, self.columns), dtype=torch.int32)
        vocab = VocabLayout(self.vocab, tp)
        found = sample_teacher_tokens(teacher, uniforms, self.temperature, temperatures=(1.0,), vocab=vocab)
        label = label_logits(teacher, labels, vocab=vocab) - found.lse[0]
        return torch.cat((found.ids, label.double()[:, None].view(torch.int32)), dim=1)

    def is_finite(self, words: Tensor) -> bool:
        return bool(words[:, self.samples :].contiguous().view(torch.float64).isfinite().all())

    def have_valid_ids(self, words: Tensor) -> bool:
        """As for top-k targets; they also ascend, for the counts in `signal`."""
        ids = words[:, : self.samples]
        return _are_below(ids, self.vocab) and bool((ids.diff(dim=1) >= 0).all())

    def signal(self, words: Tensor) -> TopKSignal:
        ids, label = words[..., : self.samples], words[..., self.samples :].contiguous().view(torch.float64)
        # The relative frequency stands in for the teacher's probability, as in a cache; repeated ids add their counts.
        ids = ids.contiguous()
        counts = torch.searchsorted(ids, ids, right=True) - torch.searchsorted(ids, ids)
        logits = (counts.float() / self.samples).log() * self.temperature
        nothing = torch.zeros_like(logits[..., 0])
        sparse = SparseTeacher(ids, logits, nothing, None, self.temperature, torch.ones_like(ids))
        return TopKSignal(sparse, label[..., 0].float())


def _are_below(ids: Tensor, vocab: int) -> bool:
    return not ids.numel() or (int(ids.min()) >= 0 and int(ids.max()) < vocab)


Targets = TopKTargets | SampledTargets
_TARGETS: dict[str, type[Targets]] = {"top_k": TopKTargets, "samples": SampledTargets}
"""Name of the number of entries -> targets."""


def read_targets(values: Any, facts: TeacherFacts) -> Targets:
    """The targets in a message, which is not trusted.

    Raises:
        ProtocolError: they are malformed, or larger than hidden states.
    """
    match values:
        case {"vocab": int(vocab), "temperature": float(temperature), **rest} if len(rest) == 1:
            ((name, entries),) = rest.items()
        case _:
            raise ProtocolError(f"unknown targets: {values!r:.100}")
    if name not in _TARGETS or type(entries) is not int:
        raise ProtocolError(f"unknown targets: {values!r:.100}")
    targets = _TARGETS[name](entries, vocab, temperature)
    most = vocab if name == "top_k" else MAX_COUNT
    if not (1 <= entries <= most and vocab <= facts.vocab and math.isfinite(temperature) and temperature > 0.0):
        raise ProtocolError(f"impossible targets: {targets}; the teacher's vocabulary has {facts.vocab} tokens")
    if targets.bytes_per_token >= facts.bytes_per_token:
        raise ProtocolError(f"{entries} entries per token, which are larger than hidden states")
    return targets
