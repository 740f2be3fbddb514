"""Families with mixtures of experts."""

from dataclasses import replace
from typing import Any

from mkd.checkpoint.hf.config_json.parts import (
    ATTENTION_BIASES,
    EXPERT_FFN,
    EXPERTS_HAVE_FFN,
    FFN,
    NORMALIZED_ROUTER,
    OPTIONAL_HEAD_NORMS,
    OPTIONAL_NORMALIZED_ROUTER,
    SHARED_EXPERT,
    SILU,
    SIZES,
    ConfigPart,
    experts,
    qkv_bias,
    required,
)
from mkd.checkpoint.hf.config_json.reader import ConfigReader
from mkd.checkpoint.hf.config_json.rope import PARTIAL_ROPE, ROPE, WHOLE_ROPE, given
from mkd.checkpoint.hf.config_json.windows import ALTERNATING_WINDOWS, NO_WINDOW, UPPER_LAYER_WINDOWS, WINDOW
from mkd.checkpoint.hf.config_json.yarn import LATENT_ROPE
from mkd.checkpoint.hf.families.family import ATTENTION, ATTENTION_BIAS_ARGUMENTS, MIXTURE, Family, but
from mkd.checkpoint.hf.gpt_oss import BIASED_MIXTURE, CLAMPED_GLU, SINK_ATTENTION
from mkd.checkpoint.hf.latent import (
    BEST_OF_SOFTMAX,
    DENSE_THEN_MIXTURE,
    LATENT_ATTENTION,
    LATENT_EPSILON,
    LATENT_INPUT_NORM,
    LATENT_SIZES,
    dense_by_layer,
    dense_then_mixture,
    no_dense,
    routed_experts,
)
from mkd.checkpoint.hf.layouts import EXPERT_DOWN, row_blocks
from mkd.checkpoint.hf.tables import (
    ATTENTION_OUT,
    HEAD_NORMS,
    MOE_NORM,
    OPTIONAL_ATTENTION_OUT_BIAS,
    OPTIONAL_HEAD_NORM_ENTRIES,
    OPTIONAL_QKV_BIAS,
    QKV_WEIGHT,
    SHARED_EXPERT_GATE,
    decoder,
    expert_entry,
    mixture,
    shared_experts,
)

_NORMED_ATTENTION = (QKV_WEIGHT, OPTIONAL_QKV_BIAS, *HEAD_NORMS, ATTENTION_OUT, OPTIONAL_ATTENTION_OUT_BIAS)

