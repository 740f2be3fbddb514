"""Nemotron-H and Nemotron 3 Nano: each layer has a norm and one mixer: Mamba 2, attention without rope, an MLP, or a
mixture of experts. MLPs and experts have no gate, their activation is the square of ReLU.

Source: transformers, models/nemotron_h.
"""

from dataclasses import replace
from typing import Any

from mkd.checkpoint.hf.config_json.parts import FFN, SIZES, Arguments, ConfigPart, required
from mkd.checkpoint.hf.config_json.reader import ConfigReader
from mkd.checkpoint.hf.families.family import DENSE, Family, but
from mkd.checkpoint.hf.families.mamba import MAMBA_SIZES, has_mixer, mamba_entries, read_mixers, write_mixers
from mkd.checkpoint.hf.latent import no_dense, routed_experts
from mkd.checkpoint.hf.layouts import ATTENTION_OUTPUT, DOWN, EXPERT_DOWN, QKV, REPLICATED, SHARED_DOWN, VOCAB, rows
from mkd.checkpoint.hf.tables import HEAD, Entry, expert_entry
from mkd.errors import MkdCheckpointError
from mkd.models.layer_options import ATTENTION, MAMBA, MIXTURE, MLP_ONLY

_EPSILON = "layer_norm_epsilon"


def _read_sizes(config: ConfigReader) -> dict[str, Any]:
    mixers = read_mixers(config)
    epsilon = config.get(_EPSILON, (int, float), 1e-5)
    known = {**config.config, "num_hidden_layers": len(mixers), "rms_norm_eps": epsilon}
    return SIZES.read(ConfigReader(known)) | {"layer_mixers": mixers}


def _write_sizes(args: Arguments) -> dict[str, Any]:
    written = SIZES.write(args)
    del written["num_hidden_layers"]
    return written | {_EPSILON: written.pop("rms_norm_eps")} | write_mixers(args)


_ROUTED, _SHARED_WIDTH = routed_experts(no_dense), "moe_shared_expert_intermediate_size"
_ROUTER = {
    "moe_router_score_function": "sigmoid",
    "moe_router_pre_softmax": False,
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_gate": False,
    "moe_latent_size": None,
    "moe_apply_probs_on_input": False,
}
"""Megatron's arguments of all mixtures of the family."""


def _read_mixture(config: ConfigReader) -> dict[str, Any]:
    mixers = read_mixers(config)
    if MIXTURE not in mixers:
        return {"num_experts": None}
    config.require("n_shared_experts", 1, default=1)
    whole = {**config.config, "num_hidden_layers": len(mixers), "n_shared_experts": 1}
    by_layer = {"moe_layer_freq": [int(mixer == MIXTURE) for mixer in mixers]}
    shared = {_SHARED_WIDTH: config.size(_SHARED_WIDTH)}
    return {**_ROUTED.read(ConfigReader(whole)), **_ROUTER, **by_layer, **shared}


def _write_mixture(args: Arguments) -> dict[str, Any]:
    if args["num_experts"] is None:
        return {}
    for name, value in _ROUTER.items():
        if args.get(name) != value and (args.get(name) or value):
            flag = name.replace("_", "-")
            raise MkdCheckpointError(f"mixtures of Nemotron-H have --{flag} {value}, the checkpoint {args.get(name)}")
    alike = {"moe_layer_freq": 1, _SHARED_WIDTH: args["moe_ffn_hidden_size"]}
    return _ROUTED.write({**args, **alike}) | {_SHARED_WIDTH: args[_SHARED_WIDTH], "norm_topk_prob": True}


_BACKBONE = "backbone."
_HF = _BACKBONE + "layers.{layer}."
_MG, _SOURCE = "decoder.layers.{layer}.", _HF + "mixer."


def _norm(half: str) -> Entry:
    return Entry(f"{_MG}{half}.weight", {_HF + "norm.weight": ("hidden",)}, REPLICATED)


