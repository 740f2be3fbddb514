"""config.json in many spellings: mkd computes what the installed transformers computes, or refuses the key by name.

For each family and spelling, transformers loads the folder and builds the model; its facts are read from modules, rope
frequencies and attention patterns. mkd's facts come from its Megatron arguments and Megatron's own rope classes.
"""

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings import rotary_pos_embedding as rope_module
from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as yarn
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from mkd.checkpoint.hf.families import FAMILIES, family_of
from mkd.checkpoint.hf.families.llama4 import LLAMA4
from mkd.checkpoint.hf.families.ministral3 import MINISTRAL3
from mkd.checkpoint.hf.families.nemotron_h import NEMOTRON_H
from mkd.errors import MkdCheckpointError
from mkd.models.model_options import attention_factor, scaled_frequencies
from tests.support.config_spellings import (
    ABSENT,
    BASES,
    EXPERT_SPELLINGS,
    GEMMA_SPELLINGS,
    GEMMAS,
    HAVE_EXPERTS,
    HAVE_GROUPS,
    HAVE_NUM_EXPERTS,
    HYBRID_SPELLINGS,
    HYBRIDS,
    SPELLINGS,
    TOKENS,
)


def spelled(family, change):
    whole = {"architectures": list(family.architectures), "model_type": family.model_type}
    whole |= BASES[family.model_type] | change
    return {key: value for key, value in whole.items() if value is not ABSENT}


def transformers_facts(folder, config):
    """Facts of the model that transformers builds from the folder; raises what transformers raises."""
    (folder / "config.json").write_text(json.dumps(config))
    loaded = AutoConfig.from_pretrained(folder)
    loaded.dtype = torch.float32
    model = AutoModelForCausalLM.from_config(loaded, attn_implementation="eager").eval()
    return facts_of_model(loaded, model)


def facts_of_model(loaded, model):
    """Facts of a text model of transformers."""
    with torch.no_grad():
        output = model(torch.arange(TOKENS)[None], output_attentions=True, use_cache=False)
    layer = model.model.layers[0]
    attention = next((layer.self_attn for layer in model.model.layers if hasattr(layer, "self_attn")), None)
    frequencies, scale = rope_of(model)
    weights = {name: tuple(value.shape) for name, value in model.state_dict().items() if not is_mixture(name)}
    return {
        "weights": weights,
        "parameters": sum(p.numel() for p in model.parameters()) + sum(e.numel() for e in biases_of_experts(model)),
        "tied": model.lm_head.weight is model.model.embed_tokens.weight,
        "eps": eps_of(layer),
        "activation": activation(model),
        "windows": [window_of(attention[0]) for attention in output.attentions],
        "frequencies": [round(value, 6) for value in frequencies],
        "rope scale": round(float(scale), 5),
        "softmax scale": None if attention is None else round(attention.scaling, 5),
        "dropout": loaded.attention_dropout if attention is None else attention.attention_dropout,
        "residual dropout": getattr(attention, "residual_dropout", 0.0),
        "rope": [has_rope(getattr(layer, "self_attn", None), loaded) for layer in model.model.layers],
        "positions": loaded.max_position_embeddings,
        "factors": [
            getattr(loaded, name, 1.0) for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling")
        ]
        if hasattr(layer, "residual_multiplier")
        else [1.0, 1.0, 1 / getattr(model, "logit_scale", 1.0)],
        "router": router(loaded, model),
        "llama 4": llama4_facts(loaded),
        "scales": scales(loaded, model),
    }


def has_rope(attention, config):
    if config.model_type == "cohere2":
        return attention.sliding_window is not None
    return bool(getattr(attention, "use_rope", True))


def eps_of(layer):
    norm = getattr(layer, "post_attention_layernorm", None) or layer.input_layernorm
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps


def rope_of(model):
    """(frequencies, factor of sine and cosine); of full layers and then of sliding layers where their ropes differ."""
    rope = model.model.rotary_emb
    if hasattr(rope, "inv_freq"):
        return rope.inv_freq.tolist(), rope.attention_scaling
    kinds = [kind for kind in ("full_attention", "sliding_attention") if kind in rope.layer_types]
    values = [value for kind in kinds for value in getattr(rope, f"{kind}_inv_freq").tolist()]
    return values, max(getattr(rope, f"{kind}_attention_scaling") for kind in kinds)


