"""Model families: config.json <-> Megatron arguments, and Hugging Face tensors <-> Megatron parameters.

A family is one `Family` object. Loading, import, export, checks and pruning are derived from it. To add a family (QWEN3
takes 7 lines):

1. `parts`: the parts of config.json (`parts.py`) that translate its keys to Megatron arguments and back. If no existing
   part covers a key, write a `ConfigPart`: a function that reads the keys, and one that writes them.
2. `table`: the tensors (`tables.py`), one `Entry` per Megatron parameter; `decoder(attention, mlp)` assembles a model.
3. `fixed`: the Megatron arguments with one value in the whole family; start from `_DENSE` or `_MIXTURE`. An argument
   that a part reads must not be in it.
4. `absent`: values that transformers uses for keys missing in config.json, where the parts would use another one.
5. Add the family to `FAMILIES`, and a small model to `MODELS` in tests/dist/test_hf_families.py: the tests compare
   logits with transformers in every layout, and the round trip bit for bit.

Keys that Megatron cannot compute are refused by `required(...)` and by the parts, with the name of the key.
"""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mkd.checkpoint.hf.config import ConfigReader
from mkd.checkpoint.hf.gpt_oss import BIASED_MIXTURE, CLAMPED_GLU, SINK_ATTENTION
from mkd.checkpoint.hf.latent import (
    DENSE_THEN_MIXTURE,
    LATENT_ATTENTION,
    LATENT_EXPERTS,
    LATENT_INPUT_NORM,
    LATENT_SIZES,
    latent_dims,
)
from mkd.checkpoint.hf.layouts import Dims
from mkd.checkpoint.hf.parts import (
    EXPERT_FFN,
    EXPERTS_HAVE_FFN,
    FFN,
    NORMALIZED_ROUTER,
    OPTIONAL_NORMALIZED_ROUTER,
    PARTIAL_ROPE,
    ROPE,
    SILU,
    SIZES,
    ConfigPart,
    experts,
    required,
)
from mkd.checkpoint.hf.tables import (
    ATTENTION_OUT,
    HEAD_NORMS,
    MLP,
    MLP_NORM,
    MOE_NORM,
    PACKED_MLP,
    PACKED_QKV_WEIGHT,
    QKV_BIAS,
    QKV_WEIGHT,
    Entry,
    Item,
    decoder,
    mixture,
)
from mkd.checkpoint.hf.windows import ALTERNATING_WINDOWS, NO_WINDOW, OPTIONAL_LAYER_WINDOWS, WINDOW
from mkd.checkpoint.hf.yarn import LATENT_ROPE, ROPE_OR_YARN
from mkd.errors import MkdCheckpointError

_NESTED = ("per_layer_config", "text_config")
"""Objects in which transformers finds other values of the keys at the top level."""


