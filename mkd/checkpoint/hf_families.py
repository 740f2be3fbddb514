"""Model families: how config.json becomes Megatron arguments and back, and which tensors are which.

Megatron's own argument names are the vocabulary. A family is one table of tensors and one pair of functions between
config.json and arguments; reading, writing and checking are derived from them.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mkd.checkpoint.hf_config import ConfigReader, read_rope, write_rope
from mkd.checkpoint.hf_layouts import ATTENTION_OUTPUT, DOWN, GATE_UP, QKV, REPLICATED, VOCAB, Dims, Layout
from mkd.errors import MkdCheckpointError


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter and the Hugging Face tensors it is made of; `{layer}` stands for the global layer index.

    `sources` gives each Hugging Face tensor's shape by the names of `Dims`. `aliases` are the names of the same
    parameter under other layer specs: Transformer Engine keeps a norm's weight in the linear layer that follows it.
    """

    megatron: str
    sources: Mapping[str, tuple[str, ...]]
    layout: Layout
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """A group of Hugging Face architectures with one tensor table."""

    architectures: tuple[str, ...]
    fixed: Mapping[str, Any]
    """Megatron arguments that have one value in the whole family."""
    read_config: Callable[[Mapping[str, Any]], dict[str, Any]]
    """config.json -> the Megatron arguments that differ between models of the family."""
    write_config: Callable[[Mapping[str, Any]], dict[str, Any]]
    """The inverse of `read_config`."""
    table: tuple[Entry, ...]
    tied: Mapping[str, str]
    """Hugging Face tensors that repeat another one when embeddings are tied: copy -> original."""
    ignored: tuple[str, ...] = ()
    """Ends of the names of tensors that hold no weights."""

    def megatron_args(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Megatron arguments for config.json. `MkdCheckpointError` names a key that is missing or not supported."""
        return {**self.fixed, "hidden_dropout": 0.0, **self.read_config(config)}

    def hf_config(self, args: Namespace | Mapping[str, Any]) -> dict[str, Any]:
        """config.json for Megatron arguments. `MkdCheckpointError` names an argument that the family cannot express."""
        values = args if isinstance(args, Mapping) else vars(args)
        for name, wanted in self.fixed.items():
            if (seen := values.get(name)) != wanted and not (seen is None and not wanted):
                flag = "--" + name.replace("_", "-")
                raise MkdCheckpointError(
                    f"{self.architectures[0]} has {flag} {wanted}, the Megatron checkpoint was made with {seen}"
                )
        return {"architectures": list(self.architectures[:1]), **self.write_config(values)}

    def dims(self, args: Mapping[str, Any]) -> Dims:
        """Sizes for the tensor table, from Megatron arguments; `vocab` is without padding."""
        heads = args["num_attention_heads"]
        return Dims(
            hidden=args["hidden_size"],
            ffn=args["ffn_hidden_size"],
            heads=heads,
            groups=args["num_query_groups"] if args["group_query_attention"] else heads,
            head_dim=args["kv_channels"],
            vocab=args["vocab_size"],
        )

    def tensors(self, args: Mapping[str, Any]) -> Iterator[tuple[Entry, int | None, dict[str, tuple[int, ...]]]]:
        """(entry, layer or None, Hugging Face names with shapes) for the whole model, in the order of the layers."""
        dims = self.dims(args)
        for entry in self.table:
            layered = "{layer}" in entry.megatron
            for layer in range(args["num_layers"]) if layered else (None,):
                shapes = {
                    name.format(layer=layer): tuple(getattr(dims, size) for size in sizes)
                    for name, sizes in entry.sources.items()
                }
                yield entry, layer, shapes


def _read_llama(config: Mapping[str, Any]) -> dict[str, Any]:
    read = ConfigReader(config)
    read.require("hidden_act", "silu", default="silu")
    read.require("attention_bias", False, default=False)
    read.require("mlp_bias", False, default=False)
    heads = read.size("num_attention_heads")
    hidden = read.size("hidden_size")
    groups = read.size("num_key_value_heads", default=heads)
    if heads % groups:
        raise read.fail("num_key_value_heads", groups, f"it must divide num_attention_heads {heads}")
    if config.get("head_dim") is None and hidden % heads:
        raise read.fail("hidden_size", hidden, f"num_attention_heads {heads} must divide it when there is no head_dim")
    return {
        "num_layers": read.size("num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": read.size("intermediate_size"),
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups if groups != heads else None,
        "kv_channels": read.size("head_dim", default=hidden // heads),
        "vocab_size": read.size("vocab_size"),
        "max_position_embeddings": read.size("max_position_embeddings"),
        "layernorm_epsilon": float(read.get("rms_norm_eps", (int, float))),
        "untie_embeddings_and_output_weights": not read.get("tie_word_embeddings", bool, False),
        "attention_dropout": float(read.get("attention_dropout", (int, float), 0.0)),
        **read_rope(config),
    }


def _write_llama(args: Mapping[str, Any]) -> dict[str, Any]:
    heads = args["num_attention_heads"]
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": args["num_layers"],
        "hidden_size": args["hidden_size"],
        "intermediate_size": args["ffn_hidden_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": args["num_query_groups"] if args["group_query_attention"] else heads,
        "head_dim": args["kv_channels"],
        "vocab_size": args["vocab_size"],
        "max_position_embeddings": args["max_position_embeddings"],
        "rms_norm_eps": args["layernorm_epsilon"],
        "tie_word_embeddings": not args["untie_embeddings_and_output_weights"],
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": args.get("attention_dropout") or 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        **write_rope(args),
    }


_LAYER, _HF_LAYER = "decoder.layers.{layer}.", "model.layers.{layer}."
_LLAMA_TABLE = (
    Entry("embedding.word_embeddings.weight", {"model.embed_tokens.weight": ("vocab", "hidden")}, VOCAB),
    Entry(
        _LAYER + "input_layernorm.weight",
        {_HF_LAYER + "input_layernorm.weight": ("hidden",)},
        REPLICATED,
        aliases=(_LAYER + "self_attention.linear_qkv.layer_norm_weight",),
    ),
    Entry(
        _LAYER + "self_attention.linear_qkv.weight",
        {
            _HF_LAYER + "self_attn.q_proj.weight": ("query", "hidden"),
            _HF_LAYER + "self_attn.k_proj.weight": ("key", "hidden"),
            _HF_LAYER + "self_attn.v_proj.weight": ("key", "hidden"),
        },
        QKV,
    ),
    Entry(
        _LAYER + "self_attention.linear_proj.weight",
        {_HF_LAYER + "self_attn.o_proj.weight": ("hidden", "query")},
        ATTENTION_OUTPUT,
    ),
    Entry(
        _LAYER + "pre_mlp_layernorm.weight",
        {_HF_LAYER + "post_attention_layernorm.weight": ("hidden",)},
        REPLICATED,
        aliases=(_LAYER + "mlp.linear_fc1.layer_norm_weight",),
    ),
    Entry(
        _LAYER + "mlp.linear_fc1.weight",
        {
            _HF_LAYER + "mlp.gate_proj.weight": ("ffn", "hidden"),
            _HF_LAYER + "mlp.up_proj.weight": ("ffn", "hidden"),
        },
        GATE_UP,
    ),
    Entry(_LAYER + "mlp.linear_fc2.weight", {_HF_LAYER + "mlp.down_proj.weight": ("hidden", "ffn")}, DOWN),
    Entry("decoder.final_layernorm.weight", {"model.norm.weight": ("hidden",)}, REPLICATED),
    Entry("output_layer.weight", {"lm_head.weight": ("vocab", "hidden")}, VOCAB),
)

LLAMA = Family(
    architectures=("LlamaForCausalLM",),
    fixed={
        "normalization": "RMSNorm",
        "layernorm_zero_centered_gamma": False,
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "qk_l2_norm": False,
        "softmax_type": "vanilla",
        "attention_output_gate": False,
        "window_size": None,
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "rotary_seq_len_interpolation_factor": None,
        "multi_latent_attention": False,
        "num_experts": None,
    },
    read_config=_read_llama,
    write_config=_write_llama,
    table=_LLAMA_TABLE,
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    ignored=("rotary_emb.inv_freq",),
)

FAMILIES = (LLAMA,)


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json; `MkdCheckpointError` lists the known architectures when there is none."""
    known = {name: family for family in FAMILIES for name in family.architectures}
    names = config.get("architectures")
    for name in names if isinstance(names, list) else []:
        if name in known:
            return known[name]
    raise MkdCheckpointError(
        f'config.json: "architectures" is {names!r}; known architectures: {", ".join(sorted(known))}'
    )
