"""config.json of DeepSeek-V3 and gpt-oss to Megatron arguments and back."""

import pytest

from mkd.checkpoint.hf.families import family_of
from mkd.config.flags import default_arguments
from mkd.errors import MkdCheckpointError
from tests.support.hf_folders import SIZES

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096}
BOTH_SCALES = {"mscale": 0.7, "mscale_all_dim": 1.2}
DEEPSEEK = SIZES | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "rope_parameters": YARN | BOTH_SCALES,
}
GPT_OSS = SIZES | {
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "attention_bias": True,
    "rope_parameters": YARN | {"truncate": False},
}


def args_of(config):
    return family_of(config).megatron_args(config)


CHANGES = {
    "deepseek": DEEPSEEK,
    "deepseek, plain rope": DEEPSEEK | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "deepseek, no groups, no dense layers": DEEPSEEK | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
    "gpt-oss": GPT_OSS,
    "gpt-oss, plain rope": GPT_OSS | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "gpt-oss, no window": GPT_OSS | {"sliding_window": None},
    "gpt-oss, odd layers": GPT_OSS | {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]},
}


@pytest.mark.parametrize("name", CHANGES)
def test_config_round_trip(name):
    args = args_of(CHANGES[name])
    written = family_of(CHANGES[name]).hf_config({**vars(default_arguments()), **args})
    assert args_of(written) == args


def test_queries_without_latent():
    args = args_of(DEEPSEEK | {"q_lora_rank": None})
    assert args["q_lora_rank"] is None
    with pytest.raises(MkdCheckpointError, match='has no "q_lora_rank"'):
        args_of({key: value for key, value in DEEPSEEK.items() if key != "q_lora_rank"})


def test_norms_of_latents_have_their_own_epsilon():
    args = args_of(DEEPSEEK | {"rms_norm_eps": 1e-5})
    assert (args["layernorm_epsilon"], args["latent_norm_epsilon"]) == (1e-5, 1e-6)
    assert args_of(DEEPSEEK)["latent_norm_epsilon"] is None
    with pytest.raises(MkdCheckpointError, match="--norm-epsilon is 1e-05"):
        family_of(DEEPSEEK).hf_config({**vars(default_arguments()), **args, "latent_norm_epsilon": None})


def test_dense_layers_come_first():
    assert args_of(DEEPSEEK)["moe_layer_freq"] == [0, 1, 1, 1]


def test_mscale_without_mscale_all_dim_is_ignored():
    args = args_of(DEEPSEEK | {"rope_parameters": YARN | {"mscale": 0.7}})
    assert (args["mscale"], args["mscale_all_dim"]) == (1.0, 0.0)


def test_windows_by_layer():
    args = args_of(GPT_OSS)
    assert (args["window_size"], args["window_attn_skip_freq"]) == ((7, 0), [1, 0, 1, 0])


@pytest.mark.parametrize(
    ("config", "change", "key"),
    [
        (DEEPSEEK, {"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        (DEEPSEEK, {"num_key_value_heads": 2}, "num_key_value_heads"),
        (DEEPSEEK, {"topk_group": 5}, "topk_group"),
        (DEEPSEEK, {"topk_group": 1}, "topk_group"),
        (DEEPSEEK, {"n_group": 3}, "n_group"),
        (DEEPSEEK, {"n_group": 8}, "n_group"),
        (DEEPSEEK, {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        (DEEPSEEK, {"first_k_dense_replace": 4}, "first_k_dense_replace"),
        (DEEPSEEK, {"norm_topk_prob": False}, "norm_topk_prob"),
        (DEEPSEEK, {"norm_topk_prob": None}, "norm_topk_prob"),
        (DEEPSEEK, {"rope_interleave": None}, "rope_interleave"),
        (DEEPSEEK, {"num_local_experts": 4}, "num_local_experts"),
        (DEEPSEEK, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func"),
        (DEEPSEEK, {"rope_parameters": YARN | {"truncate": False}}, "rope_parameters.truncate"),
        (DEEPSEEK, {"rope_parameters": YARN | {"mscale_all_dim": 1.0}}, "rope_parameters.mscale_all_dim"),
        (DEEPSEEK, {"rope_parameters": YARN | {"attention_factor": 1.0}}, "rope_parameters.attention_factor"),
        (GPT_OSS, {"rope_parameters": YARN | {"rope_type": "longrope"}}, "rope_parameters.rope_type"),
        (GPT_OSS, {"rope_parameters": None, "rope_scaling": {}}, "rope_parameters"),
        (GPT_OSS, {"num_experts": 2}, "num_local_experts"),
        (GPT_OSS, {"layer_types": ["full_attention"]}, "layer_types"),
        (GPT_OSS, {"swiglu_alpha": 1.0}, "swiglu_alpha"),
        (GPT_OSS, {"attention_bias": False}, "attention_bias"),
    ],
)
def test_unsupported_value_is_named(config, change, key):
    with pytest.raises(MkdCheckpointError, match=f'"{key}" is'):
        args_of(config | change)


def test_unsupported_order_of_dense_layers():
    values = {**vars(default_arguments()), **args_of(DEEPSEEK), "moe_layer_freq": [1, 0, 1, 0]}
    with pytest.raises(MkdCheckpointError, match="--moe-layer-freq"):
        family_of(DEEPSEEK).hf_config(values)
