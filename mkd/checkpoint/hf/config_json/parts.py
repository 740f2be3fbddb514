"""Parts of config.json that families share: each converts some keys to Megatron arguments and back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mkd.checkpoint.hf.config_json.reader import ConfigReader
from mkd.errors import MkdCheckpointError

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class ConfigPart:
    """A group of config.json keys and the equivalent Megatron arguments."""

    read: Callable[[ConfigReader], dict[str, Any]]
    """config.json -> arguments; raises `MkdCheckpointError` naming a key that is missing or not supported."""
    write: Callable[[Arguments], dict[str, Any]]
    """Arguments -> keys and values of config.json."""


def required(**values: Any) -> ConfigPart:
    """Keys with the only value that Megatron can compute; an absent key counts as this value."""

    def read(config: ConfigReader) -> dict[str, Any]:
        for key, value in values.items():
            config.require(key, value, default=value)
        return {}

    return ConfigPart(read, lambda args: dict(values))


def _read_activation(config: ConfigReader) -> dict[str, Any]:
    if config.config.get("hidden_act") != "swish":  # transformers' other name of SiLU
        config.require("hidden_act", "silu", default="silu")
    return {}


SILU = ConfigPart(_read_activation, lambda args: {"hidden_act": "silu"})
"""The activation of the MLPs."""


def _read_sizes(config: ConfigReader) -> dict[str, Any]:
    heads = config.size("num_attention_heads")
    hidden = config.size("hidden_size")
    groups = config.size("num_key_value_heads", default=heads)
    if heads % groups:
        raise config.fail("num_key_value_heads", groups, f"it must divide num_attention_heads {heads}")
    if config.config.get("head_dim") is None and hidden % heads:
        raise config.fail(
            "hidden_size", hidden, f"num_attention_heads {heads} must divide it when there is no head_dim"
        )
    return {
        "num_layers": config.size("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups if groups != heads else None,
        "kv_channels": config.size("head_dim", default=hidden // heads),
        "vocab_size": config.size("vocab_size"),
        "max_position_embeddings": config.size("max_position_embeddings"),
        "layernorm_epsilon": float(config.get("rms_norm_eps", (int, float))),
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", bool, False),
        "attention_dropout": float(config.get("attention_dropout", (int, float), 0.0)),
    }


def _write_sizes(args: Arguments) -> dict[str, Any]:
    heads = args["num_attention_heads"]
    return {
        "num_hidden_layers": args["num_layers"],
        "hidden_size": args["hidden_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": args["num_query_groups"] if args["group_query_attention"] else heads,
        "head_dim": args["kv_channels"],
        "vocab_size": args["vocab_size"],
        "max_position_embeddings": args["max_position_embeddings"],
        "rms_norm_eps": args["layernorm_epsilon"],
        "tie_word_embeddings": not args["untie_embeddings_and_output_weights"],
        "attention_dropout": args.get("attention_dropout") or 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


SIZES = ConfigPart(_read_sizes, _write_sizes)
"""Layers, widths, attention heads, vocabulary, norms. The head width is head_dim, by default hidden_size / heads."""

FFN = ConfigPart(
    lambda config: {"ffn_hidden_size": config.size("intermediate_size")},
    lambda args: {"intermediate_size": args["ffn_hidden_size"]},
)


def _read_biases(config: ConfigReader) -> dict[str, Any]:
    attention, mlp = (config.get(key, bool, False) for key in ("attention_bias", "mlp_bias"))
    if mlp and not attention:
        raise config.fail("mlp_bias", mlp, 'it is supported together with "attention_bias" only')
    # with biases in all linear layers, Megatron sets add_qkv_bias too
    return {"add_bias_linear": mlp, **_attention_biases(attention and not mlp), "add_qkv_bias": attention}


def _attention_biases(are_there: bool) -> dict[str, Any]:
    """Biases of queries, keys, values and attention's output, without biases in the MLPs."""
    return {"add_qkv_bias": are_there, "attention_output_bias": are_there or None}


def _write_biases(args: Arguments) -> dict[str, Any]:
    if args["add_qkv_bias"] and not args["add_bias_linear"] and not args.get("attention_output_bias"):
        raise MkdCheckpointError(
            "--add-qkv-bias without a bias in attention's output projection has no config.json in this family"
        )
    has_all = bool(args["add_bias_linear"])
    return {"attention_bias": has_all or bool(args.get("attention_output_bias")), "mlp_bias": has_all}


BIASES = ConfigPart(_read_biases, _write_biases)
"""Biases in all linear layers of attention, in those of the MLPs too, or in none."""

