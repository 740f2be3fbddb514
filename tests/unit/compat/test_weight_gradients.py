"""mkd/compat/weight_gradients.py on layers that follow Transformer Engine's contract; the layers themselves:
tests/gpu/test_weight_gradients.py."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mkd.compat.weight_gradients import accumulate_in_layers
from mkd.errors import MkdConfigError

GARBAGE = torch.full((2, 3), torch.nan)
"""The storage behind all placeholders."""


def get_dummy_wgrad(shape: list[int], dtype: object) -> Tensor:
    assert (shape, dtype) == ([2, 3], torch.float32)
    return GARBAGE.detach()


class Product(torch.autograd.Function):
    """x W' as Transformer Engine computes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, fused: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.fused = weight, fused
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        gradient = upstream.T @ x
        if ctx.fused:
            ctx.weight.main_grad += gradient
            ctx.weight.grad_added_to_main_grad, gradient = True, get_dummy_wgrad([2, 3], weight.dtype)
        return upstream @ weight, gradient, None


class Layer(nn.Module):
    """A linear layer of Transformer Engine."""

    def __init__(self, weight: nn.Parameter | None = None, fuse_wgrad_accumulation: bool = False) -> None:
        super().__init__()
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.weight = nn.Parameter(torch.ones(2, 3)) if weight is None else weight
        self.layer_norm_weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x * self.layer_norm_weight, self.weight, self.fuse_wgrad_accumulation)


def in_ddp(*layers: nn.Module) -> nn.ModuleList:
    """A chunk whose gradients are accumulated as by Megatron's DDP."""
    chunk = nn.ModuleList(layers)

    def add(weight: nn.Parameter) -> None:
        if weight.grad is not None and not weight.grad_added_to_main_grad:
            weight.main_grad += weight.grad
        weight.grad = None

    for weight in chunk.parameters():
        if weight.requires_grad:
            weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
            weight.register_post_accumulate_grad_hook(add)
    return chunk


def gradients(chunk: nn.Module, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """`main_grad` after two microbatches."""
    for number in (1.0, 2.0):
        run(torch.arange(12.0).view(4, 3) * number).square().sum().backward()
    return [weight.main_grad for weight in chunk.parameters()]


def test_gradients_are_the_same() -> None:
    plain, fused = Layer(), Layer()
    expected = gradients(in_ddp(plain), plain)
    chunk = in_ddp(fused)
    assert accumulate_in_layers([chunk]) == ["chunk 0: 0.weight"]
    found = gradients(chunk, fused)
    assert fused.fuse_wgrad_accumulation and fused.weight.grad_added_to_main_grad
    assert not fused.layer_norm_weight.grad_added_to_main_grad
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_layers_that_do_without() -> None:
    shared, tied, frozen, sharded = Layer(), Layer(), Layer(), Layer()
    frozen.weight.requires_grad_(False)
    own = nn.Linear(3, 2, bias=False)  # no layer of Transformer Engine
    chunk = in_ddp(shared, Layer(shared.weight), tied, frozen, sharded, own)
    tied.weight.zero_out_wgrad = True
    sharded.weight.main_grad = sharded.weight.main_grad[:1]
    outside = Layer()
    assert accumulate_in_layers([chunk, outside, in_ddp(Layer(outside.weight))]) == []
    assert not any(getattr(module, "fuse_wgrad_accumulation", False) for module in (*chunk, outside))


def test_shared_between_chunks() -> None:
    one, other = Layer(), Layer()
    chunks = [in_ddp(one), in_ddp(other, nn.Module())]
    chunks[1][1].register_parameter("again", one.weight)
    assert accumulate_in_layers(chunks) == ["chunk 1: 0.weight"]


@pytest.mark.parametrize(
    "use",
    [
        lambda layer, x: layer(x) + layer(2 * x),
        lambda layer, x: layer(x) + x @ layer.weight.T,
    ],
    ids=["called twice", "read elsewhere"],
)
def test_weights_used_otherwise_end_the_job(use: Callable[[Layer, Tensor], Tensor]) -> None:
    layer = Layer()
    chunk = in_ddp(layer)
    accumulate_in_layers([chunk])
    with pytest.raises(MkdConfigError, match=r"chunk 0: 0\.weight.*--no-gradient-accumulation-fusion"):
        gradients(chunk, lambda x: use(layer, x))


def test_weights_read_instead_of_a_call_of_the_layer() -> None:
    """As absorbed latent attention does."""
    layer, called = Layer(), Layer()
    chunk = in_ddp(layer)
    assert accumulate_in_layers([chunk])
    found = gradients(chunk, lambda x: (x * layer.layer_norm_weight) @ layer.weight.T)
    for one, other in zip(found, gradients(in_ddp(called), called), strict=True):
        assert torch.equal(one, other)


def test_layers_without_a_common_placeholder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules[__name__], "get_dummy_wgrad")
    assert accumulate_in_layers([in_ddp(Layer())]) == []


def test_recomputed_layers() -> None:
    layer = Layer()
    chunk = in_ddp(layer)
    accumulate_in_layers([chunk])

    def run(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(layer, x.requires_grad_(), use_reentrant=True)

    expected = Layer()
    for one, other in zip(gradients(chunk, run), gradients(in_ddp(expected), expected), strict=True):
        assert torch.equal(one, other)