QWEN3_MOE = Family(
    architectures=("Qwen3MoeForCausalLM",),
    model_type="qwen3_moe",
    parts=(
        SIZES,
        EXPERT_FFN,
        ROPE,
        NO_WINDOW,
        experts("num_experts"),
        OPTIONAL_NORMALIZED_ROUTER,
        SILU,
        ATTENTION_BIASES,
        required(decoder_sparse_step=1, mlp_only_layers=[]),
    ),
    table=decoder(
        _NORMED_ATTENTION,
        (MOE_NORM, *mixture("mlp.", "gate_proj", "up_proj", "down_proj")),
    ),
    fixed=but(MIXTURE, *ATTENTION_BIAS_ARGUMENTS, qk_layernorm=True),
    absent={"num_key_value_heads": 4},
)
QWEN3_VL_MOE_TEXT = replace(
    QWEN3_MOE,
    architectures=("Qwen3VLMoeTextModel",),
    model_type="qwen3_vl_moe_text",
    parts=tuple(NORMALIZED_ROUTER if part is OPTIONAL_NORMALIZED_ROUTER else part for part in QWEN3_MOE.parts),
    table=decoder(
        _NORMED_ATTENTION,
        (
            MOE_NORM,
            mixture("mlp.", "gate_proj", "up_proj", "down_proj")[0],
            expert_entry(
                "linear_fc1.weight",
                {"model.layers.{layer}.mlp.experts.gate_up_proj": ("experts", "expert_gate_and_up", "hidden")},
                row_blocks(("moe_ffn", "moe_ffn")),
                ("expert_gate_and_up", "hidden"),
            ),
            expert_entry(
                "linear_fc2.weight",
                {"model.layers.{layer}.mlp.experts.down_proj": ("experts", "hidden", "moe_ffn")},
                EXPERT_DOWN,
                ("hidden", "moe_ffn"),
            ),
        ),
    ),
    absent={"num_key_value_heads": 16},
)
"""The text model of Qwen3-VL with experts: Qwen3-MoE with the experts of a layer in two tensors."""
MIXTRAL = Family(
    architectures=("MixtralForCausalLM",),
    model_type="mixtral",
    parts=(
        SIZES,
        EXPERTS_HAVE_FFN,
        ROPE,
        WINDOW,
        experts("num_local_experts"),
        NORMALIZED_ROUTER,
        SILU,
        required(router_jitter_noise=0.0),
    ),
    table=decoder(ATTENTION, (MOE_NORM, *mixture("block_sparse_moe.", "w1", "w3", "w2"))),
    fixed=but(MIXTURE, "window_size"),
    absent={"rope_theta": 1e6, "num_key_value_heads": 8},
)
_ROUTED = but(
    MIXTURE,
    *("moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_shared_expert_intermediate_size"),
    moe_shared_expert_gate=False,
)
_ROUTED_BY_SIGMOID = but(
    _ROUTED,
    moe_router_score_function="sigmoid",
    moe_router_pre_softmax=False,
    moe_router_enable_expert_bias=True,
)
_LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "use_rope_scaling": False,
    "position_embedding_type": "rope",
    "rotary_seq_len_interpolation_factor": None,
    "group_query_attention": False,
}
DEEPSEEK_V3 = Family(
    architectures=("DeepseekV3ForCausalLM",),
    model_type="deepseek_v3",
    parts=(
        LATENT_SIZES,
        routed_experts(),
        LATENT_ROPE,
        SILU,
        required(attention_bias=False, norm_topk_prob=True, rope_interleave=True),
        required(scoring_func="sigmoid", topk_method="noaux_tc"),
        LATENT_EPSILON,
    ),
    table=decoder(LATENT_ATTENTION, DENSE_THEN_MIXTURE, LATENT_INPUT_NORM),
    fixed=but(_ROUTED_BY_SIGMOID, "latent_norm_epsilon", **_LATENT),
    absent={
        "num_key_value_heads": 128,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    },
)
GPT_OSS = Family(
    architectures=("GptOssForCausalLM",),
    model_type="gpt_oss",
    parts=(
        SIZES,
        EXPERTS_HAVE_FFN,
        given(ROPE),
        ALTERNATING_WINDOWS,
        CLAMPED_GLU,
        experts("num_local_experts"),
        NORMALIZED_ROUTER,
        SILU,
        required(attention_bias=True, swiglu_alpha=1.702),
    ),
    table=decoder(SINK_ATTENTION, BIASED_MIXTURE),
    fixed=but(
        MIXTURE,
        *("window_size", "window_attn_skip_freq", "activation_func_clamp_value"),
        add_bias_linear=True,
        add_qkv_bias=True,
        swiglu=False,
        quick_geglu=True,
        glu_linear_offset=1.0,
        softmax_type="learnable",
    ),
    absent={"sliding_window": 128, "rope_theta": 150000.0, "head_dim": 64, "num_key_value_heads": 8},
)
# without it, transformers has 60 experts, whatever num_local_experts is
NUM_EXPERTS = ConfigPart(lambda config: {"num_experts": config.size("num_experts")}, lambda args: {})
SHARED_EXPERT_LAYER = (
    MOE_NORM,
    *mixture("mlp.", "gate_proj", "up_proj", "down_proj"),
    *shared_experts("shared_expert"),
    SHARED_EXPERT_GATE,
)
"""Routed experts, and a shared one with a gate."""

QWEN2_MOE = Family(
    architectures=("Qwen2MoeForCausalLM",),
    model_type="qwen2_moe",
    parts=(
        SIZES,
        EXPERT_FFN,
        ROPE,
        NO_WINDOW,
        experts("num_experts"),
        NUM_EXPERTS,
        OPTIONAL_NORMALIZED_ROUTER,
        SHARED_EXPERT,
        SILU,
        qkv_bias("qkv_bias"),
        required(decoder_sparse_step=1, mlp_only_layers=[]),
    ),
    table=decoder(
        (QKV_WEIGHT, OPTIONAL_QKV_BIAS, ATTENTION_OUT),
        SHARED_EXPERT_LAYER,
    ),
    fixed=but(MIXTURE, "add_qkv_bias", "moe_shared_expert_intermediate_size", moe_shared_expert_gate=True),
    absent={"num_key_value_heads": 16, "qkv_bias": True},
)
_GROUPS, _NO_GROUPS = "group_limited_greedy", "greedy"
_BY_SOFTMAX = routed_experts(other_count="num_experts", best_of_group=BEST_OF_SOFTMAX)


