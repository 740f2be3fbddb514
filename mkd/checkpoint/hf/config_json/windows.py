"""Sliding windows of attention: in all layers, in some of them, or in none."""

from collections.abc import Callable
from typing import Any

from mkd.checkpoint.hf.config_json.parts import Arguments, ConfigPart
from mkd.checkpoint.hf.config_json.reader import ConfigReader

_SLIDING, _FULL = "sliding_attention", "full_attention"


def _window_size(config: ConfigReader) -> tuple[int, int] | None:
    """Megatron's window_size. A window of W tokens includes the query's own; Megatron counts the W - 1 before it."""
    if config.config.get("sliding_window") is None:
        return None
    return config.size("sliding_window") - 1, 0


def _layer_kinds(config: ConfigReader, default: list[str]) -> list[str]:
    """`layer_types`, checked."""
    kinds = config.get("layer_types", list, default)
    if len(kinds) != len(default) or not {_SLIDING, _FULL}.issuperset(kinds):
        raise config.fail("layer_types", kinds, f"{len(default)} times {_SLIDING!r} or {_FULL!r} is needed")
    return kinds


def _read_layers(config: ConfigReader, default: Callable[[int], list[str]]) -> dict[str, Any]:
    kinds, window = _layer_kinds(config, default(config.size("num_hidden_layers"))), _window_size(config)
    if window is None or _SLIDING not in kinds:
        return {"window_size": None, "window_attn_skip_freq": None}
    return {"window_size": window, "window_attn_skip_freq": [int(kind == _SLIDING) for kind in kinds]}


def layer_windows(config: ConfigReader, default: list[bool]) -> dict[str, Any]:
    """Megatron's arguments for `layer_types`; without the key, `default` has True for layers with a sliding window."""
    return _read_layers(config, lambda layers: [_SLIDING if is_sliding else _FULL for is_sliding in default])


def _write_layers(args: Arguments) -> dict[str, Any]:
    layers, every = args["num_layers"], args.get("window_attn_skip_freq")
    if not args.get("window_size"):
        return {"sliding_window": None, "layer_types": [_FULL] * layers}
    if every is None:
        every = [1] * layers
    elif isinstance(every, int):
        every = [int((layer + 1) % every != 0) for layer in range(layers)]
    kinds = [_SLIDING if is_sliding else _FULL for is_sliding in every]
    return {"sliding_window": args["window_size"][0] + 1, "layer_types": kinds}


THREE_OF_FOUR_WINDOWS = ConfigPart(
    lambda config: _read_layers(config, lambda layers: [(_SLIDING, _FULL)[layer % 4 == 3] for layer in range(layers)]),
    _write_layers,
)
"""By `layer_types`; by default every fourth layer attends to the full sequence."""

ALTERNATING_WINDOWS = ConfigPart(
    lambda config: _read_layers(config, lambda layers: [(_SLIDING, _FULL)[layer % 2] for layer in range(layers)]),
    _write_layers,
)
"""Each layer attends to the sliding window or to the full sequence, by `layer_types`; by default every second one."""


LAYER_WINDOWS = ConfigPart(lambda config: _read_layers(config, lambda layers: [_SLIDING] * layers), _write_layers)
"""Each layer attends to the sliding window or to the full sequence, by `layer_types`; by default all to the window."""

LAYER_WINDOWS_OF_FOUR = ConfigPart(
    lambda config: _read_layers(config, lambda layers: [_SLIDING if n % 4 else _FULL for n in range(layers)]),
    _write_layers,
)
"""The same, where by default each fourth layer, the first one too, attends to the full sequence."""


def _read_upper_layers(config: ConfigReader) -> dict[str, Any]:
    first = config.get("max_window_layers", int, 0)
    return _read_layers(config, lambda layers: [_SLIDING if n >= first else _FULL for n in range(layers)])


UPPER_LAYER_WINDOWS = ConfigPart(_read_upper_layers, _write_layers)
"""The same, where by default the layers from `max_window_layers` up attend to the window."""


def _read_optional_layers(config: ConfigReader) -> dict[str, Any]:
    args = _read_layers(config, lambda layers: [_SLIDING] * layers)
    return args if 0 in (args["window_attn_skip_freq"] or ()) else {**args, "window_attn_skip_freq": None}


def _write_optional_layers(args: Arguments) -> dict[str, Any]:
    if args.get("window_attn_skip_freq") is None:  # transformers loads Mistral with layer_types as another model type
        return WINDOW.write(args)
    return _write_layers(args)


OPTIONAL_LAYER_WINDOWS = ConfigPart(_read_optional_layers, _write_optional_layers)
"""All layers attend to the sliding window unless `layer_types` gives some the full sequence (Ministral)."""

WINDOW = ConfigPart(
    lambda config: {"window_size": _window_size(config)},
    lambda args: {"sliding_window": args["window_size"][0] + 1 if args.get("window_size") else None},
)
"""All layers attend to a sliding window, or all to the full sequence."""


def _read_no_window(config: ConfigReader) -> dict[str, Any]:
    config.require("use_sliding_window", False, default=False)
    kinds = config.get("layer_types", list, [])
    if any(kind != _FULL for kind in kinds):
        raise config.fail("layer_types", kinds, f"only {_FULL!r} is supported without use_sliding_window")
    return {}


NO_WINDOW = ConfigPart(_read_no_window, lambda args: {"use_sliding_window": False, "sliding_window": None})
"""Qwen's window key has no effect unless `use_sliding_window` is true, which is refused."""
