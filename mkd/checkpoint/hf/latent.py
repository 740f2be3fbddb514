"""DeepSeek: multi-head latent attention, dense layers before mixtures of experts, load balancing by a router bias.

Sources: transformers, models/deepseek_v3; megatron-core 0.19, transformer/multi_latent_attention.py and moe/router.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mkd.checkpoint.hf.config_json.parts import Arguments, ConfigPart
from mkd.checkpoint.hf.config_json.reader import ConfigReader
from mkd.checkpoint.hf.layouts import ATTENTION_OUTPUT, REPLICATED, rows
from mkd.checkpoint.hf.tables import MLP, Entry, mixture, shared_experts
from mkd.errors import MkdCheckpointError

_WIDTHS = {
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}
"""config.json's key -> Megatron's argument."""


def _has_plain_queries(config: ConfigReader) -> bool:
    """True if queries come from the hidden states; without the key, transformers uses a rank of its own."""
    return "q_lora_rank" in config.config and config.config["q_lora_rank"] is None


def _read_sizes(config: ConfigReader) -> dict[str, Any]:
    heads = config.size("num_attention_heads")
    if (groups := config.size("num_key_value_heads", default=heads)) != heads:
        raise config.fail("num_key_value_heads", groups, f"only num_attention_heads, {heads}, is supported")
    widths = {argument: config.size(key) for key, argument in _WIDTHS.items()}
    return {
        "num_layers": config.size("num_hidden_layers"),
        "hidden_size": config.size("hidden_size"),
        "ffn_hidden_size": config.size("intermediate_size"),
        "num_attention_heads": heads,
        "kv_channels": widths["v_head_dim"],
        "q_lora_rank": None if _has_plain_queries(config) else config.size("q_lora_rank"),
        **widths,
        "vocab_size": config.size("vocab_size"),
        "max_position_embeddings": config.size("max_position_embeddings"),
        "layernorm_epsilon": float(config.get("rms_norm_eps", (int, float))),
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", bool, False),
        "attention_dropout": float(config.get("attention_dropout", (int, float), 0.0)),
    }


def _write_sizes(args: Arguments) -> dict[str, Any]:
    return {
        "num_hidden_layers": args["num_layers"],
        "hidden_size": args["hidden_size"],
        "intermediate_size": args["ffn_hidden_size"],
        "num_attention_heads": args["num_attention_heads"],
        "num_key_value_heads": args["num_attention_heads"],
        "q_lora_rank": args["q_lora_rank"],
        **{key: args[argument] for key, argument in _WIDTHS.items()},
        "vocab_size": args["vocab_size"],
        "max_position_embeddings": args["max_position_embeddings"],
        "rms_norm_eps": args["layernorm_epsilon"],
        "tie_word_embeddings": not args["untie_embeddings_and_output_weights"],
        "attention_dropout": args.get("attention_dropout") or 0.0,
        "num_nextn_predict_layers": 0,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }


LATENT_SIZES = ConfigPart(_read_sizes, _write_sizes)
"""Layers, widths, attention heads and ranks of the latents."""


Dense = Callable[[ConfigReader, int], int]
"""(config.json, number of layers) -> number of dense layers before the mixtures."""


def first_dense(config: ConfigReader, layers: int) -> int:
    """Dense layers by `first_k_dense_replace`."""
    dense = config.get("first_k_dense_replace", int, 0)
    if not 0 <= dense < layers:
        raise config.fail("first_k_dense_replace", dense, f"it must be at least 0 and below the {layers} layers")
    return dense


def dense_by_layer(config: ConfigReader, layers: int) -> int:
    """Dense layers by `mlp_layer_types`; by default the first layer."""
    kinds = config.get("mlp_layer_types", list, ["dense", *["sparse"] * (layers - 1)])
    dense = kinds.index("sparse") if "sparse" in kinds else layers
    if dense == layers or kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise config.fail("mlp_layer_types", kinds, f"{layers} layers are needed, 'dense' ones before 'sparse' ones")
    return dense


def no_dense(config: ConfigReader, layers: int) -> int:
    """All layers are mixtures."""
    return 0


def _read_experts(config: ConfigReader, count_dense: Dense, other_count: str, best_of_group: int) -> dict[str, Any]:
    """See `routed_experts`."""
    layers = config.size("num_hidden_layers")
    dense = count_dense(config, layers)
    experts = config.size(config.only_key("n_routed_experts", other_count))
    chosen = config.size("num_experts_per_tok")
    if chosen > experts:
        raise config.fail("num_experts_per_tok", chosen, f"it must be at most n_routed_experts {experts}")
    groups, best = config.size("n_group", default=1), config.size("topk_group", default=1)
    if groups > 1:
        _check_groups(config, experts, groups, best, best_of_group)
    width = config.size("moe_intermediate_size")
    return {
        "num_experts": experts,
        "moe_layer_freq": [0] * dense + [1] * (layers - dense) if dense else 1,
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": width * config.size("n_shared_experts"),
        "moe_router_topk": chosen,
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": best if groups > 1 else None,
        # Megatron sums num_experts_per_tok / topk_group scores of a group
        "router_group_best": best_of_group if groups > 1 and chosen // best != best_of_group else None,
        # scores of a sigmoid are divided by their sum; Megatron does not do so with one expert per token
        "normalized_single_expert": True if chosen == 1 and best_of_group == BEST_OF_SIGMOIDS else None,
        "moe_router_topk_scaling_factor": float(config.get("routed_scaling_factor", (int, float), 1.0)),
        "moe_router_dtype": "fp32",
    }


def _check_groups(config: ConfigReader, experts: int, groups: int, best: int, best_of_group: int) -> None:
    """Raise if the experts of the `best` best of `groups` groups cannot be chosen."""
    if experts % groups or experts // groups < best_of_group:
        rule = f"it must divide n_routed_experts {experts} into groups of at least {best_of_group}"
        raise config.fail("n_group", groups, rule)
    chosen = config.size("num_experts_per_tok")
    if best > groups or chosen > best * (experts // groups):
        rule = (
            f"it must be at most n_group {groups}, with at least num_experts_per_tok {chosen} experts in these groups"
        )
        raise config.fail("topk_group", best, rule)


def _write_experts(args: Arguments, count_dense: Dense, best_of_group: int) -> dict[str, Any]:
    _check_router(args, best_of_group)
    every, layers = args["moe_layer_freq"], args["num_layers"]
    dense = every.index(1) if isinstance(every, list) else 0
    if every not in (1, [0] * dense + [1] * (layers - dense)):
        raise MkdCheckpointError(f"--moe-layer-freq {every} has no config.json in this family: dense layers come first")
    if count_dense is no_dense and dense:
        raise MkdCheckpointError(f"--moe-layer-freq {every} has no config.json in this family: it has no dense layers")
    by_layer = {"mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense)}
    return {
        **({"first_k_dense_replace": dense} if count_dense is first_dense else {}),
        **(by_layer if count_dense is dense_by_layer else {}),
        "n_routed_experts": args["num_experts"],
        "moe_intermediate_size": args["moe_ffn_hidden_size"],
        "n_shared_experts": args["moe_shared_expert_intermediate_size"] // args["moe_ffn_hidden_size"],
        "num_experts_per_tok": args["moe_router_topk"],
        "n_group": args["moe_router_num_groups"] or 1,
        "topk_group": args["moe_router_group_topk"] or 1,
        "routed_scaling_factor": args["moe_router_topk_scaling_factor"] or 1.0,
    }


def _check_router(args: Arguments, best_of_group: int) -> None:
    """Raise if the router of a Megatron checkpoint differs from that of transformers."""
    chosen, best = args["moe_router_topk"], args["moe_router_group_topk"]
    if best and (ranked := args.get("router_group_best") or chosen // best) != best_of_group:
        raise MkdCheckpointError(
            f"--moe-router-topk {chosen} with --moe-router-group-topk {best} ranks groups of experts by {ranked} "
            f"scores; transformers ranks them by {best_of_group}"
        )
    if chosen == 1 and best_of_group == BEST_OF_SIGMOIDS and not args.get("normalized_single_expert"):
        raise MkdCheckpointError(
            "--moe-router-topk 1 weights the expert of a token by its score; transformers divides the score by itself"
        )


BEST_OF_SIGMOIDS, BEST_OF_SOFTMAX = 2, 1
"""Number of a group's scores that rank it, by the function of the scores."""


