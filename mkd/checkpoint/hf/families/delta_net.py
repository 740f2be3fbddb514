"""Gated delta nets of Qwen3-Next and Qwen3.5, and the attention with a gate of their other layers.

Sources: transformers, models/qwen3_next and models/qwen3_5; megatron-core 0.19, ssm/gated_delta_net.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mkd.checkpoint.hf.config_json.parts import Arguments, ConfigPart
from mkd.checkpoint.hf.config_json.reader import ConfigReader
from mkd.checkpoint.hf.layouts import REPLICATED, Dims, Layout, Read, TensorShard, columns, gated_qkv, row_blocks, rows
from mkd.checkpoint.hf.tables import ATTENTION_OUT, HEAD_NORMS, INPUT_NORM, Entry

_LINEAR, _FULL = "linear_attention", "full_attention"
_SIZES = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
"""Key of config.json, also Megatron's argument -> default of transformers."""


def _read_delta_net(config: ConfigReader) -> dict[str, Any]:
    sizes = {key: config.size(key, default=default) for key, default in _SIZES.items()}
    keys, values = sizes["linear_num_key_heads"], sizes["linear_num_value_heads"]
    if values % keys:
        raise config.fail("linear_num_value_heads", values, f"linear_num_key_heads {keys} must divide it")
    layers, every = config.size("num_hidden_layers"), config.size("full_attention_interval", default=4)
    default = [_LINEAR if (layer + 1) % every else _FULL for layer in range(layers)]
    kinds = config.get("layer_types", list, default)
    if len(kinds) != layers or not {_LINEAR, _FULL}.issuperset(kinds):
        raise config.fail("layer_types", kinds, f"{layers} times {_LINEAR!r} or {_FULL!r} is needed")
    return {**sizes, "linear_attention_freq": [int(kind == _LINEAR) for kind in kinds]}


def linear_layers(args: Arguments) -> list[int]:
    """1 for each layer with a gated delta net, 0 for each with attention."""
    every, layers = args["linear_attention_freq"], args["num_layers"]
    return every if isinstance(every, list) else [int((layer + 1) % every != 0) for layer in range(layers)]


def _write_delta_net(args: Arguments) -> dict[str, Any]:
    kinds = [_LINEAR if is_linear else _FULL for is_linear in linear_layers(args)]
    return {**{key: args[key] for key in _SIZES}, "layer_types": kinds}


DELTA_NET = ConfigPart(_read_delta_net, _write_delta_net)
"""Layers have a gated delta net or attention, by `layer_types`; by default every fourth has attention."""


def delta_net_dims(args: Arguments) -> dict[str, int]:
    """Sizes of `Dims` that only gated delta nets have."""
    return {
        "delta_key_heads": args["linear_num_key_heads"],
        "delta_value_heads": args["linear_num_value_heads"],
        "delta_key_width": args["linear_key_head_dim"],
        "delta_value_width": args["linear_value_head_dim"],
        "taps": args["linear_conv_kernel_dim"],
    }


_SECTIONS = {
    "query": "delta_key",
    "key": "delta_key",
    "value": "delta_value",
    "z": "delta_value",
    "beta": "delta_value_heads",
    "alpha": "delta_value_heads",
}
"""Megatron's name of a block of rows of the input projection, also in checkpoints -> its rows."""


def _parts_of_key_head(dims: Dims) -> tuple[list[int], list[int]]:
    """Rows of each key head: queries, keys, values and gates in the first tensor, rates in the second."""
    shared = dims.delta_value_heads // dims.delta_key_heads
    width = shared * dims.delta_value_width
    return [dims.delta_key_width, dims.delta_key_width, width, width], [shared, shared]


def _shard_by_key_head(reads: Sequence[Read], dims: Dims, shard: TensorShard, shape: tuple[int, ...]) -> Tensor:
    """The folder's tensors hold the rows of one key head after another."""
    found = []
    totals = (dims.delta_query_key_value_gate, dims.delta_rates)
    for read, total, sizes in zip(reads, totals, _parts_of_key_head(dims), strict=True):
        block = read(shard.of(total), None)
        heads = block.reshape(-1, sum(sizes), *block.shape[1:])
        found += [part.flatten(0, 1) for part in heads.split(sizes, dim=1)]
    return torch.cat(found)


