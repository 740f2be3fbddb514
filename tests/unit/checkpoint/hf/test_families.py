"""config.json to Megatron arguments and back."""

import math
import re
from argparse import Namespace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, LlamaConfig

from mkd.checkpoint.hf.export import architecture_of
from mkd.checkpoint.hf.families import DEEPSEEK_V3, FAMILIES, GPT_OSS, LLAMA, PHI3, UNSUPPORTED, family_of
from mkd.checkpoint.hf.writer import config_with_dtype
from mkd.config.flags import default_arguments
from mkd.config.megatron.arg_names import ArgRole, names_with
from mkd.errors import MkdCheckpointError
from mkd.models.layer_options import LayerOptions
from mkd.models.model_options import ModelOptions
from tests.support.hf_folders import LLAMA3_ROPE, SIZES
from tests.support.hf_models import HYBRID_MODELS, MIXER_MODELS, NEAR_MODELS

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", **SIZES}
OWN_ARGUMENTS = {"softmax_scale", *LayerOptions.__dataclass_fields__}
"""Arguments for which Megatron has no flag."""
OLD_ROPE = {name: value for name, value in LLAMA3_ROPE.items() if name != "rope_theta"}


KNOWN_ARGUMENTS = {*vars(default_arguments()), *OWN_ARGUMENTS, *ModelOptions.__dataclass_fields__}


def args_of(**changes):
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value != "absent"}
    return family_of(config).megatron_args(config)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400], ids=["nan", "inf", "401 digits"])
@pytest.mark.parametrize("key", ["rope_theta", "rms_norm_eps"])
def test_numbers_are_finite(key, value):
    with pytest.raises(MkdCheckpointError, match=f'"{key}" is {value}; a finite number is needed'):
        args_of(**{key: value})


def test_llama_arguments():
    args = args_of(rope_theta=500000.0)
    expected = {
        "num_layers": 4,
        "hidden_size": 48,
        "ffn_hidden_size": 72,
        "num_attention_heads": 6,
        "group_query_attention": True,
        "num_query_groups": 2,
        "kv_channels": 16,
        "vocab_size": 131,
        "max_position_embeddings": 96,
        "layernorm_epsilon": 1e-5,
        "untie_embeddings_and_output_weights": True,
        "rotary_base": 500000,
        "use_rope_scaling": False,
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "position_embedding_type": "rope",
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    assert {name: args[name] for name in expected} == expected


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.architectures[0])
def test_all_names_are_megatron_arguments(family):
    assert args_of().keys() <= KNOWN_ARGUMENTS
    assert family.fixed.keys() <= KNOWN_ARGUMENTS


def test_optional_keys_have_the_defaults_of_transformers():
    absent = dict.fromkeys(["num_key_value_heads", "head_dim", "tie_word_embeddings", "hidden_act"], "absent")
    args = args_of(**absent)
    theirs = LlamaConfig(**{key: value for key, value in CONFIG.items() if key not in absent})
    assert (args["group_query_attention"], args["num_query_groups"]) == (False, None)
    assert args["kv_channels"] == theirs.head_dim == 8
    assert args["untie_embeddings_and_output_weights"] is not theirs.tie_word_embeddings
    assert args["rotary_base"] == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    "rope",
    [{"rope_parameters": LLAMA3_ROPE}, {"rope_theta": 10000.0, "rope_scaling": OLD_ROPE}],
    ids=["transformers 5", "before"],
)
def test_llama3_rope(rope):
    args = args_of(**rope)
    assert (args["rotary_base"], args["use_rope_scaling"], args["rope_scaling_factor"]) == (10000, True, 32.0)


def test_default_rope_of_transformers_5():
    args = args_of(rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert (args["rotary_base"], args["use_rope_scaling"]) == (1000000, False)


NEEDED = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
]


@pytest.mark.parametrize("key", NEEDED)
def test_missing_key_is_named(key):
    with pytest.raises(MkdCheckpointError, match=f'has no "{key}"'):
        args_of(**{key: "absent"})


