"""Megatron arguments of models, for tests of the memory estimate."""

from argparse import Namespace
from typing import Any

import torch

from mkd.config.flags import default_arguments


def llama_arguments(
    layers: int, width: int, ffn: int, heads: int, groups: int, tied: bool, **changes: Any
) -> Namespace:
    """Validated arguments of a Llama model in bf16 on one GPU."""
    values = dict(
        num_layers=layers,
        hidden_size=width,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups,
        group_query_attention=True,
        kv_channels=width // heads,
        swiglu=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        position_embedding_type="rope",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        untie_embeddings_and_output_weights=not tied,
        params_dtype=torch.bfloat16,
        bf16=True,
        accumulate_allreduce_grads_in_fp32=True,
        transformer_impl="transformer_engine",
        virtual_pipeline_model_parallel_size=None,
        data_parallel_size=1,
        world_size=1,
    )
    args = default_arguments()
    vars(args).update({**values, **changes})
    return args
