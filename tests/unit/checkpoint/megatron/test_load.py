"""Weights whose names differ between Transformer Engine's layers and local ones."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from mkd.checkpoint.megatron.load import rename_to_stored_norms

LOCAL = "decoder.layers.mlp.linear_fc1.layer_norm_weight"
TRANSFORMER_ENGINE = "decoder.layers.pre_mlp_layernorm.weight"


@pytest.mark.parametrize(
    ("asked", "stored", "expected"),
    [
        (LOCAL, {TRANSFORMER_ENGINE}, TRANSFORMER_ENGINE),
        (TRANSFORMER_ENGINE, {LOCAL}, LOCAL),
        (LOCAL, {LOCAL, TRANSFORMER_ENGINE}, LOCAL),
        (LOCAL, set(), LOCAL),
        ("decoder.final_layernorm.weight", {LOCAL}, "decoder.final_layernorm.weight"),
    ],
)
def test_norm_before_experts(asked, stored, expected):
    tensor = ShardedTensor.from_rank_offsets(asked, torch.zeros(4))
    folder = SimpleNamespace(metadata=SimpleNamespace(state_dict_metadata=dict.fromkeys(stored)))
    rename_to_stored_norms({"weight": tensor, "object": object()}, folder)
    assert tensor.key == expected
