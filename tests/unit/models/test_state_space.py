"""Convolution, scan and norm of Mamba 2 against a recurrence in float64, token by token."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mkd.models.state_space import Segments, causal_conv, chunked_scan, gated_group_norm

LENGTH, HEADS, GROUPS, WIDTH, STATE = 37, 6, 2, 5, 4
BOUNDS = {"one sample": None, "packed": [0, 9, 10, 27, 37], "segment of two chunks and more": [0, 3, 37]}


def recurrence(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, starts: set[int]) -> Tensor:
    """The definition; arguments as in `chunked_scan`."""
    state, outputs = x.new_zeros(x.shape[0], HEADS, WIDTH, STATE), []
    b, c = (values.repeat_interleave(HEADS // GROUPS, dim=2) for values in (b, c))
    for t in range(LENGTH):
        state = torch.zeros_like(state) if t in starts else state
        decay = (dt[:, t] * a).exp()[..., None, None]
        state = state * decay + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        outputs.append((state * c[:, t, :, None]).sum(-1))
    return torch.stack(outputs, dim=1)


def inputs(rows: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((rows, LENGTH, HEADS, WIDTH), (rows, LENGTH, HEADS), (HEADS,), *[(rows, LENGTH, GROUPS, STATE)] * 2)
    x, dt, a, b, c = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return tuple(value.requires_grad_() for value in (x, F.softplus(dt).detach(), -a.exp().detach(), b, c))


def scan_in_blocks(values: tuple[Tensor, ...], segments: Segments | None, chunk: int, block: int) -> Tensor:
    """The outputs of `chunked_scan`, whose state passes from block to block."""
    (x, dt, a, b, c), outputs, state = values, [], None
    for start in range(0, LENGTH, block):
        own = slice(start, min(start + block, LENGTH))
        part = None if segments is None else segments.part(own.start, own.stop)
        output, state = chunked_scan(x[:, own], dt[:, own], a, b[:, own], c[:, own], part, state, chunk)
        outputs.append(output)
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize(("chunk", "block"), [(1, 37), (8, 37), (16, 37), (64, 37), (8, 16), (8, 10), (4, 1)])
@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
def test_scan(bounds: list[int] | None, chunk: int, block: int) -> None:
    """Outputs, and the gradients of all inputs, with all tokens at one time or in blocks."""
    values = inputs(2 if bounds is None else 1)
    expected = recurrence(*values, set(bounds or ()))
    segments = None if bounds is None else Segments.of(torch.tensor(bounds, dtype=torch.int32), LENGTH)
    output = scan_in_blocks(values, segments, chunk, block)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    wanted = torch.autograd.grad((expected * weight).sum(), values)
    found = torch.autograd.grad((output * weight).sum(), values)
    for name, own, other in zip(["x", "dt", "a", "b", "c"], found, wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


def test_strong_decay_is_finite() -> None:
    """Decays whose product underflows within a chunk."""
    x, _, _, b, c = inputs(1)
    dt, a = torch.full((1, LENGTH, HEADS), 50.0, dtype=torch.float32), torch.full((HEADS,), -16.0)
    x, b, c = (value.detach().float().requires_grad_() for value in (x, b, c))
    output, _ = chunked_scan(x, dt, a, b, c, chunk=16)
    output.sum().backward()
    assert all(torch.isfinite(value).all() for value in (output, x.grad, b.grad, c.grad))


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
def test_convolution(bounds: list[int] | None) -> None:
    x, weight, bias = torch.randn(1, LENGTH, 3), torch.randn(3, 4), torch.randn(3)
    segments = None if bounds is None else Segments.of(torch.tensor(bounds), LENGTH)
    found = causal_conv(x, weight, bias, segments)
    part = None if segments is None else segments.part(11, LENGTH)
    torch.testing.assert_close(causal_conv(x[:, 8:], weight, bias, part, earlier_tokens=3), found[:, 11:])
    for start, end in zip((bounds or [0])[: len(bounds or [0, 1]) - 1], (bounds or [0, LENGTH])[1:], strict=True):
        part = F.pad(x[:, start:end].transpose(1, 2), (3, 0))
        expected = F.silu(F.conv1d(part, weight[:, None], bias, groups=3)).transpose(1, 2)
        torch.testing.assert_close(found[:, start:end], expected)


def test_norm() -> None:
    """The gate comes first; each group has a mean of squares of its own."""
    x, gate, weight = torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.randn(8)
    found = gated_group_norm(x, gate, weight, 2, 1e-5)
    for start in (0, 4):
        own = slice(start, start + 4)
        expected = F.rms_norm(x[..., own] * F.silu(gate[..., own]), (4,), weight[own], 1e-5)
        torch.testing.assert_close(found[..., own], expected)