REFUSED = {
    "hidden_act": "gelu",
    "attention_bias": 1,
    "mlp_bias": True,
    "num_key_value_heads": 4,
    "hidden_size": "48",
    "num_hidden_layers": 0,
    "vocab_size": True,
    "rms_norm_eps": "1e-5",
    "tie_word_embeddings": 1,
    "rope_scaling": "linear",
}


@pytest.mark.parametrize("key", REFUSED)
def test_unsupported_value_is_named(key):
    with pytest.raises(MkdCheckpointError, match=f'"{key}" is {REFUSED[key]!r}'):
        args_of(**{key: REFUSED[key]})


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"rope_type": "longrope"}, "rope_type"),
        ({"low_freq_factor": "2"}, "low_freq_factor"),
        ({"high_freq_factor": 0.5}, "high_freq_factor"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings"),
        ({"factor": None}, "factor"),
    ],
)
@pytest.mark.parametrize("where", ["rope_parameters", "rope_scaling"])
def test_unsupported_rope_is_named(where, change, key):
    with pytest.raises(MkdCheckpointError, match=f"{where}.{key}"):
        args_of(**{where: {**LLAMA3_ROPE, **change}})


def test_linear_rope_of_old_configs():
    args = args_of(rope_scaling={"type": "linear", "factor": 2.5})
    assert args["rotary_seq_len_interpolation_factor"] == 2.5
    for factor in (0.5, "2", None):
        with pytest.raises(MkdCheckpointError, match=r"rope_scaling\.factor"):
            args_of(rope_scaling={"type": "linear", "factor": factor})


def test_dynamic_rope_is_plain_up_to_its_base_length():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert args_of(rope_parameters=rope) == args_of()
    exported = LLAMA.config_for_transformers_4({**CONFIG, "rope_parameters": rope})
    assert exported["rope_scaling"] == {"rope_type": "dynamic", "factor": 2.0}


def test_yarn():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, "truncate": False}
    args = args_of(rope_scaling=yarn)
    expected = {
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": 4.0,
        "yarn_original_max_position_embeddings": 24,
        "yarn_correction_range_round_to_int": False,
    }
    assert {name: args[name] for name in expected} == expected
    written = LLAMA.hf_config(args)
    assert LLAMA.megatron_args(written) == args


def test_llama3_rope_with_other_constants():
    args = args_of(rope_parameters=LLAMA3_ROPE | {"original_max_position_embeddings": 4096})
    assert args["use_rope_scaling"] is False
    assert args["rope_frequencies"] == OLD_ROPE | {"original_max_position_embeddings": 4096}
    assert LLAMA.megatron_args(LLAMA.hf_config(args)) == args


def test_longrope_is_limited_to_its_original_length():
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 48, **factors}
    config = {**CONFIG, "architectures": ["Phi3ForCausalLM"], "sliding_window": None, "rope_scaling": rope}
    with pytest.raises(MkdCheckpointError, match='"original_max_position_embeddings" is 4096'):  # transformers' default
        PHI3.megatron_args(config)
    config["original_max_position_embeddings"] = 48
    args = PHI3.megatron_args(config)
    assert args["max_position_embeddings"] == 48
    assert PHI3.hf_config(args)["max_position_embeddings"] == config["max_position_embeddings"] == 96
    assert PHI3.megatron_args(PHI3.hf_config(args)) == args
    for change in ({"short_factor": [1.0]}, {"long_factor": [0.0] * 8}, {"original_max_position_embeddings": 97}):
        with pytest.raises(MkdCheckpointError, match=f"rope_scaling.{next(iter(change))}"):
            PHI3.megatron_args({**config, "rope_scaling": {**rope, **change}})


def test_biases():
    assert args_of(attention_bias=True)["attention_output_bias"] is True
    assert args_of(attention_bias=True, mlp_bias=True)["add_bias_linear"] is True
    assert args_of(attention_bias=None, mlp_bias=False)["add_bias_linear"] is False


def test_other_position_embeddings_are_named():
    with pytest.raises(MkdCheckpointError, match="--position-embedding-type"):
        LLAMA.hf_config({**args_of(), "position_embedding_type": "learned_absolute"})


def test_narrow_heads_need_a_divisible_width():
    with pytest.raises(MkdCheckpointError, match="hidden_size"):
        args_of(head_dim="absent", hidden_size=50)