def scales(config, model):
    """Gemma's softcaps of logits and attention, and factor of the embeddings."""
    if config.model_type not in GEMMAS:
        return None
    attention = model.model.layers[0].self_attn.attn_logit_softcapping
    return config.final_logit_softcapping, attention, model.model.embed_tokens.scalar_embed_scale


def biases_of_experts(model):
    return [value for name, value in model.named_buffers() if name.endswith("e_score_correction_bias")]


def is_mixture(name):
    return any(part in name for part in (".experts.", ".router.", "mlp.gate.", "block_sparse_moe"))


def activation(model):
    """Class of the activation, or the constants of gpt-oss."""
    for module in model.modules():
        if hasattr(module, "limit"):
            return (module.alpha, module.limit)
    names = ("act_fn", "activation_fn", "activation")
    found = (getattr(module, name, None) for module in model.modules() for name in names)
    function = next(one for one in found if callable(one))  # delta nets keep the name of theirs
    if "GELU" in repr(function):
        return "gelu_tanh" if "tanh" in repr(function).lower() else repr(function)
    return "silu" if type(function) in (nn.SiLU, type(nn.SiLU())) or "SiLU" in repr(function) else repr(function)


def window_of(attention):
    """Number of tokens that the last token attends to, its own included; None for all of them."""
    seen = int((attention[0, -1] > 0).sum())
    return None if seen == attention.shape[-1] else seen


def router(config, model):
    """top-k, normalization, groups and scale of the first mixture."""
    if config.model_type not in HAVE_EXPERTS:
        return None
    can_skip_normalization = config.model_type in {"olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next", *HAVE_GROUPS}
    facts = {
        "experts": config.n_routed_experts
        if config.model_type in HAVE_GROUPS
        else config.num_experts
        if config.model_type in HAVE_NUM_EXPERTS
        else config.num_local_experts,
        "chosen": config.num_experts_per_tok,
        "dense": [
            not hasattr(getattr(layer, "mlp", None) or layer.feed_forward, "experts") for layer in model.model.layers
        ],
        "normalized": not can_skip_normalization or bool(config.norm_topk_prob),
    }
    if config.model_type in HAVE_GROUPS:
        groups = config.n_group if (config.n_group or 1) > 1 else None
        if config.model_type == "deepseek_v2" and config.topk_method == "greedy":
            groups = None
        interleaved = config.rope_interleave if config.model_type in ("deepseek_v3", "glm4_moe_lite") else True
        facts |= {"groups": groups, "best": config.topk_group if groups else None}
        facts |= {"best of a group": groups and (1 if config.model_type == "deepseek_v2" else 2)}
        facts |= {"scale": config.routed_scaling_factor, "interleaved": interleaved}
    return facts


def mkd_facts(config):
    """The same facts from mkd's Megatron arguments; raises `MkdCheckpointError`."""
    family = family_of(config)
    args = SimpleNamespace(**(family.fixed | family.megatron_args(config)))
    tied = not args.untie_embeddings_and_output_weights
    shapes = [(name, shape) for item in family.tensors(vars(args)) for name, shape in item.shapes.items()]
    sizes = {name: math.prod(shape) for name, shape in shapes if not (tied and name in family.tied)}
    every = getattr(args, "window_attn_skip_freq", None)
    window = args.window_size[0] + 1 if args.window_size and args.window_size[0] + 1 < TOKENS else None
    layers = every if isinstance(every, list) else [1] * args.num_layers
    if args.experimental_attention_variant is not None:
        layers = [1] * args.linear_attention_freq.count(0)  # those with attention
    latent = args.multi_latent_attention
    softmax = 1 / math.sqrt(args.qk_head_dim + args.qk_pos_emb_head_dim if latent else args.kv_channels)
    softmax = getattr(args, "softmax_scale", None) or softmax
    frequencies, scale = rope_facts(args)
    if args.local_rotary_base is not None:
        is_local = [bool(sliding and args.window_size) for sliding in layers]
        local = rope_facts(SimpleNamespace(**vars(args) | LOCAL_ROPE | {"rotary_base": args.local_rotary_base}))[0]
        scale = 1.0 if all(is_local) else scale
        frequencies = [*(() if all(is_local) else frequencies), *(local if any(is_local) else ())]
    if latent and args.rope_type == "yarn":
        softmax *= yarn._yarn_get_mscale(args.rotary_scaling_factor, args.mscale_all_dim) ** 2
    return {
        "weights": {name: shape for name, shape in shapes if not is_mixture(name)},
        "parameters": sum(sizes.values()),
        "tied": tied,
        "eps": args.layernorm_epsilon,
        "activation": mkd_activation(family, args),
        "windows": chunks(args) if family is LLAMA4 else [window if sliding else None for sliding in layers],
        "frequencies": [round(value, 6) for value in frequencies],
        "rope scale": round(scale, 5),
        "softmax scale": round(softmax, 5) if layers else None,
        "dropout": args.attention_dropout,
        "residual dropout": args.hidden_dropout,
        "rope": [not without for without in args.no_rope_freq or [0] * args.num_layers],
        # longrope: megatron's are those of the original length
        "positions": (args.rope_frequencies or args.distant_attention or {}).get(
            "max_position_embeddings", args.max_position_embeddings
        ),
        "factors": own_factors(args),
        "router": router_facts(family, args),
        "llama 4": (
            [args.qk_l2_norm and not none for none in args.no_rope_freq or [0] * args.num_layers],
            args.max_position_embeddings,
        )
        if family is LLAMA4
        else (args.max_position_embeddings if family is MINISTRAL3 else None),
        "scales": (args.logit_softcap, args.attention_softcap, args.mup_embedding_mult)
        if family.model_type in GEMMAS
        else None,
    }


