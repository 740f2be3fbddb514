"""Families without experts."""

from mkd.checkpoint.hf.families.family import ATTENTION, DENSE, DENSE_LAYER, Family, but
from mkd.checkpoint.hf.parts import FFN, PARTIAL_ROPE, ROPE, SILU, SIZES, required
from mkd.checkpoint.hf.tables import (
    ATTENTION_OUT,
    HEAD_NORMS,
    MLP_NORM,
    PACKED_MLP,
    PACKED_QKV_WEIGHT,
    QKV_BIAS,
    QKV_WEIGHT,
    decoder,
)
from mkd.checkpoint.hf.windows import NO_WINDOW, OPTIONAL_LAYER_WINDOWS, WINDOW

LLAMA = Family(
    architectures=("LlamaForCausalLM",),
    model_type="llama",
    parts=(SIZES, FFN, ROPE, SILU, required(attention_bias=False, mlp_bias=False)),
    table=decoder(ATTENTION, DENSE_LAYER),
    fixed=DENSE,
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
    parts=(SIZES, FFN, ROPE, NO_WINDOW, SILU, required(attention_bias=False)),
    table=decoder((QKV_WEIGHT, *HEAD_NORMS, ATTENTION_OUT), DENSE_LAYER),
    fixed=but(DENSE, qk_layernorm=True),
    absent={"num_key_value_heads": 32, "head_dim": 128},
)
PHI3 = Family(
    architectures=("Phi3ForCausalLM",),
    model_type="phi3",
    parts=(SIZES, FFN, ROPE, PARTIAL_ROPE, WINDOW, SILU, required(resid_pdrop=0.0, embd_pdrop=0.0)),
    table=decoder((PACKED_QKV_WEIGHT, ATTENTION_OUT), (MLP_NORM, *PACKED_MLP)),
    fixed=but(DENSE, "window_size", "rotary_percent"),
)
