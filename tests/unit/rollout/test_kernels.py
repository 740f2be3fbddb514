"""The kernels of writing, in Triton's interpreter, against their definitions."""

from argparse import Namespace

import pytest
import torch

from mkd.rollout.cache_attention import ScoreOptions, attend_reference
from mkd.rollout.sampler import gumbel_noise
from tests.support.loss_cases import INTERPRETED

pytestmark = INTERPRETED

TEXTS, LENGTH = 3, 150


@pytest.mark.parametrize("case", ["all heads", "groups", "window", "sinks", "softcap", "widths"])
def test_attention(case: str) -> None:
    """Positions at the start, at the end of a block and behind it; what no text attends to is large."""
    from mkd.rollout.kernels import attend_triton

    heads, groups = (4, 4) if case == "all heads" else (6, 2)
    width, value_width = (24, 8) if case == "widths" else (16, 16)
    generator = torch.Generator().manual_seed(1)
    query, keys, values = (
        torch.randn(shape, generator=generator)
        for shape in (
            (TEXTS, heads, width),
            (TEXTS, groups, LENGTH, width),
            (TEXTS, groups, LENGTH, value_width),
        )
    )
    positions = torch.tensor([0, 63, 130])
    for text, position in enumerate(positions.tolist()):
        keys[text, :, position + 1 :], values[text, :, position + 1 :] = 100.0, 1000.0
    options = ScoreOptions(
        0.3,
        window=20 if case == "window" else None,
        softcap=2.0 if case == "softcap" else None,
        sinks=torch.randn(heads, generator=generator) if case == "sinks" else None,
    )
    found = attend_triton(query, keys, values, positions, options)
    exact = attend_reference(query.double(), keys.double(), values.double(), positions, options)
    assert found.shape == (TEXTS, heads, value_width)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_the_definition_is_attention() -> None:
    """PyTorch's own, text by text."""
    query, keys, values = torch.randn(2, 4, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    positions = torch.tensor([2, 8])
    found = attend_reference(query, keys, values, positions, ScoreOptions(0.5, None, None, None))
    for text, end in enumerate((3, 9)):
        exact = torch.nn.functional.scaled_dot_product_attention(
            query[text, :, None], keys[text, :, :end], values[text, :, :end], scale=0.5, enable_gqa=True
        )
        torch.testing.assert_close(found[text], exact[:, 0])


def test_no_softcap_of_transformer_engine() -> None:
    """Its core attention has the attribute `softcap`, which is 0 for none, and a window of -1 for all keys."""
    core = Namespace(softmax_scale=0.5, window_size=(-1, 0), softmax_offset=None, softcap=0.0)
    assert ScoreOptions.of(core) == ScoreOptions(0.5, None, None, None)
    core = Namespace(softmax_scale=0.5, window_size=(7, 0), softmax_offset=None, softcap=3.0)
    assert ScoreOptions.of(core) == ScoreOptions(0.5, 7, 3.0, None)


@pytest.mark.parametrize("first", [0, 5000])
def test_sampled_tokens(first: int) -> None:
    """The same as the definition for every key, with ids that do not exist and a column of equal logits."""
    from mkd.rollout.kernels import sampled_triton

    generator = torch.Generator().manual_seed(2)
    logits = 3.0 * torch.randn(8, 2100, generator=generator)
    logits[:, 2050:], logits[0] = -torch.inf, 0.0
    keys = torch.randint(-(2**63), 2**63 - 1, (8,), generator=generator)
    best, column = sampled_triton(logits, keys, first, 0.7)
    exact = (logits.double() / 0.7 + gumbel_noise(keys, first, 2100)).max(dim=1)
    assert column.tolist() == exact.indices.tolist()
    torch.testing.assert_close(best, exact.values, rtol=1e-12, atol=1e-12)


def test_sampled_tokens_exist() -> None:
    """Also where the logits are NaN, so that the loss can report them."""
    from mkd.rollout.kernels import sampled_triton

    column = sampled_triton(torch.full((2, 1030), torch.nan), torch.tensor([1, 2]), 0, 1.0)[1]
    assert ((column >= 0) & (column < 1030)).all()
