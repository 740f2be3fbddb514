"""The type of a model family: config.json <-> Megatron arguments, and Hugging Face tensors <-> Megatron parameters."""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mkd.checkpoint.hf.config_json.parts import ConfigPart
from mkd.checkpoint.hf.config_json.reader import ConfigReader
from mkd.checkpoint.hf.families.delta_net import delta_net_dims
from mkd.checkpoint.hf.families.mamba import mamba_dims
from mkd.checkpoint.hf.latent import latent_dims
from mkd.checkpoint.hf.layouts import Dims
from mkd.checkpoint.hf.tables import ATTENTION_OUT, MLP, MLP_NORM, QKV_WEIGHT, Entry, Item
from mkd.config.megatron.arg_names import comparable
from mkd.errors import MkdCheckpointError

_NESTED = ("per_layer_config", "text_config")
"""Objects in which transformers finds other values of the keys at the top level."""

_BY_LAYER = ("moe_layer_freq", "linear_attention_freq", "layer_mixers")
"""Arguments that give layers parameters of different names, where they are lists."""

_PLAIN_ROPE = {
    "position_embedding_type": "rope",
    "rotary_seq_len_interpolation_factor": None,
    "rope_frequencies": None,
}
"""Rope without scaling, unless a part reads another one."""


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
    left_out: tuple[str, ...] = ()
    """Beginnings of the names of weights that are not part of the language model; transformers leaves them out too."""
    module_prefix: str = "model."
    """Beginning of the names of the layers' tensors; that of transformers' modules is `model.`."""
    without_adapters: Mapping[str, str] = field(default_factory=dict)
    """Names of linear layers that PEFT adapts in no model of the family -> the reason."""
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
        args = {**_PLAIN_ROPE, **self.fixed, "hidden_dropout": 0.0}
        for part in self.parts:
            args.update(part.read(ConfigReader({**self.absent, **config})))
        return args

    def hf_config(self, args: Namespace | Mapping[str, Any]) -> dict[str, Any]:
        """config.json for Megatron arguments. Raises `MkdCheckpointError` naming an argument that does not fit."""
        values = args if isinstance(args, Mapping) else vars(args)
        for name, value in self.fixed.items():
            is_same = comparable(name, values) == comparable(name, {**values, name: value})
            if not is_same and not ((stored := values.get(name)) is None and not value):
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
        added = {key: written[key] for key in ("rope_theta", "rope_local_base_freq") if key in written}
        if config.get("rope_parameters") and not config.get("rope_scaling"):
            added |= {key: written[key] for key in ("rope_scaling", "partial_rotary_factor") if key in written}
            rope = config["rope_parameters"]
            if rope.get("rope_type") == "dynamic":  # Megatron has no argument of it
                outside = ("rope_theta", "partial_rotary_factor")
                added["rope_scaling"] = {key: value for key, value in rope.items() if key not in outside}
        return {**config, **{key: value for key, value in added.items() if config.get(key) != value}}

    def module_name(self, layer: str) -> str:
        """transformers' name of a module, from the beginning of its tensors' names in a folder."""
        if not layer.startswith(self.module_prefix):
            return layer
        return f"model.{layer.removeprefix(self.module_prefix)}"

    def layer_name(self, module: str) -> str:
        """The inverse of `module_name`."""
        return f"{self.module_prefix}{module.removeprefix('model.')}" if module.startswith("model.") else module

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
            **(delta_net_dims(args) if args.get("experimental_attention_variant") else {}),
            **(mamba_dims(args) if args.get("layer_mixers") else {}),
        )

    def tensors(self, args: Mapping[str, Any]) -> Iterator[Item]:
        """Every parameter of the model with its Hugging Face tensors; layers and experts ascend within an entry."""
        dims = self.dims(args)
        stacked = not any(isinstance(args.get(name), list) for name in _BY_LAYER)
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
                    sections = {name: getattr(dims, size) for name, size in entry.sections.items()}
                    yield Item(entry, layer, expert, shapes, stacked, shape, sections)


DENSE: dict[str, Any] = {
    "normalization": "RMSNorm",
    "layernorm_zero_centered_gamma": False,
    "swiglu": True,
    "quick_geglu": False,
    "squared_relu": False,
    "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "qk_l2_norm": False,
    "softmax_type": "vanilla",
    "attention_output_gate": False,
    "experimental_attention_variant": None,
    "window_size": None,
    "window_attn_skip_freq": None,
    "no_rope_freq": None,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "multi_latent_attention": False,
    "norm_placement": None,
    "whole_width_qk_norms": False,
    "attention_softcap": None,
    "local_rotary_base": None,
    "gelu_tanh": False,
    "parallel_block": None,
    "layer_mixers": None,
    "least_time_step": None,
    "logit_softcap": None,
    "embedding_scale_in_params_dtype": False,
    "latent_norm_epsilon": None,
    "attention_output_bias": None,
    "residual_multiplier": None,
    "norms_with_rope_only": None,
    "distant_attention": None,
    "softmax_scale": None,
    "use_mup": False,
    "num_experts": None,
}
MIXTURE: dict[str, Any] = {
    **{name: value for name, value in DENSE.items() if name != "num_experts"},
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
    "moe_shared_expert_intermediate_size": None,
    "moe_latent_size": None,
    "moe_apply_probs_on_input": False,
    "moe_mlp_glu_interleave_size": None,
    "moe_shared_expert_glu_interleave_size": None,
}
DENSE_LAYER = (MLP_NORM, *MLP)
ATTENTION = (QKV_WEIGHT, ATTENTION_OUT)
ATTENTION_BIAS_ARGUMENTS = ("add_qkv_bias", "attention_output_bias")
"""Arguments that `ATTENTION_BIASES` and `BIASES` read."""


def but(fixed: Mapping[str, Any], *free: str, **changed: Any) -> dict[str, Any]:
    """`fixed` with changed values, and without the arguments `free`, which a part reads."""
    return {**{name: value for name, value in fixed.items() if name not in free}, **changed}
