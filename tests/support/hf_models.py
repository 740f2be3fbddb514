"""Sizes of tiny models of the families that differ from Llama, Mistral, Qwen and DeepSeek-V3 in a few keys."""

from typing import Any

TWO = {"num_hidden_layers": 2}
MOE = {**TWO, "num_experts_per_tok": 2}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
HALF = {**PLAIN, "partial_rotary_factor": 0.5}
WINDOWS = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
MULTIPLIERS = {
    "embedding_multiplier": 1.5,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.25,
    "attention_multiplier": 0.125,
}
LATENT_SIZES = {
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "head_dim": 8,
}
LATENT = {**LATENT_SIZES, "rope_parameters": PLAIN, **TWO}
ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
LLAMA4_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.5,
    "original_max_position_embeddings": 24,
}
LLAMA4 = {
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 40,
    "intermediate_size": 24,
    "interleave_moe_layer_step": 2,
    "no_rope_layers": [1, 0],
    "rms_norm_eps": 1e-3,
    "attention_chunk_size": 64,
    "floor_scale": 61,
    "rope_parameters": LLAMA4_ROPE,
}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25},
} | TWO
SHARED_EXPERT = {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20}
HYBRID_MODELS: dict[str, dict[str, Any]] = {
    # With the delta net first, transformers' own logits differ by 2e-4 between fp32 and float64; with its other widths
    # in the last model, gradients differ by 4e-4 between two of its implementations of attention.
    "qwen3-next": {"model_type": "qwen3_next", **SHARED_EXPERT, **HYBRID, "num_experts_per_tok": 2}
    | {"layer_types": ["full_attention", "linear_attention"]},
    "qwen3.5": {"model_type": "qwen3_5_text", **HYBRID},
    "qwen3.5 moe": {"model_type": "qwen3_5_moe_text", **SHARED_EXPERT, **HYBRID, "num_experts_per_tok": 2}
    | {"layer_types": ["full_attention", "linear_attention"], "linear_key_head_dim": 12, "linear_value_head_dim": 8},
}
"""Models with gated delta nets."""
NEMOTRON_H = {
    "model_type": "nemotron_h",
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
    "ssm_state_size": 6,
    "mamba_num_heads": 4,
    "mamba_head_dim": 10,
    "n_groups": 2,
    "time_step_min": 0.9,
}
"""The time step of a part of the tokens is at its lower limit."""
MIXER_MODELS: dict[str, dict[str, Any]] = {
    "nemotron-h": NEMOTRON_H,
    "nemotron 3 nano": NEMOTRON_H
    | {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 20,
        "routed_scaling_factor": 1.5,
    },
}
"""Models whose layers have one mixer each."""
MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 48,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
NEAR_MODELS: dict[str, dict[str, Any]] = {
    "llama, biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, **TWO},
    "llama, biases of attention": {"model_type": "llama", "attention_bias": True, **TWO},
    "qwen3, biases": {"model_type": "qwen3", "attention_bias": True, **TWO},
    "llama, llama3 rope with other constants": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 4.0,
            "low_freq_factor": 2.0,
            "high_freq_factor": 5.0,
            "original_max_position_embeddings": 40,
        },
        **TWO,
    },
    "phi3, longrope, tied": {
        "model_type": "phi3",
        "head_dim": 8,
        "sliding_window": None,
        "max_position_embeddings": 96,
        "original_max_position_embeddings": 48,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.2, 2.0],
            "long_factor": [1.0, 4.0, 8.0],
            "original_max_position_embeddings": 48,
        },
        **TWO,
    },
    "llama, yarn": {"model_type": "llama", "rope_parameters": YARN, **TWO},
    "qwen3, linear rope": {
        "model_type": "qwen3",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
        **TWO,
    },
    "qwen2, dynamic rope": {
        "model_type": "qwen2",
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0},
        **TWO,
    },
    "qwen3 moe, one expert per token": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "moe_intermediate_size": 24,
        **MOE,
        "num_experts_per_tok": 1,
    },
    "qwen3 moe, one normalized expert per token": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        **MOE,
        "num_experts_per_tok": 1,
    },
    "mixtral, one expert per token": {
        "model_type": "mixtral",
        "num_local_experts": 4,
        **MOE,
        "num_experts_per_tok": 1,
    },
    "qwen3 moe, biases": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "attention_bias": True,
        **MOE,
    },
    "ministral": {"model_type": "ministral", **WINDOWS, **TWO},
    "cwm": {
        "model_type": "cwm",
        "bos_token_id": 1,
        "sliding_window": 7,
        "hidden_size": 48,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        **TWO,
    },
    "smollm3, biases": {
        "model_type": "smollm3",
        "no_rope_layers": [0, 1],
        "attention_bias": True,
        "mlp_bias": True,
        **TWO,
    },
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 4, "no_rope_layer_interval": 3},
    "seed-oss": {"model_type": "seed_oss", "attention_dropout": 0.0, "residual_dropout": 0.0, **TWO},
    "ernie 4.5": {"model_type": "ernie4_5", **TWO},
    "helium, biases": {"model_type": "helium", "attention_bias": True, "head_dim": 8, **TWO},
    "glm": {"model_type": "glm", "rope_parameters": HALF, **TWO},
    "arcee": {"model_type": "arcee", "rope_parameters": YARN, **TWO},
    "arcee, biases": {"model_type": "arcee", "attention_bias": True, "mlp_bias": True, **TWO},
    "granite": {"model_type": "granite", **MULTIPLIERS, "head_dim": 8, **TWO},
    "granite, biases": {"model_type": "granite", **MULTIPLIERS, "attention_bias": True, "mlp_bias": True, **TWO},
    "youtu": {"model_type": "youtu", **LATENT},
    "youtu, plain queries": {"model_type": "youtu", **LATENT, "q_lora_rank": None},
    "qwen2 moe": {
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 20,
        **MOE,
    },
    "olmoe, one normalized expert per token": {
        "model_type": "olmoe",
        "num_experts": 4,
        "intermediate_size": 24,
        "head_dim": 8,
        "norm_topk_prob": True,
        "rope_parameters": YARN,
        **TWO,
        "num_experts_per_tok": 1,
    },
    "olmoe": {"model_type": "olmoe", "num_experts": 4, "intermediate_size": 24, "head_dim": 8, **MOE},
    "cohere 2, tied": {
        "model_type": "cohere2",
        "head_dim": 8,
        "sliding_window": 5,
        "tie_word_embeddings": True,
        **TWO,
    },
    "cohere 2": {"model_type": "cohere2", "head_dim": 8, "logit_scale": 0.5, "layer_norm_eps": 1e-3, **WINDOWS, **TWO},
    "granite 4, dense": {
        "model_type": "granitemoehybrid",
        "num_local_experts": 0,
        "shared_intermediate_size": 40,
        "layer_types": ["full_attention"] * 2,
        "position_embedding_type": "rope",
        "mamba_n_heads": 4,
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.5,
        "logits_scaling": 4.0,
        **TWO,
    },
    "ministral 3": {
        "model_type": "ministral3",
        "sliding_window": 7,
        "rope_parameters": MINISTRAL3_ROPE,
        **TWO,
    },
    "llama 4, mixtures in every layer": {
        "model_type": "llama4_text",
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 72,
        "intermediate_size": 24,
        "use_qk_norm": False,
        "attention_chunk_size": None,
        **TWO,
    },
    "llama 4": {"model_type": "llama4_text", **LLAMA4, **TWO},
    "deepseek v3, plain queries": {"model_type": "deepseek_v3", **LATENT, **ROUTED, "q_lora_rank": None}
    | {"first_k_dense_replace": 1, "rms_norm_eps": 1e-3},
    "deepseek v3, one expert per token, groups of experts": {
        "model_type": "deepseek_v3",
        **LATENT,
        **ROUTED,
        "num_experts_per_tok": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
    },
    "deepseek v2": {"model_type": "deepseek_v2", **LATENT, **ROUTED, "first_k_dense_replace": 1}
    | {"routed_scaling_factor": 1.5},
    "deepseek v2, groups, plain queries, yarn": {
        "model_type": "deepseek_v2",
        **LATENT,
        **ROUTED,
        "q_lora_rank": None,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
    },
    "deepseek v2, groups by their best expert": {
        "model_type": "deepseek_v2",
        **LATENT,
        **ROUTED,
        "n_routed_experts": 12,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 2.0,
    },
    "deepseek v3, groups by their two best experts": {
        "model_type": "deepseek_v3",
        **LATENT,
        **ROUTED,
        "n_routed_experts": 12,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 0,
    },
    "glm 4.5": {"model_type": "glm4_moe", "use_qk_norm": True, "attention_bias": True, "rope_parameters": HALF}
    | {**ROUTED, **TWO, "first_k_dense_replace": 1},
    "dots1": {
        "model_type": "dots1",
        "norm_topk_prob": True,
        "attention_bias": True,
        **ROUTED,
        **WINDOWS,
        **TWO,
        "first_k_dense_replace": 1,
    },
    "solar open": {"model_type": "solar_open", **ROUTED, **TWO},
    "glm 4.7 flash": {"model_type": "glm4_moe_lite", **LATENT, **ROUTED, "rms_norm_eps": 1e-3},
}
"""Name -> sizes; see `MODELS` in tests/dist/test_hf_families.py."""
