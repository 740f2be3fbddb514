"""Reads config.json with errors that name the key; the rope keys in all their spellings."""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mkd.errors import MkdCheckpointError

_ANY = object()
_LAYERS, _MOST_LAYERS = "num_hidden_layers", 10_000
"""Lists with an entry per layer are made of this number before a tensor is looked up."""
_MOST = (1 << 31) - 1
"""Largest size of any other kind: that of a C int."""


@dataclass(frozen=True)
class ConfigReader:
    """Typed access to config.json whose errors name the key."""

    config: Mapping[str, Any]
    prefix: str = ""

    def fail(self, key: str, value: Any, rule: str) -> MkdCheckpointError:
        """An error that names the key, its value and the rule that it breaks."""
        return MkdCheckpointError(f'config.json: "{self.prefix}{key}" is {value!r}; {rule}')

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = _ANY) -> Any:
        """The value of a key, or the default where it is absent or null.

        Raises:
            MkdCheckpointError: it is absent and there is no default, or it is of another kind or not finite.
        """
        value = self.config.get(key)
        if value is None:
            if default is _ANY:
                raise MkdCheckpointError(f'config.json has no "{self.prefix}{key}"')
            return default
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            name = "a number" if kind == (int, float) else f"a {kind.__name__}"
            raise self.fail(key, value, f"{name} is needed")
        # Integers have bounds of their own.
        is_huge = kind is not int and isinstance(value, int) and abs(value) > sys.float_info.max
        if is_huge or (isinstance(value, float) and not math.isfinite(value)):
            raise self.fail(key, value, "a finite number is needed")
        return value

    def size(self, key: str, default: Any = _ANY) -> int:
        """A number of at least 1, otherwise as `get`."""
        value, most = self.get(key, int, default), _MOST_LAYERS if key == _LAYERS else _MOST
        if value < 1:
            raise self.fail(key, value, "it must be at least 1")
        if value > most:
            raise self.fail(key, value, f"at most {most} is supported")
        return value

    def require(self, key: str, allowed: Any, default: Any = _ANY) -> None:
        """Refuse every value but the one that Megatron computes with.

        With a default, the key may be absent. transformers reads null as false: it stands for `allowed` only if that is
        false, zero or empty.
        """
        value = self.config.get(key)
        if value is None and default is not _ANY and (key not in self.config or not allowed):
            value = default
        if value != allowed:
            raise self.fail(key, value, f"only {allowed!r} is supported")

    def only_key(self, first: str, second: str) -> str:
        """The given one of two names of a value, by default `first`. Raises if both are given and differ."""
        one, other = self.config.get(first), self.config.get(second)
        if one is not None and other is not None and one != other:
            raise self.fail(second, other, f'"{self.prefix}{first}" is {one!r}; remove the wrong one of the two')
        return second if one is None and other is not None else first


@dataclass(frozen=True)
class RopeConfig:
    """The rope keys of config.json: `rope_parameters` (transformers 5), `rope_theta` and `rope_scaling` (before)."""

    scaling: ConfigReader
    """The object with the keys of the rope type."""
    kind_key: str
    kind: str
    """Rope type, such as default, llama3 or yarn."""
    rotary_base: float | int
    rotary_share: float
    """Share of the channels of a head that rope rotates (`partial_rotary_factor`)."""

    @classmethod
    def read(cls, config: ConfigReader) -> "RopeConfig":
        """Read the rope keys with the precedence of transformers 5 (`convert_rope_params_to_dict`).

        A `rope_scaling` that is not empty replaces all of `rope_parameters`, `rope_theta` in it included. Values in the
        object win over those at the top level, with the exception of `original_max_position_embeddings`.

        Raises:
            MkdCheckpointError: a value has the wrong type, or the rope differs between layers.
        """
        for key in ("rope_scaling", "rope_parameters"):
            value = config.config.get(key)
            if value is not None and not isinstance(value, dict):
                raise config.fail(key, value, "an object is needed")
        key = "rope_scaling" if config.config.get("rope_scaling") else "rope_parameters"
        values = dict(config.config.get(key) or {})
        scaling = ConfigReader(values, f"{key}.")
        for name, nested in values.items():
            if isinstance(nested, dict):
                raise scaling.fail(name, nested, "only one rope for all layers is supported")
        theta = scaling.get("rope_theta", (int, float), config.get("rope_theta", (int, float), 10000.0))
        share = config.get("partial_rotary_factor", (int, float), 1.0)
        share = scaling.get("partial_rotary_factor", (int, float), share)
        kind_key = "rope_type" if "rope_type" in values else "type"
        kind = scaling.get(kind_key, str, "default")
        if kind != "default":
            _use_top_level_length(config, scaling, values)
        return cls(scaling, kind_key, kind, int(theta) if theta == int(theta) else theta, float(share))

    def require_whole_heads(self) -> None:
        """Refuse partial rope of a scaled type, where transformers applies it to every model."""
        if self.rotary_share != 1.0:
            where = self.scaling if "partial_rotary_factor" in self.scaling.config else ConfigReader({})
            raise where.fail("partial_rotary_factor", self.rotary_share, f"only 1.0 is supported with {self.kind} rope")


def _use_top_level_length(config: ConfigReader, scaling: ConfigReader, values: dict[str, Any]) -> None:
    """Put a top-level `original_max_position_embeddings` into the object; refuse two different lengths."""
    name = "original_max_position_embeddings"
    outer, inner = config.config.get(name), values.get(name)
    if outer is None:
        return
    if inner is not None and inner != outer:
        raise config.fail(name, outer, f'"{scaling.prefix}{name}" is {inner!r}; remove the wrong one of the two')
    values[name] = outer
