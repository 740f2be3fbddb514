"""A microbatch as a request for its final hidden states, or for targets computed from them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from mkd.data.batch import KDBatch
from mkd.teacher.service.facts import TeacherFacts
from mkd.teacher.service.messages import ProtocolError
from mkd.teacher.service.targets import SampledTargets, Targets


@dataclass(frozen=True)
class ForwardRequest:
    """Inputs of one forward pass, and the tokens whose final hidden states or targets are returned."""

    tokens: Tensor
    """[b, s] int32"""
    positions: Tensor
    """[b, s] int32"""
    bounds: Tensor
    """[n + 1] int32 bounds of the segments of a packed row; empty if nothing is packed."""
    wanted: Tensor
    """[k] int32 indices among the b * s tokens, in increasing order."""
    labels: Tensor | None = None
    """[k] int32 ids; None without `targets`."""
    keys: Tensor | None = None
    """[segments, 4] int32, the hash of each segment; for sampled targets."""
    targets: Targets | None = None
    """None for hidden states."""

    @classmethod
    def of_batch(cls, batch: KDBatch, wanted: Tensor, targets: Targets | None = None) -> "ForwardRequest":
        """The request for a whole microbatch on the host.

        Args:
            batch: the microbatch.
            wanted: [b, s] bool, True for tokens whose hidden states or targets are read.
            targets: None for hidden states.
        """
        bounds = () if batch.packed is None else batch.bounds
        return cls(
            batch.tokens.to(torch.int32),
            batch.position_ids.to(torch.int32),
            torch.tensor(bounds, dtype=torch.int32),
            wanted.flatten().nonzero().flatten().to(torch.int32),
            None if targets is None else batch.labels[wanted].to(torch.int32),
            _words_of(batch.segment_hashes) if isinstance(targets, SampledTargets) else None,
            targets,
        )

    @classmethod
    def of_tensors(
        cls, tensors: tuple[Tensor, ...], facts: TeacherFacts, targets: Targets | None = None
    ) -> "ForwardRequest":
        """The request in a message, which is not trusted.

        Raises:
            ProtocolError: it is malformed, or beyond the limits in `facts`.
        """
        count = 4 if targets is None else 6 if isinstance(targets, SampledTargets) else 5
        if len(tensors) != count or any(one.dtype != torch.int32 for one in tensors):
            raise ProtocolError(f"a request without its {count} int32 tensors")
        request = cls(*tensors, targets=targets)
        request._check(facts)
        return request

    @classmethod
    def joined(cls, requests: "Sequence[ForwardRequest]") -> "ForwardRequest":
        """One request for the wanted tokens of several, in their order; each fits the first (`can_join`)."""
        packed = len(requests[0].bounds) > 0
        starts = [0, *accumulate(one.tokens.numel() for one in requests)]
        bounds = [
            one.bounds[min(number, 1) :] + start
            for number, (one, start) in enumerate(zip(requests, starts, strict=False))
        ]
        return cls(
            torch.cat([one.tokens for one in requests], dim=int(packed)),
            torch.cat([one.positions for one in requests], dim=int(packed)),
            torch.cat(bounds),
            torch.cat([one.wanted + start for one, start in zip(requests, starts, strict=False)]),
            None if requests[0].labels is None else torch.cat([one.labels for one in requests]),
            None if requests[0].keys is None else torch.cat([one.keys for one in requests]),
            requests[0].targets,
        )

    def can_join(self, other: "ForwardRequest") -> bool:
        """True if one forward pass can compute both: packed rows are joined to one, other rows have one length."""
        if self.targets != other.targets:
            return False
        if len(self.bounds) or len(other.bounds):
            return bool(len(self.bounds) and len(other.bounds))
        return self.tokens.shape[1] == other.tokens.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """For a message."""
        own = self.tokens, self.positions, self.bounds, self.wanted
        return (*own, *(one for one in (self.labels, self.keys) if one is not None))

    @property
    def key(self) -> bytes:
        """16-byte hash, equal for equal requests."""
        digest = hashlib.blake2b(repr([one.shape for one in self.tensors]).encode(), digest_size=16)
        for one in self.tensors:
            digest.update(one.contiguous().numpy())
        return digest.digest()

    def uniforms(self) -> Tensor | None:
        """[k, samples] float64 of the wanted tokens; None without sampled targets."""
        if self.keys is None:
            return None
        rows, length = self.tokens.shape
        bounds = self.bounds.tolist() or range(0, rows * length + 1, length)
        keys = [one.tobytes() for one in self.keys.contiguous().numpy()]
        return self.targets.uniforms(keys, bounds).index_select(0, self.wanted.long())

    def batch(self) -> KDBatch:
        """The whole microbatch, without loss, on the host."""
        bounds = self.bounds.tolist() or None
        return KDBatch.of_tokens(self.tokens.long(), self.positions.long(), bounds)

    def _check(self, facts: TeacherFacts) -> None:
        shape = self.tokens.shape
        if len(shape) != 2 or not 0 < self.tokens.numel() <= facts.most_tokens:
            raise ProtocolError(f"rows of shape {list(shape)}; the service computes up to {facts.most_tokens} tokens")
        if self.positions.shape != shape or self.bounds.dim() != 1 or self.wanted.dim() != 1:
            raise ProtocolError("positions, bounds or wanted tokens do not fit the rows")
        if not _within(self.tokens, facts.vocab):
            raise ProtocolError(f"token ids outside of the teacher's vocabulary of {facts.vocab} tokens")
        if not _within(self.positions, facts.positions or 2**31 - 1):
            raise ProtocolError(f"positions beyond the teacher's {facts.positions}")
        wanted = self.wanted.long()
        if not _within(wanted, self.tokens.numel()) or bool((wanted.diff() <= 0).any()):
            raise ProtocolError("wanted tokens that are not in the rows, or not in order")
        if self.labels is not None and (self.labels.shape != wanted.shape or not _within(self.labels, facts.vocab)):
            raise ProtocolError("labels that do not fit the wanted tokens, or are outside of the vocabulary")
        if shape[1] % facts.row_multiple:
            raise ProtocolError(f"rows of {shape[1]} tokens, not a multiple of {facts.row_multiple}")
        if len(self.bounds):
            self._check_bounds(facts)
        segments = len(self.bounds) - 1 if len(self.bounds) else shape[0]
        if self.keys is not None and self.keys.shape != (segments, 4):
            raise ProtocolError(f"keys of shape {list(self.keys.shape)} for {segments} segments")

    def _check_bounds(self, facts: TeacherFacts) -> None:
        rows, length = self.tokens.shape
        if not facts.packed:
            raise ProtocolError("packed rows: start the service with --kd-packing best_fit")
        bounds = self.bounds.tolist()
        if rows != 1 or not 2 <= len(bounds) <= length + 1 or (bounds[0], bounds[-1]) != (0, length):
            raise ProtocolError(f"{len(bounds)} bounds of segments of {rows} rows of {length} tokens")
        if any(end <= start or (end - start) % facts.segment_multiple for start, end in pairwise(bounds)):
            raise ProtocolError(f"segments whose lengths are not multiples of {facts.segment_multiple}")


def _within(values: Tensor, end: int) -> bool:
    """True if all values are at least 0 and below `end`."""
    return not len(values) or (int(values.min()) >= 0 and int(values.max()) < end)


def _words_of(keys: Sequence[bytes]) -> Tensor:
    """[n, 4] int32, the words of 16-byte hashes."""
    return torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.int32).view(-1, 4)
