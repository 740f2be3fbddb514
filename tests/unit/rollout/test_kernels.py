"""The kernels of writing, in Triton's interpreter, against their definitions."""

from argparse import Namespace

import pytest
import torch
import triton
import triton.language as tl

from mkd.rollout.engine.cache_attention import ScoreOptions, attend_reference, store_reference
from mkd.rollout.engine.sampler import gumbel_noise
from tests.support.loss_cases import INTERPRETED

pytestmark = INTERPRETED

TEXTS, LENGTH = 3, 150


@pytest.mark.parametrize("case", ["all heads", "groups", "window", "sinks", "softcap", "widths"])
def test_attention(case: str) -> None:
    """Positions at the start, at the end of a block and behind it; what no text attends to is large.

    The new key and value, views of a wider tensor, replace those that are stored at the position.
    """
    from mkd.rollout.engine.attention_kernel import attend_triton

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
    positions = torch.tensor([0, 31, 130])
    for text, position in enumerate(positions.tolist()):
        keys[text, :, position:], values[text, :, position:] = 100.0, 1000.0
    mixed = torch.randn(TEXTS, groups, width + value_width, generator=generator)
    new = mixed[..., :width], mixed[..., width:]
    options = ScoreOptions(
        0.3,
        window=20 if case == "window" else None,
        softcap=2.0 if case == "softcap" else None,
        sinks=torch.randn(heads, generator=generator) if case == "sinks" else None,
    )
    stored = keys.clone(), values.clone()
    found = attend_triton(query, new, *stored, positions, options)
    store_reference(new, keys, values, positions)
    assert torch.equal(stored[0], keys) and torch.equal(stored[1], values)
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


@pytest.mark.parametrize(("first", "dtype"), [(0, torch.float32), (5000, torch.float32), (5000, torch.bfloat16)])
def test_sampled_tokens(first: int, dtype: torch.dtype) -> None:
    """The same as the definition for every key, with ids that do not exist and a column of equal logits."""
    from mkd.rollout.engine.sampling_kernel import sampled_triton

    generator = torch.Generator().manual_seed(2)
    logits = (3.0 * torch.randn(8, 2100, generator=generator)).to(dtype)
    logits[:, 2050:], logits[0] = -torch.inf, 0.0
    keys = torch.randint(-(2**63), 2**63 - 1, (8,), generator=generator)
    best, column = sampled_triton(logits, keys, first, 0.7)
    exact = (logits.double() / 0.7 + gumbel_noise(keys, first, 2100)).max(dim=1)
    assert column.tolist() == exact.indices.tolist()
    torch.testing.assert_close(best, exact.values, rtol=1e-12, atol=1e-12)


def test_bounds_of_random_numbers() -> None:
    """The bound in fp32 is above every number of the hash, at its ends too, and seldom far above those that matter."""
    from mkd.rollout.engine.sampling_kernel import _largest_gumbel

    ends = torch.cat([torch.arange(300), torch.arange(1 << 28, (1 << 28) + 300)])
    high = torch.cat([ends, (1 << 32) - 1 - ends, torch.arange(0, 1 << 32, 1 << 20)]).unique()
    found = torch.empty(len(high))

    @triton.jit
    def bounds(high_ptr, out_ptr, count, largest: tl.constexpr, BLOCK: tl.constexpr):
        index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        values = largest(tl.load(high_ptr + index, mask=index < count, other=0).to(tl.uint32))
        tl.store(out_ptr + index, values, mask=index < count)

    bounds[(triton.cdiv(len(high), 1024),)](high, found, len(high), _largest_gumbel, BLOCK=1024)
    for last in (0, (1 << 20) - 1):  # the lower bits that the numbers have
        uniform = (((high << 20) + last).double() + 0.5) * 2.0**-52
        exact = -torch.log(-torch.log(uniform))
        assert (found.double() + 1e-4 >= exact).all()
    matter = (exact > 0.0) & (exact < 15.0)
    assert matter.sum() > 1000 and (found.double() - exact)[matter].max() < 0.01


def test_sampled_tokens_exist() -> None:
    """Also where the logits are NaN, so that the loss can report them."""
    from mkd.rollout.engine.sampling_kernel import sampled_triton

    column = sampled_triton(torch.full((2, 1030), torch.nan), torch.tensor([1, 2]), 0, 1.0)[1]
    assert ((column >= 0) & (column < 1030)).all()
