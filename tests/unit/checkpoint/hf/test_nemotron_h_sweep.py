"""config.json of Nemotron-H in many spellings: mkd computes what transformers computes, or refuses the key by name.

Its keys and modules differ from those of all other families; see test_config_sweep.py.
"""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mkd.checkpoint.hf.families import family_of
from mkd.checkpoint.hf.families.nemotron_h import NEMOTRON_H
from tests.support.config_spellings import ABSENT, COMMON, EXPERT_SPELLINGS, SPELLINGS, TOKENS
from tests.unit.checkpoint.hf.test_config_sweep import assert_equal_facts, quick_transformers, window_of

__all__ = ["quick_transformers"]

MIXERS = ["mamba", "moe", "attention", "mlp"]
BASE = COMMON | {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "num_hidden_layers": 4,
    "layers_block_type": MIXERS,
    "ssm_state_size": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 6,
    "n_groups": 2,
    "conv_kernel": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "moe_shared_expert_intermediate_size": 10,
}
OLD_NAMES = {
    "mamba_n_groups": 4,
    "mamba_d_conv": 2,
    "mamba_expand": 3,
    "mamba_dt_min": 0.01,
    "mamba_dt_max": 0.2,
    "mamba_dt_init_floor": 1e-3,
    "mamba_conv_bias": False,
    "mamba_chunk_size": 16,
    "mamba_dt_limit": [0.1, 0.2],
}
NEW_NAMES = ["n_groups", "conv_kernel", "expand", "time_step_min", "time_step_max", "time_step_floor"]
OWN: dict[str, dict[str, Any]] = {
    "new names of layers": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    "pattern": {"layers_block_type": ABSENT, "hybrid_override_pattern": "ME*-"},
    "pattern of other layers": {"hybrid_override_pattern": "M-M-"},
    "pattern of the same layers": {"hybrid_override_pattern": "ME*-"},
    "pattern with another letter": {"layers_block_type": ABSENT, "hybrid_override_pattern": "MD*-"},
    "pattern, other number": {"layers_block_type": ABSENT, "hybrid_override_pattern": "M*-"},
    "pattern empty": {"layers_block_type": ABSENT, "hybrid_override_pattern": ""},
    "pattern of another type": {"layers_block_type": ABSENT, "hybrid_override_pattern": ["M", "*"]},
    "layers null": {"layers_block_type": None},
    "layers absent": {"layers_block_type": ABSENT},
    "no layers": {"layers_block_type": [], "num_hidden_layers": ABSENT},
    "layers of other kinds": {"layers_block_type": ["mamba", "moe", "sliding_attention", "mlp"]},
    "layers that are not names": {"layers_block_type": [1, [], {}, None]},
    "number of layers absent": {"num_hidden_layers": ABSENT},
    "other number of layers": {"num_hidden_layers": 2},
    "layer_types": {"layers_block_type": ABSENT, "layer_types": MIXERS},
    "layer_types and layers_block_type": {"layer_types": ["mamba"] * 4},
    "no mixture": {"layers_block_type": ["mamba", "mlp", "attention", "mamba"]},
    "no mixture, other keys of experts": {
        "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
        "n_group": 3,
        "n_routed_experts": ABSENT,
        "moe_shared_expert_intermediate_size": ABSENT,
    },
    "only attention": {"layers_block_type": ["attention", "mlp"] * 2},
    "only mamba": {"layers_block_type": ["mamba"] * 4},
    "no prediction layers": {"num_nextn_predict_layers": 0, "mtp_hybrid_override_pattern": "*E"},
    "other eps": {"layer_norm_epsilon": 1e-3},
    "eps null": {"layer_norm_epsilon": None},
    "sizes of mamba absent": dict.fromkeys(("ssm_state_size", "mamba_num_heads", "n_groups", "conv_kernel"), ABSENT),
    "width of mamba absent": {"mamba_head_dim": ABSENT, "expand": 4},
    "groups do not divide": {"n_groups": 3},
    "one group of mamba": {"n_groups": 1},
    "no groups of mamba": {"n_groups": 0},
    "one tap": {"conv_kernel": 1},
    "expand": {"expand": 5},
    "chunk_size": {"chunk_size": 3},
    "limit": {"time_step_limit": [0.0, 0.1]},
    "limits alike": {"time_step_limit": [0.0, float("inf")]},
    "limits as saved": {"time_step_limit": [0.0, {"__float__": "Infinity"}]},
    "limit null": {"time_step_limit": None},
    "limit of another type": {"time_step_limit": "none"},
    "least step": {"time_step_min": 0.2},
    "least step 0": {"time_step_min": 0.0},
    "least step below 0": {"time_step_min": -1.0},
    "least step not a number": {"time_step_min": float("nan")},
    "largest step": {"time_step_max": 0.5, "time_step_floor": 0.1},
    **{f"old name {old}": {old: value} for old, value in OLD_NAMES.items()},
    "old names alone": OLD_NAMES | dict.fromkeys(NEW_NAMES, ABSENT) | {"mamba_conv_bias": True, "mamba_dt_limit": None},
    "no conv bias": {"use_conv_bias": False},
    "projection bias": {"mamba_proj_bias": True},
    "activation of mamba": {"mamba_hidden_act": "gelu"},
    "swish in mamba": {"mamba_hidden_act": "swish"},
    "activation of MLPs": {"mlp_hidden_act": "silu"},
    "no kernels": {"use_mamba_kernels": False},
    "dtype of the state": {"mamba_ssm_cache_dtype": "bfloat16", "mamba_ssm_dtype": "float16"},
    "residual in fp32": {"residual_in_fp32": True},
    "no rescaling": {"rescale_prenorm_residual": False},
    "hidden dropout": {"hidden_dropout": 0.1},
    "logits to keep": {"num_logits_to_keep": 3},
    "latent experts": {"moe_latent_size": 8},
    "no latent experts": {"moe_latent_size": None},
    "width of the shared expert": {"moe_shared_expert_intermediate_size": 6},
    "no overlap": {"moe_shared_expert_overlap": False},
    "no shared experts": {"n_shared_experts": 0},
    "groups of experts": {"n_group": 2, "topk_group": 1},
    "groups of three experts per token": {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
    "experts per token absent": {"num_experts_per_tok": ABSENT},
}
ALL = SPELLINGS | EXPERT_SPELLINGS | OWN


def spelled(change: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in (BASE | change).items() if value is not ABSENT}


def first(modules: Any, name: str) -> Any:
    return next((module for module in modules if type(module).__name__ == name), None)


def facts_of_transformers(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(config))
    loaded = AutoConfig.from_pretrained(folder)
    loaded.dtype = torch.float32
    model = AutoModelForCausalLM.from_config(loaded, attn_implementation="eager").eval()
    with torch.no_grad():
        output = model(torch.arange(TOKENS)[None], output_attentions=True, use_cache=False)
    names = {"Mamba2Mixer": "M", "Attention": "*", "MLP": "-", "MoE": "E"}
    layers = model.model.layers
    mixers = [names[type(layer.mixer).__name__.removeprefix("NemotronH")] for layer in layers]
    modules = list(model.modules())
    mamba, attention = first(modules, "NemotronHMamba2Mixer"), first(modules, "NemotronHAttention")
    router, experts = first(modules, "NemotronHTopkRouter"), first(modules, "NemotronHExperts")
    activations = {repr(module.act_fn) for module in modules if hasattr(module, "act_fn")}
    state = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    return {
        "weights": {
            name.replace("model.", "backbone.", 1): shape for name, shape in state.items() if ".experts." not in name
        },
        "parameters": sum(map(math.prod, state.values())),
        "tied": model.lm_head.weight is model.model.embeddings.weight,
        "eps": {module.variance_epsilon for module in modules if hasattr(module, "variance_epsilon")},
        "mixers": mixers,
        "mamba": mamba
        and (mamba.num_heads, mamba.n_groups, mamba.time_step_limit, repr(mamba.act), mamba.norm.group_size),
        "conv bias": mamba and mamba.conv1d.bias is not None,
        "attention": attention and (round(attention.scaling, 5), attention.attention_dropout),
        "windows": {window_of(weights[0]) for weights in output.attentions},
        "activations": activations,
        "router": router
        and (router.top_k, router.num_experts, router.norm_topk_prob, router.routed_scaling_factor)
        + ((router.num_group, router.topk_group) if router.num_group > 1 else ()),
        "width of experts": experts and experts.intermediate_dim,
        "positions": loaded.max_position_embeddings,
    }


def own_facts(config: dict[str, Any]) -> dict[str, Any]:
    assert family_of(config) is NEMOTRON_H
    args = SimpleNamespace(**(dict(NEMOTRON_H.fixed) | NEMOTRON_H.megatron_args(config)))
    shapes = [(name, shape) for item in NEMOTRON_H.tensors(vars(args)) for name, shape in item.shapes.items()]
    mixers, groups = args.layer_mixers, args.mamba_num_groups
    inner = args.mamba_num_heads * args.mamba_head_dim
    routing = None
    if "E" in mixers:
        routing = (args.moe_router_topk, args.num_experts, True, args.moe_router_topk_scaling_factor)
        if args.moe_router_num_groups:
            assert (args.router_group_best or args.moe_router_topk // args.moe_router_group_topk) == 2
            routing += (args.moe_router_num_groups, args.moe_router_group_topk)
        assert args.moe_layer_freq == [int(mixer == "E") for mixer in mixers]
        assert bool(args.normalized_single_expert) == (args.moe_router_topk == 1)
    has_mlp = "E" in mixers or "-" in mixers
    return {
        "weights": {name: shape for name, shape in shapes if ".experts." not in name},
        "parameters": sum(math.prod(shape) for _, shape in shapes),
        "tied": not args.untie_embeddings_and_output_weights,
        "eps": {args.layernorm_epsilon},
        "mixers": mixers,
        "mamba": (args.mamba_num_heads, groups, (args.least_time_step, math.inf), "SiLUActivation()", inner // groups)
        if "M" in mixers
        else None,
        "conv bias": True if "M" in mixers else None,
        "attention": (round(args.kv_channels**-0.5, 5), args.attention_dropout) if "*" in mixers else None,
        "windows": {None} if "*" in mixers else set(),
        "activations": {"ReLUSquaredActivation()"} if has_mlp and args.squared_relu else set(),
        "router": routing,
        "width of experts": args.moe_ffn_hidden_size if "E" in mixers else None,
        "positions": args.max_position_embeddings,
    }


@pytest.mark.usefixtures("quick_transformers")
@pytest.mark.parametrize("remainder", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_no_silent_difference(tmp_path: Path, remainder: int) -> None:
    chosen = list(ALL)[remainder::2]
    configs = {name: spelled(ALL[name]) for name in chosen}
    assert assert_equal_facts(configs, own_facts, lambda config: facts_of_transformers(tmp_path, config)) >= 40
