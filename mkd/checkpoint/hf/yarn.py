"""Yarn rope, where Megatron and transformers (`_compute_yarn_parameters` in `modeling_rope_utils.py`) agree."""

from collections.abc import Mapping
from typing import Any

from mkd.checkpoint.hf.config import ConfigReader, RopeConfig
from mkd.checkpoint.hf.parts import Arguments, ConfigPart

# config.json key -> Megatron argument, for latent attention and for plain attention. `truncate` has no argument in
# latent attention, which always rounds.
_LATENT = {
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}
_PLAIN = {**{key: f"yarn_{key}" for key in _LATENT}, "truncate": "yarn_correction_range_round_to_int"}
_DEFAULTS = {"original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
"""Megatron's values for arguments that are None."""


def _read(config: ConfigReader, kind_argument: str, names: Mapping[str, str]) -> dict[str, Any]:
    rope = RopeConfig.read(config)
    if rope.kind not in ("default", "yarn"):
        raise rope.scaling.fail(rope.kind_key, rope.kind, "only 'default' and 'yarn' are supported")
    args: dict[str, Any] = {
        kind_argument: "rope",
        "rotary_base": rope.rotary_base,
        "rotary_scaling_factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
    }
    if rope.kind == "default":
        return args
    rope.require_whole_heads()
    return {**args, **_read_yarn(rope.scaling, names), kind_argument: "yarn"}


def _read_yarn(scaling: ConfigReader, names: Mapping[str, str]) -> dict[str, Any]:
    scaling.require("attention_factor", None, default=None)
    if "truncate" in scaling.config and scaling.config["truncate"] is None:
        raise scaling.fail("truncate", None, "true or false is needed")
    values: dict[str, Any] = {
        "original_max_position_embeddings": scaling.size("original_max_position_embeddings"),
        # transformers uses the defaults for 0 too
        "beta_fast": float(scaling.get("beta_fast", (int, float), 32.0) or 32.0),
        "beta_slow": float(scaling.get("beta_slow", (int, float), 1.0) or 1.0),
        "truncate": scaling.get("truncate", bool, True),
    }
    if "truncate" not in names:
        scaling.require("truncate", True, default=True)
    scale, all_dim = (float(scaling.get(key, (int, float), 0.0)) for key in ("mscale", "mscale_all_dim"))
    if all_dim and not scale:
        raise scaling.fail("mscale_all_dim", all_dim, "it is supported together with mscale only")
    return {
        "rotary_scaling_factor": float(scaling.get("factor", (int, float))),
        # Without mscale_all_dim transformers uses an mscale of 1, whatever the key holds.
        "mscale": scale if all_dim else 1.0,
        "mscale_all_dim": all_dim,
        **{names[key]: value for key, value in values.items() if key in names},
    }


def _write(args: Arguments, kind_argument: str, names: Mapping[str, str]) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": "default"}  # transformers' gpt-oss uses yarn when this is None
    if (args[kind_argument] or "yarn") == "yarn":  # latent attention's default
        known = {key: args.get(argument) for key, argument in names.items()}
        scaling = {"rope_type": "yarn", "factor": args["rotary_scaling_factor"]}
        scaling |= {key: _DEFAULTS[key] if value is None else value for key, value in known.items()}
        if args["mscale_all_dim"]:
            scaling |= {"mscale": args["mscale"], "mscale_all_dim": args["mscale_all_dim"]}
    return {"rope_theta": float(args["rotary_base"]), "rope_scaling": scaling}


def _part(kind_argument: str, names: Mapping[str, str]) -> ConfigPart:
    return ConfigPart(
        lambda config: _read(config, kind_argument, names), lambda args: _write(args, kind_argument, names)
    )


def _read_given(config: ConfigReader) -> dict[str, Any]:
    if config.config.get("rope_parameters") is None and not config.config.get("rope_scaling"):
        raise config.fail(
            "rope_parameters", None, "an object is needed: without one transformers uses its own yarn values"
        )
    return _read(config, "position_embedding_type", _PLAIN)


ROPE_OR_YARN = ConfigPart(_read_given, _part("position_embedding_type", _PLAIN).write)
LATENT_ROPE = _part("rope_type", _LATENT)
"""In latent attention, Megatron and transformers scale the attention scores by mscale_all_dim too."""