def _read_softmax_experts(config: ConfigReader) -> dict[str, Any]:
    method = config.get("topk_method", str, _NO_GROUPS)
    if method not in (_GROUPS, _NO_GROUPS):
        raise config.fail("topk_method", method, f"only {_NO_GROUPS!r} and {_GROUPS!r} are supported")
    if method == _NO_GROUPS:  # transformers then ignores the groups
        config = ConfigReader({**config.config, "n_group": 1, "topk_group": 1})
    return _BY_SOFTMAX.read(config)


_SOFTMAX_EXPERTS = ConfigPart(
    _read_softmax_experts,
    lambda args: {**_BY_SOFTMAX.write(args), "topk_method": _GROUPS if args["moe_router_num_groups"] else _NO_GROUPS},
)
DEEPSEEK_V2 = Family(
    architectures=("DeepseekV2ForCausalLM",),
    model_type="deepseek_v2",
    parts=(
        LATENT_SIZES,
        _SOFTMAX_EXPERTS,
        LATENT_ROPE,
        SILU,
        required(attention_bias=False, mlp_bias=False, norm_topk_prob=False, scoring_func="softmax"),
        LATENT_EPSILON,
    ),
    table=decoder(LATENT_ATTENTION, dense_then_mixture(), LATENT_INPUT_NORM),
    fixed=but(_ROUTED, "latent_norm_epsilon", moe_router_pre_softmax=True, **_LATENT),
)
GLM4_MOE = Family(
    architectures=("Glm4MoeForCausalLM",),
    model_type="glm4_moe",
    parts=(
        SIZES,
        FFN,
        routed_experts(),
        ROPE,
        PARTIAL_ROPE,
        OPTIONAL_HEAD_NORMS,
        SILU,
        qkv_bias(),
        required(norm_topk_prob=True),
    ),
    table=decoder(
        (QKV_WEIGHT, OPTIONAL_QKV_BIAS, *OPTIONAL_HEAD_NORM_ENTRIES, ATTENTION_OUT),
        DENSE_THEN_MIXTURE,
    ),
    fixed=but(_ROUTED_BY_SIGMOID, "rotary_percent", "qk_layernorm", "add_qkv_bias"),
    absent={"num_key_value_heads": 8, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5, "n_shared_experts": 1},
)
DOTS1 = Family(
    architectures=("Dots1ForCausalLM",),
    model_type="dots1",
    parts=(
        SIZES,
        FFN,
        routed_experts(),
        ROPE,
        UPPER_LAYER_WINDOWS,
        SILU,
        ATTENTION_BIASES,
        required(norm_topk_prob=True),
    ),
    table=decoder(
        (QKV_WEIGHT, OPTIONAL_QKV_BIAS, *HEAD_NORMS, ATTENTION_OUT, OPTIONAL_ATTENTION_OUT_BIAS), DENSE_THEN_MIXTURE
    ),
    fixed=but(_ROUTED_BY_SIGMOID, *ATTENTION_BIAS_ARGUMENTS, "window_size", "window_attn_skip_freq", qk_layernorm=True),
    absent={"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 62, "norm_topk_prob": False},
)
SOLAR_OPEN = Family(
    architectures=("SolarOpenForCausalLM",),
    model_type="solar_open",
    parts=(SIZES, EXPERT_FFN, routed_experts(no_dense), ROPE, SILU, qkv_bias(), required(norm_topk_prob=True)),
    table=decoder((QKV_WEIGHT, OPTIONAL_QKV_BIAS, ATTENTION_OUT), DENSE_THEN_MIXTURE),
    fixed=but(_ROUTED_BY_SIGMOID, "add_qkv_bias"),
    absent={"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1e6, "n_shared_experts": 1},
)
GLM4_MOE_LITE = Family(
    architectures=("Glm4MoeLiteForCausalLM",),
    model_type="glm4_moe_lite",
    parts=(
        LATENT_SIZES,
        routed_experts(dense_by_layer),
        LATENT_ROPE,
        WHOLE_ROPE,
        SILU,
        required(attention_bias=False, norm_topk_prob=True, rope_interleave=True),
        LATENT_EPSILON,
    ),
    table=decoder(LATENT_ATTENTION, DENSE_THEN_MIXTURE, LATENT_INPUT_NORM),
    fixed=but(_ROUTED_BY_SIGMOID, "latent_norm_epsilon", **_LATENT),
    absent={"num_key_value_heads": 20, "routed_scaling_factor": 1.8, "n_shared_experts": 1},
)
