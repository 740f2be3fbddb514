"""Rows from samples: nothing is lost or doubled, and rows depend on nothing but lengths and seed."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.utils import Split
from torch.utils.data import default_collate

from mkd.data.batch import KDBatch
from mkd.data.packing.row_layout import RowLayout
from mkd.data.packing.row_plan import best_fit_decreasing, cut, one_per_row, pack, shuffled
from mkd.data.packing.streams import PERIOD, BlendOfRows, BlendSchedule, ClassicRows, RowOptions, SampleRows
from mkd.errors import MkdDataError

ROW = 48
MULTIPLES = st.sampled_from([1, 2, 4, 8, 16, 48])
LENGTHS = st.lists(st.integers(0, 3 * ROW + 5), min_size=1, max_size=60).filter(lambda n: max(n) > 1)
MANY = settings(deadline=None, max_examples=100)
"""No deadline, because the machine may be loaded."""


class Texts:
    """A store in which every token of every sample has an id of its own."""

    all_targets = False

    def __init__(self, lengths: list[int], supervised: float = 1.0) -> None:
        self.lengths = np.array(lengths, dtype=np.int32)
        self._begin = np.cumsum([1, *lengths])
        self._is_target = np.random.RandomState(0).rand(self._begin[-1]) < supervised

    def read(self, sample: int, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        assert start + count <= self.lengths[sample]
        ids = np.arange(self._begin[sample] + start, self._begin[sample] + start + count)
        return ids, self._is_target[ids]

    def targets(self, sample: int) -> list[int]:
        ids, is_target = self.read(sample, 0, self.lengths[sample])
        return ids[1:][is_target[1:]].tolist()


def rows_of(store: Texts, multiple: int = 4, seed: int = 7, drop_long: bool = False, **layout: bool) -> SampleRows:
    shape = RowLayout(ROW, multiple, **{"is_packed": True, "kd_everywhere": False, **layout})
    return SampleRows(store, RowOptions(shape, drop_long, seed), "texts")


def an_epoch(rows: SampleRows, epoch: int = 0) -> list[dict[str, torch.Tensor]]:
    return [rows.row(i) for i in range(epoch * rows.per_epoch, (epoch + 1) * rows.per_epoch)]


@MANY
@given(LENGTHS, MULTIPLES, st.integers(0, 2**32 - 1), st.integers(1, 70))
def test_every_piece_is_in_one_row_that_holds_it(lengths, multiple, seed, window) -> None:
    pieces = cut(np.array(lengths), ROW, drop_long=False)
    plan = pack(pieces.positions, ROW, multiple, seed, window)
    assert sorted(plan.piece) == list(range(len(pieces)))
    for row in range(len(plan)):
        padded = -(-pieces.positions[plan.row(row)] // multiple) * multiple
        assert 0 < padded.sum() <= ROW
    assert plan.positions == pieces.positions.sum()
    assert plan.efficiency == pytest.approx(pieces.positions.sum() / (len(plan) * ROW))


@pytest.mark.parametrize("drop_long", [False, True])
def test_rows_may_be_longer_than_the_positions_of_the_models(drop_long: bool) -> None:
    """Pieces are cut to the models' positions, with room for their padding; rows hold several of them."""
    lengths = [ROW + 1, 10, 6, 15, 14, 3]
    rows = rows_of(Texts(lengths), multiple=4, drop_long=drop_long, longest=14)
    seen = [row["cu_seqlens_padded"].diff() for row in an_epoch(rows)]
    for row, sizes in zip(an_epoch(rows), seen, strict=True):
        of_text = row["cu_seqlens"].diff()
        assert of_text[of_text > 0].max() <= 12
        assert row["position_ids"][row["ce_mask"] > 0].max() < 14
        assert sizes.sum() == ROW
    assert any((sizes > 0).sum() > 2 for sizes in seen)
    limit = "the 12 positions of a model (14, in multiples of 4)"
    counted = f"3 {'dropped' if drop_long else 'split'} because they are longer than {limit}"
    assert f"the longest sample has {ROW + 1} tokens; {counted}" in str(rows)
    assert "the longest sample" not in str(rows_of(Texts([3, 4])))
    expected = [length for length in lengths if length <= 13] if drop_long else lengths
    assert sum(int(row["cu_seqlens"][-1]) for row in an_epoch(rows)) == sum(length - 1 for length in expected)


