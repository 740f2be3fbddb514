"""mkd/models/delta_rule.py: values and gradients of the token-by-token definitions, for rows of more than one chunk and
of more than one block, and for packed rows; where PyTorch's operations are used instead of kernels."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from megatron.core.ssm.gated_delta_net import common
from torch import Tensor
from torch.nn import functional as F
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn

from mkd import cpu
from mkd.models import state_space
from mkd.models.delta_rule import causal_conv1d, chunk_gated_delta_rule, l2norm, missing_kernel
from tests.support.delta_rule import delta_rule_by_token
from tests.support.tolerance import FP32, FP64, assert_close_norm

LENGTH, HEADS, WIDTH, VALUES = 150, 3, 8, 5
SEGMENTS = {"one": [0, LENGTH], "packed": [0, 1, 3, 80, 80, LENGTH]}
"""Bounds of segments: one token, fewer tokens than the convolution has taps, none, more than a chunk."""
BLOCKS = {"one block": 2048, "blocks": 64}
ROUNDING = 1e-6
"""fp32 as exact as the same definition token by token in fp32; sums and differences of decays in fp32 lose two digits
more in the gradient of the decays."""


@pytest.fixture(params=BLOCKS.values(), ids=BLOCKS)
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_space, "BLOCK", request.param)


def inputs(dtype: torch.dtype, rows: int = 1) -> dict[str, Tensor]:
    """q, k, v, log_rate and beta; decays from almost none to almost all."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(rows, LENGTH, HEADS, WIDTH, generator=generator) for _ in range(2))
    v = torch.randn(rows, LENGTH, HEADS, VALUES, generator=generator)
    beta = torch.rand(rows, LENGTH, HEADS, generator=generator)
    found = {"q": l2norm(q), "k": l2norm(k), "v": v, "beta": beta, "log_rate": torch.tensor([-6.0, 0.0, 2.8])}
    return {name: value.to(dtype).requires_grad_() for name, value in found.items()}


def decays(log_rate: Tensor, rows: int = 1) -> Tensor:
    """[b, s, h] g, as a gated delta net makes it of its parameter A_log."""
    steps = torch.randn(rows, LENGTH, HEADS, generator=torch.Generator().manual_seed(3))
    return -log_rate.exp() * F.softplus(steps.to(log_rate.dtype))


def errors_of_rule(dtype: torch.dtype, bounds: list[int], rows: int = 1) -> dict[str, tuple[Tensor, Tensor]]:
    """name -> (found, expected) of the output and of the gradients."""
    own, other = inputs(dtype, rows), {name: value.detach().double() for name, value in inputs(dtype, rows).items()}
    upstream = torch.randn(rows, LENGTH, HEADS, VALUES, generator=torch.Generator().manual_seed(1))
    for value in other.values():
        value.requires_grad_()
    segments = torch.tensor(bounds, dtype=torch.int32) if len(bounds) > 2 else None
    own_rate, other_rate = (some.pop("log_rate") for some in (own, other))
    output, state = chunk_gated_delta_rule(**own, g=decays(own_rate, rows), cu_seqlens=segments, initial_state=None)
    expected, _ = delta_rule_by_token(**other, g=decays(other_rate, rows), starts=bounds)
    assert state is None and output.dtype == dtype
    output.backward(upstream.to(dtype))
    expected.backward(upstream.double())
    own["log_rate"], other["log_rate"] = own_rate, other_rate
    gradients = {name: (value.grad, other[name].grad) for name, value in own.items()}
    return {"output": (output, expected), **gradients}


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("bounds", SEGMENTS.values(), ids=SEGMENTS)
def test_delta_rule(bounds: list[int]) -> None:
    for name, (found, expected) in errors_of_rule(torch.float32, bounds).items():
        assert_close_norm(found, expected, ROUNDING, name)
    for name, (found, expected) in errors_of_rule(torch.float64, bounds).items():
        assert_close_norm(found, expected, FP64, name)