@pytest.mark.parametrize("names", [["T5ForConditionalGeneration"], [], None, "LlamaForCausalLM"])
def test_unknown_architecture_lists_the_known(names):
    with pytest.raises(MkdCheckpointError, match=r"known architectures: .*LlamaForCausalLM"):
        family_of({**CONFIG, "architectures": names})


def test_unknown_architecture_names_the_nearest():
    with pytest.raises(MkdCheckpointError, match=r"\(the nearest by name is Qwen3NextForCausalLM\)"):
        family_of({**CONFIG, "architectures": ["Qwen3NextMoeForCausalLM"]})
    for unlike in ({"architectures": ["BertLMHeadModel"]}, {"model_type": "rwkv"}):
        (key,) = unlike
        with pytest.raises(MkdCheckpointError, match=rf'"{key}" is .* \(the nearest by name is \w+\)'):
            family_of(unlike)


@pytest.mark.parametrize("rope", [{}, {"rope_theta": 10000.0, "rope_scaling": OLD_ROPE}], ids=["plain", "llama3"])
@pytest.mark.parametrize("groups", [6, 2])
def test_config_round_trip(rope, groups):
    args = args_of(**rope, num_key_value_heads=groups)
    config = LLAMA.hf_config(args)
    assert family_of(config).megatron_args(config) == args
    theirs = LlamaConfig(**config)
    assert theirs.rope_parameters["rope_type"] == ("llama3" if rope else "default")
    assert (theirs.num_key_value_heads, theirs.head_dim, theirs.vocab_size) == (groups, 16, 131)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("normalization", "LayerNorm"),
        ("add_qkv_bias", True),
        ("num_experts", 8),
        ("rotary_percent", 0.5),
        ("glu_linear_offset", 1.0),
        ("activation_func_clamp_value", 7.0),
        ("squared_relu", True),
        ("quick_geglu", True),
    ],
)
def test_unsupported_arguments_are_named(name, value):
    with pytest.raises(MkdCheckpointError, match="--" + name.replace("_", "-")):
        LLAMA.hf_config({**args_of(), name: value})


QWEN3_MOE = {
    **CONFIG,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}


def test_experts():
    args = family_of(QWEN3_MOE).megatron_args(QWEN3_MOE)
    expected = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "moe_router_pre_softmax": False}
    assert {name: args[name] for name in expected} == expected
    renamed = {**QWEN3_MOE, "num_local_experts": 8, "num_experts": None}  # as transformers 5 writes it
    assert family_of(renamed).megatron_args(renamed) == args


def test_window_includes_the_token_itself():
    config = {**CONFIG, "architectures": ["MistralForCausalLM"], "sliding_window": 8}
    assert family_of(config).megatron_args(config)["window_size"] == (7, 0)
    config["sliding_window"] = None
    assert family_of(config).megatron_args(config)["window_size"] is None


WITHOUT_DEFAULTS = ("gpt_oss", "cwm", "dots1", "ministral3", "granitemoehybrid")
"""transformers' default rope, normalization or layers are not supported: the keys must be in config.json."""


