"""The supervised tokens of a microbatch: their order, their parts, and what is made of them."""

import pytest
import torch

from mkd.data.batch import KDBatch
from mkd.data.supervised import NEARLY_ALL, SupervisedTokens

MASK = torch.tensor([[0, 1, 1, 0, 0, 1], [0, 0, 0.5, 0, 0, 1]])
"""[b, s]"""
NUMBERS = [2, 4, 5, 10, 11]
"""Indices of its tokens among [s * b]."""


def test_numbers_are_sequence_first() -> None:
    tokens = SupervisedTokens.of(MASK, torch.zeros_like(MASK))
    assert tokens.index.tolist() == NUMBERS and tokens.share == 5 / 12
    hidden = torch.arange(12.0)[:, None]
    assert tokens.take(hidden).flatten().tolist() == NUMBERS
    spread = tokens.spread(tokens.take(hidden) + 1)
    assert spread.flatten().nonzero().flatten().tolist() == NUMBERS and spread.sum() == sum(NUMBERS) + 5


def test_parts_hold_each_token_once() -> None:
    tokens, hidden = SupervisedTokens.of(MASK), torch.arange(12.0)
    assert tokens.counts(3) == [1, 2, 2]
    parts = [tokens.take(part, rank, 3) for rank, part in enumerate(hidden.chunk(3))]
    assert torch.cat(parts).tolist() == NUMBERS
    assert [tokens.part(rank, 3)[0] for rank in range(3)] == [slice(0, 1), slice(1, 3), slice(3, 5)]
    whole = torch.cat([tokens.spread(part, rank, 3) for rank, part in enumerate(parts)])
    assert torch.equal(whole, tokens.spread(hidden[NUMBERS]))


def test_tokens_of_either_term_are_supervised() -> None:
    ce, kd = torch.tensor([[0.0, 1.0, 0.0, 0.0]]), torch.tensor([[0.0, 0.0, 0.0, 2.0]])
    assert SupervisedTokens.of(ce, kd).index.tolist() == [1, 3]
    assert SupervisedTokens.of(torch.zeros(1, 4)).index.tolist() == []


@pytest.mark.parametrize("count", [95, 96, 100])
def test_nearly_all_tokens_are_all_tokens(count: int) -> None:
    mask = (torch.arange(100) < count).float()[None]
    assert (SupervisedTokens.of(mask) is None) == (count > 100 * NEARLY_ALL)


def test_context_parallel_slices_agree_with_their_masks() -> None:
    mask = (torch.arange(16) % 3 == 0).float().view(2, 8)
    tokens = torch.arange(16).view(2, 8)
    batch = KDBatch(tokens, tokens, mask, torch.zeros_like(mask), tokens).with_supervised()
    for rank in range(2):
        part = batch.cp_slice(rank, 2)
        assert torch.equal(part.supervised.mask, part.ce_mask != 0)
        assert torch.equal(
            part.tokens.t().flatten()[part.supervised.index] % 3, torch.zeros(len(part.supervised.index))
        )
        assert part.supervised.whole is batch.supervised.mask