@dataclass(frozen=True)
class Family:
    """A group of Hugging Face architectures with one tensor table."""

    architectures: tuple[str, ...]
    model_type: str
    parts: tuple[ConfigPart, ...]
    table: tuple[Entry, ...]
    fixed: Mapping[str, Any]
    """Megatron arguments with one value in the whole family."""
    tied: Mapping[str, str] = field(default_factory=lambda: {"lm_head.weight": "model.embed_tokens.weight"})
    """Hugging Face tensors that are copies when embeddings are tied: copy -> original."""
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    """Suffixes of the names of tensors that are not weights."""
    absent: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of transformers for absent keys of config.json, where those of the parts differ."""

    def megatron_args(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Megatron arguments for config.json. Raises `MkdCheckpointError` naming a missing or unsupported key."""
        for key in _NESTED:
            if value := config.get(key):
                raise MkdCheckpointError(
                    f'config.json: "{key}" is {value!r}; only one value of a key for all layers is supported: '
                    "write the model's keys at the top level"
                )
        args = {**self.fixed, "hidden_dropout": 0.0}
        for part in self.parts:
            args.update(part.read(ConfigReader({**self.absent, **config})))
        return args

    def hf_config(self, args: Namespace | Mapping[str, Any]) -> dict[str, Any]:
        """config.json for Megatron arguments. Raises `MkdCheckpointError` naming an argument that does not fit."""
        values = args if isinstance(args, Mapping) else vars(args)
        for name, value in self.fixed.items():
            if (stored := values.get(name)) != value and not (stored is None and not value):
                flag = "--" + name.replace("_", "-")
                raise MkdCheckpointError(
                    f"{self.architectures[0]} has {flag} {value}, the Megatron checkpoint was made with {stored}"
                )
        config = {"architectures": list(self.architectures[:1]), "model_type": self.model_type}
        for part in self.parts:
            config.update(part.write(values))
        return config

    def config_for_transformers_4(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """`config` with rope keys at the top level, the only ones that transformers 4 reads; for 5 nothing changes.

        Without them, transformers 4 uses its default base instead of the one in `rope_parameters`.
        """
        written = self.hf_config(self.megatron_args(config))
        added = {"rope_theta": written["rope_theta"]}
        if config.get("rope_parameters") and not config.get("rope_scaling"):
            added |= {key: written[key] for key in ("rope_scaling", "partial_rotary_factor") if key in written}
        return {**config, **{key: value for key, value in added.items() if config.get(key) != value}}

    def dims(self, args: Mapping[str, Any]) -> Dims:
        """Sizes for the tensor table, from Megatron arguments; `vocab` excludes padding."""
        heads = args["num_attention_heads"]
        return Dims(
            hidden=args["hidden_size"],
            ffn=args["ffn_hidden_size"],
            heads=heads,
            groups=args["num_query_groups"] if args["group_query_attention"] else heads,
            head_dim=args["kv_channels"],
            vocab=args["vocab_size"],
            experts=args.get("num_experts") or 0,
            moe_ffn=args.get("moe_ffn_hidden_size") or 0,
            shared_ffn=args.get("moe_shared_expert_intermediate_size") or 0,
            **(latent_dims(args) if args.get("multi_latent_attention") else {}),
        )

    def tensors(self, args: Mapping[str, Any]) -> Iterator[Item]:
        """Every parameter of the model with its Hugging Face tensors; layers and experts ascend within an entry."""
        dims = self.dims(args)
        stacked = not isinstance(args.get("moe_layer_freq"), list)
        for entry in self.table:
            layers = range(args["num_layers"]) if "{layer}" in entry.megatron else (None,)
            layers = [layer for layer in layers if entry.where(args, layer)]
            numbers = range(dims.experts) if "{expert}" in entry.megatron else (None,)
            for layer in layers:
                for expert in numbers:
                    shapes = {
                        name.format(layer=layer, expert=expert): tuple(getattr(dims, size) for size in sizes)
                        for name, sizes in entry.sources.items()
                    }
                    shape = tuple(getattr(dims, size) for size in entry.shape)
                    yield Item(entry, layer, expert, shapes, stacked, shape)


_DENSE: dict[str, Any] = {
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
    "window_attn_skip_freq": None,
    "no_rope_freq": None,
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": None,
    "multi_latent_attention": False,
    "use_mup": False,
    "num_experts": None,
}
_MIXTURE: dict[str, Any] = {
    **{name: value for name, value in _DENSE.items() if name != "num_experts"},
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
    "moe_shared_expert_intermediate_size": None,
    "moe_latent_size": None,
    "moe_apply_probs_on_input": False,
}
_DENSE_LAYER = (MLP_NORM, *MLP)
_ATTENTION = (QKV_WEIGHT, ATTENTION_OUT)


def _but(fixed: Mapping[str, Any], *free: str, **changed: Any) -> dict[str, Any]:
    """`fixed` with changed values, and without the arguments `free`, which a part reads."""
    return {**{name: value for name, value in fixed.items() if name not in free}, **changed}


LLAMA = Family(
    architectures=("LlamaForCausalLM",),
    model_type="llama",
    parts=(SIZES, FFN, ROPE, SILU, required(attention_bias=False, mlp_bias=False)),
    table=decoder(_ATTENTION, _DENSE_LAYER),
    fixed=_DENSE,
)
MISTRAL = Family(
    architectures=("MistralForCausalLM",),
    model_type="mistral",
    parts=(SIZES, FFN, ROPE, OPTIONAL_LAYER_WINDOWS, SILU),
    table=decoder(_ATTENTION, _DENSE_LAYER),
    fixed=_but(_DENSE, "window_size", "window_attn_skip_freq"),
    absent={"sliding_window": 4096, "num_key_value_heads": 8},
)
QWEN2 = Family(
    architectures=("Qwen2ForCausalLM",),
    model_type="qwen2",
    parts=(SIZES, FFN, ROPE, NO_WINDOW, SILU),
    table=decoder((QKV_WEIGHT, QKV_BIAS, ATTENTION_OUT), _DENSE_LAYER),
    fixed=_but(_DENSE, add_qkv_bias=True),
    absent={"num_key_value_heads": 32},
)
QWEN3 = Family(
    architectures=("Qwen3ForCausalLM",),
    model_type="qwen3",
    parts=(SIZES, FFN, ROPE, NO_WINDOW, SILU, required(attention_bias=False)),
    table=decoder((QKV_WEIGHT, *HEAD_NORMS, ATTENTION_OUT), _DENSE_LAYER),
    fixed=_but(_DENSE, qk_layernorm=True),
    absent={"num_key_value_heads": 32, "head_dim": 128},
)
PHI3 = Family(
    architectures=("Phi3ForCausalLM",),
    model_type="phi3",
    parts=(SIZES, FFN, ROPE, PARTIAL_ROPE, WINDOW, SILU, required(resid_pdrop=0.0, embd_pdrop=0.0)),
    table=decoder((PACKED_QKV_WEIGHT, ATTENTION_OUT), (MLP_NORM, *PACKED_MLP)),
    fixed=_but(_DENSE, "window_size", "rotary_percent"),
)
QWEN3_MOE = Family(
    architectures=("Qwen3MoeForCausalLM",),
    model_type="qwen3_moe",
    parts=(
        SIZES,
        EXPERT_FFN,
        ROPE,
        NO_WINDOW,
        experts("num_experts"),
        OPTIONAL_NORMALIZED_ROUTER,
        SILU,
        required(attention_bias=False, decoder_sparse_step=1, mlp_only_layers=[]),
    ),
    table=decoder(
        (QKV_WEIGHT, *HEAD_NORMS, ATTENTION_OUT),
        (MOE_NORM, *mixture("mlp.", "gate_proj", "up_proj", "down_proj")),
    ),
    fixed=_but(_MIXTURE, qk_layernorm=True),
    absent={"num_key_value_heads": 4},
)
MIXTRAL = Family(
    architectures=("MixtralForCausalLM",),
    model_type="mixtral",
    parts=(
        SIZES,
        EXPERTS_HAVE_FFN,
        ROPE,
        WINDOW,
        experts("num_local_experts"),
        NORMALIZED_ROUTER,
        SILU,
        required(router_jitter_noise=0.0),
    ),
    table=decoder(_ATTENTION, (MOE_NORM, *mixture("block_sparse_moe.", "w1", "w3", "w2"))),
    fixed=_but(_MIXTURE, "window_size"),
    absent={"rope_theta": 1e6, "num_key_value_heads": 8},
)
DEEPSEEK_V3 = Family(
    architectures=("DeepseekV3ForCausalLM",),
    model_type="deepseek_v3",
    parts=(
        LATENT_SIZES,
        LATENT_EXPERTS,
        LATENT_ROPE,
        SILU,
        required(attention_bias=False, norm_topk_prob=True, rope_interleave=True),
        required(scoring_func="sigmoid", topk_method="noaux_tc"),
        # transformers' norms of the two latents always use 1e-6, Megatron's use the value of the model
        required(rms_norm_eps=1e-6),
    ),
    table=decoder(LATENT_ATTENTION, DENSE_THEN_MIXTURE, LATENT_INPUT_NORM),
    fixed=_but(
        _MIXTURE,
        *("moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_shared_expert_intermediate_size"),
        multi_latent_attention=True,
        qk_layernorm=True,
        use_rope_scaling=False,
        moe_router_score_function="sigmoid",
        moe_router_pre_softmax=False,
        moe_router_enable_expert_bias=True,
        moe_shared_expert_gate=False,
        group_query_attention=False,
    ),
    absent={
        "num_key_value_heads": 128,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    },
)
GPT_OSS = Family(
    architectures=("GptOssForCausalLM",),
    model_type="gpt_oss",
    parts=(
        SIZES,
        EXPERTS_HAVE_FFN,
        ROPE_OR_YARN,
        ALTERNATING_WINDOWS,
        CLAMPED_GLU,
        experts("num_local_experts"),
        NORMALIZED_ROUTER,
        SILU,
        required(attention_bias=True, swiglu_alpha=1.702),
    ),
    table=decoder(SINK_ATTENTION, BIASED_MIXTURE),
    fixed=_but(
        _MIXTURE,
        *("window_size", "window_attn_skip_freq", "position_embedding_type"),
        add_bias_linear=True,
        add_qkv_bias=True,
        swiglu=False,
        quick_geglu=True,
        glu_linear_offset=1.0,
        softmax_type="learnable",
        use_rope_scaling=False,
    ),
    absent={"sliding_window": 128, "rope_theta": 150000.0, "head_dim": 64, "num_key_value_heads": 8},
)

FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, QWEN3_MOE, MIXTRAL, DEEPSEEK_V3, GPT_OSS)

