"""Two ropes: one in layers with full attention, which may be scaled, and a plain one in layers with a sliding window.

Source: transformers, `convert_rope_params_to_dict` of Gemma3TextConfig and Olmo3Config.
"""

import math
from dataclasses import dataclass
from typing import Any

from mkd.checkpoint.hf.config_json.parts import Arguments, ConfigPart
from mkd.checkpoint.hf.config_json.reader import ConfigReader
from mkd.checkpoint.hf.config_json.rope import ROPE_OR_YARN

_FULL, _LOCAL = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class _Bases:
    """The keys in which transformers finds the bases that are not in `rope_parameters`."""

    full: float
    """Default of `rope_theta`."""
    local: float
    """Default of `local_key`."""
    local_key: str | None = None
    """None: the base of sliding layers is the default, whatever `rope_theta` is."""


def _layer_ropes(config: ConfigReader, bases: _Bases) -> tuple[ConfigReader, ConfigReader]:
    """The ropes of full and of sliding layers, with the precedence of transformers 5."""
    parameters, scaling = (config.config.get(key) for key in ("rope_parameters", "rope_scaling"))
    for key, value in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if value is not None and not isinstance(value, dict):
            raise config.fail(key, value, "an object is needed")
    given = {_FULL: {}, _LOCAL: {}} if parameters is None else parameters
    if set(given) - {_FULL, _LOCAL} or not all(isinstance(value, dict) for value in given.values()):
        raise config.fail("rope_parameters", given, f"only objects for {_FULL!r} and {_LOCAL!r} are supported")
    if scaling is not None and _FULL not in given:
        raise config.fail("rope_scaling", scaling, f'"rope_parameters" has no {_FULL!r}: leave one of the two out')
    full, local = ({**given.get(name, {})} for name in (_FULL, _LOCAL))
    if parameters is None:
        full["rope_type"] = "default"
    full |= scaling or {}
    if "rope_theta" not in full:
        full["rope_theta"] = config.get("rope_theta", (int, float), bases.full)
    if "rope_theta" not in local:
        key = bases.local_key
        local["rope_theta"] = bases.local if key is None else config.get(key, (int, float), bases.local)
    for rope in (full, local):
        rope.setdefault("rope_type", rope.get("type", "default"))
    return ConfigReader(full, f"rope_parameters.{_FULL}."), ConfigReader(local, f"rope_parameters.{_LOCAL}.")


def _read_local(local: ConfigReader) -> dict[str, Any]:
    local.require("rope_type", "default")
    return {"local_rotary_base": float(local.get("rope_theta", (int, float)))}


def _read_linear(config: ConfigReader) -> dict[str, Any]:
    full, local = _layer_ropes(config, _Bases(1e6, 1e4, "rope_local_base_freq"))
    kind = full.get("rope_type", str)
    if kind not in ("default", "linear"):
        raise full.fail("rope_type", kind, "only 'default' and 'linear' are supported")
    factor = None
    if kind == "linear":
        full.require("partial_rotary_factor", 1.0, default=1.0)
        factor = float(full.get("factor", (int, float)))
    base = full.get("rope_theta", (int, float))
    return {
        "rotary_base": int(base) if base == int(base) else base,
        "rotary_seq_len_interpolation_factor": factor,
        "use_rope_scaling": False,
        **_read_local(local),
    }


def _write_linear(args: Arguments) -> dict[str, Any]:
    factor = args.get("rotary_seq_len_interpolation_factor")
    return {
        "rope_theta": float(args["rotary_base"]),
        "rope_local_base_freq": args["local_rotary_base"],
        "rope_scaling": None if factor is None else {"rope_type": "linear", "factor": float(factor)},
    }


LINEAR_AND_LOCAL_ROPE = ConfigPart(_read_linear, _write_linear)
"""Gemma 3: default or linear rope in full layers, `rope_local_base_freq` in the others."""


def _read_yarn(config: ConfigReader) -> dict[str, Any]:
    full, local = _layer_ropes(config, _Bases(5e5, 5e5))
    values = dict(full.config)
    attention = full.get("attention_factor", (int, float), None)
    if attention is not None and full.config["rope_type"] == "yarn":
        usual = 0.1 * math.log(full.get("factor", (int, float))) + 1.0
        if not math.isclose(attention, usual, rel_tol=1e-6):
            raise full.fail(
                "attention_factor", attention, f"only the value that follows from factor, {usual}, is supported"
            )
        del values["attention_factor"]
    values.pop("type", None)
    return {**ROPE_OR_YARN.read(ConfigReader({"rope_scaling": values}, full.prefix)), **_read_local(local)}


def _write_yarn(args: Arguments) -> dict[str, Any]:
    written = ROPE_OR_YARN.write(args)
    full = {**written["rope_scaling"], "rope_theta": written["rope_theta"]}
    local = {"rope_type": "default", "rope_theta": args["local_rotary_base"]}
    return {"rope_theta": written["rope_theta"], "rope_parameters": {_FULL: full, _LOCAL: local}}


YARN_AND_LOCAL_ROPE = ConfigPart(_read_yarn, _write_yarn)
"""OLMo 3: default or yarn rope in full layers."""