@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if f.model_type not in WITHOUT_DEFAULTS], ids=lambda f: f.architectures[0]
)
def test_every_absent_key_has_the_default_of_transformers(family):
    """The arguments equal those of a config.json with transformers' default values filled in."""
    latent = {key: 8 for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
    counts = {"n_routed_experts": 16, "n_shared_experts": 1, "num_key_value_heads": 6, "num_hidden_layers": 5}
    config = {**QWEN3_MOE, "architectures": [family.architectures[0]], "num_local_experts": 16, "num_experts": 16}
    config |= {**latent, **counts, "num_experts_per_tok": 8, "rms_norm_eps": 1e-6}
    config |= {"shared_expert_intermediate_size": 8}
    if family.model_type == "arcee":
        config["hidden_act"] = "relu2"
    if family.model_type == "olmoe":
        config["head_dim"] = 8
    if family.model_type == "llama4_text":
        config["num_experts_per_tok"] = 1
    if family.model_type == "nemotron_h":
        config["layers_block_type"] = ["mamba", "attention", "mlp", "mlp", "moe"]
    for key in ("rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "norm_topk_prob"):
        config.pop(key, None)
    whole = CONFIG_MAPPING[family.model_type].from_dict(config).to_dict()
    keys = set(family.absent) | {"sliding_window", "use_sliding_window", "norm_topk_prob", "rope_parameters"}
    filled = {**config, **{key: whole[key] for key in keys if key in whole}}
    args, wanted = family.megatron_args(config), family.megatron_args(filled)
    assert {name: args[name] for name in wanted.keys() - set(names_with(ArgRole.RUN_CHOICE))} == {
        name: wanted[name] for name in wanted.keys() - set(names_with(ArgRole.RUN_CHOICE))
    }


def test_gpt_oss_has_no_rope_by_default():
    """Without rope keys, transformers uses its own yarn values for every rope_theta."""
    config = {**QWEN3_MOE, "architectures": ["GptOssForCausalLM"], "num_local_experts": 8, "rope_theta": 1e4}
    with pytest.raises(MkdCheckpointError, match='"rope_parameters" is None'):
        GPT_OSS.megatron_args({key: value for key, value in config.items() if key != "rope_scaling"})
    plain = GPT_OSS.megatron_args({**config, "rope_scaling": {"rope_type": "default"}})
    theirs = CONFIG_MAPPING["gpt_oss"].from_dict(GPT_OSS.hf_config(plain))
    assert theirs.rope_parameters["rope_type"] == "default"
    assert GPT_OSS.megatron_args(config | {"sliding_window": 128, "rope_scaling": {"type": "default"}}) == plain


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("Qwen2ForCausalLM", "use_sliding_window", True),
        ("Phi3ForCausalLM", "partial_rotary_factor", 1.5),
        ("Phi3ForCausalLM", "resid_pdrop", 0.1),
        ("MistralForCausalLM", "sliding_window", 0),
        ("Qwen3MoeForCausalLM", "decoder_sparse_step", 2),
        ("Qwen3MoeForCausalLM", "mlp_only_layers", [0]),
        ("Qwen3MoeForCausalLM", "num_experts_per_tok", 9),
        ("MixtralForCausalLM", "router_jitter_noise", 0.1),
        ("OlmoeForCausalLM", "clip_qkv", 8.0),
        ("Cohere2ForCausalLM", "attention_bias", True),
        ("Cohere2ForCausalLM", "sliding_window", None),
        ("Cohere2ForCausalLM", "logit_scale", 0.0),
        ("Llama4ForCausalLM", "num_experts_per_tok", 2),
        ("Llama4ForCausalLM", "moe_layers", []),
        ("Llama4ForCausalLM", "floor_scale", 1),
        ("Llama4ForCausalLM", "layer_types", ["sliding_attention"] * 5),
        ("OlmoeForCausalLM", "attention_bias", True),
        ("OlmoeForCausalLM", "head_dim", 16),
    ],
)
def test_unsupported_value_of_a_family_is_named(architecture, key, value):
    config = {**QWEN3_MOE, "architectures": [architecture], key: value}
    with pytest.raises(MkdCheckpointError, match=re.escape(f'"{key}" is {value!r}')):
        family_of(config).megatron_args(config)


@pytest.mark.parametrize(
    ("key", "value", "nearest"),
    [
        ("layer_types", ["mamba", "attention", "mamba", "mamba"], "nearest family with Mamba layers is Nemotron-H"),
        ("num_local_experts", 64, "nearest with experts is Qwen2-MoE"),
        ("position_embedding_type", "nope", "only 'rope' is supported"),
    ],
)
def test_unsupported_granite_4(key: str, value: Any, nearest: str) -> None:
    config = {**QWEN3_MOE, "architectures": ["GraniteMoeHybridForCausalLM"], "num_local_experts": 0}
    config |= {"layer_types": ["attention"] * 4, "position_embedding_type": "rope"}
    assert family_of(config).megatron_args(config)["ffn_hidden_size"] == 1024
    with pytest.raises(MkdCheckpointError, match=re.escape(f'"{key}" is {value!r}') + f".*{nearest}"):
        family_of(config).megatron_args(config | {key: value})


