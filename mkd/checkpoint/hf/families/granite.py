"""Granite: Llama with factors on embeddings, attention scores, residuals and logits."""

from collections.abc import Mapping
from typing import Any

from mkd.checkpoint.hf.config_parts import BIASES, FFN, SILU, SIZES, Arguments, ConfigPart
from mkd.checkpoint.hf.config_reader import ConfigReader
from mkd.checkpoint.hf.families.dense import BIASED_ATTENTION, BIASED_LAYER
from mkd.checkpoint.hf.families.family import ATTENTION_BIAS_ARGUMENTS, DENSE, Family, but
from mkd.checkpoint.hf.rope import ROPE
from mkd.checkpoint.hf.tables import decoder

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
