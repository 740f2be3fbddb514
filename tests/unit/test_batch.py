"""mkd/data/batch.py: microbatches of existing tokens, and hashes that tell them apart. Across ranks:
tests/dist/test_batch.py.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mkd.data.batch import KDBatch, draw
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


def test_draw_takes_as_many_as_asked():
    iterator = iter([sample(seed=seed) for seed in range(3)])
    drawn = draw(iterator, 2, VOCAB)
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
