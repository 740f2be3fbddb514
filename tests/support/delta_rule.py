"""The definition of the gated delta rule, token by token, in float64."""

from collections.abc import Collection

import torch
from torch import Tensor


def delta_rule_by_token(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Collection[int] = ()
) -> Tensor:
    """[b, s, h, w] float64 outputs; arguments as in `mkd.models.delta_rule.chunk_gated_delta_rule`.

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
    return torch.stack(outputs, dim=1)
