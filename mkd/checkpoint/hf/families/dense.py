"""Families without experts."""

from mkd.checkpoint.hf.config_json.parts import (
    ATTENTION_BIASES,
    BIASES,
    FFN,
    SILU,
    SIZES,
    ConfigPart,
    qkv_bias,
    required,
)
from mkd.checkpoint.hf.config_json.rope import (
    INTERLEAVED_ROPE,
    LAYERS_WITHOUT_ROPE,
    PARTIAL_ROPE,
    ROPE,
    ROPE_OR_LONGROPE,
    given,
)
from mkd.checkpoint.hf.config_json.windows import (
    LAYER_WINDOWS,
    LAYER_WINDOWS_OF_FOUR,
    NO_WINDOW,
    OPTIONAL_LAYER_WINDOWS,
    WINDOW,
)
from mkd.checkpoint.hf.config_json.yarn import LATENT_ROPE
from mkd.checkpoint.hf.families.family import ATTENTION, ATTENTION_BIAS_ARGUMENTS, DENSE, DENSE_LAYER, Family, but
from mkd.checkpoint.hf.latent import (
    LATENT_ATTENTION,
    LATENT_DENSE_LAYER,
    LATENT_EPSILON,
    LATENT_INPUT_NORM,
    LATENT_SIZES,
)
from mkd.checkpoint.hf.tables import (
    ATTENTION_OUT,
    HEAD_NORMS,
    MLP_NORM,
    OPTIONAL_ATTENTION_OUT_BIAS,
    OPTIONAL_MLP_BIAS,
    OPTIONAL_QKV_BIAS,
    PACKED_MLP,
    PACKED_QKV_WEIGHT,
    QKV_BIAS,
    QKV_WEIGHT,
    UNGATED_MLP,
    decoder,
)

BIASED_ATTENTION = (QKV_WEIGHT, OPTIONAL_QKV_BIAS, ATTENTION_OUT, OPTIONAL_ATTENTION_OUT_BIAS)
BIASED_LAYER = (*DENSE_LAYER, *OPTIONAL_MLP_BIAS)
_QKV_BIASED_ATTENTION = (QKV_WEIGHT, OPTIONAL_QKV_BIAS, ATTENTION_OUT)

