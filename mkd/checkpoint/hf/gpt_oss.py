"""gpt-oss: attention sinks, a sliding window in every second layer, clamped experts with biases in one tensor per
layer.

Sources: transformers, models/gpt_oss; megatron-core 0.19, transformer/mlp.py and transformer/dot_product_attention.py.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mkd.checkpoint.hf.config_json.parts import Arguments, ConfigPart
from mkd.checkpoint.hf.layouts import REPLICATED, Dims, Layout, Read, TensorShard, rows
from mkd.checkpoint.hf.tables import ATTENTION_OUT, MOE_NORM, QKV_BIAS, QKV_WEIGHT, Entry, expert_entry
from mkd.errors import MkdCheckpointError


def _write_limit(args: Arguments) -> dict[str, Any]:
    if (limit := args.get("activation_func_clamp_value")) is None:
        raise MkdCheckpointError(
            "GptOssForCausalLM clamps its experts' activations, the checkpoint has no limit for it"
        )
    return {"swiglu_limit": limit}


CLAMPED_GLU = ConfigPart(
    lambda config: {"activation_func_clamp_value": float(config.get("swiglu_limit", (int, float), 7.0))}, _write_limit
)
"""Gate and linear part of the GLU are clamped at a limit."""


def _gate_up(tensor: Tensor, dims: Dims, shard: TensorShard) -> Tensor:
    """[gate rows of this rank; up rows of this rank] from rows that alternate between gate and up."""
    own = shard.of(dims.moe_ffn)
    return torch.cat([tensor[0::2][own], tensor[1::2][own]])


def _alternate(full: Tensor) -> Tensor:
    """The inverse on one rank: [gate; up] -> alternating rows."""
    return torch.stack(full.chunk(2), dim=1).flatten(0, 1)


def expert_layout(shard: Callable[[Tensor, Dims, TensorShard], Tensor], split: Callable[[Tensor], Tensor]) -> Layout:
    """The layout of a parameter of an expert from the functions on its whole tensor in the folder."""

    def shard_of(reads: Sequence[Read], dims: Dims, own: TensorShard, shape: tuple[int, ...]) -> Tensor:
        return shard(reads[0](None, None), dims, own)

    return Layout(shard_of, lambda full, dims: [split(full)])


# The folder's tensors of one expert: [hidden, gate and up], [gate and up], [ffn, hidden], [hidden]
_EXPERT_GATE_UP = expert_layout(lambda t, dims, own: _gate_up(t.T, dims, own), lambda full: _alternate(full).T)
_EXPERT_GATE_UP_BIAS = expert_layout(_gate_up, _alternate)
TRANSPOSED_EXPERT_DOWN = expert_layout(lambda t, dims, own: t.T[:, own.of(dims.moe_ffn)], lambda full: full.T)

_MG, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."


def _expert(name: str, source: str, shape: tuple[str, ...], source_shape: tuple[str, ...], layout: Layout) -> Entry:
    return expert_entry(name, {f"{_HF}mlp.experts.{source}": ("experts", *source_shape)}, layout, shape)


SINK_ATTENTION = (
    QKV_WEIGHT,
    QKV_BIAS,
    ATTENTION_OUT,
    Entry(_MG + "self_attention.linear_proj.bias", {_HF + "self_attn.o_proj.bias": ("hidden",)}, REPLICATED),
    Entry(_MG + "self_attention.core_attention.softmax_offset", {_HF + "self_attn.sinks": ("heads",)}, rows("heads")),
)
BIASED_MIXTURE = (
    MOE_NORM,
    Entry(_MG + "mlp.router.weight", {_HF + "mlp.router.weight": ("experts", "hidden")}, REPLICATED),
    Entry(_MG + "mlp.router.bias", {_HF + "mlp.router.bias": ("experts",)}, REPLICATED),
    _expert(
        "linear_fc1.weight",
        "gate_up_proj",
        ("expert_gate_and_up", "hidden"),
        ("hidden", "expert_gate_and_up"),
        _EXPERT_GATE_UP,
    ),
    _expert(
        "linear_fc1.bias", "gate_up_proj_bias", ("expert_gate_and_up",), ("expert_gate_and_up",), _EXPERT_GATE_UP_BIAS
    ),
    _expert("linear_fc2.weight", "down_proj", ("hidden", "moe_ffn"), ("moe_ffn", "hidden"), TRANSPOSED_EXPERT_DOWN),
    _expert("linear_fc2.bias", "down_proj_bias", ("hidden",), ("hidden",), REPLICATED),
)
