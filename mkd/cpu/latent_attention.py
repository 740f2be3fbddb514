"""Gradients of latent attention on tensor-parallel ranks without Transformer Engine.

Megatron's local layers cut the projection down to the latent over the ranks and gather its output. The part of it that
carries positions is every head's key, but the gather's backward pass is a cut: each rank keeps what its own heads send
back for its columns, and what the other ranks' heads send back is lost. Transformer Engine's projection is not cut.
"""

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

MEGATRONS_OWN = MLASelfAttention._qkv_down_projection


def project_down(attention: MLASelfAttention, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Projections to the latents, as megatron's method: it goes on as if they had not been cut.

    Args:
        attention: the module.
        hidden_states: [s, b, h], [s/tp, b, h] under sequence parallelism.

    Returns:
        Of the query [s, b, rank], of key and value [s, b, rank + positions]; s/tp under sequence parallelism.
    """
    query, key_value = MEGATRONS_OWN(attention, hidden_states)
    config, group = attention.config, attention.tp_group
    sizes = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
    if key_value.size(-1) == sum(sizes):
        return query, key_value
    key_value = gather_from_tensor_model_parallel_region(key_value, group=group)
    if config.sequence_parallel:
        # Megatron gathers the positions over the sequence, which adds up their gradients.
        return query, scatter_to_sequence_parallel_region(key_value, group=group)
    latent, positions = key_value.split(sizes, dim=-1)
    return query, torch.cat([latent, copy_to_tensor_model_parallel_region(positions, group=group)], dim=-1)


def install() -> None:
    """Have megatron's latent attention use `project_down`."""
    MLASelfAttention._qkv_down_projection = project_down
