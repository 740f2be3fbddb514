"""What a teacher said about a token, as a record of fixed length, and back.

The loss sees differences of logits only, so a record has no absolute level: it has the ids, their logits as
differences, and for each temperature the mass of the head (those ids together) against the tail (all other tokens).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from mkd.errors import MkdCacheError
from mkd.teacher.cache.bits import IdSets, pack, packed_bytes, unpack

Values = Literal["log12", "fp32", "counts"]
"""How the values beside the ids are stored. log12: 12 bits, finer for likely tokens. fp32: 32 bits, nothing is lost.
counts: how often each id was drawn, 12 bits."""

MAX_VOCAB = 1 << 20
MAX_COUNT = 4095
"""Of one id, with `counts`."""
_BITS = 12
_SCALE = 6.0
"""Nats over which the steps of log12 grow e-fold: from 0.0015 at the most likely token to 0.018 at 15 nats below it."""
_LIMIT = 60.0
"""Nats. Of head against tail: beyond it one of them is nothing in fp32 and in float64."""
_NEVER = -50.0
"""Log of a count of 0."""


@dataclass(frozen=True)
class TokenRows:
    """What a teacher said about n tokens, on the host."""

    ids: np.ndarray
    """[n, K] int32, distinct in each row."""
    logits: np.ndarray
    """[n, K] fp32, up to a constant of each row."""
    lse: np.ndarray
    """[n, T] fp32: log sum exp of all logits divided by each of the temperatures, with the same constant."""
    label_log_prob: np.ndarray
    """[n] fp32: of the token's label at temperature 1."""
    tail_lse: np.ndarray | None = None
    """[n, T] fp32: as `lse`, over the columns that are not in `ids`; -inf where there are none. Without it `encode`
    knows the tail as the rounded difference of `lse` and the head. `decode` always gives it."""