def routed_experts(
    count_dense: Dense = first_dense, other_count: str = "num_local_experts", best_of_group: int = BEST_OF_SIGMOIDS
) -> ConfigPart:
    """Dense layers, then mixtures with shared experts; routing optionally limited to groups of experts.

    Args:
        count_dense: reads the number of dense layers.
        other_count: another name of `n_routed_experts`.
        best_of_group: number of scores that rank a group; sigmoids are divided by their sum over a token's experts.
    """
    return ConfigPart(
        lambda config: _read_experts(config, count_dense, other_count, best_of_group),
        lambda args: _write_experts(args, count_dense, best_of_group),
    )


_LATENT_EPSILON = 1e-6
"""In transformers, the norms of the latents always use it."""


def _read_epsilon(config: ConfigReader) -> dict[str, Any]:
    own = float(config.get("rms_norm_eps", (int, float)))
    return {"latent_norm_epsilon": None if own == _LATENT_EPSILON else _LATENT_EPSILON}


def _write_epsilon(args: Arguments) -> dict[str, Any]:
    epsilon = args.get("latent_norm_epsilon") or args["layernorm_epsilon"]
    if epsilon != _LATENT_EPSILON:
        raise MkdCheckpointError(
            f"--norm-epsilon is {epsilon:g} in the norms of latents; transformers always uses {_LATENT_EPSILON:g}"
        )
    return {}