def _split_by_key_head(full: Tensor, dims: Dims) -> list[Tensor]:
    parts = list(full.split([getattr(dims, size) for size in _SECTIONS.values()]))
    found = []
    for sizes in _parts_of_key_head(dims):
        own, parts = parts[: len(sizes)], parts[len(sizes) :]
        heads = [part.reshape(-1, size, *full.shape[1:]) for part, size in zip(own, sizes, strict=True)]
        found.append(torch.cat(heads, dim=1).flatten(0, 1))
    return found


_BY_KEY_HEAD = Layout(_shard_by_key_head, _split_by_key_head)
_QUERY_KEY_VALUE = ("delta_key", "delta_key", "delta_value")
_IN_ORDER = row_blocks(_QUERY_KEY_VALUE, ("delta_value",), ("delta_value_heads",), ("delta_value_heads",))


def _has_delta_net(args: Mapping[str, Any], layer: int | None) -> bool:
    return bool(linear_layers(args)[layer])


def _has_attention(args: Mapping[str, Any], layer: int | None) -> bool:
    return not _has_delta_net(args, layer)


_MG, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."
_OWN, _SOURCE = _MG + "self_attention.", _HF + "linear_attn."


def _input_projection(layout: Layout, **sources: str) -> Entry:
    return Entry(
        _OWN + "in_proj.weight",
        {f"{_SOURCE}{name}.weight": (size, "hidden") for name, size in sources.items()},
        layout,
        sections=_SECTIONS,
    )


JOINED_PROJECTION = _input_projection(_BY_KEY_HEAD, in_proj_qkvz="delta_query_key_value_gate", in_proj_ba="delta_rates")
"""Qwen3-Next: two tensors, ordered by key heads."""

SEPARATE_PROJECTIONS = _input_projection(
    _IN_ORDER,
    in_proj_qkv="delta_query_key_value",
    in_proj_z="delta_value",
    in_proj_b="delta_value_heads",
    in_proj_a="delta_value_heads",
)
"""Qwen3.5: a tensor for queries, keys and values, and one each for gates and rates."""


def _per_head(name: str) -> Entry:
    return Entry(_OWN + name, {_SOURCE + name: ("delta_value_heads",)}, rows("delta_value_heads"))


def hybrid_attention(input_projection: Entry) -> tuple[Entry, ...]:
    """Entries of the layers with a gated delta net and of those with attention, with the norm before both.

    Args:
        input_projection: of the gated delta net.
    """
    convolution = Entry(
        _OWN + "conv1d.weight",
        {_SOURCE + "conv1d.weight": ("delta_query_key_value", "one", "taps")},
        row_blocks(_QUERY_KEY_VALUE),
        sections={name: _SECTIONS[name] for name in ("query", "key", "value")},
    )
    delta_net = (
        replace(INPUT_NORM, aliases=(_OWN + "in_proj.layer_norm_weight",)),
        input_projection,
        convolution,
        _per_head("dt_bias"),
        _per_head("A_log"),
        Entry(_OWN + "out_norm.weight", {_SOURCE + "norm.weight": ("delta_value_width",)}, REPLICATED),
        Entry(
            _OWN + "out_proj.weight", {_SOURCE + "out_proj.weight": ("hidden", "delta_value")}, columns("delta_value")
        ),
    )
    sizes = (("q_proj", "gated_query"), ("k_proj", "key"), ("v_proj", "key"))
    attention = (
        INPUT_NORM,
        Entry(
            _OWN + "linear_qkv.weight",
            {f"{_HF}self_attn.{name}.weight": (size, "hidden") for name, size in sizes},
            gated_qkv(),
        ),
        *HEAD_NORMS,
        ATTENTION_OUT,
    )
    return (
        *(replace(entry, where=_has_delta_net) for entry in delta_net),
        *(replace(entry, where=_has_attention) for entry in attention),
    )