LLAMA = Family(
    architectures=("LlamaForCausalLM",),
    model_type="llama",
    parts=(SIZES, FFN, ROPE, SILU, BIASES),
    table=decoder(BIASED_ATTENTION, BIASED_LAYER),
    fixed=but(DENSE, "add_bias_linear", *ATTENTION_BIAS_ARGUMENTS),
)
MISTRAL = Family(
    architectures=("MistralForCausalLM",),
    model_type="mistral",
    parts=(SIZES, FFN, ROPE, OPTIONAL_LAYER_WINDOWS, SILU),
    table=decoder(ATTENTION, DENSE_LAYER),
    fixed=but(DENSE, "window_size", "window_attn_skip_freq"),
    absent={"sliding_window": 4096, "num_key_value_heads": 8},
)
QWEN2 = Family(
    architectures=("Qwen2ForCausalLM",),
    model_type="qwen2",
    parts=(SIZES, FFN, ROPE, NO_WINDOW, SILU),
    table=decoder((QKV_WEIGHT, QKV_BIAS, ATTENTION_OUT), DENSE_LAYER),
    fixed=but(DENSE, add_qkv_bias=True),
    absent={"num_key_value_heads": 32},
)
QWEN3 = Family(
    architectures=("Qwen3ForCausalLM",),
    model_type="qwen3",
    parts=(SIZES, FFN, ROPE, NO_WINDOW, SILU, ATTENTION_BIASES),
    table=decoder(
        (QKV_WEIGHT, OPTIONAL_QKV_BIAS, *HEAD_NORMS, ATTENTION_OUT, OPTIONAL_ATTENTION_OUT_BIAS), DENSE_LAYER
    ),
    fixed=but(DENSE, *ATTENTION_BIAS_ARGUMENTS, qk_layernorm=True),
    absent={"num_key_value_heads": 32, "head_dim": 128},
)
PHI3 = Family(
    architectures=("Phi3ForCausalLM",),
    model_type="phi3",
    parts=(SIZES, FFN, ROPE_OR_LONGROPE, PARTIAL_ROPE, WINDOW, SILU, required(resid_pdrop=0.0, embd_pdrop=0.0)),
    table=decoder((PACKED_QKV_WEIGHT, ATTENTION_OUT), (MLP_NORM, *PACKED_MLP)),
    fixed=but(DENSE, "window_size", "rotary_percent"),
    absent={"original_max_position_embeddings": 4096},
)
MINISTRAL = Family(
    architectures=("MinistralForCausalLM",),
    model_type="ministral",
    parts=(SIZES, FFN, ROPE, LAYER_WINDOWS, SILU),
    table=decoder(ATTENTION, DENSE_LAYER),
    fixed=but(DENSE, "window_size", "window_attn_skip_freq"),
    absent={"sliding_window": 4096, "num_key_value_heads": 8},
)
# transformers refuses null
_BEGIN_TOKEN = ConfigPart(lambda config: {}, lambda args: {"bos_token_id": 128000})
CWM = Family(
    architectures=("CwmForCausalLM",),
    model_type="cwm",
    parts=(SIZES, FFN, given(ROPE), LAYER_WINDOWS_OF_FOUR, SILU, _BEGIN_TOKEN, required(mlp_bias=False)),
    table=decoder(ATTENTION, DENSE_LAYER),
    fixed=but(DENSE, "window_size", "window_attn_skip_freq"),
    absent={"sliding_window": 8192, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1e6},
)
SMOLLM3 = Family(
    architectures=("SmolLM3ForCausalLM",),
    model_type="smollm3",
    parts=(SIZES, FFN, ROPE, LAYERS_WITHOUT_ROPE, NO_WINDOW, SILU, BIASES),
    table=decoder(BIASED_ATTENTION, BIASED_LAYER),
    fixed=but(DENSE, "add_bias_linear", *ATTENTION_BIAS_ARGUMENTS, "no_rope_freq"),
    absent={"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
)
_RESIDUAL_DROPOUT = ConfigPart(
    lambda config: {"hidden_dropout": float(config.get("residual_dropout", (int, float), 0.0))},
    lambda args: {"residual_dropout": args.get("hidden_dropout") or 0.0},
)
SEED_OSS = Family(
    architectures=("SeedOssForCausalLM",),
    model_type="seed_oss",
    parts=(SIZES, FFN, ROPE, SILU, qkv_bias(), _RESIDUAL_DROPOUT, required(attention_out_bias=False, mlp_bias=False)),
    table=decoder(_QKV_BIASED_ATTENTION, DENSE_LAYER),
    fixed=but(DENSE, "add_qkv_bias"),
    absent={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "attention_dropout": 0.1,
        "residual_dropout": 0.1,
    },
)
ERNIE = Family(
    architectures=("Ernie4_5ForCausalLM",),
    model_type="ernie4_5",
    parts=(SIZES, FFN, INTERLEAVED_ROPE, SILU, required(use_bias=False, attention_dropout=0.0)),
    table=decoder(ATTENTION, DENSE_LAYER),
    fixed=but(DENSE, rotary_interleaved=True),
    absent={"num_key_value_heads": 2, "head_dim": 128, "rope_theta": 5e5, "tie_word_embeddings": True},
)
HELIUM = Family(
    architectures=("HeliumForCausalLM",),
    model_type="helium",
    parts=(SIZES, FFN, INTERLEAVED_ROPE, SILU, qkv_bias(), required(mlp_bias=False)),
    table=decoder(_QKV_BIASED_ATTENTION, DENSE_LAYER),
    fixed=but(DENSE, "add_qkv_bias", rotary_interleaved=True),
    absent={"num_key_value_heads": 20, "head_dim": 128, "rope_theta": 1e5},
)
GLM = Family(
    architectures=("GlmForCausalLM",),
    model_type="glm",
    parts=(SIZES, FFN, INTERLEAVED_ROPE, PARTIAL_ROPE, SILU, qkv_bias()),
    table=decoder(_QKV_BIASED_ATTENTION, (MLP_NORM, *PACKED_MLP)),
    fixed=but(DENSE, "add_qkv_bias", "rotary_percent", rotary_interleaved=True),
    absent={"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5},
)
ARCEE = Family(
    architectures=("ArceeForCausalLM",),
    model_type="arcee",
    parts=(SIZES, FFN, ROPE, BIASES, required(hidden_act="relu2")),
    table=decoder(BIASED_ATTENTION, (MLP_NORM, *UNGATED_MLP)),
    fixed=but(DENSE, "add_bias_linear", *ATTENTION_BIAS_ARGUMENTS, swiglu=False, squared_relu=True),
)
YOUTU = Family(
    architectures=("YoutuForCausalLM",),
    model_type="youtu",
    parts=(LATENT_SIZES, LATENT_EPSILON, LATENT_ROPE, SILU, required(attention_bias=False, rope_interleave=True)),
    table=decoder(LATENT_ATTENTION, LATENT_DENSE_LAYER, LATENT_INPUT_NORM),
    fixed=but(
        DENSE,
        "latent_norm_epsilon",
        multi_latent_attention=True,
        qk_layernorm=True,
        group_query_attention=False,
        use_rope_scaling=False,
        position_embedding_type="rope",
        rotary_seq_len_interpolation_factor=None,
    ),
    absent={"num_key_value_heads": 16, "tie_word_embeddings": True},
)
