"""Norm modules for sequence parallelism without Transformer Engine.

Megatron's torch norms refuse sequence parallelism, although the computation allows it: each rank normalizes its own
tokens, and the weight's gradient is the sum over the tensor-parallel ranks. Megatron computes that sum for every
parameter with `sequence_parallel = True`.
"""

from typing import Any

import torch
from megatron.core.transformer import torch_norm
from megatron.core.transformer.transformer_config import TransformerConfig


class ZeroCenteredRMSNorm(torch.nn.Module):
    """RMSNorm whose weight is the difference from 1 (`--apply-layernorm-1p`), computed in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        """A norm over the last axis, with weights of 0."""
        super().__init__()
        self.weight, self._eps = torch.nn.Parameter(torch.zeros(width)), eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., width] -> the same shape and dtype."""
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        return (wide * (1.0 + self.weight.float())).to(hidden.dtype)


def build_norm(
    cls: type, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any
) -> torch.nn.Module:
    """The LayerNorm or RMSNorm of `config`, its parameters marked for the gradient sum under sequence parallelism."""
    kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
    assert config.normalization in kinds, f"normalization {config.normalization!r} has no CPU module"
    if config.layernorm_zero_centered_gamma:
        assert config.normalization == "RMSNorm", "LayerNorm with layernorm_zero_centered_gamma has no CPU module"
        norm = ZeroCenteredRMSNorm(hidden_size, eps)
    else:
        norm = kinds[config.normalization](normalized_shape=hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


def install() -> None:
    """Make megatron's `WrappedTorchNorm(...)` return these modules, also where the name is imported already."""
    torch_norm.WrappedTorchNorm.__new__ = staticmethod(build_norm)
