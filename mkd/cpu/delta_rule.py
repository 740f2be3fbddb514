"""The gated delta rule, its convolution and its norm in plain PyTorch, in place of the GPU package FLA.

megatron-core 0.19's `GatedDeltaNet` computes with three functions of flash-linear-attention, which need a GPU. These
functions of PyTorch have the same arguments, also for packed rows.

Yang, Kautz, Hatamizadeh 2024, https://arxiv.org/abs/2412.06464; transformers, models/qwen3_next.
"""

from itertools import pairwise
from typing import Any

import torch
from megatron.core.ssm.gated_delta_net import common, gdn
from torch import Tensor
from torch.nn import functional as F

_CHUNK = 64
"""Tokens that are processed with matrix products; the state is passed from chunk to chunk."""


def l2norm(values: Tensor, eps: float = 1e-6, **unused: Any) -> Tensor:
    """[..., d] divided by sqrt(sum of squares + eps)."""
    wide = values.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(values.dtype)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str,
    cu_seqlens: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Convolution of each channel with its last tokens, in which a segment sees zeros before its first token.

    Args:
        x: [b, s, d]
        weight: [d, w], the last column for the token itself.
        bias: [d], or None.
        activation: silu.
        cu_seqlens: [segments + 1] bounds of the segments of a packed row.
        unused: states, which are None.

    Returns:
        [b, s, d], and no state.
    """
    assert activation in ("silu", "swish"), activation
    length, taps = x.shape[1], weight.shape[1]
    distance = torch.arange(length, device=x.device)  # to the first token of the segment
    if cu_seqlens is not None:
        bounds = cu_seqlens.long()
        distance = distance - bounds[torch.searchsorted(bounds, distance, right=True) - 1]
    output = x * weight[:, -1]
    for back in range(1, min(taps, length)):
        earlier = F.pad(x, (0, 0, back, 0))[:, :length] * (distance >= back)[:, None]
        output = output + earlier * weight[:, taps - 1 - back]
    return F.silu(output if bias is None else output + bias), None


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Outputs S_t^T q_t / sqrt(d) of the states S_t = exp(g_t) (I - beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T.

    Args:
        q: [b, s, h, d], normalized.
        k: as `q`.
        v: [b, s, h, w]
        g: [b, s, h] logarithms of the decays.
        beta: [b, s, h]
        cu_seqlens: [segments + 1] bounds of the segments of a packed row, each of which starts with a state of zeros.
        unused: states and options, which have their defaults.

    Returns:
        [b, s, h, w] in the dtype of `q`, and no state.
    """
    bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    tensors = [tensor.transpose(1, 2).float() for tensor in (q * q.shape[-1] ** -0.5, k, v, g, beta)]
    outputs = [
        _segment(*(tensor[:, :, start:end] for tensor in tensors)) for start, end in pairwise(bounds) if end > start
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2).to(q.dtype), None


def _segment(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """[b, h, n, w] outputs of one segment; arguments as in `chunk_gated_delta_rule`, with heads before tokens."""
    state = v.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1])
    outputs = []
    for chunk in zip(*(tensor.split(_CHUNK, dim=2) for tensor in (q, k, v, g, beta)), strict=True):
        output, state = _chunk(*chunk, state)
        outputs.append(output)
    return torch.cat(outputs, dim=2)


def _chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs of the tokens of one chunk, and the state after it."""
    decay, scaled = g.cumsum(-1), k * beta[..., None]
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(later, float("-inf")).exp()
    # The changes of the state by the chunk's tokens depend on one another: a triangular system.
    system = (scaled @ k.transpose(-1, -2)) * between
    sides = torch.cat([v * beta[..., None], scaled * decay.exp()[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    values, keys = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    values = values - keys @ state
    output = (q * decay.exp()[..., None]) @ state + ((q @ k.transpose(-1, -2)) * between) @ values
    last = decay[..., -1:]
    state = state * last.exp()[..., None] + (k * (last - decay).exp()[..., None]).transpose(-1, -2) @ values
    return output, state


def install() -> None:
    """Use these functions in megatron's gated delta net."""
    common.HAVE_FLA, common.l2norm = True, l2norm
    gdn.causal_conv1d, gdn.chunk_gated_delta_rule = causal_conv1d, chunk_gated_delta_rule
