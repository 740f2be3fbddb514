"""mkd/compat/experts.py, and that megatron-core 0.19 still needs it. The loss: tests/dist/test_context_parallel.py."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import moe_utils, router
from torch.nn.functional import linear

from mkd.compat.experts import (
    add_router_biases_in_fp32,
    balance_experts_over_unequal_ranks,
    with_own_output,
    with_whole_bias,
)
from tests.support.upstream import fresh


def test_padding_does_not_change_the_expert_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = fresh(router)
    names = ("get_tokens_per_expert_and_token_count", "_apply_expert_bias")
    monkeypatch.setattr(router, names[0], getattr(upstream, names[0]))
    monkeypatch.setattr(router.TopKRouter, names[1], getattr(upstream.TopKRouter, names[1]))
    choices = torch.tensor([[1, 0], [0, 1], [1, 0]], dtype=torch.bool)
    padding = torch.tensor([False, False, True])

    def counted() -> list[float]:
        module = SimpleNamespace(enable_expert_bias=True, local_tokens_per_expert=torch.zeros(2))
        router.TopKRouter._apply_expert_bias(module, choices, padding)
        return module.local_tokens_per_expert.tolist()

    with pytest.raises(RuntimeError, match="must match"):
        counted()
    balance_experts_over_unequal_ranks()
    assert counted() == [1.0, 1.0]


def product_of_transformer_engine(
    a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, layout: str, bias: Any = None, grad: bool = False
) -> list[torch.Tensor]:
    """b x a in cuBLASLt's layouts; a bias of bf16 is read as if it had the dtype of the output."""
    a, b = a.to(dtype), b.to(dtype)
    output = {"TN": lambda: b @ a.T, "NN": lambda: b @ a, "NT": lambda: b.T @ a}[layout]()
    if bias is not None:
        misread = bias.detach().view(dtype)
        output = output + torch.cat([misread, misread.new_zeros(len(bias) - len(misread))])
    return [output]


def test_router_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and gradients of a router with a bias in bf16 are those of fp32."""
    monkeypatch.setattr(moe_utils, "te_general_gemm", product_of_transformer_engine)
    monkeypatch.setattr(router, "router_gating_linear", moe_utils.router_gating_linear)
    torch.manual_seed(1)
    inputs = [torch.randn(shape).bfloat16().requires_grad_() for shape in ((3, 2, 8), (4, 8), (4,))]
    upstream = torch.randn(3, 2, 4)

    def logits_and_gradients(compute: Any) -> tuple[torch.Tensor, ...]:
        logits = compute(*inputs)
        return (logits, *torch.autograd.grad(logits, inputs, upstream))

    expected = logits_and_gradients(lambda x, weight, bias: linear(x.float(), weight.float(), bias.float()))
    for _ in range(2):
        add_router_biases_in_fp32()
        found = logits_and_gradients(lambda *given: router.router_gating_linear(*given, torch.float32))
        torch.testing.assert_close(found[0], expected[0])
        for one, other in zip(found[1:], expected[1:], strict=True):  # rounded to bf16
            torch.testing.assert_close(one, other, rtol=2**-8, atol=1e-6)
    wrong = moe_utils.router_gating_linear(*inputs, torch.float32)
    assert (wrong - expected[0]).abs().max() > 0.1, "megatron-core adds the bias itself: the patch can go"
    assert router.router_gating_linear(*inputs[:2], None, torch.float32).dtype == torch.float32


class Double(torch.autograd.Function):
    """Its output is a view, as that of Transformer Engine's linear layers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return (2 * x).view(-1, 2)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> torch.Tensor:
        return 2 * upstream


class Layer:
    def __init__(self, *, is_expert: bool) -> None:
        self.bias = torch.ones(2, requires_grad=True)
        self.bias.sequence_parallel = True

    def forward(self, x: torch.Tensor) -> tuple:
        return Double.apply(x).view(-1, 2), self.bias


@pytest.mark.parametrize("is_expert", [False, True])
def test_biases_of_experts(monkeypatch: pytest.MonkeyPatch, is_expert: bool) -> None:
    """The bias of an expert can be added in place, and no rank sums its gradient again."""
    monkeypatch.setattr(Layer, "__init__", with_whole_bias(Layer.__init__))
    monkeypatch.setattr(Layer, "forward", with_own_output(Layer.forward))
    layer, x = Layer(is_expert=is_expert), torch.ones(3, 2, requires_grad=True)
    assert layer.bias.sequence_parallel != is_expert
    output, bias = layer.forward(x)
    if not is_expert:
        with pytest.raises(RuntimeError, match="modified inplace"):
            output += bias
        return
    output += bias
    output.sum().backward()
    assert x.grad.eq(2).all() and layer.bias.grad.eq(3).all()
