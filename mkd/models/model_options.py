"""Properties of a model that megatron-core has no arguments for, without layers of its own.

Their names are arguments of the model without flags: they come from config.json and are stored in checkpoints.
"""

import math
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
    MultiLatentAttention,
    QKNormConfigResolver,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.utils import unwrap_model
from megatron.training.models import GPTModelConfig
from megatron.training.models.gpt import default_layer_spec
from torch import Tensor, nn

_NORMS_OF_LATENTS = ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj")
"""Modules with these norms: Transformer Engine computes them in the linear layers that follow."""


@dataclass(frozen=True)
class ModelOptions:
    """Options of one model; None or False leave Megatron's model as it is."""

    rope_frequencies: Mapping[str, Any] | None = None
    """The keys of a rope of type llama3 or longrope, as in config.json (`scaled_frequencies`)."""
    latent_norm_epsilon: float | None = None
    """Epsilon of the norms of latent attention's latents; None is that of the other norms."""
    attention_output_bias: bool = False
    """True if attention's output projection has a bias, also without biases in the MLPs."""

    residual_multiplier: float | None = None
    """Factor on the outputs of attention and MLP before they are added to the residual stream."""
    router_group_best: int | None = None
    """Number of a group's best scores whose sum ranks groups of experts; None is Megatron's rule, the number of experts
    per token divided by that of groups."""
    normalized_single_expert: bool = False
    """True if the one expert of each token has the weight 1: its score divided by itself."""

    norms_with_rope_only: bool = False
    """True if layers without rope have no norms of queries and keys."""
    distant_attention: Mapping[str, Any] | None = None
    """Keys of config.json about attention beyond the model's positions, which the model does not compute."""

    @classmethod
    def of(cls, args: Namespace) -> "ModelOptions":
        """The options of a model, from its Megatron arguments."""
        given = {name: getattr(args, name, None) for name in cls.__dataclass_fields__}
        return cls(**{name: value for name, value in given.items() if value is not None})

    def apply(self, config: GPTModelConfig) -> None:
        """Change the configuration of a model in place; models that are built from it get the properties."""
        if self.attention_output_bias:
            config.transformer_layer_spec = partial(_changed_spec, change=_with_output_bias)
        elif config.transformer.multi_latent_attention and config.transformer.q_lora_rank is None:
            config.transformer_layer_spec = partial(_changed_spec, change=_with_plain_queries)
        if self.rope_frequencies is not None:
            transformer = config.transformer
            # As Megatron sets them for yarn: attention multiplies sine and cosine by 0.1 yarn_mscale log(e) + 1.
            transformer.yarn_rotary_scaling_factor, transformer.yarn_mscale_all_dim = math.e, 0.0
            transformer.yarn_mscale = (attention_factor(self.rope_frequencies) - 1.0) / 0.1
            transformer.apply_rope_fusion = False  # the fused kernels omit the factor in packed rows
        if config.transformer.multi_latent_attention and not config.transformer.sequence_parallel:
            config.pre_wrap_hooks.append(_correct_latent_gradients)
        if self.router_group_best is not None:
            config.transformer.moe_router_fusion = False  # the fused kernel has Megatron's rule
        if self != ModelOptions(attention_output_bias=self.attention_output_bias):
            config.pre_wrap_hooks.append(self._correct)

    def _correct(self, chunks: Sequence[nn.Module]) -> Sequence[nn.Module]:
        """Correct built model chunks in place."""
        for chunk in map(unwrap_model, chunks):
            if self.rope_frequencies is not None:
                rope = chunk.rotary_pos_emb
                rope.inv_freq = scaled_frequencies(rope.inv_freq, self.rope_frequencies)
            if self.norms_with_rope_only and chunk.config.no_rope_freq:
                for layer in chunk.decoder.layers:
                    if chunk.config.no_rope_freq[layer.layer_number - 1]:
                        layer.self_attention.q_layernorm = layer.self_attention.k_layernorm = None
            if self.residual_multiplier is not None:
                for layer in chunk.decoder.layers:
                    for linear in (layer.self_attention.linear_proj, layer.mlp.linear_fc2):
                        linear.register_forward_hook(self._multiply)
            for router in chunk.modules():
                if isinstance(router, TopKRouter):
                    self._correct_router(router)
            if self.latent_norm_epsilon is not None:
                for attention in chunk.modules():
                    if isinstance(attention, MultiLatentAttention):
                        self._set_epsilon(attention)
        return chunks

    def _multiply(self, linear: nn.Module, inputs: Any, output: tuple[Tensor, Tensor | None]) -> Any:
        """A forward hook on a linear layer that returns its output and its bias."""
        return tuple(None if part is None else part * self.residual_multiplier for part in output)

    def _correct_router(self, router: TopKRouter) -> None:
        if self.router_group_best is not None:
            router.router_replay = RankedGroups(self.router_group_best)
        if self.normalized_single_expert:
            router.register_forward_hook(_normalize)

    def _set_epsilon(self, attention: MultiLatentAttention) -> None:
        for name in _NORMS_OF_LATENTS:
            if hasattr(module := getattr(attention, name, None), "eps"):
                module.eps = self.latent_norm_epsilon


