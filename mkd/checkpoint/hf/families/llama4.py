"""The text models of Llama 4: layers without rope, norms of queries and keys without weights in layers with rope,
mixtures in all or some layers whose one expert per token has its input multiplied by a sigmoid.

Attention in chunks and the temperature of layers without rope differ from plain attention only beyond
`attention_chunk_size` and `floor_scale` tokens: the Megatron model has fewer positions.

Source: transformers, models/llama4.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mkd.checkpoint.hf.config_json.parts import SILU, SIZES, Arguments, ConfigPart, required
from mkd.checkpoint.hf.config_json.reader import ConfigReader
from mkd.checkpoint.hf.config_json.rope import INTERLEAVED_ROPE, LAYERS_WITHOUT_ROPE
from mkd.checkpoint.hf.families.family import ATTENTION, MIXTURE, Family, but
from mkd.checkpoint.hf.gpt_oss import TRANSPOSED_EXPERT_DOWN, expert_layout
from mkd.checkpoint.hf.latent import MLP_OR_MOE_NORM, is_dense, is_mixture
from mkd.checkpoint.hf.layouts import REPLICATED, Dims, TensorShard
from mkd.checkpoint.hf.tables import MLP, Entry, decoder, expert_entry, shared_experts
from mkd.errors import MkdCheckpointError

_CHUNKED, _FULL = "chunked_attention", "full_attention"


def _read_mixtures(config: ConfigReader) -> dict[str, Any]:
    layers, width = config.size("num_hidden_layers"), config.size("intermediate_size")
    step = config.size("interleave_moe_layer_step", default=1)
    mixtures = config.get("moe_layers", list, list(range(step - 1, layers, step)))
    every = [int(layer in mixtures) for layer in range(layers)]
    if not any(every):
        raise config.fail(
            "moe_layers", mixtures, f"at least one of the {layers} layers is needed; the nearest is Llama"
        )
    if (chosen := config.size("num_experts_per_tok")) != 1:
        raise config.fail(
            "num_experts_per_tok", chosen, "only 1 is supported: Megatron divides several scores by their sum"
        )
    return {
        "num_experts": config.size("num_local_experts"),
        "moe_layer_freq": 1 if all(every) else every,
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": width,
        "ffn_hidden_size": config.size("intermediate_size_mlp"),
        "moe_router_topk": chosen,
        "moe_router_dtype": "fp32",
    }


def _write_mixtures(args: Arguments) -> dict[str, Any]:
    layers, every = range(args["num_layers"]), args["moe_layer_freq"]
    if isinstance(every, int):
        every = [int(layer % every == 0) for layer in layers]
    return {
        "num_local_experts": args["num_experts"],
        "moe_layers": [layer for layer in layers if every[layer]],
        "intermediate_size": args["moe_ffn_hidden_size"],
        "intermediate_size_mlp": args["ffn_hidden_size"],
        "num_experts_per_tok": args["moe_router_topk"],
    }


_MIXTURES = ConfigPart(_read_mixtures, _write_mixtures)
_NORMS = ConfigPart(
    lambda config: {"qk_l2_norm": config.get("use_qk_norm", bool), "norms_with_rope_only": True},
    lambda args: {"use_qk_norm": bool(args["qk_l2_norm"])},
)


def _read_distant_attention(config: ConfigReader) -> dict[str, Any]:
    """The number of positions up to which attention is plain; the keys beyond it are kept for the export."""
    layers, positions = config.size("num_hidden_layers"), config.size("max_position_embeddings")
    without = LAYERS_WITHOUT_ROPE.read(config)["no_rope_freq"] or [0] * layers
    # null means no chunks; without the key, transformers has chunks
    chunk = config.config.get("attention_chunk_size")
    kinds = config.get("layer_types", list, [_FULL if plain or chunk is None else _CHUNKED for plain in without])
    if len(kinds) < layers or not {_CHUNKED, _FULL}.issuperset(kinds):
        raise config.fail("layer_types", kinds, f"{layers} times {_CHUNKED!r} or {_FULL!r} is needed")
    limits = [positions]
    if _CHUNKED in kinds[:layers]:
        limits.append(config.size("attention_chunk_size"))
    tuned, scale = config.get("attn_temperature_tuning", bool), float(config.get("attn_scale", (int, float)))
    floor = config.size("floor_scale")
    if tuned and any(without):  # the temperature of token floor_scale is the first other than 1
        if floor < 2:
            raise config.fail("floor_scale", floor, "at least 2 is supported with attn_temperature_tuning")
        limits.append(floor - 1)
    keys = {"max_position_embeddings": positions, "attention_chunk_size": chunk, "layer_types": list(kinds[:layers])}
    keys |= {"attn_temperature_tuning": tuned, "floor_scale": floor, "attn_scale": scale}
    return {"max_position_embeddings": min(limits), "distant_attention": keys}


def _write_distant_attention(args: Arguments) -> dict[str, Any]:
    if (keys := args.get("distant_attention")) is None:
        raise MkdCheckpointError(
            "the Megatron checkpoint was not imported from Llama 4: it has no attention_chunk_size"
        )
    return dict(keys)


_DISTANT_ATTENTION = ConfigPart(_read_distant_attention, _write_distant_attention)


def _shard_gate_up(tensor: Tensor, dims: Dims, shard: TensorShard) -> Tensor:
    """[gate rows of this rank; up rows of this rank] from [hidden, all gate and all up columns]."""
    own = shard.of(dims.moe_ffn)
    return torch.cat([part[own] for part in tensor.T.chunk(2)])


_GATE_UP = expert_layout(_shard_gate_up, lambda full: full.T)
_MG, _HF = "decoder.layers.{layer}.", "model.layers.{layer}.feed_forward."


def _in_feed_forward(entry: Entry) -> Entry:
    """The entry of a dense MLP under Llama 4's name of it."""
    sources = {name.replace(".mlp.", ".feed_forward."): shape for name, shape in entry.sources.items()}
    return replace(entry, sources=sources)


