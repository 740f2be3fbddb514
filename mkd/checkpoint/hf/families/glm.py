"""GLM-4, dense: norms around attention and MLP, rope on interleaved pairs of a part of each head's channels, optional
biases of queries, keys and values.

Source: transformers, models/glm4.
"""

from dataclasses import replace

from mkd.checkpoint.hf.config_json.parts import FFN, SILU, SIZES, ConfigPart
from mkd.checkpoint.hf.config_json.rope import PARTIAL_ROPE, PLAIN_ROPE
from mkd.checkpoint.hf.families.family import ATTENTION, DENSE, Family, but
from mkd.checkpoint.hf.families.olmo import ATTENTION_POST_NORM, MLP_POST_NORM
from mkd.checkpoint.hf.tables import MLP_NORM, PACKED_MLP, QKV_BIAS, Entry, decoder

_OPTIONAL_BIAS = ConfigPart(
    lambda config: {"add_qkv_bias": config.get("attention_bias", bool)},
    lambda args: {"attention_bias": bool(args["add_qkv_bias"])},
)


def _named(entry: Entry, name: str) -> Entry:
    """The entry of a norm with another name in the folder."""
    return replace(entry, sources={f"model.layers.{{layer}}.{name}.weight": ("hidden",)})


GLM4 = Family(
    architectures=("Glm4ForCausalLM",),
    model_type="glm4",
    parts=(SIZES, FFN, PLAIN_ROPE, PARTIAL_ROPE, SILU, _OPTIONAL_BIAS),
    table=decoder(
        (
            *ATTENTION,
            replace(QKV_BIAS, where=lambda args, layer: bool(args["add_qkv_bias"])),
            _named(ATTENTION_POST_NORM, "post_self_attn_layernorm"),
        ),
        (MLP_NORM, *PACKED_MLP, _named(MLP_POST_NORM, "post_mlp_layernorm")),
    ),
    fixed=but(DENSE, "rotary_percent", "add_qkv_bias", norm_placement="around", rotary_interleaved=True),
    absent={"partial_rotary_factor": 0.5, "attention_bias": True, "head_dim": 128, "num_key_value_heads": 2},
)
