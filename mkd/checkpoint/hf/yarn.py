"""Rope with yarn, as far as Megatron's equals transformers' (`modeling_rope_utils.py`, `_compute_yarn_parameters`)."""

from collections.abc import Mapping
from typing import Any

from mkd.checkpoint.hf.config import ConfigReader
from mkd.checkpoint.hf.parts import Arguments, ConfigPart

# The same settings have other names in Megatron's latent attention; the last is not there, and true.
_LATENT = {
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}
_PLAIN = {**{key: f"yarn_{key}" for key in _LATENT}, "truncate": "yarn_correction_range_round_to_int"}
_DEFAULTS = {"original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
"""Megatron's, where an argument is None."""


def _read(config: ConfigReader, kind_argument: str, names: Mapping[str, str]) -> dict[str, Any]:
    key = "rope_parameters" if config.config.get("rope_parameters") is not None else "rope_scaling"
    scaling = ConfigReader(config.config.get(key) or {}, f"{key}.")
    theta = scaling.get("rope_theta", (int, float), config.get("rope_theta", (int, float), 10000.0))
    kind_key = "rope_type" if "rope_type" in scaling.config else "type"
    kind = scaling.get(kind_key, str, "default")
    if kind not in ("default", "yarn"):
        raise scaling.fail(kind_key, kind, "only 'default' and 'yarn' are supported")
    args: dict[str, Any] = {
        kind_argument: "rope",
        "rotary_base": int(theta) if theta == int(theta) else theta,
        "rotary_scaling_factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
    }
    return args if kind == "default" else {**args, **_read_yarn(scaling, names), kind_argument: "yarn"}


def _read_yarn(scaling: ConfigReader, names: Mapping[str, str]) -> dict[str, Any]:
    scaling.require("attention_factor", None, default=None)
    values: dict[str, Any] = {
        "original_max_position_embeddings": scaling.size("original_max_position_embeddings"),
        "beta_fast": float(scaling.get("beta_fast", (int, float), 32.0)),
        "beta_slow": float(scaling.get("beta_slow", (int, float), 1.0)),
        "truncate": scaling.get("truncate", bool, True),
    }
    if "truncate" not in names:
        scaling.require("truncate", True, default=True)
    scale, all_dim = (float(scaling.get(key, (int, float), 0.0)) for key in ("mscale", "mscale_all_dim"))
    if all_dim and not scale:
        raise scaling.fail("mscale_all_dim", all_dim, "it is supported together with mscale only")
    return {
        "rotary_scaling_factor": float(scaling.get("factor", (int, float))),
        # Without mscale_all_dim transformers computes with 1, whatever mscale is.
        "mscale": scale if all_dim else 1.0,
        "mscale_all_dim": all_dim,
        **{names[key]: value for key, value in values.items() if key in names},
    }


def _write(args: Arguments, kind_argument: str, names: Mapping[str, str]) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": "default"}  # None is yarn to transformers' gpt-oss
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
    if all(config.config.get(key) is None for key in ("rope_parameters", "rope_scaling")):
        raise config.fail(
            "rope_parameters", None, "an object is needed: without one transformers takes yarn of its own"
        )
    return _read(config, "position_embedding_type", _PLAIN)


ROPE_OR_YARN = ConfigPart(_read_given, _part("position_embedding_type", _PLAIN).write)
LATENT_ROPE = _part("rope_type", _LATENT)
"""In latent attention mscale_all_dim scales the attention scores too, in both programs."""