@MANY
@given(LENGTHS, st.booleans())
def test_pieces_cover_each_sample_once(lengths, drop_long) -> None:
    pieces = cut(np.array(lengths), ROW, drop_long=drop_long)
    assert len(pieces) == 0 or (pieces.positions.min() >= 1 and pieces.positions.max() <= ROW)
    for sample, length in enumerate(lengths):
        own = np.flatnonzero(pieces.sample == sample)
        places = [range(pieces.start[i], pieces.start[i] + pieces.positions[i]) for i in own]
        is_dropped = drop_long and length - 1 > ROW
        assert [p for part in places for p in part] == ([] if is_dropped else list(range(length - 1)))
    long = sum(length - 1 > ROW for length in lengths)
    assert (pieces.split, pieces.dropped) == ((0, long) if drop_long else (long, 0))
    assert pieces.short == sum(length < 2 for length in lengths)


@settings(MANY, max_examples=40)
@given(LENGTHS, MULTIPLES, st.booleans(), st.booleans())
def test_an_epoch_has_every_target_once(lengths, multiple, is_packed, kd_everywhere) -> None:
    store = Texts(lengths, supervised=0.6)
    wanted = sorted(token for sample in range(len(lengths)) for token in store.targets(sample))
    if not wanted and not kd_everywhere:
        return
    rows = rows_of(store, multiple, is_packed=is_packed, kd_everywhere=kd_everywhere)
    for epoch in (0, 3):
        seen, distilled = [], []
        for row in an_epoch(rows, epoch):
            assert (row["tokens"] + 1 == row["labels"])[row["kd_mask"] > 0].all()
            seen += row["labels"][row["ce_mask"] > 0].tolist()
            distilled += row["labels"][row["kd_mask"] > 0].tolist()
        assert sorted(seen) == wanted
        firsts = set(np.cumsum([1, *lengths]).tolist())
        everything = [t for t in range(1, sum(lengths) + 1) if t not in firsts]
        assert sorted(distilled) == (everything if kd_everywhere else wanted)


@settings(MANY, max_examples=40)
@given(LENGTHS, MULTIPLES)
def test_segments_of_a_row(lengths, multiple) -> None:
    for row in an_epoch(rows_of(Texts(lengths), multiple)):
        padded, real = row["cu_seqlens_padded"].numpy(), row["cu_seqlens"].numpy()
        assert padded.dtype == real.dtype == np.int32
        assert len(padded) == len(real) == ROW // multiple + 1
        assert padded[0] == real[0] == 0
        assert padded[-1] == ROW
        assert (padded % multiple == 0).all()
        places, texts = np.diff(padded), np.diff(real)
        assert (places >= texts).all()
        assert (places - texts < multiple)[texts > 0].all()
        assert row["max_seqlen"] == places.max()
        for start, end, length in zip(padded[:-1], padded[1:], texts, strict=True):
            tokens, labels = row["tokens"][start : start + length], row["labels"][start : start + length]
            assert (tokens[1:] == labels[:-1]).all()
            assert (row["position_ids"][start:end] == torch.arange(end - start)).all()
            for name in ("ce_mask", "kd_mask"):
                assert (row[name][start : start + length] == 1).all()
                assert (row[name][start + length : end] == 0).all()
            assert (row["tokens"][start + length : end] == 0).all()
        assert int((row["ce_mask"] > 0).sum()) == real[-1]


