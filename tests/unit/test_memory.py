"""The memory estimate against models that are built, and against sizes by hand."""

from argparse import Namespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mkd.arguments import default_arguments
from mkd.memory import estimate_memory, parameters_on_fullest_rank

GIB = 2**30
SIZES = dict(
    num_layers=3, hidden_size=64, ffn_hidden_size=160, num_attention_heads=8, num_query_groups=2, kv_channels=8
)


def arguments(**changes: Any) -> Namespace:
    values = dict(
        **SIZES,
        group_query_attention=True,
        swiglu=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        padded_vocab_size=512,
        seq_length=32,
        micro_batch_size=2,
        global_batch_size=16,
        data_parallel_size=2,
        untie_embeddings_and_output_weights=False,
        params_dtype=torch.float32,
    )
    args = default_arguments()
    for name, value in {**values, **changes}.items():
        setattr(args, name, value)
    return args


@pytest.mark.parametrize("tied", [True, False])
def test_counts_the_parameters_that_transformers_has(tied: bool) -> None:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    count = sum(p.numel() for p in LlamaForCausalLM(config).parameters())
    assert parameters_on_fullest_rank(arguments(untie_embeddings_and_output_weights=not tied)) == count


def test_parts_by_hand() -> None:
    student, teacher = arguments(), arguments(hidden_size=128, kv_channels=16, params_dtype=torch.bfloat16)
    parts = {name: gib * GIB for name, gib in estimate_memory(student, teacher, 20, all_at_once=True).items()}
    assert parts["student weights, gradients, optimizer"] == 16 * parameters_on_fullest_rank(student)
    assert parts["logits of the loss"] == (2 * 20 + 20) * 4 * 512
    assert parts["teacher weights"] == 2 * parameters_on_fullest_rank(teacher)
    assert parts["teacher hidden states"] == 2 * 128 * (16 // 2) * 32
    paired = estimate_memory(student, teacher, 20, all_at_once=True, paired_layers=3)
    assert paired["teacher hidden states"] * GIB == 4 * parts["teacher hidden states"]
    assert paired["maps between layers"] * GIB == 3 * 64 * 128 * 16
    assert "maps between layers" not in parts


def test_context_parallel_ranks_have_their_share_of_the_tokens_and_of_the_optimizer_state() -> None:
    sizes = dict(params_dtype=torch.bfloat16, use_distributed_optimizer=True, context_parallel_size=2)
    student, teacher = arguments(**sizes), arguments(hidden_size=128, kv_channels=16)
    parts = estimate_memory(student, teacher, 20, all_at_once=True)
    assert parts["teacher hidden states"] * GIB == 4 * 128 * (16 // 2) * 32 // 2
    assert parts["student weights, gradients, optimizer"] * GIB == 9 * parameters_on_fullest_rank(student)


def test_optimizer_state_is_cut_over_replicas_in_half_precision() -> None:
    args = arguments(params_dtype=torch.bfloat16, use_distributed_optimizer=True, data_parallel_size=4)
    parts = estimate_memory(args, None, None, all_at_once=False)
    assert parts["student weights, gradients, optimizer"] * GIB == 9 * parameters_on_fullest_rank(args)
    assert "teacher weights" not in parts