def _correct_latent_gradients(chunks: Sequence[nn.Module]) -> Sequence[nn.Module]:
    """Make Megatron average the gradient of the norm of the queries' latent over tensor-parallel ranks.

    Each rank has the gradient of the whole latent. megatron-core 0.19 takes the norm by its name for one of each head,
    of which ranks have parts, and sums.
    """
    for module in chunks:
        for attention in module.modules():
            norm = getattr(attention, "q_layernorm", None) if isinstance(attention, MultiLatentAttention) else None
            if (weight := getattr(norm, "weight", None)) is not None:
                weight.average_gradients_across_tp_domain = True
    return chunks


def scaled_frequencies(frequencies: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Rope frequencies of type llama3 or longrope from the unscaled ones, both [channels / 2] fp32.

    The formulas are those of transformers' `modeling_rope_utils.py`. longrope has the frequencies of sequences within
    the original length.
    """
    if rope["rope_type"] == "longrope":
        return frequencies / torch.tensor(rope["short_factor"], dtype=torch.float32, device=frequencies.device)
    low, high, length = (
        rope[name] for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    turns = length * frequencies / (2 * math.pi)
    interpolated = frequencies / rope["factor"]
    smooth = (turns - low) / (high - low)  # infinite, and not used, where Llama 4 Scout has high equal to low
    between = (1 - smooth) * interpolated + smooth * frequencies
    return torch.where(turns < low, interpolated, torch.where(turns > high, frequencies, between))


def attention_factor(rope: Mapping[str, Any]) -> float:
    """Factor of sine and cosine of a rope of type llama3 or longrope."""
    return rope.get("attention_factor", 1.0)


def _normalize(router: TopKRouter, inputs: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """A forward hook: (weights, map), both [tokens, experts]; a token's weights sum to the router's factor."""
    weights, chosen = output
    factor = router.config.moe_router_topk_scaling_factor or 1.0
    return weights / weights.sum(-1, keepdim=True) * factor, chosen


@dataclass
class RankedGroups:
    """Choice of experts in the best groups; replaces Megatron's `RouterReplay`, which computes a router's top-k."""

    best: int
    """Number of a group's best scores whose sum ranks it."""
    layer_number: int | None = None
    """Set by Megatron."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """([tokens, topk] scores, their experts) of the `group_topk` best groups; `scores` is [tokens, experts]."""
        groups = scores.unflatten(-1, (num_groups, -1))
        ranks = groups.topk(self.best, dim=-1).values.sum(-1)
        chosen = torch.zeros_like(ranks, dtype=torch.bool).scatter(-1, ranks.topk(group_topk, dim=-1).indices, True)
        masked = groups.masked_fill(~chosen.unsqueeze(-1), float("-inf")).flatten(-2)
        best = masked.topk(topk, dim=-1)
        return best.values, best.indices


class PlainQueryAttention(MLASelfAttention):
    """Latent attention whose queries have no latent and no norm, while the latent of keys and values has one."""

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        """Megatron's choice of modules for attention with both latents, without those of the queries' latent.

        megatron-core 0.19 itself demands a norm in the projection of queries without a latent.
        """
        with_latent = copy(self.config)
        with_latent.q_lora_rank = self.config.kv_lora_rank
        found = QKNormConfigResolver(with_latent, submodules).resolve()
        without = dict.fromkeys(("linear_q_up_proj", "q_layernorm"), IdentityOp)
        return {**found, **without, "linear_q_proj": submodules.linear_q_proj}


def _changed_spec(
    config: GPTModelConfig, vp_stage: int | None = None, *, change: Callable[[ModuleSpec], ModuleSpec]
) -> Any:
    """Megatron's layer spec with `change` of the specs of attention."""
    spec = default_layer_spec(config, vp_stage)
    if isinstance(spec, ModuleSpec):
        return _changed_layer(spec, change)
    return replace(spec, layer_specs=[_changed_layer(layer, change) for layer in spec.layer_specs])


def _changed_layer(layer: ModuleSpec, change: Callable[[ModuleSpec], ModuleSpec]) -> ModuleSpec:
    attention = change(layer.submodules.self_attention)
    return replace(layer, submodules=replace(layer.submodules, self_attention=attention))


def _with_output_bias(attention: ModuleSpec) -> ModuleSpec:
    linear = partial(_biased, attention.submodules.linear_proj)
    return replace(attention, submodules=replace(attention.submodules, linear_proj=linear))


def _with_plain_queries(attention: ModuleSpec) -> ModuleSpec:
    return replace(attention, module=PlainQueryAttention)


def _biased(linear: Callable[..., nn.Module], *args: Any, bias: bool, **options: Any) -> nn.Module:
    return linear(*args, bias=True, **options)