def test_rope_scaling_replaces_rope_parameters():
    """transformers takes nothing from `rope_parameters`, rope_theta neither, when `rope_scaling` is not empty."""
    plain = {"rope_type": "default", "rope_theta": 5e5}
    with pytest.raises(MkdCheckpointError, match=r"rope_scaling\.original_max_position_embeddings"):
        args_of(rope_parameters=plain, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    args = args_of(rope_parameters=plain, rope_scaling={"type": "linear", "factor": 2.0})
    assert (args["rotary_base"], args["rotary_seq_len_interpolation_factor"]) == (10000, 2.0)
    args = args_of(rope_parameters=plain, rope_scaling=OLD_ROPE)
    assert (args["rotary_base"], args["use_rope_scaling"]) == (10000, True)
    assert args_of(rope_parameters=plain, rope_scaling={})["rotary_base"] == 500000


@pytest.mark.parametrize(
    ("rope", "share"),
    [
        ({"partial_rotary_factor": 0.5}, 0.5),
        ({"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.75}}, 0.75),
        ({"partial_rotary_factor": 0.5, "rope_parameters": {"rope_type": "default"}}, 0.5),
        ({"rope_scaling": {"type": "default", "partial_rotary_factor": 0.25}, "partial_rotary_factor": 0.5}, 0.25),
        ({"rope_scaling": {"type": "default"}, "rope_parameters": {"partial_rotary_factor": 0.5}}, 1.0),
    ],
)
def test_share_of_partial_rope(rope, share):
    config = {**CONFIG, "architectures": ["Phi3ForCausalLM"], **rope}
    assert family_of(config).megatron_args(config)["rotary_percent"] == share


MISTRAL = {**CONFIG, "architectures": ["MistralForCausalLM"], "sliding_window": 8}


def test_mistral_windows_by_layer():
    config = {**MISTRAL, "layer_types": ["sliding_attention", "full_attention", "full_attention", "full_attention"]}
    args = family_of(config).megatron_args(config)
    assert (args["window_size"], args["window_attn_skip_freq"]) == ((7, 0), [1, 0, 0, 0])
    assert family_of(config).hf_config(args)["layer_types"] == config["layer_types"]
    every = {**MISTRAL, "layer_types": ["sliding_attention"] * 4}
    plain = family_of(MISTRAL).megatron_args(MISTRAL)
    assert family_of(every).megatron_args(every) == plain
    assert "layer_types" not in family_of(MISTRAL).hf_config(plain)


CONTRADICTIONS = {
    "model_type": {"model_type": "mistral"},
    "per_layer_config": {"per_layer_config": {"1": {"num_key_value_heads": 6}}},
    "text_config": {"text_config": {"tie_word_embeddings": True}},
    "num_local_experts": {"architectures": ["Qwen3MoeForCausalLM"], "num_local_experts": 4},
    "layer_types": {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"] * 4},
    "original_max_position_embeddings": {"original_max_position_embeddings": 96, "rope_scaling": OLD_ROPE},
    "rope_parameters.full_attention": {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
    "rope_scaling.partial_rotary_factor": {"rope_scaling": {**OLD_ROPE, "partial_rotary_factor": 0.5}},
}


@pytest.mark.parametrize("key", CONTRADICTIONS)
def test_contradiction_is_named(key):
    config = {**QWEN3_MOE, **CONFIG, **CONTRADICTIONS[key]}
    with pytest.raises(MkdCheckpointError, match=f'"{re.escape(key)}" is'):
        family_of(config).megatron_args(config)


def test_model_type_without_architectures():
    config = {**CONFIG, "model_type": "llama"}
    for names in (None, []):
        assert family_of({**config, "architectures": names}) is LLAMA


ROPES_OF_TRANSFORMERS_5 = {
    "llama, plain": (LLAMA, {"rope_type": "default", "rope_theta": 5e5}, None),
    "llama, llama3": (LLAMA, LLAMA3_ROPE, OLD_ROPE),
    "phi3": (PHI3, {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}, None),
    "gpt-oss, plain": (GPT_OSS, {"rope_type": "default", "rope_theta": 5e5}, {"rope_type": "default"}),
}


@pytest.mark.parametrize("name", ROPES_OF_TRANSFORMERS_5)
def test_export_has_the_rope_keys_of_transformers_4(name):
    family, rope, scaling = ROPES_OF_TRANSFORMERS_5[name]
    config = {**QWEN3_MOE, "architectures": list(family.architectures), "rope_parameters": rope}
    written = family.config_for_transformers_4(config)
    assert written["rope_theta"] == rope["rope_theta"]
    assert written.get("rope_scaling") == scaling
    assert written.get("partial_rotary_factor", 1.0) == rope.get("partial_rotary_factor", 1.0)
    assert family.megatron_args(written) == family.megatron_args(config)
    loaded = CONFIG_MAPPING[family.model_type]
    theirs, before = (loaded.from_dict({**c, "rope_parameters": dict(rope)}) for c in (written, config))
    assert theirs.rope_parameters == before.rope_parameters
    assert config.items() <= written.items()


def test_export_sets_both_keys_of_the_dtype():
    both = {"dtype": "float32", "torch_dtype": "float32"}
    assert config_with_dtype(both, torch.bfloat16) == dict.fromkeys(both, "bfloat16")
    assert config_with_dtype({}, torch.bfloat16) == {"torch_dtype": "bfloat16"}


def test_swish_is_silu():
    assert args_of(hidden_act="swish") == args_of()


def test_one_expert_per_token():
    """The weight of a single expert is its probability, or 1 with division by the sum of the top-k probabilities."""
    config = {**QWEN3_MOE, "architectures": ["Qwen3MoeForCausalLM"], "num_experts_per_tok": 1}
    for normalized in (False, True):
        args = family_of(config).megatron_args({**config, "norm_topk_prob": normalized})
        assert (args["moe_router_topk"], args["moe_router_pre_softmax"]) == (1, True)
        assert bool(args["normalized_single_expert"]) is normalized
        written = family_of(config).hf_config({**vars(default_arguments()), **args})
        assert written["norm_topk_prob"] is normalized


def test_routers_that_no_folder_has():
    """A router of a Megatron checkpoint that transformers computes otherwise is refused, naming the flag."""
    mixtral = {**QWEN3_MOE, "architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "head_dim": 8}
    args = {**vars(default_arguments()), **family_of(mixtral).megatron_args(mixtral)}
    with pytest.raises(MkdCheckpointError, match="--moe-router-pre-softmax"):
        family_of(mixtral).hf_config({**args, "moe_router_pre_softmax": True})


SIZE_FLAGS = {
    "num_layers": 2,
    "hidden_size": 96,
    "num_attention_heads": 6,
    "kv_channels": 16,
    "ffn_hidden_size": 80,
    "max_position_embeddings": 64,
    "vocab_size": 131,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
}


class RandomStudent:
    """A student from Megatron's size flags, without a Hugging Face folder."""

    flag = "--load"
    assets_dir = None

    def __init__(self, **changes: Any) -> None:
        self.args = Namespace(**{**vars(default_arguments()), **SIZE_FLAGS, **changes})

    def error(self, text: str) -> MkdCheckpointError:
        return MkdCheckpointError(text)


@pytest.mark.parametrize(
    ("changes", "architecture"),
    [
        ({}, "LlamaForCausalLM"),
        ({"swiglu": False, "squared_relu": True}, "ArceeForCausalLM"),
        ({"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0}, "LlamaForCausalLM"),
        ({"num_experts": 4, "moe_ffn_hidden_size": 24, "qk_layernorm": True}, "Qwen3MoeForCausalLM"),
    ],
    ids=["plain", "squared relu", "yarn", "experts"],
)
def test_students_from_size_flags_have_an_architecture(changes: dict[str, Any], architecture: str) -> None:
    family, config, _ = architecture_of(RandomStudent(**changes))
    assert config["architectures"] == [architecture] == list(family.architectures[:1])


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"glu_linear_offset": 1.0}, "--glu-linear-offset"),
        ({"activation_func_clamp_value": 7.0}, "--activation-func-clamp-value"),
        ({"num_experts": 4, "moe_ffn_hidden_size": 24}, "--ffn-hidden-size 24, the Megatron"),
    ],
)
def test_students_that_no_folder_describes(changes: dict[str, Any], flag: str) -> None:
    with pytest.raises(MkdCheckpointError, match=f"no known Hugging Face architecture fits this checkpoint: .*{flag}"):
        architecture_of(RandomStudent(**changes))


OTHER_MODELS = NEAR_MODELS | HYBRID_MODELS | MIXER_MODELS
NEAR_FAMILIES = {sizes["model_type"] for sizes in OTHER_MODELS.values()} - {"llama", "qwen2", "qwen3", "qwen3_moe"}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_config_round_trip_of_near_models(name):
    config = {**CONFIG, **OTHER_MODELS[name], "architectures": None}
    config["hidden_act"] = "relu2" if config["model_type"] == "arcee" else "silu"
    if "layers_block_type" in config:
        del config["num_hidden_layers"], config["tie_word_embeddings"]
    family = family_of(config)
    args = family.megatron_args(config)
    written = family.hf_config({**vars(default_arguments()), **args})
    assert family_of(written) is family
    assert family.megatron_args(written) == args


# test_yarn_families.py covers DeepSeek-V3.
@pytest.mark.parametrize(
    "family",
    [f for f in FAMILIES if f != DEEPSEEK_V3 and f.model_type not in NEAR_FAMILIES],
    ids=lambda f: f.architectures[0],
)
def test_config_round_trip_of_every_family(family):
    plain = {"sliding_window": None, "rope_scaling": {"rope_type": "default"}}
    config = {**QWEN3_MOE, "architectures": [family.architectures[0]], **plain}
    args = family.megatron_args(config)
    written = family.hf_config(args)
    assert family_of(written) is family
    assert family.megatron_args(written) == args
    assert args.keys() <= KNOWN_ARGUMENTS


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_architecture_that_megatron_cannot_compute(name):
    with pytest.raises(MkdCheckpointError, match=rf"{name}.*{re.escape(UNSUPPORTED[name])}"):
        family_of({**CONFIG, "architectures": [name]})


QWEN3_NEXT_80B = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_qwen3_next():
    """Published sizes, which give about 80 billion parameters."""
    family = family_of(QWEN3_NEXT_80B)
    args = family.megatron_args(QWEN3_NEXT_80B)
    assert args["linear_attention_freq"] == [1, 1, 1, 0] * 12
    assert (args["rotary_percent"], args["rotary_base"]) == (0.25, 10000000)
    shapes = [shape for item in family.tensors(args) for shape in item.shapes.values()]
    assert sum(map(math.prod, shapes)) == pytest.approx(79.67e9, rel=1e-3)


NEMOTRON_3_NANO_30B = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "chunk_size": 128,
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 128,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856,
    "layer_norm_epsilon": 1e-5,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 64,
    "mamba_proj_bias": False,
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_groups": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "routed_scaling_factor": 2.5,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_limit": [0.0, float("inf")],
    "time_step_min": 0.001,
    "topk_group": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 131072,
}


def test_nemotron_3_nano():
    """Published sizes, which give about 31.6 billion parameters."""
    family = family_of(NEMOTRON_3_NANO_30B)
    args = family.megatron_args(NEMOTRON_3_NANO_30B)
    assert [args["layer_mixers"].count(mixer) for mixer in "ME*"] == [23, 23, 6]
    assert args["moe_layer_freq"] == [int(mixer == "E") for mixer in args["layer_mixers"]]
    shapes = [shape for item in family.tensors(args) for shape in item.shapes.values()]
    assert sum(map(math.prod, shapes)) == pytest.approx(31.58e9, rel=1e-3)


def test_mixtures_that_no_nemotron_has():
    """A router of a Megatron checkpoint that transformers computes otherwise is refused, naming the flag."""
    args = {**vars(default_arguments()), **family_of(NEMOTRON_3_NANO_30B).megatron_args(NEMOTRON_3_NANO_30B)}
    with pytest.raises(MkdCheckpointError, match="--moe-router-score-function sigmoid, the checkpoint softmax"):
        family_of(NEMOTRON_3_NANO_30B).hf_config({**args, "moe_router_score_function": "softmax"})
