"""Families with mixtures of experts."""

from mkd.checkpoint.hf.families.family import ATTENTION, MIXTURE, Family, but
from mkd.checkpoint.hf.gpt_oss import BIASED_MIXTURE, CLAMPED_GLU, SINK_ATTENTION
from mkd.checkpoint.hf.latent import (
    DENSE_THEN_MIXTURE,
    LATENT_ATTENTION,
    LATENT_EXPERTS,
    LATENT_INPUT_NORM,
    LATENT_SIZES,
)
from mkd.checkpoint.hf.parts import (
    EXPERT_FFN,
    EXPERTS_HAVE_FFN,
    NORMALIZED_ROUTER,
    OPTIONAL_NORMALIZED_ROUTER,
    ROPE,
    SILU,
    SIZES,
    experts,
    required,
)
from mkd.checkpoint.hf.tables import ATTENTION_OUT, HEAD_NORMS, MOE_NORM, QKV_WEIGHT, decoder, mixture
from mkd.checkpoint.hf.windows import ALTERNATING_WINDOWS, NO_WINDOW, WINDOW
from mkd.checkpoint.hf.yarn import LATENT_ROPE, ROPE_OR_YARN

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
        required(attention_bias=False, decoder_sparse_step=1, mlp_only_layers=[]),
    ),
    table=decoder(
        (QKV_WEIGHT, *HEAD_NORMS, ATTENTION_OUT),
        (MOE_NORM, *mixture("mlp.", "gate_proj", "up_proj", "down_proj")),
    ),
    fixed=but(MIXTURE, qk_layernorm=True),
    absent={"num_key_value_heads": 4},
)
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
DEEPSEEK_V3 = Family(
    architectures=("DeepseekV3ForCausalLM",),
    model_type="deepseek_v3",
    parts=(
        LATENT_SIZES,
        LATENT_EXPERTS,
        LATENT_ROPE,
        SILU,
        required(attention_bias=False, norm_topk_prob=True, rope_interleave=True),
        required(scoring_func="sigmoid", topk_method="noaux_tc"),
        # transformers' norms of the two latents always use 1e-6, Megatron's use the value of the model
        required(rms_norm_eps=1e-6),
    ),
    table=decoder(LATENT_ATTENTION, DENSE_THEN_MIXTURE, LATENT_INPUT_NORM),
    fixed=but(
        MIXTURE,
        *("moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_shared_expert_intermediate_size"),
        multi_latent_attention=True,
        qk_layernorm=True,
        use_rope_scaling=False,
        moe_router_score_function="sigmoid",
        moe_router_pre_softmax=False,
        moe_router_enable_expert_bias=True,
        moe_shared_expert_gate=False,
        group_query_attention=False,
    ),
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
        ROPE_OR_YARN,
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
        *("window_size", "window_attn_skip_freq", "position_embedding_type"),
        add_bias_linear=True,
        add_qkv_bias=True,
        swiglu=False,
        quick_geglu=True,
        glu_linear_offset=1.0,
        softmax_type="learnable",
        use_rope_scaling=False,
    ),
    absent={"sliding_window": 128, "rope_theta": 150000.0, "head_dim": 64, "num_key_value_heads": 8},
)
