"""Layers whose attention and MLP have the same input, x + attention(norm(x)) + mlp(norm(x)), and norms without bias."""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn


class CenteredNorm(nn.Module):
    """LayerNorm with weights and without biases, computed in fp32."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **options: Any) -> None:
        """A norm with weights of 1.

        Args:
            config: of the model.
            hidden_size: number of channels.
            eps: added to the variance.
            options: as in megatron's norms; unused.
        """
        super().__init__()
        self._eps = eps
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., H] -> the same shape and dtype."""
        wide = hidden_states.float()
        normed = nn.functional.layer_norm(wide, wide.shape[-1:], self.weight.float(), None, self._eps)
        return normed.to(hidden_states.dtype)


class _AttentionInput(nn.Module):
    """Takes the place of the norm before the MLP: returns the input of attention and the residual."""

    def __init__(self, norm: CenteredNorm) -> None:
        super().__init__()
        self._normed: Tensor | None = None
        norm.register_forward_hook(self._keep)

    def _keep(self, norm: CenteredNorm, inputs: Any, output: Tensor) -> None:
        self._normed = output

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """[s, b, H] after attention -> ([s, b, H] input of attention, `hidden_states`)."""
        normed, self._normed = self._normed, None
        return normed, hidden_states


class ParallelBlockLayer(TransformerLayer):
    """Megatron's layer with one norm, a `CenteredNorm`, for attention and MLP."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """See megatron's `TransformerLayer`."""
        super().__init__(*args, **options)
        self.recompute_input_layernorm = False  # Megatron frees the output after attention, but the MLP needs it
        self.pre_mlp_layernorm = _AttentionInput(self.input_layernorm)
