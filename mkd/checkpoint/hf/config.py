"""Reads config.json with errors that name the key; default and llama3 rope, which many families share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mkd.errors import MkdCheckpointError

_ANY = object()


@dataclass(frozen=True)
class ConfigReader:
    """Typed access to config.json whose errors name the key."""

    config: Mapping[str, Any]
    prefix: str = ""

    def fail(self, key: str, value: Any, rule: str) -> MkdCheckpointError:
        return MkdCheckpointError(f'config.json: "{self.prefix}{key}" is {value!r}; {rule}')

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = _ANY) -> Any:
        value = self.config.get(key)
        if value is None:
            if default is _ANY:
                raise MkdCheckpointError(f'config.json has no "{self.prefix}{key}"')
            return default
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            name = "a number" if kind == (int, float) else f"a {kind.__name__}"
            raise self.fail(key, value, f"{name} is needed")
        return value

    def size(self, key: str, default: Any = _ANY) -> int:
        value = self.get(key, int, default)
        if value < 1:
            raise self.fail(key, value, "it must be at least 1")
        return value

    def require(self, key: str, allowed: Any, default: Any = _ANY) -> None:
        """Refuse every value but the one that Megatron computes with."""
        value = self.config.get(key)
        value = default if value is None and default is not _ANY else value
        if value != allowed:
            raise self.fail(key, value, f"only {allowed!r} is supported")


# megatron/core/models/common/embeddings/rotary_pos_embedding.py, RotaryEmbedding._apply_scaling: constants there
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_MEGATRON_ROPE_FACTOR = 8.0  # default of --rope-scaling-factor, unused without --use-rope-scaling


@dataclass(frozen=True)
class RopeConfig:
    """The rope keys of config.json: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before)."""

    scaling: ConfigReader
    """The object with the keys of the rope type."""
    kind_key: str
    kind: str
    """Rope type, such as default, llama3 or yarn."""
    rotary_base: float | int

    @classmethod
    def read(cls, config: ConfigReader) -> "RopeConfig":
        """Read the rope keys; the error names a value of the wrong type."""
        key = "rope_parameters" if config.config.get("rope_parameters") is not None else "rope_scaling"
        value = config.config.get(key) or {}
        if not isinstance(value, dict):
            raise config.fail(key, value, "an object is needed")
        scaling = ConfigReader(value, f"{key}.")
        theta = scaling.get("rope_theta", (int, float), config.get("rope_theta", (int, float), 10000.0))
        kind_key = "rope_type" if "rope_type" in value else "type"
        kind = scaling.get(kind_key, str, "default")
        return cls(scaling, kind_key, kind, int(theta) if theta == int(theta) else theta)


def read_rope(config: ConfigReader) -> dict[str, Any]:
    """Megatron's rope arguments for the rope types default and llama3."""
    rope = RopeConfig.read(config)
    scaling, kind = rope.scaling, rope.kind
    factor = _MEGATRON_ROPE_FACTOR
    if kind == "llama3":
        for name, constant in _LLAMA3_ROPE.items():
            scaling.require(name, constant)
        factor = float(scaling.get("factor", (int, float)))
    elif kind != "default":
        raise scaling.fail(rope.kind_key, kind, "only 'default' and 'llama3' are supported")
    return {
        "rotary_base": rope.rotary_base,
        "use_rope_scaling": kind == "llama3",
        "rope_scaling_factor": factor,
    }


def write_rope(args: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, which every version of transformers reads."""
    scaling = None
    if args.get("use_rope_scaling"):
        scaling = {"rope_type": "llama3", "factor": float(args["rope_scaling_factor"]), **_LLAMA3_ROPE}
    return {"rope_theta": float(args["rotary_base"]), "rope_scaling": scaling}