@dataclass(frozen=True)
class RecordFormat:
    """Fields of a record. Byte for byte the same for equal arguments."""

    vocab: int
    """Ids are below it; at most `MAX_VOCAB`."""
    top_k: int
    """Ids in a record."""
    values: Values
    temperatures: tuple[float, ...] = (1.0,)
    """Those whose tail is stored; the first is 1."""
    samples: int = 0
    """Ids drawn for each token, with `counts`; else 0."""

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
        """Of a record: `high` and `low` (see `IdSets`); `values`; `head` (for each temperature, log of head mass over
        tail mass); `label` (its log-probability); `check` (see `seal`). Its length is a multiple of 4.
        """
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

    def encode(self, rows: TokenRows) -> np.ndarray:
        """[n] records, without their check.

        Raises:
            MkdCacheError: a value that is not finite, an id outside of the vocabulary or twice in a row.
        """
        self._require_valid(rows)
        order = np.argsort(rows.ids, axis=1)
        ids = np.take_along_axis(rows.ids, order, axis=1)
        logits = np.take_along_axis(rows.logits, order, axis=1).astype(np.float64)
        if (ids[:, 1:] == ids[:, :-1]).any():
            raise MkdCacheError("the teacher's top-k has a token id twice in one row")
        records = np.zeros(len(ids), dtype=self.dtype)
        records["low"], records["high"] = self._ids.encode(ids)
        for i, temperature in enumerate(self.temperatures):
            head = _log_sum_exp(logits / temperature)
            if rows.tail_lse is not None:
                odds = head - rows.tail_lse[:, i]
            else:
                with np.errstate(divide="ignore", over="ignore"):
                    odds = -np.log(np.expm1(np.maximum(rows.lse[:, i] - head, 0.0)))
            records["head"][:, i] = np.clip(odds, -_LIMIT, _LIMIT)
        records["label"] = rows.label_log_prob
        records["values"] = self._encode_values(logits, rows.lse[:, :1].astype(np.float64))
        return records

    def _require_valid(self, rows: TokenRows) -> None:
        for what, values in (("logit", rows.logits), ("logsumexp", rows.lse), ("label's logit", rows.label_log_prob)):
            if not np.isfinite(values).all():
                raise MkdCacheError(f"the teacher computes a {what} that is not finite: nothing of it is stored")
        if rows.tail_lse is not None and not (rows.tail_lse < np.inf).all():  # true of NaN, too
            raise MkdCacheError("the teacher computes a logsumexp of the tail that is not finite: nothing is stored")
        if rows.ids.min(initial=0) < 0 or rows.ids.max(initial=0) >= self.vocab:
            raise MkdCacheError(
                f"token ids {rows.ids.min()} to {rows.ids.max()} in the teacher's top-k, but its vocabulary has "
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
        """[4096] fp32: value of each code, up to a constant of the row."""
        codes = np.arange(1 << _BITS, dtype=np.float64)
        if self.values == "counts":
            return np.where(codes > 0, np.log(np.maximum(codes, 1)), _NEVER).astype(np.float32)
        return (_SCALE * np.log1p(-codes / (1 << _BITS))).astype(np.float32)

    def decode(self, records: np.ndarray, temperature: float = 1.0) -> TokenRows:
        """The inverse of `encode`, with the constant of each row such that its logsumexp at temperature 1 is 0.

        Args:
            records: [n] of `dtype`.
            temperature: of `lse` and `tail_lse`, which have this one column.

        Raises:
            MkdCacheError: the tail at this temperature is not stored; or a value is not finite.
        """
        if temperature not in self.temperatures:
            raise MkdCacheError(
                f"the teacher cache has the tail at the temperatures {self.temperatures}, not at {temperature:g}"
            )
        head = records["head"]
        if self.values == "fp32":
            logits = np.ascontiguousarray(records["values"])
        else:
            logits = self._table.take(unpack(records["values"], self.top_k, _BITS))
            # Codes are of values in [-50, 9], whose exponentials need no maximum taken off.
            logits -= (np.log(np.exp(logits).sum(axis=1)) + _tail(head[:, 0]))[:, None]
        lse = np.zeros(len(records), dtype=np.float32)
        column = self.temperatures.index(temperature)
        if temperature != 1.0:
            lse = _log_sum_exp(logits / np.float32(temperature)) + _tail(head[:, column])
        label = np.ascontiguousarray(records["label"])
        for values in (head, label, logits):
            if not np.isfinite(values).all():
                raise MkdCacheError("the teacher cache holds a value that is not finite")
        tail_lse = lse - np.logaddexp(np.float32(0.0), head[:, column])
        ids = self._ids.decode(records["low"], records["high"])
        return TokenRows(ids, logits, lse[:, None], label, tail_lse[:, None])


def _log_sum_exp(values: np.ndarray) -> np.ndarray:
    """Over the last axis, in the dtype of the values."""
    top = values.max(axis=1)
    return top + np.log(np.exp(values - top[:, None]).sum(axis=1))


def _tail(head: np.ndarray) -> np.ndarray:
    """-log of the head's mass from log of head mass over tail mass."""
    return np.logaddexp(np.float32(0.0), -head)


def seal(records: np.ndarray, key: bytes) -> None:
    """Set the check of a segment's records, in place.

    A record's check is over its bytes, its place in the segment and the segment's key: a changed byte, and a record in
    another's place, are seen when it is read.

    Args:
        records: [n], all tokens of the segment in order.
        key: of the segment, 16 bytes.
    """
    records["check"] = _check(records, key_words([key])[0], np.arange(len(records)))


def damaged(records: np.ndarray, keys: np.ndarray, places: np.ndarray) -> np.ndarray:
    """[n] bool: which records are not as `seal` left them.

    Args:
        records: [n].
        keys: [n] of `key_words`, of each record's segment.
        places: [n] integers: of each record in its segment.
    """
    return records["check"] != _check(records, keys, places)


def key_words(keys: Sequence[bytes]) -> np.ndarray:
    """[n] uint32: what `damaged` needs of n keys."""
    return np.frombuffer(b"".join(keys), "<u4").reshape(-1, 4)[:, 0]


def _check(records: np.ndarray, keys: np.ndarray, places: np.ndarray) -> np.ndarray:
    """[n] uint32. Each 32-bit word has an odd factor, so that no change of one word alone keeps the sum."""
    words = records.view("<u4").reshape(len(records), -1)[:, :-1]
    factors = (np.arange(1, words.shape[1] + 1, dtype=np.uint32) * np.uint32(2654435761)) | np.uint32(1)
    sums = np.einsum("ij,j->i", words, factors)
    return sums + places.astype(np.uint32) * np.uint32(2246822519) + (keys ^ np.uint32(0x9E3779B9))
