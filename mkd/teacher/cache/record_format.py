"""The record of a cache: what a teacher computed for one token, as a fixed number of bytes, and its decoding.

The loss needs differences of logits only, so a record has no absolute level. It stores the K token ids, their logits
as differences, and for each temperature the log-odds of the top columns (the K ids together) against the tail (all
other ids). From these, with all logits normalized to a logsumexp of 0 at temperature 1:

    ln p(top)  = -ln(1 + e^-odds)          ln p(tail) = -ln(1 + e^odds)
    logit_k    = value_k - ln(sum_j e^value_j) + ln p(top)

Layout with K = 64 and V = 128256, one temperature, in this order (`RecordFormat.dtype`):

    field     bytes  content
    values       96  64 codes of 12 bits: value_k, the logit up to a constant of the record   (fp32: 256 bytes)
    low          80  64 x 10 bits: the low bits of the ids, ascending                          (`IdSets`)
    high         24  189 bits: the rest of the ids as a bitmap
    padding       0  to a multiple of 4 bytes
    head          4  fp32 log-odds of top columns against tail; 4 more per further temperature
    label         4  fp32 log-probability of the label at temperature 1
    check         4  checksum over all of the above, the position and the segment's key
                ---
                212  bytes per token

    K            16    32    64   128
    log12        68   116   212   396  bytes per token
    fp32        108   196   372   716

Ids. 64 ids of 17 bits would be 136 bytes; a set of 64 out of 128256 has no less than 99 bytes of information. The
order of the ids carries none, because each has its logit beside it, so a record stores them ascending as an Elias-Fano
set: 104 bytes.

log12. A value's error matters in proportion to its probability, so the 4096 codes are denser near the largest logit:
code c stands for a logit of 6 ln(1 - c / 4096) relative to the largest one. Codes are spaced uniformly in exp(x / 6):
steps are 0.0015 nats at the largest logit, 0.018 at 15 nats below it, and the last code is 49.9 nats below it.
fp32 stores the values as they are. counts stores how often each id was sampled, up to 4095.

Odds. Both masses are recovered from the log-odds to fp32 precision, however close to 1 the mass of the top columns is;
the log of either mass alone would lose the other one to cancellation.

Check. The records of a segment are read one by one (a context-parallel rank reads its tokens only), so each has its own
checksum; the SHA-256 of the whole shard is compared by `verify` only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from mkd.errors import MkdCacheError
from mkd.teacher.cache.bits import IdSets, pack, packed_bytes, unpack

Values = Literal["log12", "fp32", "counts"]
"""Encoding of the values beside the ids; see above."""

MAX_VOCAB = 1 << 20
MAX_COUNT = 4095
"""Largest count of one id, with `counts`."""
_BITS = 12
_SCALE = 6.0
"""Nats over which the steps of log12 grow e-fold."""
_LIMIT = 60.0
"""Nats. Larger log-odds are clipped: the smaller mass is then 0 in fp32 and in float64."""
_ZERO_COUNT = -50.0
"""Stands for the log of a count of 0."""


@dataclass(frozen=True)
class TokenTargets:
    """Targets of n tokens, on the host."""

    ids: np.ndarray
    """[n, K] int32, distinct for each token."""
    logits: np.ndarray
    """[n, K] fp32, up to a constant of each token."""
    lse: np.ndarray
    """[n, T] fp32: logsumexp of all logits divided by each of the temperatures, with the same constant."""
    label_log_prob: np.ndarray
    """[n] fp32: log-probability of the label at temperature 1."""
    tail_lse: np.ndarray | None = None
    """[n, T] fp32: as `lse`, over the ids that are not in `ids`; -inf if there are none. If None, `encode` takes the
    tail as the rounded difference of `lse` and the top columns. `decode` always sets it."""


@dataclass(frozen=True)
class RecordFormat:
    """Encodes and decodes records. Equal arguments give equal bytes."""

    vocab: int
    """Ids are below it; at most `MAX_VOCAB`."""
    top_k: int
    """Ids in a record."""
    values: Values
    temperatures: tuple[float, ...] = (1.0,)
    """Temperatures whose log-odds are stored; the first is 1."""
    samples: int = 0
    """Samples per token, with `counts`; else 0."""

    def __post_init__(self) -> None:
        if not 1 <= self.vocab <= MAX_VOCAB:
            raise MkdCacheError(f"a teacher cache holds vocabularies of up to {MAX_VOCAB} tokens, not {self.vocab}")
        if not 1 <= self.top_k <= self.vocab:
            raise MkdCacheError(f"top-k {self.top_k} is not between 1 and the vocabulary of {self.vocab} tokens")
        if self.temperatures[0] != 1.0:
            raise MkdCacheError(f"the first temperature of a teacher cache is 1, not {self.temperatures[0]:g}")

    @cached_property
    def _ids(self) -> IdSets:
        return IdSets(self.vocab, self.top_k)

    @cached_property
    def dtype(self) -> np.dtype:
        """Structured dtype of a record; see the layout above. Its size is a multiple of 4 bytes."""
        low, high, count = self._ids.low_bytes, self._ids.high_bytes, len(self.temperatures)
        is_fp32 = self.values == "fp32"
        values = 4 * self.top_k if is_fp32 else packed_bytes(self.top_k, _BITS)
        padding = -(low + high + values) % 4
        return np.dtype(
            [
                ("values", "<f4", (self.top_k,)) if is_fp32 else ("values", "u1", (values,)),
                ("low", "u1", (low,)),
                ("high", "u1", (high,)),
                ("padding", "u1", (padding,)),
                ("head", "<f4", (count,)),
                ("label", "<f4"),
                ("check", "<u4"),
            ]
        )

    def encode(self, targets: TokenTargets) -> np.ndarray:
        """[n] records; `seal` sets their checksums.

        Raises:
            MkdCacheError: a value is not finite, or an id is outside the vocabulary or twice in one token's targets.
        """
        self._require_valid(targets)
        order = np.argsort(targets.ids, axis=1)
        ids = np.take_along_axis(targets.ids, order, axis=1)
        logits = np.take_along_axis(targets.logits, order, axis=1).astype(np.float64)
        if (ids[:, 1:] == ids[:, :-1]).any():
            raise MkdCacheError("the teacher's top-k has a token id twice for one token")
        records = np.zeros(len(ids), dtype=self.dtype)
        records["low"], records["high"] = self._ids.encode(ids)
        for i, temperature in enumerate(self.temperatures):
            top_lse = _log_sum_exp(logits / temperature)
            if targets.tail_lse is not None:
                odds = top_lse - targets.tail_lse[:, i]
            else:
                with np.errstate(divide="ignore", over="ignore"):
                    odds = -np.log(np.expm1(np.maximum(targets.lse[:, i] - top_lse, 0.0)))
            records["head"][:, i] = np.clip(odds, -_LIMIT, _LIMIT)
        records["label"] = targets.label_log_prob
        records["values"] = self._encode_values(logits, targets.lse[:, :1].astype(np.float64))
        return records

    def _require_valid(self, targets: TokenTargets) -> None:
        for what, values in (
            ("logit", targets.logits),
            ("logsumexp", targets.lse),
            ("label's logit", targets.label_log_prob),
        ):
            if not np.isfinite(values).all():
                raise MkdCacheError(f"the teacher computes a {what} that is not finite: nothing is stored")
        if targets.tail_lse is not None and not (targets.tail_lse < np.inf).all():  # also true for NaN
            raise MkdCacheError("the teacher computes a logsumexp of the tail that is not finite: nothing is stored")
        if targets.ids.min(initial=0) < 0 or targets.ids.max(initial=0) >= self.vocab:
            raise MkdCacheError(
                f"token ids {targets.ids.min()} to {targets.ids.max()} in the teacher's top-k, but its vocabulary has "
                f"{self.vocab} tokens"
            )

    def _encode_values(self, logits: np.ndarray, lse: np.ndarray) -> np.ndarray:
        if self.values == "fp32":
            return logits - lse
        if self.values == "counts":
            counts = np.exp(logits - lse) * self.samples
            return pack(np.rint(counts), _BITS)
        below = logits.max(axis=1, keepdims=True) - logits
        codes = np.rint(-np.expm1(-below / _SCALE) * (1 << _BITS))
        return pack(np.minimum(codes, (1 << _BITS) - 1), _BITS)

    @cached_property
    def _table(self) -> np.ndarray:
        """[4096] fp32: value of each code, up to a constant of the record."""
        codes = np.arange(1 << _BITS, dtype=np.float64)
        if self.values == "counts":
            return np.where(codes > 0, np.log(np.maximum(codes, 1)), _ZERO_COUNT).astype(np.float32)
        return (_SCALE * np.log1p(-codes / (1 << _BITS))).astype(np.float32)

    def decode(self, records: np.ndarray, temperature: float = 1.0) -> TokenTargets:
        """The inverse of `encode`, with logits normalized to a logsumexp of 0 at temperature 1.

        Args:
            records: [n] of `dtype`.
            temperature: temperature of `lse` and `tail_lse`, which have this one column.

        Raises:
            MkdCacheError: the log-odds at this temperature are not stored, or a value is not finite.
        """
        if temperature not in self.temperatures:
            raise MkdCacheError(
                f"the teacher cache has the tail at the temperatures {self.temperatures}, not at {temperature:g}"
            )
        odds = records["head"]
        if self.values == "fp32":
            logits = np.ascontiguousarray(records["values"])
        else:
            logits = self._table.take(unpack(records["values"], self.top_k, _BITS))
            # Values lie in [-50, 9], so their exponentials neither overflow nor vanish without subtracting a maximum.
            logits -= (np.log(np.exp(logits).sum(axis=1)) + _neg_log_top(odds[:, 0]))[:, None]
        lse = np.zeros(len(records), dtype=np.float32)
        column = self.temperatures.index(temperature)
        if temperature != 1.0:
            lse = _log_sum_exp(logits / np.float32(temperature)) + _neg_log_top(odds[:, column])
        label = np.ascontiguousarray(records["label"])
        for values in (odds, label, logits):
            if not np.isfinite(values).all():
                raise MkdCacheError("the teacher cache holds a value that is not finite")
        tail_lse = lse - np.logaddexp(np.float32(0.0), odds[:, column])
        ids = self._ids.decode(records["low"], records["high"])
        return TokenTargets(ids, logits, lse[:, None], label, tail_lse[:, None])


def _log_sum_exp(values: np.ndarray) -> np.ndarray:
    """[n, K] -> [n], in the dtype of the values."""
    top = values.max(axis=1)
    return top + np.log(np.exp(values - top[:, None]).sum(axis=1))


def _neg_log_top(odds: np.ndarray) -> np.ndarray:
    """-ln p(top) from the log-odds of top columns against tail."""
    return np.logaddexp(np.float32(0.0), -odds)


def seal(records: np.ndarray, key: bytes) -> None:
    """Set the checksums of a segment's records, in place.

    A checksum covers the record's bytes, its position in the segment and the segment's key, so it detects changed bytes
    and records that are swapped.

    Args:
        records: [n], all tokens of the segment in order.
        key: the segment's key, 16 bytes.
    """
    records["check"] = _check(records, key_words([key])[0], np.arange(len(records)))


def damaged(records: np.ndarray, keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """[n] bool: True for records whose checksum does not match.

    Args:
        records: [n].
        keys: [n] `key_words` of each record's segment.
        positions: [n] integers, position of each record in its segment.
    """
    return records["check"] != _check(records, keys, positions)


def key_words(keys: Sequence[bytes]) -> np.ndarray:
    """[n] uint32: the first word of each of n keys, which enters the checksums."""
    return np.frombuffer(b"".join(keys), "<u4").reshape(-1, 4)[:, 0]


def _check(records: np.ndarray, keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """[n] uint32 checksums: a sum of 32-bit words with odd factors, so every change of a single word changes it."""
    words = records.view("<u4").reshape(len(records), -1)[:, :-1]
    factors = (np.arange(1, words.shape[1] + 1, dtype=np.uint32) * np.uint32(2654435761)) | np.uint32(1)
    sums = np.einsum("ij,j->i", words, factors)
    return sums + positions.astype(np.uint32) * np.uint32(2246822519) + (keys ^ np.uint32(0x9E3779B9))
