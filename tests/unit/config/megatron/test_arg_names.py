"""mkd/config/megatron/arg_names.py has an entry for each model argument of the installed megatron-core."""

from argparse import ArgumentParser
from functools import cache

import pytest
from megatron.training.arguments import add_megatron_arguments

from mkd.config.megatron import arg_names as names
from mkd.config.megatron.arg_names import (
    ARGS,
    ArgRole,
    comparable,
    frozen_values,
    labels,
    names_with,
    values_without_student,
)
from mkd.models.layer_options import LayerOptions
from mkd.models.model_options import ModelOptions

MODEL_GROUPS = (
    "transformer configuration",
    "network size",
    "moe",
    "mla",
    "experimental_attention_variant",
    "heterogeneous architecture",
)
"""Titles of the argument groups in which Megatron describes models."""
BEYOND_MEGATRON = {"beta_fast", "beta_slow", "gtp_weight_remat_size", "expert_gtp_weight_remat_size"}
BEYOND_MEGATRON |= {"original_max_position_embeddings", "rank", "rope_type", "virtual_pipeline_model_parallel_size"}
BEYOND_MEGATRON |= {"padded_vocab_size", "world_size", "softmax_scale", *LayerOptions.__dataclass_fields__}
BEYOND_MEGATRON |= {*ModelOptions.__dataclass_fields__}
"""Arguments without a flag: Megatron computes them, or checkpoints of some models store them."""


@cache
def parser() -> ArgumentParser:
    return add_megatron_arguments(ArgumentParser(allow_abbrev=False))


@pytest.mark.parametrize("title", MODEL_GROUPS)
def test_each_model_argument_has_an_entry(title: str) -> None:
    (group,) = (group for group in parser()._action_groups if group.title == title)
    found = {action.dest for action in group._group_actions}
    assert found, "Megatron renamed the group"
    assert sorted(found - ARGS.keys()) == [], "give these names their roles in mkd/config/megatron/arg_names.py"


def test_each_entry_is_an_argument() -> None:
    known = {action.dest for action in parser()._actions}
    assert sorted(ARGS.keys() - known - BEYOND_MEGATRON) == []


def test_each_name_has_one_entry_with_a_role() -> None:
    sections = [value for value in vars(names).values() if isinstance(value, tuple) and value]
    entries = [arg for section in sections for arg in section if isinstance(arg, names.MegatronArg)]
    assert len(entries) == len(ARGS) == len({arg.name for arg in entries})
    assert all(arg.roles for arg in entries)


def test_queries() -> None:
    assert names_with(ArgRole.LAYOUT) == (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "sequence_parallel",
    )
    assert set(names_with(ArgRole.LAYOUT)) < set(names_with(ArgRole.SHARED))
    assert set(names_with(ArgRole.RUN_CHOICE)) == {
        *("attention_dropout", "hidden_dropout", "moe_aux_loss_coeff", "moe_router_dtype"),
    }
    assert names_with(ArgRole.SAMPLES)[-1] == "seq_length"
    assert {"hidden_dropout": 0.0, "cuda_graph_impl": "none", "mtp_num_layers": None}.items() <= frozen_values().items()
    assert {"lr_decay_style": "constant", "save": None}.items() <= values_without_student().items()
    assert list(labels())[:2] == ["num_layers", "hidden_size"]


def test_a_teacher_takes_no_value_of_the_student_that_shapes_weights() -> None:
    shared, weights = set(names_with(ArgRole.SHARED)), {*names_with(ArgRole.SHAPE), *names_with(ArgRole.MEANING)}
    assert not shared & weights and not frozen_values().keys() & (shared | weights)


PLAIN = {"num_attention_heads": 6, "group_query_attention": False, "num_layers": 5}


@pytest.mark.parametrize("name", ["num_query_groups", "group_query_attention"])
def test_one_key_value_head_per_head_in_every_spelling(name: str) -> None:
    spellings = [{"num_query_groups": groups} for groups in (None, 1, 6)]
    spellings += [{"group_query_attention": True, "num_query_groups": groups} for groups in (None, 6)]
    values = [comparable(name, {**PLAIN, **spelling}) for spelling in spellings]
    assert values == [values[0]] * len(values)
    assert comparable(name, {**PLAIN, "group_query_attention": True, "num_query_groups": 2}) != values[0]


@pytest.mark.parametrize(
    ("name", "spellings", "other"),
    [
        ("moe_layer_freq", [1, [1] * 5], 2),
        ("moe_layer_freq", [2, [1, 0, 1, 0, 1]], [0, 1, 0, 1, 0]),
        ("window_attn_skip_freq", [None, 6, [1] * 5], 5),
        ("window_attn_skip_freq", [2, [1, 0, 1, 0, 1]], [0, 1, 0, 1, 0]),
        ("no_rope_freq", [None, 6, [0] * 5], [1] * 5),
        ("no_rope_freq", [4, [0, 0, 0, 1, 0]], 3),
        ("linear_attention_freq", [4, [1, 1, 1, 0, 1]], None),
    ],
)
def test_kinds_of_layers_in_every_spelling(name: str, spellings: list[object], other: object) -> None:
    values = [comparable(name, {**PLAIN, name: spelling}) for spelling in spellings]
    assert values == [values[0]] * len(values)
    assert comparable(name, {**PLAIN, name: other}) != values[0]


def test_a_stored_number_of_layers_takes_no_memory() -> None:
    assert comparable("moe_layer_freq", {"num_layers": 1 << 39, "moe_layer_freq": 2}) == 2
