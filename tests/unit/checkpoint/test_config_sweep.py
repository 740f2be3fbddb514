"""config.json in many spellings: mkd computes what the installed transformers computes, or refuses the key by name.

For each family and spelling, transformers loads the folder and builds the model; its facts are read from modules, rope
frequencies and attention patterns. mkd's facts come from its Megatron arguments and Megatron's own rope classes.
"""

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings import rotary_pos_embedding as rope_module
from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as yarn
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from mkd.checkpoint.hf.families import FAMILIES, family_of
from mkd.checkpoint.hf.families.llama4 import LLAMA4
from mkd.errors import MkdCheckpointError
from mkd.models.model_options import attention_factor, scaled_frequencies

ABSENT = object()
TOKENS = 12
COMMON = {
    "vocab_size": 23,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 5e4,
    "initializer_range": 0.5,
    "hidden_act": "silu",
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 4.0],
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "factor": 2.0}
PLAIN = {"rope_type": "default"}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
GEMMA = {"sliding_window": 5, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 6}
GRANITE = {
    "embedding_multiplier": 2.0,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.25,
}
DELTA_NET = {
    "layer_types": ["full_attention", "linear_attention"],
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 3,
    "partial_rotary_factor": 0.5,
}
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": ABSENT,
    "rms_norm_eps": 1e-6,
    "q_lora_rank": 10,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "rope_interleave": True,
}
ROUTED = {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "norm_topk_prob": True}
BASES = {
    "llama": COMMON,
    "mistral": COMMON | {"sliding_window": 5},
    "qwen2": COMMON | {"head_dim": ABSENT},
    "qwen3": COMMON,
    "phi3": COMMON | {"sliding_window": 5, "head_dim": ABSENT},
    "qwen3_moe": COMMON | EXPERTS | {"num_experts": 4, "norm_topk_prob": True},
    "mixtral": COMMON | {"num_experts_per_tok": 2, "num_local_experts": 4},
    "deepseek_v3": COMMON
    | EXPERTS
    | {
        "num_key_value_heads": 4,
        "head_dim": ABSENT,
        "rms_norm_eps": 1e-6,
        "q_lora_rank": 10,
        "kv_lora_rank": 6,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "rope_interleave": True,
    },
    "olmo2": COMMON,
    "olmo3": COMMON | {"sliding_window": 5},
    "glm4": COMMON,
    "gemma2": COMMON | GEMMA | {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0},
    "gemma3_text": COMMON | GEMMA | {"rope_local_base_freq": 3e3},
    "gpt_oss": COMMON
    | {
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "sliding_window": 5,
        "attention_bias": True,
        "rope_scaling": YARN | {"truncate": False},
    },
    "ministral": COMMON | {"sliding_window": 5},
    "cwm": COMMON | {"sliding_window": 5, "rope_scaling": LLAMA3, "bos_token_id": 1},
    "smollm3": COMMON,
    "seed_oss": COMMON | {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "ernie4_5": COMMON,
    "helium": COMMON | {"head_dim": 6},
    "glm": COMMON,
    "arcee": COMMON | {"hidden_act": "relu2"},
    "granite": COMMON | GRANITE,
    "youtu": COMMON | LATENT,
    "qwen2_moe": COMMON | EXPERTS | {"num_experts": 4, "head_dim": ABSENT, "shared_expert_intermediate_size": 8},
    "cohere2": COMMON | {"sliding_window": 5, "head_dim": 6, "layer_norm_eps": 1e-5, "logit_scale": 0.25},
    "llama4_text": COMMON
    | {"intermediate_size_mlp": 28, "num_local_experts": 4, "num_experts_per_tok": 1, "no_rope_layer_interval": 2},
    "olmoe": COMMON | {"head_dim": 6, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "deepseek_v2": COMMON
    | EXPERTS
    | LATENT
    | ROUTED
    | {"first_k_dense_replace": 1, "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
    "glm4_moe": COMMON | EXPERTS | ROUTED,
    "dots1": COMMON | EXPERTS | ROUTED | {"sliding_window": 5, "max_window_layers": 1, "first_k_dense_replace": 1},
    "solar_open": COMMON | EXPERTS | ROUTED,
    "qwen3_next": COMMON | EXPERTS | DELTA_NET | {"num_experts": 4, "shared_expert_intermediate_size": 8},
    "qwen3_5_text": COMMON | DELTA_NET,
    "qwen3_5_moe_text": COMMON | EXPERTS | DELTA_NET | {"num_experts": 4, "shared_expert_intermediate_size": 8},
    "glm4_moe_lite": COMMON | EXPERTS | LATENT | ROUTED,
}
ALTERNATING = ["sliding_attention", "full_attention"]
NO_ROPE = {"rope_theta": ABSENT, "rope_scaling": ABSENT, "rope_parameters": ABSENT}

ROPE_SPELLINGS = {
    "no rope keys": NO_ROPE,
    "theta on top": NO_ROPE | {"rope_theta": 2e4},
    "theta as an integer": NO_ROPE | {"rope_theta": 20000},
    "theta in rope_parameters": NO_ROPE | {"rope_parameters": PLAIN | {"rope_theta": 2e4}},
    "theta in rope_scaling": NO_ROPE | {"rope_scaling": PLAIN | {"rope_theta": 2e4}},
    "two thetas, rope_parameters": {"rope_scaling": ABSENT, "rope_parameters": PLAIN | {"rope_theta": 2e4}},
    "two thetas, rope_scaling": {"rope_scaling": PLAIN | {"rope_theta": 2e4}},
    "theta in both objects": NO_ROPE
    | {"rope_parameters": PLAIN | {"rope_theta": 2e4}, "rope_scaling": PLAIN | {"rope_theta": 3e4}},
    "theta in the overridden object": NO_ROPE
    | {"rope_parameters": PLAIN | {"rope_theta": 2e4}, "rope_scaling": {"type": "default"}},
    "only rope_theta in rope_parameters": NO_ROPE | {"rope_parameters": {"rope_theta": 2e4}},
    "empty rope_scaling": {"rope_scaling": {}},
    "empty rope_scaling, rope_parameters": {"rope_scaling": {}, "rope_parameters": PLAIN},
    "empty rope_scaling, yarn in rope_parameters": {"rope_scaling": {}, "rope_parameters": YARN},
    "empty rope_parameters": {"rope_scaling": ABSENT, "rope_parameters": {}},
    "empty rope_parameters, rope_scaling null": {"rope_scaling": None, "rope_parameters": {}},
    "both null": {"rope_scaling": None, "rope_parameters": None},
    "yarn over rope_parameters": {"rope_parameters": PLAIN | {"rope_theta": 2e4}, "rope_scaling": YARN},
    "linear over rope_parameters": {"rope_parameters": PLAIN | {"rope_theta": 2e4}, "rope_scaling": LINEAR},
    "llama3 over rope_parameters": {"rope_parameters": PLAIN | {"rope_theta": 2e4}, "rope_scaling": LLAMA3},
    "dynamic over rope_parameters": {"rope_parameters": PLAIN, "rope_scaling": LINEAR | {"rope_type": "dynamic"}},
    "plain over yarn": {"rope_parameters": YARN, "rope_scaling": PLAIN},
    "rope_scaling of another type": {"rope_scaling": "yarn"},
    "yarn in rope_parameters": {"rope_scaling": ABSENT, "rope_parameters": YARN},
    "linear in rope_parameters": {"rope_scaling": ABSENT, "rope_parameters": LINEAR},
    "llama3 in rope_parameters": {"rope_scaling": ABSENT, "rope_parameters": LLAMA3},
    "llama3 with other constants": {
        "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 32, "low_freq_factor": 2, "high_freq_factor": 8.0}
    },
    "llama3 without constants": {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
    "longrope": {"rope_scaling": LONGROPE},
    "longrope, old length on top": {
        "rope_scaling": {key: LONGROPE[key] for key in ("rope_type", "short_factor", "long_factor")},
        "original_max_position_embeddings": 32,
    },
    "longrope with attention_factor": {"rope_scaling": LONGROPE | {"attention_factor": 1.3}},
    "longrope with factor": {"rope_scaling": LONGROPE | {"factor": 8.0}},
    "old key type": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "old key type, yarn": {"rope_scaling": YARN | {"type": "yarn", "rope_type": None}},
    "type and rope_type differ": {"rope_scaling": LINEAR | {"rope_type": "default", "type": "linear"}},
    "type and rope_type differ, yarn": {"rope_scaling": YARN | {"type": "default"}},
    "rope_type null": {"rope_scaling": {"rope_type": None, "type": "linear", "factor": 2.0}},
    "original length on top": {"original_max_position_embeddings": 32, "rope_scaling": YARN},
    "original length on top, llama3": {"original_max_position_embeddings": 32, "rope_scaling": LLAMA3},
    "original length on top alone": {
        "original_max_position_embeddings": 32,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    },
    "yarn without original length": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "yarn with beta 0": {"rope_scaling": YARN | {"beta_fast": 0, "beta_slow": 0}},
    "yarn with betas": {"rope_scaling": YARN | {"beta_fast": 4, "beta_slow": 2}},
    "yarn with mscales": {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0.4}},
    "yarn with mscale": {"rope_scaling": YARN | {"mscale": 0.7}},
    "yarn with mscale_all_dim": {"rope_scaling": YARN | {"mscale_all_dim": 0.4}},
    "yarn with attention_factor": {"rope_scaling": YARN | {"attention_factor": 2.0}},
    "yarn truncated": {"rope_scaling": YARN | {"truncate": True}},
    "yarn not truncated": {"rope_scaling": YARN | {"truncate": False}},
    "yarn with partial rope": {"rope_scaling": YARN | {"partial_rotary_factor": 0.5}},
    "yarn with partial rope on top": {"rope_scaling": YARN, "partial_rotary_factor": 0.5},
    "llama3 with partial rope": {"rope_scaling": LLAMA3 | {"partial_rotary_factor": 0.5}},
    "partial rope on top": {"partial_rotary_factor": 0.5},
    "partial rope in rope_parameters": {
        "rope_scaling": ABSENT,
        "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5},
    },
    "partial rope in rope_scaling": {"rope_scaling": PLAIN | {"partial_rotary_factor": 0.5}},
    "two shares of partial rope": {
        "partial_rotary_factor": 0.5,
        "rope_scaling": ABSENT,
        "rope_parameters": PLAIN | {"partial_rotary_factor": 1.0},
    },
    "share of partial rope in the overridden object": {
        "rope_scaling": PLAIN,
        "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5},
    },
    "dynamic rope": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.5}},
    "dynamic rope without factor": {"rope_scaling": {"rope_type": "dynamic"}},
    "linear rope without factor": {"rope_scaling": {"rope_type": "linear"}},
    "linear rope, factor below 1": {"rope_scaling": {"rope_type": "linear", "factor": 0.5}},
    "linear rope of a share": {"rope_scaling": LINEAR | {"partial_rotary_factor": 0.5}},
    "a layer without rope": {"no_rope_layers": [1, 0]},
    "layers without rope": {"no_rope_layers": [0, 0]},
    "all layers with rope": {"no_rope_layers": [1, 1, 1]},
    "every second layer without rope": {"no_rope_layer_interval": 2},
    "no_rope_layers null": {"no_rope_layers": None, "no_rope_layer_interval": 1},
    "rope by layer type": {
        "rope_scaling": ABSENT,
        "rope_parameters": {"full_attention": PLAIN | {"rope_theta": 2e4}, "sliding_attention": PLAIN},
    },
    "rope by layer type, with layer_types": {
        "rope_scaling": ABSENT,
        "layer_types": ALTERNATING,
        "rope_parameters": {"full_attention": PLAIN | {"rope_theta": 2e4}, "sliding_attention": PLAIN},
    },
    "local theta": {"rope_local_base_freq": 2e4},
}
ATTENTION_SPELLINGS = {
    "as it is": {},
    "window": {"sliding_window": 3},
    "window null": {"sliding_window": None},
    "window absent": {"sliding_window": ABSENT},
    "window used": {"sliding_window": 3, "use_sliding_window": True},
    "window not used": {"sliding_window": 3, "use_sliding_window": False},
    "window used from layer 1": {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 1},
    "window used in no layer": {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 2},
    "max_window_layers alone": {"sliding_window": 3, "max_window_layers": 1},
    "alternating layers": {"sliding_window": 3, "layer_types": ALTERNATING},
    "alternating layers, window null": {"sliding_window": None, "layer_types": ALTERNATING},
    "alternating layers, window absent": {"sliding_window": ABSENT, "layer_types": ALTERNATING},
    "alternating layers, window used": {"sliding_window": 3, "use_sliding_window": True, "layer_types": ALTERNATING},
    "alternating layers, window not used": {
        "sliding_window": 3,
        "use_sliding_window": False,
        "layer_types": ALTERNATING,
    },
    "full layers": {"sliding_window": 3, "layer_types": ["full_attention"] * 2},
    "full layers, window used": {
        "sliding_window": 3,
        "use_sliding_window": True,
        "layer_types": ["full_attention"] * 2,
    },
    "sliding layers": {"sliding_window": 3, "layer_types": ["sliding_attention"] * 2},
    "layer_types null": {"sliding_window": 3, "layer_types": None},
    "layer_types too short": {"sliding_window": 3, "layer_types": ["full_attention"]},
    "chunked layers": {"layer_types": ["chunked_attention"] * 2, "attention_chunk_size": 3},
    "chunks": {"attention_chunk_size": 3},
    "chunks null": {"attention_chunk_size": None},
    "chunks absent": {"attention_chunk_size": ABSENT},
    "chunks in full layers": {"attention_chunk_size": 3, "layer_types": ["full_attention"] * 2},
    "chunks and kinds of layers": {"attention_chunk_size": 3, "layer_types": ["chunked_attention", "full_attention"]},
    "low temperature": {"floor_scale": 4, "attn_scale": 0.5},
    "no temperature": {"floor_scale": 4, "attn_temperature_tuning": False},
    "temperature absent": {"floor_scale": ABSENT, "attn_scale": ABSENT, "attn_temperature_tuning": ABSENT},
    "floor 1": {"floor_scale": 1},
    "no norms without weights": {"use_qk_norm": False, "no_rope_layers": [0, 1]},
    "head_dim absent": {"head_dim": ABSENT},
    "head_dim null": {"head_dim": None},
    "head_dim": {"head_dim": 4},
    "groups absent": {"num_key_value_heads": ABSENT},
    "groups null": {"num_key_value_heads": None},
    "groups equal heads": {"num_key_value_heads": 4},
    "one group": {"num_key_value_heads": 1},
    "multi_query": {"multi_query": True},
    "attention_bias": {"attention_bias": True},
    "no attention_bias": {"attention_bias": False},
    "qkv_bias": {"qkv_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "use_bias": {"use_bias": True},
    "all biases": {"attention_bias": True, "mlp_bias": True, "attention_out_bias": True},
    "attention_out_bias": {"attention_out_bias": True},
    "qkv_bias false": {"qkv_bias": False},
    "biases null": {"attention_bias": None, "mlp_bias": None, "qkv_bias": None},
    "biases absent": dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias", "attention_out_bias"), ABSENT),
    "norms of heads": {"use_qk_norm": True},
    "no norms of heads": {"use_qk_norm": False},
    "residual_dropout": {"residual_dropout": 0.2},
    "residual_dropout absent": {"residual_dropout": ABSENT},
    "windows from layer 0": {"sliding_window": 3, "max_window_layers": 0},
    "max_window_layers absent": {"sliding_window": 3, "max_window_layers": ABSENT},
    "attention_multiplier": {"attention_multiplier": 0.3},
    "attention_dropout": {"attention_dropout": 0.1},
    "attention_dropout absent": {"attention_dropout": ABSENT},
}
OTHER_SPELLINGS = {
    "tied": {"tie_word_embeddings": True},
    "tie absent": {"tie_word_embeddings": ABSENT},
    "tied in text_config": {"text_config": {"tie_word_embeddings": True}},
    "tied in text_config, tie absent": {"tie_word_embeddings": ABSENT, "text_config": {"tie_word_embeddings": True}},
    "untied in text_config": {"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}},
    "other eps": {"rms_norm_eps": 1e-3},
    "layer_norm_eps": {"layer_norm_eps": 1e-2},
    "norm_eps and layer_norm_epsilon": {"norm_eps": 1e-2, "layer_norm_epsilon": 1e-2},
    "eps absent": {"rms_norm_eps": ABSENT, "layer_norm_eps": 1e-2},
    "two dtypes": {"torch_dtype": "float16", "dtype": "float32"},
    "torch_dtype": {"torch_dtype": "float32"},
    "several ends": {"eos_token_id": [1, 2]},
    "swish": {"hidden_act": "swish"},
    "gelu": {"hidden_act": "gelu"},
    "activation absent": {"hidden_act": ABSENT},
    "hidden_activation": {"hidden_activation": "gelu"},
    "resid_pdrop": {"resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "pretraining_tp": {"pretraining_tp": 2},
    "per layer groups": {"per_layer_config": {"1": {"num_key_value_heads": 4}}},
    "per layer window": {"per_layer_config": {"1": {"sliding_window": 2}}},
    "per layer nothing": {"per_layer_config": {}},
    "architectures absent": {"architectures": ABSENT},
    "architectures null": {"architectures": None},
    "model_type of mistral": {"model_type": "mistral", "sliding_window": 3},
    "model_type of qwen2": {"model_type": "qwen2"},
    "model_type of llama": {"model_type": "llama"},
    "architectures of llama": {"architectures": ["LlamaForCausalLM"]},
    "two architectures": {"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]},
    "logit_scale": {"logit_scale": 2.0},
    "logit_scale absent": {"logit_scale": ABSENT},
    "pattern of windows": {"sliding_window_pattern": 2},
    "logit scale": {"logits_scaling": 2.0, "final_logit_softcapping": 30.0},
    "multipliers absent": dict.fromkeys(GRANITE, ABSENT),
    "other multipliers": {"embedding_multiplier": 3.0, "residual_multiplier": 0.2, "logits_scaling": 3.0},
    "multipliers null": dict.fromkeys(GRANITE),
    "old names of sizes": {"n_layer": 5, "n_head": 3, "n_embd": 8},
}
EXPERT_SPELLINGS = {
    "num_experts": {"num_experts": 4},
    "other num_experts": {"num_experts": 2},
    "num_local_experts": {"num_local_experts": 4},
    "other num_local_experts": {"num_local_experts": 2},
    "only num_experts": {"num_experts": 8, "num_local_experts": ABSENT, "n_routed_experts": ABSENT},
    "only num_local_experts": {"num_local_experts": 8, "num_experts": ABSENT, "n_routed_experts": ABSENT},
    "num_local_experts, num_experts null": {"num_local_experts": 4, "num_experts": None},
    "num_experts, num_local_experts null": {"num_experts": 4, "num_local_experts": None},
    "experts_per_token": {"experts_per_token": 1},
    "all experts chosen": {"num_experts_per_tok": 4},
    "normalized": {"norm_topk_prob": True},
    "not normalized": {"norm_topk_prob": False},
    "normalization absent": {"norm_topk_prob": ABSENT},
    "normalization null": {"norm_topk_prob": None},
    "dense layer": {"mlp_only_layers": [1]},
    "no dense layer": {"mlp_only_layers": []},
    "dense layers null": {"mlp_only_layers": None},
    "every second layer": {"decoder_sparse_step": 2},
    "moe_layer_freq": {"moe_layer_freq": 2},
    "two dense layers": {"first_k_dense_replace": 2},
    "no leading dense layer": {"first_k_dense_replace": 0},
    "leading dense layers absent": {"first_k_dense_replace": ABSENT},
    "mlp_layer_types": {"mlp_layer_types": ["dense", "sparse"]},
    "mlp_layer_types, all sparse": {"mlp_layer_types": ["sparse", "sparse"]},
    "no groups of experts": {"n_group": 1, "topk_group": 1},
    "groups of experts absent": {"n_group": ABSENT, "topk_group": ABSENT},
    "scaling": {"routed_scaling_factor": 1.5},
    "scaling absent": {"routed_scaling_factor": ABSENT},
    "every second layer a mixture": {"interleave_moe_layer_step": 2},
    "mixtures listed": {"moe_layers": [1]},
    "no mixtures": {"moe_layers": []},
    "mixtures beyond the layers": {"moe_layers": [0, 5]},
    "mixtures null": {"moe_layers": None, "interleave_moe_layer_step": 2},
    "dense width absent": {"intermediate_size_mlp": ABSENT},
    "two experts per token": {"num_experts_per_tok": 2},
    "no clip": {"clip_qkv": None},
    "clip": {"clip_qkv": 2.0},
    "three experts per token": {"num_experts_per_tok": 3, "n_group": 2, "topk_group": 2},
    "one expert per token, normalized": {"num_experts_per_tok": 1, "norm_topk_prob": True},
    "softmax scores": {"scoring_func": "softmax"},
    "greedy selection": {"topk_method": "greedy"},
    "selection limited to groups": {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    "groups not used": {"topk_method": "greedy", "n_group": 4, "topk_group": 2},
    "one expert per token": {"num_experts_per_tok": 1},
    "sparse before dense": {"mlp_layer_types": ["sparse", "dense"]},
    "shared experts absent": {"n_shared_experts": ABSENT},
    "query rank null": {"q_lora_rank": None},
    "two shared experts": {"n_shared_experts": 2},
    "shared_expert_intermediate_size": {"shared_expert_intermediate_size": 16},
    "expert width absent": {"moe_intermediate_size": ABSENT},
    "other expert width": {"moe_intermediate_size": 16},
    "rope not interleaved": {"rope_interleave": False},
    "limit": {"swiglu_limit": 3.0},
    "limit absent": {"swiglu_limit": ABSENT},
    "alpha": {"swiglu_alpha": 1.0},
    "prediction layers": {"num_nextn_predict_layers": 1},
    "num_mtp_layers": {"num_mtp_layers": 1},
    "jitter": {"router_jitter_noise": 0.1},
}
SPELLINGS = {**ROPE_SPELLINGS, **ATTENTION_SPELLINGS, **OTHER_SPELLINGS}
GEMMA_SPELLINGS = {
    "other pattern": {"sliding_window_pattern": 2},
    "pattern and layer_types": {"sliding_window_pattern": 1, "layer_types": ALTERNATING},
    "pattern 1": {"sliding_window_pattern": 1},
    "other attention scale": {"query_pre_attn_scalar": 8},
    "attention scale absent": {"query_pre_attn_scalar": ABSENT},
    "logit softcap": {"final_logit_softcapping": 30.0},
    "logit softcap null": {"final_logit_softcapping": None},
    "logit softcap absent": {"final_logit_softcapping": ABSENT},
    "attention softcap": {"attn_logit_softcapping": 30.0},
    "attention softcap null": {"attn_logit_softcapping": None},
    "attention softcap absent": {"attn_logit_softcapping": ABSENT},
    "softcap 0": {"final_logit_softcapping": 0.0},
    "GELU": {"hidden_activation": "gelu"},
    "hidden_activation absent": {"hidden_activation": ABSENT},
    "hidden_activation null": {"hidden_activation": None},
    "both directions": {"use_bidirectional_attention": True},
    "one direction": {"use_bidirectional_attention": False},
    "local theta absent": {"rope_local_base_freq": ABSENT},
    "two ropes": NO_ROPE
    | {
        "rope_local_base_freq": ABSENT,
        "rope_parameters": {
            "full_attention": LINEAR | {"rope_theta": 2e4},
            "sliding_attention": PLAIN | {"rope_theta": 4e3},
        },
    },
    "two ropes without theta": NO_ROPE | {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": PLAIN}},
    "two ropes and theta on top": {
        "rope_scaling": ABSENT,
        "rope_parameters": {"full_attention": LINEAR, "sliding_attention": PLAIN},
    },
    "two ropes and rope_scaling": {
        "rope_scaling": LINEAR,
        "rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN},
    },
    "only the rope of full layers": {"rope_scaling": ABSENT, "rope_parameters": {"full_attention": LINEAR}},
    "only the rope of sliding layers": {"rope_scaling": ABSENT, "rope_parameters": {"sliding_attention": PLAIN}},
    "linear rope of sliding layers": {
        "rope_scaling": ABSENT,
        "rope_parameters": {"full_attention": PLAIN, "sliding_attention": LINEAR},
    },
    "yarn in full layers": {
        "rope_scaling": ABSENT,
        "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN},
    },
    "alternating layers and linear rope": {"layer_types": ALTERNATING, "rope_scaling": LINEAR},
    "full layers and linear rope": {"layer_types": ["full_attention"] * 2, "rope_scaling": LINEAR},
}
HYBRID_SPELLINGS = {
    "layer_types absent": {"layer_types": ABSENT},
    "every second layer with attention": {"layer_types": ABSENT, "full_attention_interval": 2},
    "all layers with attention": {"layer_types": ABSENT, "full_attention_interval": 1},
    "interval and layer_types": {"full_attention_interval": 1},
    "interval null": {"layer_types": ABSENT, "full_attention_interval": None},
    "interval 0": {"layer_types": ABSENT, "full_attention_interval": 0},
    "linear layers": {"layer_types": ["linear_attention"] * 2},
    "attention second": {"layer_types": ["linear_attention", "full_attention"]},
    "two key heads absent": {"linear_num_key_heads": ABSENT, "linear_num_value_heads": ABSENT},
    "widths absent": {"linear_key_head_dim": ABSENT, "linear_value_head_dim": ABSENT},
    "one value head per key head": {"linear_num_value_heads": 2},
    "value heads between": {"linear_num_key_heads": 4, "linear_num_value_heads": 6},
    "one tap": {"linear_conv_kernel_dim": 1},
    "taps absent": {"linear_conv_kernel_dim": ABSENT},
    "taps null": {"linear_conv_kernel_dim": None},
    "share of rope absent": {"partial_rotary_factor": ABSENT, "head_dim": 16},
    "share of rope null": {"partial_rotary_factor": None, "head_dim": 16},
    "sections of rope": NO_ROPE
    | {"rope_parameters": PLAIN | {"mrope_section": [1, 1, 0], "mrope_interleaved": True, "rope_theta": 1e7}},
    "rope of sections": NO_ROPE | {"rope_parameters": {"rope_type": "mrope", "mrope_section": [1, 1, 0]}},
    "prediction layers of Qwen3.5": {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False},
    "gate of attention": {"attn_output_gate": True},
    "no gate of attention": {"attn_output_gate": False},
    "dtype of the state": {"mamba_ssm_dtype": "float32"},
    "conv bias": {"linear_conv_bias": True},
}
HYBRIDS = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
GEMMAS = {"gemma2", "gemma3_text"}
HAVE_GROUPS = {"deepseek_v3", "deepseek_v2", "glm4_moe", "dots1", "solar_open", "glm4_moe_lite"}
HAVE_NUM_EXPERTS = {"olmoe", "qwen2_moe", "qwen3_next", "qwen3_5_moe_text"}
HAVE_EXPERTS = {"llama4_text", "qwen3_moe", "mixtral", "gpt_oss", *HAVE_NUM_EXPERTS, *HAVE_GROUPS}


def spelled(family, change):
    whole = {"architectures": list(family.architectures), "model_type": family.model_type}
    whole |= BASES[family.model_type] | change
    return {key: value for key, value in whole.items() if value is not ABSENT}


def transformers_facts(folder, config):
    """Facts of the model that transformers builds from the folder; raises what transformers raises."""
    (folder / "config.json").write_text(json.dumps(config))
    loaded = AutoConfig.from_pretrained(folder)
    loaded.dtype = torch.float32
    model = AutoModelForCausalLM.from_config(loaded, attn_implementation="eager").eval()
    return facts_of_model(loaded, model)


def facts_of_model(loaded, model):
    """Facts of a text model of transformers."""
    with torch.no_grad():
        output = model(torch.arange(TOKENS)[None], output_attentions=True, use_cache=False)
    layer = model.model.layers[0]
    attention = next((layer.self_attn for layer in model.model.layers if hasattr(layer, "self_attn")), None)
    frequencies, scale = rope_of(model)
    weights = {name: tuple(value.shape) for name, value in model.state_dict().items() if not is_mixture(name)}
    return {
        "weights": weights,
        "parameters": sum(p.numel() for p in model.parameters()) + sum(e.numel() for e in biases_of_experts(model)),
        "tied": model.lm_head.weight is model.model.embed_tokens.weight,
        "eps": eps_of(layer),
        "activation": activation(model),
        "windows": [window_of(attention[0]) for attention in output.attentions],
        "frequencies": [round(value, 6) for value in frequencies],
        "rope scale": round(float(scale), 5),
        "softmax scale": None if attention is None else round(attention.scaling, 5),
        "dropout": loaded.attention_dropout if attention is None else attention.attention_dropout,
        "residual dropout": getattr(attention, "residual_dropout", 0.0),
        "rope": [has_rope(getattr(layer, "self_attn", None), loaded) for layer in model.model.layers],
        "positions": loaded.max_position_embeddings,
        "factors": [
            getattr(loaded, name, 1.0) for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling")
        ]
        if hasattr(layer, "residual_multiplier")
        else [1.0, 1.0, 1 / getattr(loaded, "logit_scale", 1.0)],
        "router": router(loaded, model),
        "llama 4": llama4_facts(loaded),
        "scales": scales(loaded, model),
    }


def has_rope(attention, config):
    if config.model_type == "cohere2":
        return attention.sliding_window is not None
    return bool(getattr(attention, "use_rope", True))


def eps_of(layer):
    norm = getattr(layer, "post_attention_layernorm", None) or layer.input_layernorm
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps


def rope_of(model):
    """(frequencies, factor of sine and cosine); of full layers and then of sliding layers where their ropes differ."""
    rope = model.model.rotary_emb
    if hasattr(rope, "inv_freq"):
        return rope.inv_freq.tolist(), rope.attention_scaling
    kinds = [kind for kind in ("full_attention", "sliding_attention") if kind in rope.layer_types]
    values = [value for kind in kinds for value in getattr(rope, f"{kind}_inv_freq").tolist()]
    return values, max(getattr(rope, f"{kind}_attention_scaling") for kind in kinds)


def scales(config, model):
    """Gemma's softcaps of logits and attention, and factor of the embeddings."""
    if config.model_type not in GEMMAS:
        return None
    attention = model.model.layers[0].self_attn.attn_logit_softcapping
    return config.final_logit_softcapping, attention, model.model.embed_tokens.scalar_embed_scale


def biases_of_experts(model):
    return [value for name, value in model.named_buffers() if name.endswith("e_score_correction_bias")]


def is_mixture(name):
    return any(part in name for part in (".experts.", ".router.", "mlp.gate.", "block_sparse_moe"))


def activation(model):
    """Class of the activation, or the constants of gpt-oss."""
    for module in model.modules():
        if hasattr(module, "limit"):
            return (module.alpha, module.limit)
    module = next(module for module in model.modules() if hasattr(module, "act_fn") or hasattr(module, "activation_fn"))
    function = getattr(module, "act_fn", None) or module.activation_fn
    if "GELU" in repr(function):
        return "gelu_tanh" if "tanh" in repr(function).lower() else repr(function)
    return "silu" if type(function) in (nn.SiLU, type(nn.SiLU())) or "SiLU" in repr(function) else repr(function)


def window_of(attention):
    """Number of tokens that the last token attends to, its own included; None for all of them."""
    seen = int((attention[0, -1] > 0).sum())
    return None if seen == attention.shape[-1] else seen


def router(config, model):
    """top-k, normalization, groups and scale of the first mixture."""
    if config.model_type not in HAVE_EXPERTS:
        return None
    can_skip_normalization = config.model_type in {"olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next", *HAVE_GROUPS}
    facts = {
        "experts": config.n_routed_experts
        if config.model_type in HAVE_GROUPS
        else config.num_experts
        if config.model_type in HAVE_NUM_EXPERTS
        else config.num_local_experts,
        "chosen": config.num_experts_per_tok,
        "dense": [
            not hasattr(getattr(layer, "mlp", None) or layer.feed_forward, "experts") for layer in model.model.layers
        ],
        "normalized": not can_skip_normalization or bool(config.norm_topk_prob),
    }
    if config.model_type in HAVE_GROUPS:
        groups = config.n_group if (config.n_group or 1) > 1 else None
        if config.model_type == "deepseek_v2" and config.topk_method == "greedy":
            groups = None
        interleaved = config.rope_interleave if config.model_type in ("deepseek_v3", "glm4_moe_lite") else True
        facts |= {"groups": groups, "best": config.topk_group if groups else None}
        facts |= {"best of a group": groups and (1 if config.model_type == "deepseek_v2" else 2)}
        facts |= {"scale": config.routed_scaling_factor, "interleaved": interleaved}
    return facts


def mkd_facts(config):
    """The same facts from mkd's Megatron arguments; raises `MkdCheckpointError`."""
    family = family_of(config)
    args = SimpleNamespace(**(family.fixed | family.megatron_args(config)))
    tied = not args.untie_embeddings_and_output_weights
    shapes = [(name, shape) for item in family.tensors(vars(args)) for name, shape in item.shapes.items()]
    sizes = {name: math.prod(shape) for name, shape in shapes if not (tied and name in family.tied)}
    every = getattr(args, "window_attn_skip_freq", None)
    window = args.window_size[0] + 1 if args.window_size and args.window_size[0] + 1 < TOKENS else None
    layers = every if isinstance(every, list) else [1] * args.num_layers
    if args.experimental_attention_variant is not None:
        layers = [1] * args.linear_attention_freq.count(0)  # those with attention
    latent = args.multi_latent_attention
    softmax = 1 / math.sqrt(args.qk_head_dim + args.qk_pos_emb_head_dim if latent else args.kv_channels)
    softmax = getattr(args, "softmax_scale", None) or softmax
    frequencies, scale = rope_facts(args)
    if args.local_rotary_base is not None:
        is_local = [bool(sliding and args.window_size) for sliding in layers]
        local = rope_facts(SimpleNamespace(**vars(args) | LOCAL_ROPE | {"rotary_base": args.local_rotary_base}))[0]
        scale = 1.0 if all(is_local) else scale
        frequencies = [*(() if all(is_local) else frequencies), *(local if any(is_local) else ())]
    if latent and args.rope_type == "yarn":
        softmax *= yarn._yarn_get_mscale(args.rotary_scaling_factor, args.mscale_all_dim) ** 2
    return {
        "weights": {name: shape for name, shape in shapes if not is_mixture(name)},
        "parameters": sum(sizes.values()),
        "tied": tied,
        "eps": args.layernorm_epsilon,
        "activation": mkd_activation(family, args),
        "windows": chunks(args) if family is LLAMA4 else [window if sliding else None for sliding in layers],
        "frequencies": [round(value, 6) for value in frequencies],
        "rope scale": round(scale, 5),
        "softmax scale": round(softmax, 5) if layers else None,
        "dropout": args.attention_dropout,
        "residual dropout": args.hidden_dropout,
        "rope": [not without for without in args.no_rope_freq or [0] * args.num_layers],
        # longrope: megatron's are those of the original length
        "positions": (args.rope_frequencies or args.distant_attention or {}).get(
            "max_position_embeddings", args.max_position_embeddings
        ),
        "factors": own_factors(args),
        "router": router_facts(family, args),
        "llama 4": (
            [args.qk_l2_norm and not none for none in args.no_rope_freq or [0] * args.num_layers],
            args.max_position_embeddings,
        )
        if family is LLAMA4
        else None,
        "scales": (args.logit_softcap, args.attention_softcap, args.mup_embedding_mult)
        if family.model_type in GEMMAS
        else None,
    }


def chunks(args):
    """Llama 4: see `window_of`."""
    size = args.distant_attention["attention_chunk_size"] or TOKENS
    seen = (TOKENS - 1) % size + 1 if size < TOKENS else None
    return [seen if kind == "chunked_attention" else None for kind in args.distant_attention["layer_types"]]


def llama4_facts(config):
    """Layers with norms of queries and keys, and the number of tokens that all layers treat alike."""
    if config.model_type != "llama4_text":
        return None
    norms = [bool(config.use_qk_norm and rope) for rope in config.no_rope_layers[: config.num_hidden_layers]]
    limits = [config.max_position_embeddings]
    if "chunked_attention" in config.layer_types[: config.num_hidden_layers]:
        limits.append(config.attention_chunk_size)
    positions = torch.arange(config.max_position_embeddings)
    tuned = torch.log1p(torch.floor((positions + 1) / config.floor_scale)) * config.attn_scale
    if config.attn_temperature_tuning and 0 in config.no_rope_layers[: config.num_hidden_layers] and tuned.any():
        limits.append(int(tuned.nonzero()[0]))
    return norms, min(limits)


def mkd_activation(family, args):
    if family.model_type == "gpt_oss":
        return 1.702, args.activation_func_clamp_value
    if family.model_type == "arcee":
        return "ReLUSquaredActivation()"
    return "gelu_tanh" if args.gelu_tanh else "silu"


def own_factors(args):
    if args.residual_multiplier is None:
        return [1.0, 1.0, 1 / args.mup_output_mult if args.parallel_block else 1.0]
    return [args.mup_embedding_mult, args.residual_multiplier, 1 / args.mup_output_mult]


def router_facts(family, args):
    if family.model_type not in HAVE_EXPERTS:
        return None
    every = args.moe_layer_freq if isinstance(args.moe_layer_freq, list) else [1] * args.num_layers
    facts = {
        "experts": args.num_experts,
        "chosen": args.moe_router_topk,
        "dense": [not mixture for mixture in every],
        "normalized": not args.moe_router_pre_softmax or bool(args.normalized_single_expert),
    }
    if family.model_type in HAVE_GROUPS:
        groups, best = args.moe_router_num_groups, args.moe_router_group_topk
        facts |= {"groups": groups, "best": best}
        facts |= {"best of a group": groups and (args.router_group_best or args.moe_router_topk // best)}
        facts |= {"scale": args.moe_router_topk_scaling_factor, "interleaved": True}
    return facts


LOCAL_ROPE = {"position_embedding_type": "rope", "rotary_seq_len_interpolation_factor": None, "use_rope_scaling": False}


def rope_facts(args):
    """(frequencies, factor of sine and cosine) of Megatron's rope classes."""
    width = args.qk_pos_emb_head_dim if args.multi_latent_attention else args.kv_channels
    if "yarn" not in (args.position_embedding_type, getattr(args, "rope_type", None)):
        rope = rope_module.RotaryEmbedding(
            width,
            args.rotary_percent,
            rotary_base=args.rotary_base,
            rope_scaling=args.use_rope_scaling,
            rope_scaling_factor=getattr(args, "rope_scaling_factor", 8.0),
            use_cpu_initialization=True,
        )
        if (scaled := args.rope_frequencies) is not None:
            return scaled_frequencies(rope.inv_freq, scaled).tolist(), attention_factor(scaled)
        return (rope.inv_freq / (args.rotary_seq_len_interpolation_factor or 1)).tolist(), 1.0
    prefix = "" if args.multi_latent_attention else "yarn_"
    fast, slow, length = (
        getattr(args, prefix + name) for name in ("beta_fast", "beta_slow", "original_max_position_embeddings")
    )
    whole = getattr(args, "yarn_correction_range_round_to_int", True)
    low, high = yarn._yarn_find_correction_range(fast, slow, width, args.rotary_base, length, whole)
    own = 1.0 - yarn._yarn_linear_ramp_mask(low, high, width // 2, device="cpu").float()
    plain = 1.0 / args.rotary_base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    factor = args.rotary_scaling_factor
    scale = yarn._yarn_get_concentration_factor(factor, args.mscale, args.mscale_all_dim)
    return (plain / factor * (1 - own) + plain * own).tolist(), float(scale)


@pytest.fixture
def quick_transformers(monkeypatch):
    """Models without the two things that take half of their time and are in no fact: weights of a distribution of
    their own, and settings of text generation. Torch functions pass no mode of mkd.cpu."""

    def initialize(model):
        for param in model.parameters():
            nn.init.normal_(param, std=0.1)

    monkeypatch.setattr(PreTrainedModel, "initialize_weights", initialize)
    monkeypatch.setattr(PreTrainedModel, "can_generate", classmethod(lambda model: False))
    with torch._C.DisableTorchFunction():
        yield


def halves():
    """(family, remainder): every second spelling of a family, and every spelling in half of the families; the others
    are slow."""
    for number, family in enumerate(FAMILIES):
        yield pytest.param(family, number % 2, id=family.model_type)
        yield pytest.param(family, 1 - number % 2, id=f"{family.model_type}-others", marks=pytest.mark.slow)


@pytest.mark.usefixtures("quick_transformers")
@pytest.mark.parametrize("family, remainder", list(halves()))
def test_no_silent_difference(family, remainder, tmp_path):
    """Every spelling that transformers loads is computed alike, or refused with its key; most are computed."""
    spellings = SPELLINGS | (EXPERT_SPELLINGS if family.model_type in HAVE_EXPERTS else {})
    spellings |= GEMMA_SPELLINGS if family.model_type in (*GEMMAS, "olmo3") else {}
    spellings |= HYBRID_SPELLINGS if family.model_type in HYBRIDS else {}
    chosen = {name: spelled(family, change) for name, change in list(spellings.items())[remainder::2]}
    equal = assert_equal_facts(chosen, mkd_facts, lambda config: transformers_facts(tmp_path, config))
    assert equal >= 30


def assert_equal_facts(configs, own_facts, facts_of_transformers):
    """Number of spellings that both compute; fails if one is computed otherwise, or refused without its key."""
    different, unnamed, equal = {}, {}, 0
    for name, config in configs.items():
        try:
            own = own_facts(config)
        except MkdCheckpointError as error:
            if not re.match(r'config.json(:.* "?[\w.]+"? is .*[;,:] .+| has no "[\w.]+")', str(error)):
                unnamed[name] = str(error)
            continue
        try:
            theirs = facts_of_transformers(config)
        except Exception:  # transformers cannot load or run this spelling, in many ways
            continue
        differences = {key: (theirs[key], own[key]) for key in own if theirs[key] != own[key]}
        if differences:
            different[name] = differences
        equal += not differences
    assert not different
    assert not unnamed
    return equal