@settings(MANY, max_examples=30)
@given(LENGTHS, st.integers(0, 2**31), st.integers(0, 500))
def test_a_row_is_a_function_of_its_number(lengths, seed, index) -> None:
    first, second = rows_of(Texts(lengths), seed=seed), rows_of(Texts(lengths), seed=seed)
    second.row(index // 2 + 3)
    for (name, a), (same, b) in zip(first.row(index).items(), second.row(index).items(), strict=True):
        assert name == same
        assert torch.equal(a, b)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    store = Texts(list(range(2, 40)))

    def order(seed: int, epoch: int) -> list[int]:
        return [int(row["tokens"][0]) for row in an_epoch(rows_of(store, seed=seed), epoch)]

    assert order(1, 0) != order(1, 1) != order(2, 1)
    assert sorted(order(1, 0)) == sorted(order(1, 1))
    assert sorted(shuffled(100, 3, 5)) == list(range(100))


def test_numbers_that_must_never_change() -> None:
    """Another order would make a resumed run read other rows."""
    assert shuffled(8, 1234, 0).tolist() == [5, 7, 1, 3, 4, 2, 0, 6]
    assert best_fit_decreasing(np.array([3, 6, 5, 2, 8, 4, 1]), 8).tolist() == [2, 1, 2, 1, 0, 3, 3]


def test_the_fullest_bin_that_fits_is_taken() -> None:
    sizes = np.array([7, 5, 3, 2, 1])
    bins = best_fit_decreasing(sizes, 8)
    assert bins[4] == bins[0] != bins[1] == bins[2]


def test_rows_are_nearly_full() -> None:
    lengths = np.clip(np.random.RandomState(0).lognormal(5.5, 1.0, 30_000).astype(int), 2, 4096)
    plan = pack(lengths, 4096, 1, seed=0)
    assert plan.efficiency > 0.99
    assert plan.efficiency > 5 * one_per_row(lengths, 4096).efficiency


def test_a_collated_row_is_a_batch() -> None:
    rows = rows_of(Texts([9, 20, 31, 5, 60]), multiple=4)
    sample = default_collate([rows.row(0), rows.row(1)])
    batch = KDBatch.from_sample(sample, true_vocab=1000)
    assert batch.tokens.shape == (1, 2 * ROW)
    assert batch.bounds[-1] == 2 * ROW
    assert torch.equal(batch.ce_mask.view(2, ROW), sample["ce_mask"])
    unpacked = rows_of(Texts([9, 20, 31, 5, 60]), is_packed=False)
    batch = KDBatch.from_sample(default_collate([unpacked.row(0), unpacked.row(1)]), true_vocab=1000)
    assert batch.packed is None
    assert batch.tokens.shape == (2, ROW)
    assert int(unpacked.row(0)["length"]) == int(unpacked.row(0)["ce_mask"].sum())


def test_packed_and_unpacked_rows_have_the_same_segments() -> None:
    store = Texts([9, 20, 31, 5, 60, 2], supervised=0.5)

    def segments(is_packed: bool) -> list[tuple]:
        found = []
        for row in an_epoch(rows_of(store, is_packed=is_packed)):
            bounds = row["cu_seqlens_padded"].unique().tolist() if is_packed else [0, ROW]
            for start, end in pairwise(bounds):
                text = slice(start, end)
                length = int((row["tokens"][text] > 0).sum())
                names = ("tokens", "labels", "ce_mask", "kd_mask", "position_ids")
                found += [tuple(tuple(row[name][text][:length].tolist()) for name in names)] if length else []
        return sorted(found)

    assert segments(True) == segments(False)


def test_parts_without_a_target_are_left_out() -> None:
    store = Texts([3 * ROW + 1, 10])
    store._is_target[1 + ROW + 1 : 1 + 2 * ROW + 1] = False  # the labels of the second part
    assert rows_of(store, is_packed=False).per_epoch == 3
    assert "1 parts of long samples left out" in str(rows_of(store, is_packed=False))
    assert rows_of(store, is_packed=False, kd_everywhere=True).per_epoch == 4


def test_nothing_is_read_before_training_where_every_token_is_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Texts([3 * ROW + 1, 10])
    store.all_targets = True
    monkeypatch.setattr(store, "read", lambda *bounds: pytest.fail(f"read {bounds}"))
    assert rows_of(store, is_packed=False).per_epoch == 4


def test_no_usable_sample_is_an_error() -> None:
    with pytest.raises(MkdDataError, match=r"none of its 2 samples can be used: 1 are longer than --seq-length 48, 1"):
        rows_of(Texts([ROW + 2, 1]), drop_long=True)


def test_blends_keep_weights_and_read_each_stream_in_order() -> None:
    shares = BlendSchedule([3.0, 1.0])
    found = [shares.locate(i) for i in range(2 * PERIOD, 2 * PERIOD + 4000)]
    for stream, begin in ((0, 3 * PERIOD // 2), (1, PERIOD // 2)):
        places = [place for which, place in found if which == stream]
        assert places == list(range(begin, begin + (3000, 1000)[stream]))
    for rows in (0, 5, PERIOD, PERIOD + 77):
        seen = [shares.locate(i)[0] for i in range(rows)]
        assert shares.needed(rows) == [seen.count(0), seen.count(1)]
    with pytest.raises(MkdDataError, match="weights 1 0 in --data-path"):
        BlendSchedule([1.0, 0.0])


def test_one_epoch_of_a_blend_has_every_row_of_every_stream() -> None:
    streams = [rows_of(Texts([20] * 50)), rows_of(Texts([ROW + 1] * 30))]
    epoch = BlendOfRows(streams, BlendSchedule([0.2, 0.8]), 3, Split.train).one_epoch()
    for needed, stream in zip(BlendSchedule([0.2, 0.8]).needed(len(epoch)), streams, strict=True):
        assert needed >= stream.per_epoch
    assert len(epoch) < 1.05 * streams[0].per_epoch / 0.2 + 5
    classic = ClassicRows([], 7)
    assert BlendOfRows([streams[0], classic], BlendSchedule([0.5, 0.5]), 3, Split.train).one_epoch() is None