UNSUPPORTED: Mapping[str, str] = {
    **dict.fromkeys(
        ("Gemma2ForCausalLM",),
        "megatron-core 0.19 has no norm after attention and MLP, and no softcap on attention scores",
    ),
    **dict.fromkeys(
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        "megatron-core 0.19 has no norm after attention and MLP, and one rope base for all layers",
    ),
}
"""Well-known architectures that megatron-core cannot compute -> reason."""


def family_by_name(name: str) -> Family:
    """The family of an architecture. Raises `MkdCheckpointError` with the list of known architectures."""
    return family_of({"architectures": [name]})


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json, by `architectures` or, without them, by `model_type`.

    Raises:
        MkdCheckpointError: with the list of known architectures, or naming two keys that contradict each other.
    """
    known = {name: family for family in FAMILIES for name in family.architectures}
    names, model_type = config.get("architectures"), config.get("model_type")
    if not names:
        names = [family.architectures[0] for family in FAMILIES if family.model_type == model_type]
    names = names if isinstance(names, list) else [names]
    for name in names:
        if name in known and config.get("architectures") != name:
            if model_type not in (None, known[name].model_type):
                raise MkdCheckpointError(
                    f'config.json: "model_type" is {model_type!r}, "architectures" has {name}, whose model type is '
                    f"{known[name].model_type!r}; transformers loads by model_type: correct the wrong one of the two"
                )
            return known[name]
    reasons = "".join(f" ({UNSUPPORTED[name]})" for name in names if name in UNSUPPORTED)
    raise MkdCheckpointError(
        f'config.json: "architectures" is {config.get("architectures")!r}{reasons}; known architectures: '
        + ", ".join(sorted(known))
    )