def _linear(name: str, source: str, count: str, width: str, layout: Any) -> Entry:
    return Entry(f"{_MG}{name}.weight", {f"{_SOURCE}{source}.weight": (count, width)}, layout)


_ATTENTION = (
    Entry(
        _MG + "self_attention.linear_qkv.weight",
        {
            f"{_SOURCE}{name}_proj.weight": (size, "hidden")
            for name, size in (("q", "query"), ("k", "key"), ("v", "key"))
        },
        QKV,
    ),
    _linear("self_attention.linear_proj", "o_proj", "hidden", "query", ATTENTION_OUTPUT),
)
_MLP = (
    _linear("mlp.linear_fc1", "up_proj", "ffn", "hidden", rows("ffn")),
    _linear("mlp.linear_fc2", "down_proj", "hidden", "ffn", DOWN),
)
_EXPERT = _SOURCE + "experts.{expert}."
_MIXTURE = (
    _linear("mlp.router", "gate", "experts", "hidden", REPLICATED),
    Entry(
        _MG + "mlp.router.expert_bias",
        {_SOURCE + "gate.e_score_correction_bias": ("experts",)},
        REPLICATED,
        in_fp32=True,
    ),
    expert_entry("linear_fc1.weight", {_EXPERT + "up_proj.weight": ("moe_ffn", "hidden")}, rows("moe_ffn")),
    expert_entry("linear_fc2.weight", {_EXPERT + "down_proj.weight": ("hidden", "moe_ffn")}, EXPERT_DOWN),
    _linear("mlp.shared_experts.linear_fc1", "shared_experts.up_proj", "shared_ffn", "hidden", rows("shared_ffn")),
    _linear("mlp.shared_experts.linear_fc2", "shared_experts.down_proj", "hidden", "shared_ffn", SHARED_DOWN),
)
_BY_MIXER = {
    MAMBA: (_norm("input_layernorm"), *mamba_entries(_SOURCE)),
    ATTENTION: (_norm("input_layernorm"), *_ATTENTION),
    MLP_ONLY: (_norm("pre_mlp_layernorm"), *_MLP),
    MIXTURE: (_norm("pre_mlp_layernorm"), *_MIXTURE),
}
_EMBEDDING = _BACKBONE + "embeddings.weight"

NEMOTRON_H = Family(
    architectures=("NemotronHForCausalLM",),
    model_type="nemotron_h",
    parts=(
        ConfigPart(_read_sizes, _write_sizes),
        FFN,
        MAMBA_SIZES,
        ConfigPart(_read_mixture, _write_mixture),
        required(tie_word_embeddings=False, mlp_hidden_act="relu2", mamba_hidden_act="silu", moe_latent_size=None),
        required(use_bias=False, use_conv_bias=True, mlp_bias=False, attention_bias=False, mamba_proj_bias=False),
        required(mamba_conv_bias=True, sliding_window=None, norm_topk_prob=True),
    ),
    table=(
        Entry("embedding.word_embeddings.weight", {_EMBEDDING: ("vocab", "hidden")}, VOCAB),
        *(replace(entry, where=has_mixer(mixer)) for mixer, entries in _BY_MIXER.items() for entry in entries),
        Entry("decoder.final_layernorm.weight", {_BACKBONE + "norm_f.weight": ("hidden",)}, REPLICATED),
        HEAD,
    ),
    fixed=but(
        DENSE,
        *("num_experts", "layer_mixers", "least_time_step"),
        position_embedding_type="none",
        swiglu=False,
        squared_relu=True,
    ),
    tied={"lm_head.weight": _EMBEDDING},
    left_out=("mtp.",),
    module_prefix=_BACKBONE,
    without_adapters={"out_proj": "PEFT refuses it in models with Mamba layers, whose kernels read its weight alone"},
    absent={"num_key_value_heads": 8, "head_dim": 128, "moe_intermediate_size": 7688, _SHARED_WIDTH: 7688}
    | {"num_experts_per_tok": 2},
)
