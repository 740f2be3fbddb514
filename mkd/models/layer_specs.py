"""Layer specs for models that Megatron's own specs cannot compute: norms after attention and MLP, norms over the whole
width of queries and keys, softcaps of attention scores, and another rope in layers with a sliding window.

Nothing of Megatron is patched; the specs serve Transformer Engine and local layers.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import LayerNormBuilder
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules, get_transformer_layer_offset
from megatron.training.models import GPTModelConfig
from megatron.training.models.gpt import default_layer_spec

from mkd.models.attention import ExtendedSelfAttention
from mkd.models.layer_options import AFTER, BEFORE, LayerOptions
from mkd.models.mlp import PostNormMLP
from mkd.models.parallel_block import CenteredNorm, ParallelBlockLayer
from mkd.models.softcap import SoftcapAttention


def layer_spec(
    config: GPTModelConfig, vp_stage: int | None = None, *, options: LayerOptions
) -> ModuleSpec | TransformerBlockSubmodules:
    """Megatron's layer spec, or for mixtures of experts those of a pipeline stage, changed according to the options.

    Args:
        config: the model.
        vp_stage: virtual pipeline stage.
        options: of the model's layers.
    """
    spec, backend = default_layer_spec(config, vp_stage), backend_of(config)
    if options.parallel_block:
        layer = replace(spec, module=ParallelBlockLayer, submodules=_parallel(spec.submodules, backend))
        layers = [layer] * get_num_layers_to_build(config.transformer, vp_stage)
        return TransformerBlockSubmodules(layer_specs=layers, layer_norm=CenteredNorm)
    if isinstance(spec, ModuleSpec):
        return replace(spec, submodules=_changed(spec.submodules, backend, options))
    layers = [replace(layer, submodules=_changed(layer.submodules, backend, options)) for layer in spec.layer_specs]
    return replace(spec, layer_specs=layers)


def backend_of(config: GPTModelConfig) -> BackendSpecProvider:
    """Modules of Transformer Engine, or megatron's local ones."""
    if config.transformer.transformer_impl == "transformer_engine" and HAVE_TE:
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        return TESpecProvider()
    return LocalSpecProvider()


def numbered_layers(
    config: TransformerConfig, vp_stage: int | None
) -> tuple[TransformerBlockSubmodules, Sequence[int]]:
    """Megatron's layers of a pipeline stage, each with a spec of its own, and their numbers in the whole model from 0.

    Args:
        config: the model.
        vp_stage: virtual pipeline stage.
    """
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=config.transformer_impl == "transformer_engine",
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
    )
    if (layout := config.pipeline_model_parallel_layout) is not None:
        return block, layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    return block, range(first, first + len(block.layer_specs))


def _parallel(layer: TransformerLayerSubmodules, backend: BackendSpecProvider) -> TransformerLayerSubmodules:
    """One norm outside of the linear layers, and none before the MLP."""
    column, attention = backend.column_parallel_linear(), layer.self_attention
    mlp = replace(layer.mlp.keywords["submodules"], linear_fc1=column)
    return replace(
        layer,
        input_layernorm=CenteredNorm,
        pre_mlp_layernorm=IdentityOp,
        sharded_state_dict_keys_map={},
        self_attention=replace(attention, submodules=replace(attention.submodules, linear_qkv=column)),
        mlp=partial(MLP.as_mlp_submodule, mlp),
    )


def _changed(
    layer: TransformerLayerSubmodules, backend: BackendSpecProvider, options: LayerOptions
) -> TransformerLayerSubmodules:
    norm: LayerNormBuilder | None = None
    if options.norm_placement != BEFORE:
        norm = backend.layer_norm(rms_norm=True)
    attention, mlp = layer.self_attention.submodules, layer.mlp
    if options.norm_placement != BEFORE:
        mlp = mlp.keywords["submodules"]  # dense models only
    if options.norm_placement == AFTER:
        # Transformer Engine's specs have the norm inside the linear layer that follows it.
        column = backend.column_parallel_linear()
        attention, mlp = replace(attention, linear_qkv=column), replace(mlp, linear_fc1=column)
        layer = replace(layer, input_layernorm=IdentityOp, pre_mlp_layernorm=IdentityOp, sharded_state_dict_keys_map={})
    if options.attention_softcap is not None:
        core = partial(SoftcapAttention, softcap=options.attention_softcap)
        attention = replace(attention, core_attention=core)
    params = {**layer.self_attention.params, "post_norm": norm, "options": options}
    return replace(
        layer,
        self_attention=ModuleSpec(module=ExtendedSelfAttention, params=params, submodules=attention),
        mlp=mlp if norm is None else partial(PostNormMLP.with_norm, norm, mlp),
    )
