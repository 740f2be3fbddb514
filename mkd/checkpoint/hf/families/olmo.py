"""OLMoE: a mixture of experts with norms over the whole width of queries and keys. OLMo 2 and 3: these norms, and norms
after attention and MLP instead of before; in OLMo 3 sliding windows in some layers, and two ropes.

Sources: transformers, models/olmoe, models/olmo2 and models/olmo3.
"""

from typing import Any

from mkd.checkpoint.hf.config_json.layer_ropes import YARN_AND_LOCAL_ROPE
from mkd.checkpoint.hf.config_json.parts import (
    EXPERTS_HAVE_FFN,
    FFN,
    OPTIONAL_NORMALIZED_ROUTER,
    SILU,
    SIZES,
    ConfigPart,
    experts,
    required,
)
from mkd.checkpoint.hf.config_json.reader import ConfigReader
from mkd.checkpoint.hf.config_json.rope import PLAIN_ROPE, ROPE
from mkd.checkpoint.hf.config_json.windows import THREE_OF_FOUR_WINDOWS
from mkd.checkpoint.hf.families.family import DENSE, MIXTURE, Family, but
from mkd.checkpoint.hf.layouts import REPLICATED, rows
from mkd.checkpoint.hf.tables import (
    ATTENTION_OUT,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    MLP,
    MOE_NORM,
    QKV_WEIGHT,
    Entry,
    decoder,
    mixture,
)

_MG, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."
_WIDE_NORMS = tuple(
    Entry(
        f"{_MG}self_attention.{name}_layernorm.weight",
        {f"{_HF}self_attn.{name}_norm.weight": (width,)},
        rows(width),
    )
    for name, width in (("q", "query"), ("k", "key"))
)
ATTENTION_POST_NORM = Entry(
    _MG + "self_attention.post_layernorm.weight",
    {_HF + "post_attention_layernorm.weight": ("hidden",)},
    REPLICATED,
)
MLP_POST_NORM = Entry(
    _MG + "mlp.post_layernorm.weight", {_HF + "post_feedforward_layernorm.weight": ("hidden",)}, REPLICATED
)

_TABLE = (
    EMBEDDING,
    *(QKV_WEIGHT, *_WIDE_NORMS, ATTENTION_OUT, ATTENTION_POST_NORM),
    *(*MLP, MLP_POST_NORM),
    *(FINAL_NORM, HEAD),
)


def _read_whole_width(config: ConfigReader) -> dict[str, Any]:
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    width = config.size("head_dim", default=hidden // heads)
    if heads * width != hidden:
        raise config.fail(
            "head_dim", width, f"only hidden_size / num_attention_heads, {hidden / heads:g}, is supported"
        )
    return {}


_WHOLE_WIDTH = ConfigPart(_read_whole_width, lambda args: {})
"""The norm of the queries has the width of the hidden states."""
OLMOE = Family(
    architectures=("OlmoeForCausalLM",),
    model_type="olmoe",
    parts=(
        SIZES,
        EXPERTS_HAVE_FFN,
        ROPE,
        experts("num_experts"),
        OPTIONAL_NORMALIZED_ROUTER,
        SILU,
        required(attention_bias=False, clip_qkv=None),
        _WHOLE_WIDTH,
    ),
    table=decoder(
        (QKV_WEIGHT, *_WIDE_NORMS, ATTENTION_OUT),
        (MOE_NORM, *mixture("mlp.", "gate_proj", "up_proj", "down_proj")),
    ),
    fixed=but(MIXTURE, whole_width_qk_norms=True),
)
OLMO2 = Family(
    architectures=("Olmo2ForCausalLM",),
    model_type="olmo2",
    parts=(SIZES, FFN, PLAIN_ROPE, SILU, required(attention_bias=False)),
    table=_TABLE,
    fixed=but(DENSE, norm_placement="after", whole_width_qk_norms=True),
)
OLMO3 = Family(
    architectures=("Olmo3ForCausalLM",),
    model_type="olmo3",
    parts=(SIZES, FFN, YARN_AND_LOCAL_ROPE, THREE_OF_FOUR_WINDOWS, SILU, required(attention_bias=False)),
    table=_TABLE,
    fixed=but(
        OLMO2.fixed,
        *("position_embedding_type", "window_size", "window_attn_skip_freq", "local_rotary_base"),
        use_rope_scaling=False,
    ),
    absent={"sliding_window": 4096},
)