LATENT_EPSILON = ConfigPart(_read_epsilon, _write_epsilon)
"""The norms of the latents have an epsilon of their own."""


def latent_dims(args: Arguments) -> dict[str, int]:
    """Sizes of `Dims` that only latent attention has."""
    return {
        "query_latent": args["q_lora_rank"] or 0,
        "key_latent": args["kv_lora_rank"],
        "positions": args["qk_pos_emb_head_dim"],
        "plain_width": args["qk_head_dim"],
    }


def is_mixture(args: Mapping[str, Any], layer: int | None) -> bool:
    """True if the layer has experts."""
    every = args["moe_layer_freq"]
    return every[layer] == 1 if isinstance(every, list) else True


def is_dense(args: Mapping[str, Any], layer: int | None) -> bool:
    """True if the layer has an MLP."""
    return not is_mixture(args, layer)


_MG, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."
_ATTENTION, _SELF = _MG + "self_attention.", _HF + "self_attn."


def _has_latent_query(args: Mapping[str, Any], layer: int | None) -> bool:
    return args["q_lora_rank"] is not None


def _norm(name: str, projection: str, source: str, width: str) -> Entry:
    """The norm of a latent; Transformer Engine stores it in the projection that follows, also in checkpoints."""
    own, fused = f"{_ATTENTION}{name}.weight", f"{_ATTENTION}{projection}.layer_norm_weight"
    sources = {f"{_SELF}{source}.weight": (width,)}
    return Entry(own, sources, REPLICATED, aliases=(fused,), stored=(own, fused))


def _row_sharded(name: str, source: str, count: str, width: str) -> Entry:
    """A projection; local layers shard the projections down to the latents too, Transformer Engine's do not."""
    return Entry(f"{_ATTENTION}{name}.weight", {f"{_SELF}{source}.weight": (count, width)}, rows(count))


LATENT_INPUT_NORM = Entry(_MG + "input_layernorm.weight", {_HF + "input_layernorm.weight": ("hidden",)}, REPLICATED)
_LATENT_QUERY = (
    _row_sharded("linear_q_down_proj", "q_a_proj", "query_latent", "hidden"),
    _norm("q_layernorm", "linear_q_up_proj", "q_a_layernorm", "query_latent"),
    _row_sharded("linear_q_up_proj", "q_b_proj", "latent_query", "query_latent"),
)
_PLAIN_QUERY = _row_sharded("linear_q_proj", "q_proj", "latent_query", "hidden")
LATENT_ATTENTION = (
    *(replace(entry, where=_has_latent_query) for entry in _LATENT_QUERY),
    replace(_PLAIN_QUERY, where=lambda args, layer: not _has_latent_query(args, layer)),
    _row_sharded("linear_kv_down_proj", "kv_a_proj_with_mqa", "key_latent_and_positions", "hidden"),
    _norm("kv_layernorm", "linear_kv_up_proj", "kv_a_layernorm", "key_latent"),
    _row_sharded("linear_kv_up_proj", "kv_b_proj", "latent_key_value", "key_latent"),
    Entry(_ATTENTION + "linear_proj.weight", {_SELF + "o_proj.weight": ("hidden", "query")}, ATTENTION_OUTPUT),
)

_EXPERT_BIAS = Entry(
    _MG + "mlp.router.expert_bias",
    {_HF + "mlp.gate.e_score_correction_bias": ("experts",)},
    REPLICATED,
    in_fp32=True,
)
MLP_OR_MOE_NORM = Entry(
    _MG + "pre_mlp_layernorm.weight",
    {_HF + "post_attention_layernorm.weight": ("hidden",)},
    REPLICATED,
    aliases=(_MG + "mlp.linear_fc1.layer_norm_weight",),
    stored=(_MG + "pre_mlp_layernorm.weight", _MG + "mlp.linear_fc1.layer_norm_weight"),
)
LATENT_DENSE_LAYER = (MLP_OR_MOE_NORM, *MLP)


def dense_then_mixture(*router: Entry) -> tuple[Entry, ...]:
    """Tables of dense layers and of mixtures with shared experts, with further parameters of the router."""
    experts = mixture("mlp.", "gate_proj", "up_proj", "down_proj")
    return (
        MLP_OR_MOE_NORM,
        *(replace(entry, where=is_dense) for entry in MLP),
        *(replace(entry, where=is_mixture) for entry in (*experts, *router, *shared_experts("shared_experts"))),
    )


DENSE_THEN_MIXTURE = dense_then_mixture(_EXPERT_BIAS)
"""Mixtures whose router has a bias for load balancing."""
