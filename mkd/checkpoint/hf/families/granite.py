"""Granite: Llama with factors on embeddings, attention scores, residuals and logits.

Granite 4 (GraniteMoeHybrid) is read where all layers have attention and none experts, as in the dense models.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mkd.checkpoint.hf.config_json.parts import (
    ATTENTION_BIASES,
    BIASES,
    FFN,
    SILU,
    SIZES,
    Arguments,
    ConfigPart,
    required,
)
from mkd.checkpoint.hf.config_json.reader import ConfigReader
from mkd.checkpoint.hf.config_json.rope import ROPE
from mkd.checkpoint.hf.families.dense import BIASED_ATTENTION, BIASED_LAYER
from mkd.checkpoint.hf.families.family import ATTENTION_BIAS_ARGUMENTS, DENSE, Family, but
from mkd.checkpoint.hf.tables import (
    ATTENTION_OUT,
    MLP_NORM,
    OPTIONAL_ATTENTION_OUT_BIAS,
    OPTIONAL_QKV_BIAS,
    PACKED_MLP,
    QKV_WEIGHT,
    Entry,
    decoder,
)

_FACTORS: Mapping[str, str] = {
    "embedding_multiplier": "mup_embedding_mult",
    "attention_multiplier": "softmax_scale",
    "residual_multiplier": "residual_multiplier",
}
"""config.json's key -> Megatron's argument."""


def _read(config: ConfigReader) -> dict[str, Any]:
    factors = {key: float(config.get(key, (int, float), 1.0)) for key in (*_FACTORS, "logits_scaling")}
    for key, factor in factors.items():
        if not factor > 0:
            raise config.fail(key, config.config[key], "it must be above 0")
    args = {argument: factors[key] for key, argument in _FACTORS.items()}
    return {**args, "mup_output_mult": 1 / factors["logits_scaling"]}


def _write(args: Arguments) -> dict[str, Any]:
    return {
        **{key: args[argument] for key, argument in _FACTORS.items()},
        "logits_scaling": 1 / args["mup_output_mult"],
    }


_MULTIPLIERS = ConfigPart(_read, _write)
_FREE = ("add_bias_linear", *ATTENTION_BIAS_ARGUMENTS, "softmax_scale", "residual_multiplier")
GRANITE = Family(
    architectures=("GraniteForCausalLM",),
    model_type="granite",
    parts=(SIZES, FFN, ROPE, SILU, BIASES, _MULTIPLIERS),
    table=decoder(BIASED_ATTENTION, BIASED_LAYER),
    fixed=but(DENSE, *_FREE, use_mup=True, mup_base_hidden_size=None),
)


def _read_dense_layers(config: ConfigReader) -> dict[str, Any]:
    layers, key = config.size("num_hidden_layers"), config.only_key("layer_types", "layers_block_type")
    kinds = config.get(key, list, ["mamba"] * layers)
    if len(kinds) != layers or not {"attention", "full_attention"}.issuperset(kinds):
        rule = f"only {layers} times 'attention' is supported; the nearest family with Mamba layers is Nemotron-H"
        raise config.fail(key, kinds, rule)
    if (experts := config.get("num_local_experts", int, 8)) != 0:
        raise config.fail("num_local_experts", experts, "only 0 is supported; the nearest with experts is Qwen2-MoE")
    return {"ffn_hidden_size": config.size("shared_intermediate_size", default=1024)}


def _write_dense_layers(args: Arguments) -> dict[str, Any]:
    return {
        "layer_types": ["attention"] * args["num_layers"],
        "num_local_experts": 0,
        "shared_intermediate_size": args["ffn_hidden_size"],
        # transformers checks the widths of Mamba layers where there are none
        "mamba_n_heads": 1,
        "mamba_d_head": "auto",
    }


def _shared(entry: Entry, name: str) -> Entry:
    """The entry of a linear layer of the MLP under Granite 4's name of it."""
    return replace(
        entry, sources={f"model.layers.{{layer}}.shared_mlp.{name}.weight": next(iter(entry.sources.values()))}
    )


_GATE_UP, _DOWN = PACKED_MLP
GRANITE4 = Family(
    architectures=("GraniteMoeHybridForCausalLM",),
    model_type="granitemoehybrid",
    parts=(
        SIZES,
        ConfigPart(_read_dense_layers, _write_dense_layers),
        required(position_embedding_type="rope"),
        ROPE,
        SILU,
        ATTENTION_BIASES,
        _MULTIPLIERS,
    ),
    table=decoder(
        (QKV_WEIGHT, OPTIONAL_QKV_BIAS, ATTENTION_OUT, OPTIONAL_ATTENTION_OUT_BIAS),
        (MLP_NORM, _shared(_GATE_UP, "input_linear"), _shared(_DOWN, "output_linear")),
    ),
    fixed=but(
        DENSE,
        *(*ATTENTION_BIAS_ARGUMENTS, "softmax_scale", "residual_multiplier"),
        use_mup=True,
        mup_base_hidden_size=None,
    ),
)
