"""Yarn rope, where Megatron and transformers (`_compute_yarn_parameters` in `modeling_rope_utils.py`) agree."""

from collections.abc import Mapping
from typing import Any

from mkd.checkpoint.hf.config_json.parts import Arguments, ConfigPart
from mkd.checkpoint.hf.config_json.reader import ConfigReader, RopeConfig

# config.json key -> Megatron argument, for latent attention and for plain attention. `truncate` has no argument in
# latent attention, which always rounds.
_LATENT = {
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}
PLAIN_YARN = {**{key: f"yarn_{key}" for key in _LATENT}, "truncate": "yarn_correction_range_round_to_int"}
_DEFAULTS = {"original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
"""Megatron's values for arguments that are None."""


def _read(config: ConfigReader) -> dict[str, Any]:
    rope = RopeConfig.read(config)
    if rope.kind not in ("default", "yarn"):
        raise rope.scaling.fail(rope.kind_key, rope.kind, "only 'default' and 'yarn' are supported")
    args: dict[str, Any] = {
        "rope_type": "rope",
        "rotary_base": rope.rotary_base,
        "rotary_scaling_factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
    }
    if rope.kind == "default":
        return args
    rope.require_whole_heads()
    return {**args, **read_yarn(rope.scaling, _LATENT), "rope_type": "yarn"}


def read_yarn(scaling: ConfigReader, names: Mapping[str, str]) -> dict[str, Any]:
    """Megatron's arguments of yarn rope; `names` is `PLAIN_YARN` outside of latent attention."""
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


def _write(args: Arguments) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": "default"}
    if (args["rope_type"] or "yarn") == "yarn":  # Megatron's default
        scaling = write_yarn(args, _LATENT)
    return {"rope_theta": float(args["rotary_base"]), "rope_scaling": scaling}


def write_yarn(args: Arguments, names: Mapping[str, str]) -> dict[str, Any]:
    """The object with the keys of yarn rope for Megatron's arguments; see `read_yarn`."""
    known = {key: args.get(argument) for key, argument in names.items()}
    scaling = {"rope_type": "yarn", "factor": args["rotary_scaling_factor"]}
    scaling |= {key: _DEFAULTS[key] if value is None else value for key, value in known.items()}
    if args["mscale_all_dim"]:
        scaling |= {"mscale": args["mscale"], "mscale_all_dim": args["mscale_all_dim"]}
    return scaling


LATENT_ROPE = ConfigPart(_read, _write)
"""In latent attention, Megatron and transformers scale the attention scores by mscale_all_dim too."""
