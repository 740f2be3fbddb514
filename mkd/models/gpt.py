"""GPT model configurations from Megatron arguments, and access to the LM head of a built model."""

from argparse import Namespace
from functools import partial
from typing import NamedTuple

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.models import GPTModelConfig
from torch import Tensor, nn

from mkd.compat.refusals import megatron_refusals
from mkd.errors import MkdConfigError
from mkd.models.gated_delta_net import VARIANT, hybrid_layer_spec
from mkd.models.layer_options import LayerOptions
from mkd.models.layer_specs import layer_spec
from mkd.models.mamba import mixer_layer_spec
from mkd.models.model_options import ModelOptions
from mkd.models.parameter_sync import finish_parameter_sync


def gpt_config(args: Namespace) -> GPTModelConfig:
    """Model configuration from the arguments of the student or of a teacher.

    Raises:
        MkdConfigError: megatron refuses the arguments, or a package that they need is missing.
    """
    if args.position_embedding_type == "yarn" or (args.multi_latent_attention and args.rope_type != "yarn"):
        # The fused rope of packed rows omits yarn's factor of sine and cosine: Megatron turns it off in the student,
        # but a teacher has the student's choice of kernels. That of latent attention is for yarn only.
        args = Namespace(**{**vars(args), "apply_rope_fusion": False})
    if args.squared_relu:  # Megatron fuses biases with other activations only, and refuses to build the model
        args = Namespace(**{**vars(args), "bias_gelu_fusion": False})
    if args.add_bias_linear and args.activation_func_clamp_value is not None and not args.moe_grouped_gemm:
        # megatron-core 0.19's fused activation of gpt-oss clamps before it adds the bias, which grouped experts add
        # themselves.
        args = Namespace(**{**vars(args), "bias_gelu_fusion": False})
    if args.num_experts is not None and args.moe_grouped_gemm and args.add_bias_linear:
        # Megatron refuses to build grouped experts with biases (gpt-oss) otherwise. The fusion is its default, and a
        # teacher has the student's choice of kernels.
        args = Namespace(**{**vars(args), "bias_dropout_fusion": False})
    if args.qk_l2_norm and args.num_experts is None and args.transformer_impl == "local":
        raise MkdConfigError(
            "--qk-l2-norm needs --transformer-impl transformer_engine, on GPUs, in a model without experts: Megatron's "
            "local layers leave the norms out"
        )
    with megatron_refusals("the flags of the model"):
        config = gpt_config_from_args(args)
    # megatron-core 0.19's gpt_config_from_args ignores this flag and builds every model with 8.
    config.rope_scaling_factor = args.rope_scaling_factor
    _apply_options(config, LayerOptions.of(args))
    ModelOptions.of(args).apply(config)
    return config


def _apply_options(config: GPTModelConfig, options: LayerOptions) -> None:
    """Change the configuration of a model in place as the options demand."""
    transformer = config.transformer
    if options.gelu_tanh:
        transformer.activation_func = _gelu_tanh
        transformer.bias_activation_fusion = False  # Megatron fuses other activations only
    if options.embedding_scale_in_params_dtype:
        scale = torch.tensor(transformer.mup_embedding_mult, dtype=transformer.params_dtype, device="cpu")
        transformer.mup_embedding_mult = scale.item()
    transformer.logit_softcap = options.logit_softcap
    if transformer.experimental_attention_variant == VARIANT:
        config.transformer_layer_spec = hybrid_layer_spec
    if options.layer_mixers is not None:
        config.transformer_layer_spec = partial(mixer_layer_spec, options=options)
        transformer.hetereogenous_dist_checkpoint = True  # layers have parameters of different names
    if options.need_own_layers:
        if options.attention_softcap is not None and transformer.attention_backend == AttnBackend.local:
            raise MkdConfigError(
                "--attention-backend local is Megatron's attention, which has no softcap of the scores: leave it out"
            )
        config.transformer_layer_spec = partial(layer_spec, options=options)


def _gelu_tanh(values: Tensor) -> Tensor:
    return nn.functional.gelu(values, approximate="tanh")


def lm_head(model: GPTModel) -> Tensor:
    """[V/tp, H]: this rank's rows of the LM head on the last pipeline stage; the embedding itself if they are tied."""
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight


class LogitScale(NamedTuple):
    """From the LM head's products x to logits: scale x, or c tanh(scale x / c) with a softcap c."""

    scale: float
    softcap: float | None


def output_head(
    output_layer: nn.Module, output_weight: Tensor | None, config: TransformerConfig
) -> tuple[Tensor, LogitScale]:
    """The LM head that a GPTModel passes to its output processor, complete after a parameter sync.

    Args:
        output_layer: the LM head's module.
        output_weight: [V/tp, H] if the LM head is the embedding, else None.
        config: configuration of the model.

    Returns:
        (weight [V/tp, H], scale and softcap of the logits).
    """
    if output_layer._forward_pre_hooks:  # with --overlap-param-gather
        finish_parameter_sync(output_layer)
    return output_layer.weight if output_weight is None else output_weight, logit_scale(config)


def router_padding_mask(chunk: GPTModel, padding: Tensor | None) -> Tensor | None:
    """The padding mask [b, s] in the form that a pipeline stage of a GPTModel expects; its routers then exclude padding
    from load balancing. None for a dense model, and for the only balancing type without a mask.

    megatron-core 0.19 shards the mask over sequence-parallel ranks on the first pipeline stage only; the routers of the
    other stages would apply a mask of all tokens to their own slice.
    """
    config = chunk.config
    if padding is None or not config.num_moe_experts:
        return None
    if config.moe_router_load_balancing_type == "quantile_balancing":
        return None
    if config.sequence_parallel and not chunk.pre_process:
        tp = chunk.pg_collection.tp
        return padding.chunk(tp.size(), dim=1)[tp.rank()].contiguous()
    return padding


def logit_scale(config: TransformerConfig) -> LogitScale:
    """Factor on the logits of a model, 1 without `--use-mup`, and their softcap.

    megatron-core 0.19 applies only the factor itself; its GPT models have no bias in the LM head.
    """
    return LogitScale(config.mup_output_mult if config.use_mup else 1.0, getattr(config, "logit_softcap", None))
