"""Properties of a model's layers that Megatron's layer specs lack, as arguments of the model."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

BEFORE, AFTER, AROUND = "before", "after", "around"
"""Norms of attention and MLP: before each (Megatron's), after each instead, or both."""

MAMBA, ATTENTION, MLP_ONLY, MIXTURE = "M", "*", "-", "E"
"""Mixers of layers with one mixer each, by Megatron's letters of hybrid models."""


@dataclass(frozen=True)
class LayerOptions:
    """Properties that `mkd.models` gives to the layers, embeddings and logits of one model.

    Each field is an argument of the same name. Megatron has no flags for them: they come from config.json and are
    stored in checkpoints. An argument that is missing or None has the default.
    """

    norm_placement: str = BEFORE
    """`BEFORE`, `AFTER` or `AROUND`."""
    whole_width_qk_norms: bool = False
    """True if one norm covers the queries of all heads, and one the keys of all heads."""
    attention_softcap: float | None = None
    """Cap c of the attention scores: c tanh(score / c) before the mask and the softmax."""
    local_rotary_base: float | None = None
    """Base of an unscaled rope in the layers with a sliding window; the other layers have the model's rope."""
    gelu_tanh: bool = False
    """True if gated MLPs use the tanh approximation of GELU instead of SiLU."""
    logit_softcap: float | None = None
    """Cap c of the logits: c tanh(logit / c)."""
    parallel_block: bool = False
    """True if attention and MLP have the same input, the output of a norm without bias; the last norm is alike."""
    embedding_scale_in_params_dtype: bool = False
    """True if the factor of the embeddings (`mup_embedding_mult`) is rounded to the dtype of the parameters."""
    layer_mixers: Sequence[str] | None = None
    """The mixer of each layer, such as `MAMBA`, where layers have one each. None if all have attention and an MLP."""
    least_time_step: float | None = None
    """Lower limit of the time step of `MAMBA` layers."""

    @classmethod
    def of(cls, args: Namespace) -> "LayerOptions":
        """The options of a model, from its Megatron arguments."""
        given = {name: getattr(args, name, None) for name in cls.__dataclass_fields__}
        return cls(**{name: value for name, value in given.items() if value is not None})

    @property
    def need_own_layers(self) -> bool:
        """True if Megatron's own layer specs cannot compute the layers."""
        plain = LayerOptions()
        names = ("norm_placement", "whole_width_qk_norms", "attention_softcap", "local_rotary_base", "parallel_block")
        return any(getattr(self, name) != getattr(plain, name) for name in names)
