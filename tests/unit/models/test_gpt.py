"""mkd/models/gpt.py, and that megatron-core 0.19 still needs its corrections."""

import torch
from megatron.training.argument_utils import gpt_config_from_args

from mkd.config import flags
from mkd.models.gpt import gpt_config


def test_upstream_ignores_the_rope_scaling_factor() -> None:
    args = flags.default_arguments()
    vars(args).update(num_layers=2, hidden_size=32, num_attention_heads=2, params_dtype=torch.float32)
    vars(args).update(use_rope_scaling=True, rope_scaling_factor=32.0, padded_vocab_size=128, apply_rope_fusion=False)
    assert gpt_config_from_args(args).rope_scaling_factor == 8.0
    assert gpt_config(args).rope_scaling_factor == 32.0
