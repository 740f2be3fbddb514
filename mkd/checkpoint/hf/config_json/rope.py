"""Rope of plain attention: config.json's rope types and the equivalent arguments of Megatron's rope classes."""

import math
from typing import Any

from mkd.checkpoint.hf.config_json.parts import Arguments, ConfigPart
from mkd.checkpoint.hf.config_json.reader import ConfigReader, RopeConfig
from mkd.checkpoint.hf.config_json.yarn import PLAIN_YARN, read_yarn, write_yarn
from mkd.errors import MkdCheckpointError

# megatron/core/models/common/embeddings/rotary_pos_embedding.py, RotaryEmbedding._apply_scaling: constants there
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_MEGATRON_ROPE_FACTOR = 8.0  # default of --rope-scaling-factor, unused without --use-rope-scaling

_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
_INTERLEAVED_KINDS = tuple(kind for kind in _KINDS if kind != "yarn")
"""Megatron's yarn class has no rope of adjacent channels."""


def _read(config: ConfigReader, kinds: tuple[str, ...] = _KINDS) -> dict[str, Any]:
    rope = RopeConfig.read(config)
    scaling, kind = rope.scaling, rope.kind
    if kind not in kinds:
        raise scaling.fail(rope.kind_key, kind, f"only {', '.join(map(repr, kinds))} are supported")
    args: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": rope.rotary_base,
        "use_rope_scaling": False,
        "rope_scaling_factor": _MEGATRON_ROPE_FACTOR,
        "rotary_seq_len_interpolation_factor": None,
        "rope_frequencies": None,
    }
    if kind == "default":
        return args
    if kind == "longrope":
        return {**args, **_read_longrope(config, rope)}
    rope.require_whole_heads()
    if kind == "yarn":
        return {**args, "position_embedding_type": "yarn", **read_yarn(scaling, PLAIN_YARN)}
    factor = float(scaling.get("factor", (int, float)))
    if factor < 1:
        raise scaling.fail("factor", factor, "it must be at least 1")
    if kind == "llama3":
        return {**args, **_read_llama3(scaling, factor)}
    if kind == "linear":
        args["rotary_seq_len_interpolation_factor"] = factor
    # dynamic: the base changes only beyond max_position_embeddings, and samples are not longer
    return args


def _read_llama3(scaling: ConfigReader, factor: float) -> dict[str, Any]:
    low, high = (float(scaling.get(f"{name}_freq_factor", (int, float))) for name in ("low", "high"))
    if not 0 < low <= high:
        rule = f"it must be at least low_freq_factor {low:g}, and that above 0"
        raise scaling.fail("high_freq_factor", high, rule)
    length = scaling.size("original_max_position_embeddings")
    constants = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": length}
    if constants == _LLAMA3_ROPE:
        return {"use_rope_scaling": True, "rope_scaling_factor": factor}
    return {"rope_frequencies": {"rope_type": "llama3", "factor": factor, **constants}}