def test_several_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_space, "BLOCK", 128)
    for name, (found, expected) in errors_of_rule(torch.float32, [0, LENGTH], rows=2).items():
        assert_close_norm(found, expected, ROUNDING, name)


def test_bf16() -> None:
    """Only inputs and outputs are rounded."""
    for name, (found, expected) in errors_of_rule(torch.bfloat16, SEGMENTS["packed"]).items():
        assert_close_norm(found, expected, 1e-2, name)


def test_decays_do_not_overflow() -> None:
    values = {name: value.detach() for name, value in inputs(torch.float32).items() if name != "log_rate"}
    decay = torch.full_like(values["beta"], -1e4).requires_grad_()
    output, _ = chunk_gated_delta_rule(**values, g=decay)
    output.sum().backward()
    assert output.isfinite().all() and decay.grad.isfinite().all()


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("taps", [1, 4])
@pytest.mark.parametrize("bounds", SEGMENTS.values(), ids=SEGMENTS)
def test_convolution(bounds: list[int], taps: int) -> None:
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn(1, LENGTH, 6, generator=generator), torch.randn(6, taps, generator=generator)
    upstream = torch.randn(1, LENGTH, 6, generator=generator)
    segments = torch.tensor(bounds, dtype=torch.int32) if len(bounds) > 2 else None
    for bias in (torch.randn(6, generator=generator), None):
        own, other = ([value.clone().requires_grad_() for value in (x, weight)] for _ in range(2))
        found, _ = causal_conv1d(*own, bias, activation="silu", cu_seqlens=segments)
        parts = [
            causal_conv1d_fn(other[0][:, start:end].transpose(1, 2), other[1], bias, activation="silu").transpose(1, 2)
            for start, end in pairwise(bounds)
            if end > start
        ]
        expected = torch.cat(parts, dim=1)
        assert_close_norm(found, expected, FP32, "convolution")
        for value, gradient in zip(own, torch.autograd.grad(expected, other, upstream), strict=True):
            assert_close_norm(torch.autograd.grad(found, value, upstream, retain_graph=True)[0], gradient, FP32, "x")


@pytest.mark.parametrize(
    ("version", "capability", "has_tilelang", "is_missing"),
    [
        ("3.6.0", (9, 0), False, True),
        ("3.4.0+git1", (9, 0), False, True),
        ("3.7.1", (9, 0), False, False),
        ("3.3.1", (9, 0), False, False),
        ("3.6.0", (8, 0), False, False),
        ("3.6.0", None, False, False),
        ("3.6.0", (9, 0), True, False),
    ],
)
def test_kernels_for_training(
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    capability: tuple[int, int] | None,
    has_tilelang: bool,
    is_missing: bool,
) -> None:
    monkeypatch.setattr(cpu, "is_target", lambda: False)
    monkeypatch.setattr(cpu, "compute_capability", lambda: capability)
    monkeypatch.setattr(common, "chunk_gated_delta_rule", chunk_gated_delta_rule)
    monkeypatch.setattr("triton.__version__", version)
    monkeypatch.setattr("mkd.models.delta_rule.find_spec", lambda name: object() if has_tilelang else None)
    assert missing_kernel(is_trained=False, is_deterministic=False) is None
    assert missing_kernel(is_trained=False, is_deterministic=True) == "--deterministic-mode"
    reason: Any = missing_kernel(is_trained=True, is_deterministic=False)
    assert (reason is not None) == is_missing
    if is_missing:
        assert f"no gradients with Triton {version} on Hopper GPUs" in reason and "tilelang" in reason


def test_without_flash_linear_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_kernel(is_trained=True, is_deterministic=False) == "the job runs on CPU"
    monkeypatch.setattr(cpu, "is_target", lambda: False)
    monkeypatch.setattr(common, "chunk_gated_delta_rule", None)
    assert "pip install flash-linear-attention" in missing_kernel(is_trained=False, is_deterministic=False)