def chunks(args):
    """Llama 4: see `window_of`."""
    size = args.distant_attention["attention_chunk_size"] or TOKENS
    seen = (TOKENS - 1) % size + 1 if size < TOKENS else None
    return [seen if kind == "chunked_attention" else None for kind in args.distant_attention["layer_types"]]


def llama4_facts(config):
    """Layers with norms of queries and keys, and the number of tokens that all layers treat alike; in Ministral 3 the
    number alone."""
    if config.model_type == "ministral3":
        return min(config.max_position_embeddings, config.rope_parameters["original_max_position_embeddings"])
    if config.model_type != "llama4_text":
        return None
    norms = [bool(config.use_qk_norm and rope) for rope in config.no_rope_layers[: config.num_hidden_layers]]
    limits = [config.max_position_embeddings]
    if "chunked_attention" in config.layer_types[: config.num_hidden_layers]:
        limits.append(config.attention_chunk_size)
    positions = torch.arange(config.max_position_embeddings)
    tuned = torch.log1p(torch.floor((positions + 1) / config.floor_scale)) * config.attn_scale
    if config.attn_temperature_tuning and 0 in config.no_rope_layers[: config.num_hidden_layers] and tuned.any():
        limits.append(int(tuned.nonzero()[0]))
    return norms, min(limits)


def mkd_activation(family, args):
    if family.model_type == "gpt_oss":
        return 1.702, args.activation_func_clamp_value
    if family.model_type == "arcee":
        return "ReLUSquaredActivation()"
    return "gelu_tanh" if args.gelu_tanh else "silu"


def own_factors(args):
    if args.residual_multiplier is None:
        return [1.0, 1.0, 1 / args.mup_output_mult if args.parallel_block else 1.0]
    return [args.mup_embedding_mult, args.residual_multiplier, 1 / args.mup_output_mult]