_MIXTURE_ENTRIES = (
    Entry(_MG + "mlp.router.weight", {_HF + "router.weight": ("experts", "hidden")}, REPLICATED),
    expert_entry(
        "linear_fc1.weight",
        {_HF + "experts.gate_up_proj": ("experts", "hidden", "expert_gate_and_up")},
        _GATE_UP,
        ("expert_gate_and_up", "hidden"),
    ),
    expert_entry(
        "linear_fc2.weight",
        {_HF + "experts.down_proj": ("experts", "moe_ffn", "hidden")},
        TRANSPOSED_EXPERT_DOWN,
        ("hidden", "moe_ffn"),
    ),
    *map(_in_feed_forward, shared_experts("shared_expert")),
)
LLAMA4 = Family(
    architectures=("Llama4ForCausalLM",),
    model_type="llama4_text",
    parts=(
        SIZES,
        INTERLEAVED_ROPE,
        LAYERS_WITHOUT_ROPE,
        _NORMS,
        _DISTANT_ATTENTION,
        _MIXTURES,
        SILU,
        required(attention_bias=False),
    ),
    table=decoder(
        ATTENTION,
        (
            MLP_OR_MOE_NORM,
            *(replace(_in_feed_forward(entry), where=is_dense) for entry in MLP),
            *(replace(entry, where=is_mixture) for entry in _MIXTURE_ENTRIES),
        ),
    ),
    fixed=but(
        MIXTURE,
        *("no_rope_freq", "qk_l2_norm", "norms_with_rope_only", "distant_attention"),
        "moe_shared_expert_intermediate_size",
        moe_router_score_function="sigmoid",
        moe_router_pre_softmax=False,
        moe_apply_probs_on_input=True,
        moe_shared_expert_gate=False,
        rotary_interleaved=True,
    ),
    absent={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 5e5,
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
        "intermediate_size_mlp": 16384,
        "use_qk_norm": True,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
)
