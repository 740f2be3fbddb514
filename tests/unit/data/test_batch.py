"""mkd/data/batch.py: microbatches of existing tokens, and hashes that distinguish them. Across ranks:
tests/dist/test_batch.py.
"""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mkd.data.batch import KDBatch
from mkd.data.microbatches import next_microbatches
from mkd.data.segments import segment_hash
from mkd.distributed.context_parallel import dual_chunk_positions
from mkd.errors import MkdDataError

VOCAB = 41


def sample(size: int = 3, length: int = 7, seed: int = 0) -> dict[str, torch.Tensor]:
    """A collated sample of megatron's GPTDataset."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (size, length + 1), generator=generator)
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": (torch.rand(size, length, generator=generator) > 0.3).float(),
        "position_ids": torch.arange(length).expand(size, length),
    }


def test_a_sample_becomes_a_batch():
    given_sample = sample()
    batch = KDBatch.from_sample(given_sample, VOCAB)
    for name in ("tokens", "labels", "position_ids"):
        assert torch.equal(getattr(batch, name), given_sample[name])
        assert getattr(batch, name).dtype == torch.int64
    assert torch.equal(batch.ce_mask, given_sample["loss_mask"])
    assert torch.equal(batch.kd_mask, given_sample["loss_mask"])
    assert batch.ce_mask.dtype == batch.kd_mask.dtype == torch.float32


@pytest.mark.parametrize("name", ["tokens", "labels"])
@pytest.mark.parametrize("largest", [VOCAB, VOCAB + 100])
def test_ids_beyond_the_vocabulary(name, largest):
    wrong = sample()
    wrong[name] = wrong[name].clone()
    wrong[name][2, 6] = VOCAB - 1
    KDBatch.from_sample(wrong, VOCAB)
    wrong[name][2, 6] = largest
    with pytest.raises(MkdDataError) as caught:
        KDBatch.from_sample(wrong, VOCAB)
    for word in (f"token id {largest}", f"{VOCAB} tokens", "--data-path"):
        assert word in str(caught.value)


def test_next_microbatches_returns_the_requested_count():
    iterator = iter([sample(seed=seed) for seed in range(3)])
    drawn = next_microbatches(iterator, 2, VOCAB)
    assert [int(batch.tokens.sum()) for batch in drawn] == [int(sample(seed=seed)["tokens"].sum()) for seed in range(2)]
    assert torch.equal(next(iterator)["tokens"], sample(seed=2)["tokens"])


def test_equal_batches_have_equal_hashes():
    first, second = (KDBatch.from_sample(sample(), VOCAB).content_hash() for _ in range(2))
    assert first.shape == (1,) and first.dtype == torch.int64
    assert torch.equal(first, second)


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(["tokens", "labels", "ce_mask", "kd_mask"]),
    row=st.integers(0, 2),
    column=st.integers(0, 6),
    by=st.integers(1, VOCAB - 1),
)
def test_any_single_change_changes_the_hash(name, row, column, by):
    batch = KDBatch.from_sample(sample(), VOCAB)
    values = getattr(batch, name).clone()
    is_mask = values.dtype == torch.float32
    values[row, column] = 1 - values[row, column] if is_mask else (values[row, column] + by) % VOCAB
    assert replace(batch, **{name: values}).content_hash() != batch.content_hash()


@settings(max_examples=200, deadline=None)
@given(first=st.integers(0, 20), second=st.integers(0, 20))
def test_exchanged_tokens_change_the_hash(first, second):
    batch = KDBatch.from_sample(sample(), VOCAB)
    tokens = batch.tokens.flatten().clone()
    tokens[[first, second]] = tokens[[second, first]]
    same = torch.equal(tokens, batch.tokens.flatten())
    assert (replace(batch, tokens=tokens.view(3, 7)).content_hash() == batch.content_hash()).item() is same


def test_large_batches_do_not_hash_alike():
    """Sums wrap around at 64 bits; that must not make them equal."""
    large = sample(4, 4096, seed=1)
    large["tokens"] = large["tokens"] + 250_000
    batch = KDBatch.from_sample(large, 300_000)
    tokens = batch.tokens.clone()
    tokens[3, 4095] += 1
    assert replace(batch, tokens=tokens).content_hash() != batch.content_hash()


def packed_sample(cuts: list[list[tuple[int, int]]], seed: int = 0) -> dict[str, torch.Tensor]:
    """A collated packed sample. `cuts`: of each row the (tokens, places) of its segments."""
    length = sum(places for _, places in cuts[0])
    rows = sample(len(cuts), length, seed)
    most = max(map(len, cuts)) + 3
    for name, which in (("cu_seqlens", 0), ("cu_seqlens_padded", 1)):
        ends = [[0, *accumulate(cut[which] for cut in row)] for row in cuts]
        rows[name] = torch.tensor([row + row[-1:] * (most - len(row)) for row in ends], dtype=torch.int32)
    return rows


CUTS = [[(3, 4), (4, 4), (1, 8)], [(11, 12), (0, 4)]]


def test_packed_rows_follow_each_other():
    given_sample = packed_sample(CUTS)
    batch = KDBatch.from_sample(given_sample, VOCAB)
    assert batch.tokens.shape == (1, 32)
    for name in ("tokens", "labels", "position_ids"):
        assert torch.equal(getattr(batch, name)[0], given_sample[name].flatten())
    assert batch.bounds == (0, 4, 8, 16, 28, 32)
    packed = batch.packed
    assert packed.qkv_format == "thd" and packed.max_seqlen_q == packed.max_seqlen_kv == 12
    for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        assert getattr(packed, name).tolist() == [0, 4, 8, 16, 28, 32]
        assert getattr(packed, name).dtype == torch.int32


def test_padding_mask():
    batch = KDBatch.from_sample(packed_sample(CUTS), VOCAB)
    expected = [(t, p - t) for row in CUTS for t, p in row]
    assert batch.padding[0].tolist() == [flag for t, rest in expected for flag in [False] * t + [True] * rest]
    rows = KDBatch.from_sample(sample(3, 8) | {"length": torch.tensor([8, 1, 5])}, VOCAB)
    assert (~rows.padding).sum(1).tolist() == [8, 1, 5] and not rows.padding[2, :5].any()
    assert KDBatch.from_sample(sample(), VOCAB).padding is None
    part = rows.cp_slice(1, 2)
    assert torch.equal(part.padding, rows.padding[:, [2, 3, 4, 5]])


def test_segments_and_their_positions():
    batch = KDBatch.from_sample(packed_sample(CUTS), VOCAB)
    places = [slice(0, 3), slice(4, 8), slice(8, 9), slice(16, 27)]
    assert batch.segments() == list(zip(batch.segment_hashes, places, strict=False))  # the last one has no text
    rows = KDBatch.from_sample(sample(3, 8) | {"length": torch.tensor([8, 0, 5])}, VOCAB)
    assert rows.segments() == [(rows.segment_hashes[0], slice(0, 8)), (rows.segment_hashes[2], slice(16, 21))]
    assert KDBatch.from_sample(sample(2, 8), VOCAB).segments()[1][1] == slice(8, 16)


def test_segment_hashes_depend_on_the_text_alone():
    """Another row, another place in it, other padding, other microbatch: the same key."""
    given_sample = packed_sample(CUTS)
    batch = KDBatch.from_sample(given_sample, VOCAB)
    hashes = batch.segment_hashes
    assert len(hashes) == len(set(hashes)) == 5 and {len(digest) for digest in hashes} == {16}
    text = given_sample["tokens"][1, :11]
    assert batch.segment_hashes[3] == segment_hash(text)
    row = {name: torch.zeros(1, 24, dtype=value.dtype) for name, value in sample().items()}
    row["tokens"][0, 8:19] = text
    row["cu_seqlens"], row["cu_seqlens_padded"] = torch.tensor([[0, 8, 19, 19]]), torch.tensor([[0, 8, 24, 24]])
    assert KDBatch.from_sample(row, VOCAB).segment_hashes[1] == batch.segment_hashes[3]
    alone = {"length": torch.tensor([11]), **{name: row[name][:, 8:] for name in sample()}}
    assert KDBatch.from_sample(alone, VOCAB).segment_hashes == (batch.segment_hashes[3],)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("is_packed", [False, True])
def test_cp_slices_hold_each_token_once(size, is_packed):
    given_sample = packed_sample(CUTS) if is_packed else sample(3, 8)
    given_sample["kd_mask"] = 1 - given_sample["loss_mask"]
    given_sample["ce_mask"] = given_sample.pop("loss_mask")
    whole = KDBatch.from_sample(given_sample, VOCAB)
    parts = [whole.cp_slice(rank, size) for rank in range(size)]
    for name in ("tokens", "labels", "ce_mask", "kd_mask", "position_ids"):
        order = torch.cat([dual_chunk_positions(whole.bounds, rank, size) for rank in range(size)])
        assert torch.equal(torch.cat([getattr(p, name) for p in parts], 1), getattr(whole, name)[:, order]), name
    assert all(part.segment_hashes == whole.segment_hashes and part.packed is whole.packed for part in parts)


@pytest.mark.parametrize(
    ("padded", "real", "word"),
    [
        ([0, 4, 6], [0, 4, 6], "has the segment bounds"),
        ([1, 4, 7], [0, 3, 6], "has the segment bounds"),
        ([0, 4, 7], [0, 5, 7], "5 tokens has 4 positions"),
        ([0, 5, 4, 7], [0, 5, 5, 7], "0 tokens has -1 positions"),
    ],
)
def test_invalid_bounds(padded, real, word):
    wrong = sample(1) | {"cu_seqlens_padded": torch.tensor([padded]), "cu_seqlens": torch.tensor([real])}
    with pytest.raises(MkdDataError, match=word):
        KDBatch.from_sample(wrong, VOCAB)


def test_bounds_change_the_hash():
    first, second = (KDBatch.from_sample(packed_sample([cut]), VOCAB) for cut in ([(4, 4), (8, 8)], [(8, 8), (4, 4)]))
    assert torch.equal(first.tokens, second.tokens)
    assert first.content_hash() != second.content_hash()


def test_next_microbatches_refuses_another_number_of_rows():
    with pytest.raises(MkdDataError, match=r"gives 3 samples at a time, the schedule expects 2: .*--micro-batch-size"):
        next_microbatches(iter([sample()]), 1, VOCAB, micro_batch_size=2)


@pytest.mark.parametrize(("multiple", "length"), [(None, 12), (1, 5), (4, 8), (12, 12)])
def test_padding_is_cut_off(multiple, length):
    given_sample = sample(3, 12) | {"length": torch.tensor([2, 5, 1])}
    (batch,) = next_microbatches(iter([given_sample]), 1, VOCAB, length_multiple=multiple)
    for name in ("tokens", "labels", "position_ids", "ce_mask", "kd_mask"):
        source = "loss_mask" if name.endswith("mask") else name
        assert torch.equal(getattr(batch, name), given_sample[source][:, :length])