def router_facts(family, args):
    if family.model_type not in HAVE_EXPERTS:
        return None
    every = args.moe_layer_freq if isinstance(args.moe_layer_freq, list) else [1] * args.num_layers
    facts = {
        "experts": args.num_experts,
        "chosen": args.moe_router_topk,
        "dense": [not mixture for mixture in every],
        "normalized": not args.moe_router_pre_softmax or bool(args.normalized_single_expert),
    }
    if family.model_type in HAVE_GROUPS:
        groups, best = args.moe_router_num_groups, args.moe_router_group_topk
        facts |= {"groups": groups, "best": best}
        facts |= {"best of a group": groups and (args.router_group_best or args.moe_router_topk // best)}
        facts |= {"scale": args.moe_router_topk_scaling_factor, "interleaved": True}
    return facts


LOCAL_ROPE = {"position_embedding_type": "rope", "rotary_seq_len_interpolation_factor": None, "use_rope_scaling": False}


def rope_facts(args):
    """(frequencies, factor of sine and cosine) of Megatron's rope classes."""
    width = args.qk_pos_emb_head_dim if args.multi_latent_attention else args.kv_channels
    if "yarn" not in (args.position_embedding_type, getattr(args, "rope_type", None)):
        rope = rope_module.RotaryEmbedding(
            width,
            args.rotary_percent,
            rotary_base=args.rotary_base,
            rope_scaling=args.use_rope_scaling,
            rope_scaling_factor=getattr(args, "rope_scaling_factor", 8.0),
            use_cpu_initialization=True,
        )
        if (scaled := args.rope_frequencies) is not None:
            return scaled_frequencies(rope.inv_freq, scaled).tolist(), attention_factor(scaled)
        return (rope.inv_freq / (args.rotary_seq_len_interpolation_factor or 1)).tolist(), 1.0
    prefix = "" if args.multi_latent_attention else "yarn_"
    fast, slow, length = (
        getattr(args, prefix + name) for name in ("beta_fast", "beta_slow", "original_max_position_embeddings")
    )
    whole = getattr(args, "yarn_correction_range_round_to_int", True)
    low, high = yarn._yarn_find_correction_range(fast, slow, width, args.rotary_base, length, whole)
    own = 1.0 - yarn._yarn_linear_ramp_mask(low, high, width // 2, device="cpu").float()
    plain = 1.0 / args.rotary_base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    factor = args.rotary_scaling_factor
    scale = yarn._yarn_get_concentration_factor(factor, args.mscale, args.mscale_all_dim)
    return (plain / factor * (1 - own) + plain * own).tolist(), float(scale)


@pytest.fixture
def quick_transformers(monkeypatch):
    """Models without the two things that take half of their time and are in no fact: weights of a distribution of
    their own, and settings of text generation. Torch functions pass no mode of mkd.cpu."""

    def initialize(model):
        for param in model.parameters():
            nn.init.normal_(param, std=0.1)

    monkeypatch.setattr(PreTrainedModel, "initialize_weights", initialize)
    monkeypatch.setattr(PreTrainedModel, "can_generate", classmethod(lambda model: False))
    with torch._C.DisableTorchFunction():
        yield


def halves():
    """(family, remainder): every second spelling of a family, and every spelling in half of the families; the others
    are slow."""
    families = [family for family in FAMILIES if family is not NEMOTRON_H]  # test_nemotron_h_sweep.py
    for number, family in enumerate(families):
        yield pytest.param(family, number % 2, id=family.model_type)
        yield pytest.param(family, 1 - number % 2, id=f"{family.model_type}-others", marks=pytest.mark.slow)


@pytest.mark.usefixtures("quick_transformers")
@pytest.mark.parametrize("family, remainder", list(halves()))
def test_no_silent_difference(family, remainder, tmp_path):
    """Every spelling that transformers loads is computed alike, or refused with its key; most are computed."""
    spellings = SPELLINGS | (EXPERT_SPELLINGS if family.model_type in HAVE_EXPERTS else {})
    spellings |= GEMMA_SPELLINGS if family.model_type in (*GEMMAS, "olmo3") else {}
    spellings |= HYBRID_SPELLINGS if family.model_type in HYBRIDS else {}
    chosen = {name: spelled(family, change) for name, change in list(spellings.items())[remainder::2]}
    equal = assert_equal_facts(chosen, mkd_facts, lambda config: transformers_facts(tmp_path, config))
    assert equal >= 30


def assert_equal_facts(configs, own_facts, facts_of_transformers):
    """Number of spellings that both compute; fails if one is computed otherwise, or refused without its key."""
    different, unnamed, equal = {}, {}, 0
    for name, config in configs.items():
        try:
            own = own_facts(config)
        except MkdCheckpointError as error:
            if not re.match(r'config.json(:.* "?[\w.]+"? is .*[;,:] .+| has no "[\w.]+")', str(error)):
                unnamed[name] = str(error)
            continue
        try:
            theirs = facts_of_transformers(config)
        except Exception:  # transformers cannot load or run this spelling, in many ways
            continue
        differences = {key: (theirs[key], own[key]) for key in own if theirs[key] != own[key]}
        if differences:
            different[name] = differences
        equal += not differences
    assert not different
    assert not unnamed
    return equal
