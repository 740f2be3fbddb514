"""Records of a teacher cache: round trips, sizes, quantization error, checksums."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mkd.errors import MkdCacheError
from mkd.teacher.cache.bits import IdSets, pack, packed_bytes, unpack
from mkd.teacher.cache.reader import keep_largest
from mkd.teacher.cache.record_format import MAX_COUNT, RecordFormat, TokenTargets, damaged, key_words, seal
from tests.support.cached_targets import make_logits, targets_of
from tests.support.tolerance import FP32, assert_close_norm

VOCABULARIES = (128256, 151936, 262144)
KEY = bytes(range(16))


@settings(max_examples=60, deadline=None)
@given(width=st.integers(0, 25), count=st.integers(1, 70), rows=st.integers(1, 5), seed=st.integers(0, 1000))
def test_bits_round_trip(width, count, rows, seed):
    values = np.random.default_rng(seed).integers(0, 1 << width, (rows, count))
    packed = pack(values, width)
    assert packed.shape == (rows, packed_bytes(count, width))
    assert np.array_equal(unpack(packed, count, width), values)


@pytest.mark.parametrize("vocab", [1, 2, 9, 307, *VOCABULARIES, 1 << 20])
@pytest.mark.parametrize("count", [1, 2, 64, 100])
def test_ids_round_trip(vocab, count):
    if count > vocab:
        return
    rng = np.random.default_rng(vocab + count)
    sets = IdSets(vocab, count)
    sets_of_ids = [np.arange(count), np.arange(vocab - count, vocab)]
    sets_of_ids += [np.sort(rng.choice(vocab, count, replace=False)) for _ in range(50)]
    ids = np.stack(sets_of_ids).astype(np.int32)
    low, high = sets.encode(ids)
    assert (low.shape[1], high.shape[1]) == (sets.low_bytes, sets.high_bytes)
    assert np.array_equal(sets.decode(low, high), ids)


def test_wrong_number_of_ids_is_refused():
    sets = IdSets(307, 8)
    low, high = sets.encode(np.arange(0, 80, 10)[None])
    with pytest.raises(MkdCacheError, match="number of ids"):
        sets.decode(low, np.zeros_like(high))


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_at_most_220_bytes_per_token(vocab):
    assert RecordFormat(vocab, 64, "log12").dtype.itemsize <= 220


@pytest.mark.parametrize("values", ["log12", "fp32"])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_large_vocabularies_round_trip(vocab, values):
    logits = make_logits(20, vocab)
    labels = torch.arange(20) * 5000
    targets = targets_of(logits, labels, 64)
    decoded = RecordFormat(vocab, 64, values).decode(RecordFormat(vocab, 64, values).encode(targets))
    order = np.argsort(targets.ids, axis=1)
    assert np.array_equal(decoded.ids, np.take_along_axis(targets.ids, order, axis=1))
    assert np.array_equal(decoded.label_log_prob, targets.label_log_prob)
    expected = np.take_along_axis(targets.logits - targets.lse, order, axis=1)
    assert np.abs(decoded.logits - expected)[expected > -10].max() < (1e-5 if values == "fp32" else 0.01)


def divergence(student: Tensor, ids: Tensor, logits: Tensor, lse: Tensor, temperature: float, kind: str) -> Tensor:
    """[n] in float64, over K + 1 categories, the last of which is the tail."""
    q = (student.double() / temperature).log_softmax(-1)
    p_head = logits.double() / temperature - lse.double()[:, None]
    q_head = q.gather(1, ids.long())
    q_tail = q.scatter(1, ids.long(), -torch.inf).logsumexp(-1)
    p_tail = torch.log1p(-p_head.logsumexp(-1).exp().clamp(max=1 - 1e-12))
    p, q = torch.cat([p_head, p_tail[:, None]], 1), torch.cat([q_head, q_tail[:, None]], 1)
    return (p.exp() * (p - q)).sum(-1) if kind == "forward" else (q.exp() * (q - p)).sum(-1)


@pytest.mark.parametrize("kind", ["forward", "reverse"])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize(("values", "error"), [("log12", 1e-3), ("fp32", 2e-5)])
def test_error_of_the_loss(values, error, temperature, kind):
    """Largest error of a single token, in nats, for students from equal to unrelated."""
    vocab, record = 3000, RecordFormat(3000, 64, values, (1.0, 2.5))
    teacher = make_logits(300, vocab)
    targets = targets_of(teacher, torch.zeros(300, dtype=torch.int64), 64, record.temperatures)
    decoded = record.decode(record.encode(targets), temperature)
    for distance in (0.0, 0.3, 2.0):
        student = teacher - teacher.mean(-1, keepdim=True) + distance * make_logits(300, vocab, 1).clamp(-5, 5)
        column = record.temperatures.index(temperature)
        parts = torch.tensor(targets.ids), torch.tensor(targets.logits), torch.tensor(targets.lse[:, column])
        exact = divergence(student, *parts, temperature, kind)
        parts = torch.tensor(decoded.ids), torch.tensor(decoded.logits), torch.tensor(decoded.lse[:, 0])
        assert (divergence(student, *parts, temperature, kind) - exact).abs().max() < error


def test_top_columns_with_all_the_mass():
    record = RecordFormat(100, 4, "log12", (1.0, 3.0))
    logits = torch.full((2, 100), -300.0)
    logits[:, 7] = 50.0
    decoded = record.decode(record.encode(targets_of(logits, torch.tensor([7, 8]), 4, (1.0, 3.0))), 3.0)
    top = decoded.logits.max(axis=1)
    assert np.isfinite(decoded.logits).all()
    assert np.abs(top / 3 - decoded.lse[:, 0]).max() < 1e-6 and np.abs(top).max() < 1e-6


@pytest.mark.parametrize("values", ["log12", "fp32"])
def test_tail_below_rounding_is_kept(values):
    """1 - p(top) is 0 in fp32; the tail is e^-20 of the mass, e^-9 at T = 2."""
    record = RecordFormat(100, 2, values, (1.0, 2.0))
    tails = np.array([[-20.0, -9.0], [-30.0, -np.inf]], dtype=np.float32)
    targets = TokenTargets(np.array([[3, 9]] * 2), np.zeros((2, 2)), np.full((2, 2), np.log(2.0)), np.zeros(2), tails)
    records = record.encode(targets)
    for column, temperature in enumerate(record.temperatures):
        decoded = record.decode(records, temperature)
        head = np.log(np.exp(decoded.logits / temperature).sum(axis=1))
        expected = np.maximum(tails[:, column] - np.log(2.0), -60.0)
        assert np.abs(decoded.tail_lse[:, 0] - head - expected).max() < 1e-5


def test_top_columns_with_hardly_any_mass():
    record = RecordFormat(1 << 20, 2, "log12")
    targets = TokenTargets(np.array([[3, 9]]), np.zeros((1, 2)), np.full((1, 1), np.log(1 << 20)), np.zeros(1))
    assert np.abs(record.decode(record.encode(targets)).logits + np.log(1 << 20)).max() < 1e-4


def test_counts_are_exact():
    record = RecordFormat(307, 5, "counts", samples=MAX_COUNT)
    counts = np.array([[0, 1, 4094, 0, 0], [1000, 1000, 1000, 1000, 95]])
    ids = np.array([[300, 2, 30, 4, 5], [4, 3, 2, 1, 0]], dtype=np.int32)
    with np.errstate(divide="ignore"):
        logits = np.maximum(np.log(counts), -80.0)
    targets = TokenTargets(ids, logits, np.full((2, 1), np.log(MAX_COUNT)), np.zeros(2))
    decoded = record.decode(record.encode(targets))
    found = np.rint(np.exp(decoded.logits.astype(np.float64)) * MAX_COUNT)
    order = np.argsort(ids, axis=1)
    assert np.array_equal(found, np.take_along_axis(counts, order, axis=1))
    assert_close_norm(torch.tensor(np.exp(decoded.logits).sum(axis=1)), torch.ones(2), FP32, "head mass")


@pytest.mark.parametrize("where", ["logits", "lse", "label_log_prob"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_values_are_refused(where, value):
    targets = targets_of(make_logits(3, 50), torch.zeros(3, dtype=torch.int64), 4)
    getattr(targets, where).reshape(-1)[1] = value
    with pytest.raises(MkdCacheError, match="not finite"):
        RecordFormat(50, 4, "log12").encode(targets)


@pytest.mark.parametrize(("ids", "message"), [([0, 50], "0 to 50"), ([-1, 5], "-1 to 5"), ([7, 7], "twice")])
def test_invalid_ids_are_refused(ids, message):
    targets = TokenTargets(np.array([ids]), np.zeros((1, 2)), np.ones((1, 1)), np.zeros(1))
    with pytest.raises(MkdCacheError, match=message):
        RecordFormat(50, 2, "log12").encode(targets)


@pytest.mark.parametrize(
    ("vocab", "top_k", "temperatures"), [((1 << 20) + 1, 4, (1.0,)), (50, 51, (1.0,)), (50, 0, (1.0,)), (50, 4, (2.0,))]
)
def test_invalid_formats(vocab, top_k, temperatures):
    with pytest.raises(MkdCacheError):
        RecordFormat(vocab, top_k, "log12", temperatures)


def test_temperature_that_is_not_stored():
    record = RecordFormat(50, 4, "log12", (1.0, 2.0))
    with pytest.raises(MkdCacheError, match=r"\(1.0, 2.0\), not at 3"):
        record.decode(np.zeros(0, dtype=record.dtype), 3.0)


def test_every_flipped_bit_is_detected():
    record = RecordFormat(307, 8, "log12")
    records = record.encode(targets_of(make_logits(2, 307), torch.zeros(2, dtype=torch.int64), 8))
    seal(records, KEY)
    keys, positions = key_words([KEY, KEY]), np.arange(2)
    assert not damaged(records, keys, positions).any()
    for bit in range(8 * record.dtype.itemsize):
        changed = records.copy()
        changed.view(np.uint8)[record.dtype.itemsize + bit // 8] ^= 1 << bit % 8
        assert damaged(changed, keys, positions).tolist() == [False, True]


def test_swapped_and_empty_records_are_detected():
    record = RecordFormat(307, 8, "log12")
    records = record.encode(targets_of(make_logits(2, 307), torch.zeros(2, dtype=torch.int64), 8))
    seal(records, KEY)
    assert damaged(records[::-1].copy(), key_words([KEY, KEY]), np.arange(2)).all()
    assert damaged(records, key_words([KEY[::-1]] * 2), np.arange(2)).all()
    assert damaged(np.zeros_like(records), key_words([KEY, KEY]), np.arange(2)).all()


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_smaller_top_k_than_stored(temperature):
    """As with a cache of the smaller K: dropped ids join the tail; among equal logits the lowest id stays."""
    record, labels = RecordFormat(307, 40, "fp32", (1.0, 2.0)), torch.zeros(30, dtype=torch.int64)
    logits = torch.round(make_logits(30, 307) * 2) / 2  # with many that are equal
    order = logits.sort(dim=1, descending=True, stable=True).indices
    targets = targets_of(logits, labels, 40, record.temperatures)
    rest = logits.double().scatter(1, order[:, :40], -torch.inf)
    tails = torch.stack([(rest / t).logsumexp(1) for t in record.temperatures], dim=1).float().numpy()
    top = logits.gather(1, order[:, :40]).numpy()
    targets = replace(targets, ids=order[:, :40].int().numpy(), logits=top, tail_lse=tails)
    kept = keep_largest(record.decode(record.encode(targets), temperature), 5, temperature)
    assert np.array_equal(kept.ids, order[:, :5])
    scaled = logits.double() / temperature
    tail = scaled.scatter(1, order[:, :5], -torch.inf).logsumexp(1) - scaled.logsumexp(1)
    assert_close_norm(torch.tensor(kept.tail_lse - kept.lse)[:, 0], tail, FP32, "tail")
