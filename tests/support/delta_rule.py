"""The definition of the gated delta rule, token by token, in float64."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next


def delta_rule_by_token(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Collection[int] = ()
) -> tuple[Tensor, Tensor]:
    """Outputs [b, s, h, w] and the last state [b, h, d, w] in float64, as `mkd.models.delta_rule` defines them.

    Args:
        q: [b, s, h, d]
        k: [b, s, h, d]
        v: [b, s, h, w]
        g: [b, s, h]
        beta: [b, s, h]
        starts: tokens at which the state is zero.
    """
    q, k, v, g, beta = (tensor.double() for tensor in (q * q.shape[-1] ** -0.5, k, v, g, beta))
    state, outputs = q.new_zeros(q.shape[0], *k.shape[2:], v.shape[-1]), []
    for token in range(q.shape[1]):
        state = torch.zeros_like(state) if token in starts else state * g[:, token, :, None, None].exp()
        change = v[:, token] - torch.einsum("bhdw,bhd->bhw", state, k[:, token])
        state = state + torch.einsum("bhd,bhw->bhdw", k[:, token] * beta[:, token, :, None], change)
        outputs.append(torch.einsum("bhdw,bhd->bhw", state, q[:, token]))
    return torch.stack(outputs, dim=1), state


def _of_transformers(
    query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, use_qk_l2norm_in_kernel: bool, **unused: Any
) -> tuple[Tensor, Tensor]:
    """As `torch_chunk_gated_delta_rule` of transformers, without an earlier state."""
    assert use_qk_l2norm_in_kernel and unused["initial_state"] is None
    groups = value.shape[2] // key.shape[2]
    query, key = (
        (tensor.double() * torch.rsqrt(tensor.double().square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(
            groups, dim=2
        )
        for tensor in (query, key)
    )
    output, state = delta_rule_by_token(query, key, value, g, beta)
    return output.to(value.dtype), state.float()


@contextmanager
def exact_delta_rule() -> Iterator[None]:
    """Models of transformers compute gated delta nets token by token in float64.

    transformers' own function works in fp32, in which the sums of the gradients of the decays cancel up to four digits.
    """
    modules = (modeling_qwen3_next, modeling_qwen3_5, modeling_qwen3_5_moe)
    usual = [module.torch_chunk_gated_delta_rule for module in modules]
    for module in modules:
        module.torch_chunk_gated_delta_rule = _of_transformers
    try:
        yield
    finally:
        for module, function in zip(modules, usual, strict=True):
            module.torch_chunk_gated_delta_rule = function
