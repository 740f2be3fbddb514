"""Ministral 3: Mistral with yarn rope, and a temperature of attention that rises beyond the rope's original length.

Up to this length attention is plain: the Megatron model has no more positions.

Source: transformers, models/ministral3.
"""

from typing import Any

from mkd.checkpoint.hf.config_json.parts import FFN, SILU, SIZES, Arguments, ConfigPart
from mkd.checkpoint.hf.config_json.reader import ConfigReader, RopeConfig
from mkd.checkpoint.hf.config_json.rope import YARN
from mkd.checkpoint.hf.config_json.windows import WINDOW
from mkd.checkpoint.hf.families.family import ATTENTION, DENSE, DENSE_LAYER, Family, but
from mkd.checkpoint.hf.tables import decoder
from mkd.errors import MkdCheckpointError

_RISE = "llama_4_scaling_beta"


def _read(config: ConfigReader) -> dict[str, Any]:
    args, positions = YARN.read(config), config.size("max_position_embeddings")
    rise = float(RopeConfig.read(config).scaling.get(_RISE, (int, float)))
    return {
        **args,
        "max_position_embeddings": min(positions, args["yarn_original_max_position_embeddings"]),
        "distant_attention": {"max_position_embeddings": positions, _RISE: rise},
    }


def _write(args: Arguments) -> dict[str, Any]:
    keys, written = args.get("distant_attention"), YARN.write(args)
    if keys is None or _RISE not in keys:
        raise MkdCheckpointError(f"the Megatron checkpoint was not imported from Ministral 3: it has no {_RISE}")
    scaling = {**written["rope_scaling"], _RISE: keys[_RISE]}
    return {**written, "rope_scaling": scaling, "max_position_embeddings": keys["max_position_embeddings"]}


MINISTRAL3 = Family(
    architectures=("Ministral3ForCausalLM",),
    model_type="ministral3",
    parts=(SIZES, FFN, ConfigPart(_read, _write), WINDOW, SILU),
    table=decoder(ATTENTION, DENSE_LAYER),
    fixed=but(DENSE, "window_size", "distant_attention"),
    absent={"num_key_value_heads": 8, "head_dim": 128},
)
