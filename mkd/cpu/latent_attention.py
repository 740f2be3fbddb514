"""Gradients of latent attention on tensor-parallel ranks without Transformer Engine.

Megatron's local layers split the down projection to the latent over the ranks and gather its output. Its rotary part is
shared by the keys of all heads, but the backward pass of the gather is a split: each rank keeps only the gradient from
its own heads, and the gradients from the heads of other ranks are lost. Transformer Engine's projection is not split.
"""

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

UPSTREAM = MLASelfAttention._qkv_down_projection


def project_down(attention: MLASelfAttention, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces megatron's method; the result is as if the projections were not split.

    Args:
        attention: the module.
        hidden_states: [s, b, h], [s/tp, b, h] under sequence parallelism.

    Returns:
        Query latent [s, b, rank], key-value latent [s, b, rank + rotary width]; s/tp under sequence parallelism.
    """
    query, key_value = UPSTREAM(attention, hidden_states)
    config, group = attention.config, attention.tp_group
    sizes = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
    if key_value.size(-1) == sum(sizes):
        return query, key_value
    key_value = gather_from_tensor_model_parallel_region(key_value, group=group)
    if config.sequence_parallel:
        # Megatron gathers the rotary part over the sequence, which sums its gradients.
        return query, scatter_to_sequence_parallel_region(key_value, group=group)
    latent, positions = key_value.split(sizes, dim=-1)
    return query, torch.cat([latent, copy_to_tensor_model_parallel_region(positions, group=group)], dim=-1)


def install() -> None:
    """Use `project_down` in megatron's latent attention."""
    MLASelfAttention._qkv_down_projection = project_down