def _read_longrope(config: ConfigReader, rope: RopeConfig) -> dict[str, Any]:
    """Arguments for sequences within the original length, which becomes the number of positions."""
    scaling, positions = rope.scaling, config.size("max_position_embeddings")
    original = scaling.size("original_max_position_embeddings")
    if original > positions:
        raise scaling.fail("original_max_position_embeddings", original, f"above max_position_embeddings, {positions}")
    heads = config.size("num_attention_heads")
    width = config.size("head_dim", default=config.size("hidden_size") // heads)
    count = int(width * rope.rotary_share) // 2
    factors = {}
    for name in ("short_factor", "long_factor"):
        values = factors[name] = scaling.get(name, list)
        if len(values) != count or not all(type(value) in (int, float) and value > 0 for value in values):
            raise scaling.fail(name, values, f"{count} numbers above 0 are needed")
    factor = scaling.get("factor", (int, float), positions / original)
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    frequencies = {
        "rope_type": "longrope",
        **factors,
        "factor": float(factor),
        "attention_factor": float(scaling.get("attention_factor", (int, float), default)),
        "original_max_position_embeddings": original,
        "max_position_embeddings": positions,
    }
    return {"rope_frequencies": frequencies, "max_position_embeddings": original}


def _write(args: Arguments) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, which every version of transformers reads."""
    kind, scaling = args["position_embedding_type"], None
    if kind not in ("rope", "yarn"):
        raise MkdCheckpointError(
            f"--position-embedding-type rope or yarn is needed, the Megatron checkpoint was made with {kind}"
        )
    frequencies, positions = args.get("rope_frequencies"), {}
    if kind == "yarn":
        scaling = write_yarn(args, PLAIN_YARN)
    elif frequencies is not None:
        scaling = dict(frequencies)
        if "max_position_embeddings" in scaling:  # longrope has fewer positions in Megatron
            original = scaling["original_max_position_embeddings"]
            positions = {
                "max_position_embeddings": scaling.pop("max_position_embeddings"),
                "original_max_position_embeddings": original,
            }
    elif args.get("use_rope_scaling"):
        scaling = {"rope_type": "llama3", "factor": float(args["rope_scaling_factor"]), **_LLAMA3_ROPE}
    elif (factor := args.get("rotary_seq_len_interpolation_factor")) is not None:
        scaling = {"rope_type": "linear", "factor": float(factor)}
    return {"rope_theta": float(args["rotary_base"]), "rope_scaling": scaling, **positions}


ROPE = ConfigPart(_read, _write)
"""Rope of the two halves of each attention head."""

PLAIN_ROPE = ConfigPart(lambda config: _read(config, ("default", "llama3")), _write)
"""The same without the types that stretch positions."""

ROPE_OR_LONGROPE = ConfigPart(lambda config: _read(config, (*_KINDS, "longrope")), _write)
"""The same; `longrope` (Phi) only for sequences within its original length."""

INTERLEAVED_ROPE = ConfigPart(lambda config: {**_read(config, _INTERLEAVED_KINDS), "rotary_interleaved": True}, _write)
"""Rope of adjacent channels."""


def given(part: ConfigPart) -> ConfigPart:
    """`part` for families where transformers has scaled rope of its own without an object in config.json."""

    def read(config: ConfigReader) -> dict[str, Any]:
        if config.config.get("rope_parameters") is None and not config.config.get("rope_scaling"):
            rule = "an object is needed: without one transformers uses its own rope_type"
            raise config.fail("rope_parameters", None, rule)
        return part.read(config)

    def write(args: Arguments) -> dict[str, Any]:
        written = part.write(args)
        return {**written, "rope_scaling": written["rope_scaling"] or {"rope_type": "default"}}

    return ConfigPart(read, write)


YARN = given(ConfigPart(lambda config: _read(config, ("yarn",)), _write))
ROPE_OR_YARN = given(ConfigPart(lambda config: _read(config, ("default", "yarn")), _write))


def _read_whole(config: ConfigReader) -> dict[str, Any]:
    RopeConfig.read(config).require_whole_heads()
    return {}


WHOLE_ROPE = ConfigPart(_read_whole, lambda args: {})
"""Refuses partial rope of every type, where transformers applies it in a family without an argument for it."""


def _read_partial(config: ConfigReader) -> dict[str, Any]:
    share = RopeConfig.read(config).rotary_share
    if not 0 < share <= 1:
        raise config.fail("partial_rotary_factor", share, "it must be above 0 and at most 1")
    return {"rotary_percent": share}


PARTIAL_ROPE = ConfigPart(_read_partial, lambda args: {"partial_rotary_factor": args["rotary_percent"]})
"""Rope rotates only the first channels of each attention head (`partial_rotary_factor`)."""


def _read_layers_without(config: ConfigReader) -> dict[str, Any]:
    layers, every = config.size("num_hidden_layers"), config.size("no_rope_layer_interval", default=4)
    have_rope = config.get("no_rope_layers", list, [int((layer + 1) % every != 0) for layer in range(layers)])
    if len(have_rope) < layers or not {0, 1}.issuperset(have_rope):
        raise config.fail("no_rope_layers", have_rope, f"{layers} times 1 (rope) or 0 is needed")
    without = [1 - has for has in have_rope[:layers]]
    return {"no_rope_freq": without if any(without) else None}


def _write_layers_without(args: Arguments) -> dict[str, Any]:
    layers, without = args["num_layers"], args.get("no_rope_freq")
    if isinstance(without, int):
        without = [int((layer + 1) % without == 0) for layer in range(layers)]
    return {"no_rope_layers": [1 - value for value in without or [0] * layers]}


LAYERS_WITHOUT_ROPE = ConfigPart(_read_layers_without, _write_layers_without)
"""Some layers have no rope (`no_rope_layers`, with 1 for layers that have it; by default every fourth has none)."""
