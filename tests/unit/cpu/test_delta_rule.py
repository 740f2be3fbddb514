"""mkd/cpu/delta_rule.py: the functions give the values and gradients of transformers' token-by-token definitions, for
rows of more than one chunk and for packed rows."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, torch_recurrent_gated_delta_rule

from mkd.cpu.delta_rule import causal_conv1d, chunk_gated_delta_rule, l2norm
from tests.support.tolerance import FP32, assert_close_norm

LENGTH, HEADS, WIDTH, VALUES = 150, 3, 8, 5
SEGMENTS = {"one": [0, LENGTH], "packed": [0, 1, 3, 80, 80, LENGTH]}
"""Bounds of segments: one token, fewer tokens than the convolution has taps, none, more than a chunk."""


def inputs() -> dict[str, Tensor]:
    """q, k, v, g and beta of one row; decays from almost none to almost all."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, LENGTH, HEADS, WIDTH, generator=generator) for _ in range(2))
    rates = torch.rand(2, 1, LENGTH, HEADS, generator=generator)
    v = torch.randn(1, LENGTH, HEADS, VALUES, generator=generator)
    found = {"q": l2norm(q), "k": l2norm(k), "v": v, "g": -8 * rates[0] ** 4, "beta": rates[1]}
    return {name: value.requires_grad_() for name, value in found.items()}


def by_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, bounds: list[int]) -> Tensor:
    parts = [
        torch_recurrent_gated_delta_rule(*(value[:, start:end] for value in (q, k, v, g, beta)))[0]
        for start, end in pairwise(bounds)
        if end > start
    ]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("bounds", SEGMENTS.values(), ids=SEGMENTS)
def test_delta_rule(bounds: list[int]) -> None:
    upstream = torch.randn(1, LENGTH, HEADS, VALUES, generator=torch.Generator().manual_seed(1))
    own, other = inputs(), inputs()
    segments = torch.tensor(bounds) if len(bounds) > 2 else None
    output, state = chunk_gated_delta_rule(**own, cu_seqlens=segments, initial_state=None, output_final_state=False)
    expected = by_token(**other, bounds=bounds)
    assert state is None
    assert_close_norm(output, expected, FP32, "output")
    output.backward(upstream)
    expected.backward(upstream)
    for name, value in own.items():
        assert_close_norm(value.grad, other[name].grad, FP32, name)


def test_decays_do_not_overflow() -> None:
    values = {name: value.detach() for name, value in inputs().items()}
    values["g"] = torch.full_like(values["g"], -1e4).requires_grad_()
    output, _ = chunk_gated_delta_rule(**values)
    output.sum().backward()
    assert output.isfinite().all() and values["g"].grad.isfinite().all()


@pytest.mark.parametrize("taps", [1, 4])
@pytest.mark.parametrize("bounds", SEGMENTS.values(), ids=SEGMENTS)
def test_convolution(bounds: list[int], taps: int) -> None:
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn(1, LENGTH, 6, generator=generator), torch.randn(6, taps, generator=generator)
    bias = torch.randn(6, generator=generator)
    segments = torch.tensor(bounds, dtype=torch.int32) if len(bounds) > 2 else None
    found, _ = causal_conv1d(x, weight, bias, activation="silu", cu_seqlens=segments)
    parts = [
        causal_conv1d_fn(x[:, start:end].transpose(1, 2), weight, bias, activation="silu").transpose(1, 2)
        for start, end in pairwise(bounds)
        if end > start
    ]
    assert_close_norm(found, torch.cat(parts, dim=1), FP32, "convolution")