ATTENTION_BIASES = ConfigPart(
    lambda config: _attention_biases(config.get("attention_bias", bool, False)),
    lambda args: {"attention_bias": _write_biases({**args, "add_bias_linear": False})["attention_bias"]},
)
"""Biases in all linear layers of attention."""


def qkv_bias(key: str = "attention_bias") -> ConfigPart:
    """Biases of queries, keys and values alone, where `key` is true."""
    return ConfigPart(
        lambda config: {"add_qkv_bias": config.get(key, bool, False)}, lambda args: {key: bool(args["add_qkv_bias"])}
    )


def _read_head_norms(config: ConfigReader) -> dict[str, Any]:
    return {"qk_layernorm": config.get("use_qk_norm", bool, False)}


OPTIONAL_HEAD_NORMS = ConfigPart(_read_head_norms, lambda args: {"use_qk_norm": bool(args["qk_layernorm"])})
"""Norms of each attention head's queries and keys (`use_qk_norm`)."""


def _read_experts(config: ConfigReader) -> dict[str, Any]:
    key = config.only_key("num_experts", "num_local_experts")
    experts = config.size(key)
    chosen = config.size("num_experts_per_tok")
    if chosen > experts:
        raise config.fail("num_experts_per_tok", chosen, f"it must be at most {key} {experts}")
    return {
        "num_experts": experts,
        "moe_router_topk": chosen,
        "moe_layer_freq": 1,
        "moe_aux_loss_coeff": float(config.get("router_aux_loss_coef", (int, float), 0.0)),
        # transformers' routers compute the softmax in fp32 for every model dtype
        "moe_router_dtype": "fp32",
    }


def experts(count_key: str) -> ConfigPart:
    """Every layer's MLP is a mixture of experts without biases.

    Args:
        count_key: key with the number of experts that is written; `num_experts` and `num_local_experts` are both read.
    """
    return ConfigPart(
        _read_experts,
        lambda args: {
            count_key: args["num_experts"],
            "num_experts_per_tok": args["moe_router_topk"],
            "router_aux_loss_coef": _first(args.get("moe_aux_loss_coeff")) or 0.0,
        },
    )


def _first(value: Any) -> Any:
    """The coefficient itself, or the first of a list with one coefficient per type of load balancing."""
    return value[0] if isinstance(value, list) else value


def _read_normalized_router(config: ConfigReader) -> dict[str, Any]:
    # Megatron refuses a softmax over the one chosen expert
    single = config.size("num_experts_per_tok") == 1
    return {"moe_router_pre_softmax": single, "normalized_single_expert": single or None}


def _read_optional_normalized_router(config: ConfigReader) -> dict[str, Any]:
    if not config.get("norm_topk_prob", bool, False):
        return {"moe_router_pre_softmax": True, "normalized_single_expert": None}
    return _read_normalized_router(config)


def _is_normalized(args: Arguments) -> bool:
    return not args["moe_router_pre_softmax"] or bool(args.get("normalized_single_expert"))


def _write_normalized_router(args: Arguments) -> dict[str, Any]:
    if not _is_normalized(args):
        raise MkdCheckpointError(
            "--moe-router-pre-softmax does not divide the probabilities of a token's experts by their sum; this family "
            "of transformers does"
        )
    return {}


# The softmax over all experts, restricted to the top-k and renormalized, equals the softmax over the top-k.
NORMALIZED_ROUTER = ConfigPart(_read_normalized_router, _write_normalized_router)
OPTIONAL_NORMALIZED_ROUTER = ConfigPart(
    _read_optional_normalized_router, lambda args: {"norm_topk_prob": _is_normalized(args)}
)


def _read_expert_width(key: str) -> Callable[[ConfigReader], dict[str, Any]]:
    def read(config: ConfigReader) -> dict[str, Any]:
        width = config.size(key)
        return {"moe_ffn_hidden_size": width, "ffn_hidden_size": config.size("intermediate_size", default=width)}

    return read


EXPERT_FFN = ConfigPart(
    _read_expert_width("moe_intermediate_size"),
    lambda args: {"moe_intermediate_size": args["moe_ffn_hidden_size"], "intermediate_size": args["ffn_hidden_size"]},
)
"""Experts and dense layers have separate widths."""

EXPERTS_HAVE_FFN = ConfigPart(
    _read_expert_width("intermediate_size"), lambda args: {"intermediate_size": args["moe_ffn_hidden_size"]}
)
"""No dense layers: `intermediate_size` is the width of the experts."""

SHARED_EXPERT = ConfigPart(
    lambda config: {"moe_shared_expert_intermediate_size": config.size("shared_expert_intermediate_size")},
    lambda args: {"shared_expert_intermediate_size": args["moe_shared_expert_intermediate_size"]},
)
"""A shared expert with a width of its own, beside the routed ones."""
