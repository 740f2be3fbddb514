"""Number of parameters on a rank, and bytes of gradients and optimizer state per parameter."""

import copy
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

from mkd.checkpoint.hf.families.delta_net import linear_layers
from mkd.job.memory.stage_layers import chunks_of_stage
from mkd.models.gated_delta_net import VARIANT
from mkd.models.layer_options import AROUND, ATTENTION, MAMBA, MLP_ONLY, LayerOptions
from mkd.models.lora import Lora

_MEGATRONS_BYTES = 18
"""Bytes per parameter in `compute_weight_and_optimizer_memory`."""


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters on one rank."""

    shared: float
    """All parameters except those of routed experts."""
    expert: float = 0.0

    @property
    def total(self) -> float:
        return self.shared + self.expert

    def __add__(self, other: "Parameters") -> "Parameters":
        return Parameters(self.shared + other.shared, self.expert + other.expert)

    def __mul__(self, count: int) -> "Parameters":
        return Parameters(self.shared * count, self.expert * count)


def is_moe_layer(args: Namespace, layer: int) -> bool:
    """True if the layer with this index from 0 is a mixture of experts."""
    if args.num_experts is None:
        return False
    frequency = args.moe_layer_freq
    return layer % frequency == 0 if isinstance(frequency, int) else bool(frequency[layer])


def is_gated(args: Namespace) -> bool:
    """True if the feed-forward layers have a gate."""
    return args.swiglu or args.quick_geglu


def parameters_of_stage(args: Namespace, stage: int) -> Parameters:
    """Parameters on each tensor- and expert-parallel rank of a pipeline stage.

    Layers are counted with megatron's own formula, one at a time, plus the parameters that it omits: biases and the
    norms of queries and keys. Megatron's formula puts one embedding on the fullest rank; here the first stage has the
    embedding and the last stage the LM head, which is a copy of the embedding if the two are tied and the stages
    differ.

    Args:
        args: Megatron's arguments of a model.
        stage: pipeline stage from 0.
    """
    layers = [layer for chunk in chunks_of_stage(args, stage) for layer in chunk]
    outside = Parameters(outside_of_layers(args, stage))
    if (mixers := mixers_of(args)) is not None:
        return sum((_mixer(args, mixers[layer]) for layer in layers), outside)
    experts = sum(is_moe_layer(args, layer) for layer in layers)
    total = _layer(args, moe=False) * (len(layers) - experts)
    if experts:
        total = total + _layer(args, moe=True) * experts
    total = total + Parameters(sum(_gates_and_delta_net(args, layer) for layer in layers))
    return total + outside


def adapters_of_stage(lora: Lora, args: Namespace, stage: int) -> Parameters:
    """Parameters of the adapters on each tensor- and expert-parallel rank of a pipeline stage."""
    layers = {layer for chunk in chunks_of_stage(args, stage) for layer in chunk}
    tp, channels = args.tensor_model_parallel_size, {False: 0.0, True: 0.0}
    for linear in lora.linears:
        if linear.decoder_layer in layers:
            is_routed = linear.experts is not None
            experts = linear.experts / args.expert_model_parallel_size if is_routed else 1
            ranks = (args.expert_tensor_parallel_size or tp) if is_routed else tp
            for factor in linear.factors:
                is_sharded = (factor.part is None) == linear.is_row_parallel
                channels[is_routed] += experts * factor.channels / (ranks if is_sharded else 1)
    return Parameters(channels[False] * lora.options.rank, channels[True] * lora.options.rank)


def outside_of_layers(args: Namespace, stage: int) -> int:
    """Parameters of embeddings, last norm and LM head on each tensor-parallel rank of a pipeline stage."""
    stages = args.pipeline_model_parallel_size
    embedding = args.padded_vocab_size // args.tensor_model_parallel_size * args.hidden_size
    outside = 0
    if stage == 0:
        outside += embedding
        if args.position_embedding_type == "learned_absolute":
            outside += args.max_position_embeddings * args.hidden_size
    if stage == stages - 1:
        outside += _norm_size(args) * args.hidden_size
        outside += embedding if stages > 1 or args.untie_embeddings_and_output_weights else 0
    return outside


def _norm_size(args: Namespace) -> int:
    return 1 if args.normalization == "RMSNorm" or LayerOptions.of(args).parallel_block else 2


def _layer(args: Namespace, moe: bool) -> Parameters:
    """Parameters of one layer on a rank."""
    one = copy.copy(args)
    one.num_layers, one.padded_vocab_size, one.mtp_num_layers = 1, 0, None
    one.pipeline_model_parallel_size, one.use_distributed_optimizer, one.data_parallel_size = 1, False, 1
    tp = args.tensor_model_parallel_size
    etp = args.expert_tensor_parallel_size or tp
    one.expert_tensor_parallel_size, one.world_size = etp, etp * args.expert_model_parallel_size
    one.swiglu, one.moe_layer_freq, one.moe_ffn_hidden_size = is_gated(args), 1, _expert_width(args)
    if LayerOptions.of(args).parallel_block:
        one.normalization = "RMSNorm"  # its norms have no bias
    if not moe:
        one.num_experts = one.moe_shared_expert_intermediate_size = None
    counted = compute_weight_and_optimizer_memory(one) / _MEGATRONS_BYTES - _norm_size(args) * args.hidden_size
    counted += _biases(args, moe)
    if not moe:
        return Parameters(counted)
    factors = 3 if is_gated(args) else 2
    routed = factors * (args.moe_latent_size or args.hidden_size) * _expert_width(args) * args.num_experts
    ranks = etp * args.expert_model_parallel_size
    biases = _expert_biases(args, etp) / args.expert_model_parallel_size
    return Parameters(counted - routed / ranks, routed / ranks + biases)


def _biases(args: Namespace, moe: bool) -> float:
    """Parameters that Megatron's formula omits in one layer on a rank: biases outside of routed experts, norms of
    queries and keys, norms after attention and MLP."""
    if args.multi_latent_attention:
        return 0.0
    tp, hidden = args.tensor_model_parallel_size, args.hidden_size
    queries = args.num_attention_heads * args.kv_channels
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    count = 0.0
    if args.add_bias_linear or args.add_qkv_bias:
        count += (queries + 2 * groups * args.kv_channels) / tp
    if args.qk_layernorm:
        count += 2 * _norm_size(args) * args.kv_channels
    options = LayerOptions.of(args)
    if options.whole_width_qk_norms:
        count += (queries + groups * args.kv_channels) / tp
    if options.norm_placement == AROUND:
        count += 2 * _norm_size(args) * hidden  # Megatron's formula has the norms before attention and MLP
    if options.parallel_block:
        count -= _norm_size(args) * hidden  # one norm for both
    if args.add_bias_linear or getattr(args, "attention_output_bias", None):
        count += hidden
    if args.add_bias_linear and not moe:
        count += (2 if is_gated(args) else 1) * args.ffn_hidden_size / tp + hidden
    return count


def mixers_of(args: Namespace) -> Sequence[str] | None:
    """The mixer of each layer (`LayerOptions.layer_mixers`); None if all layers have attention and an MLP."""
    return LayerOptions.of(args).layer_mixers


def mamba_channels(args: Namespace) -> tuple[int, int, int]:
    """Channels of a Mamba layer: of its heads, of its convolution, and of its input projection's output."""
    inner = args.mamba_num_heads * args.mamba_head_dim
    convolved = inner + 2 * args.mamba_num_groups * args.mamba_state_dim
    return inner, convolved, inner + convolved + args.mamba_num_heads


def _mixer(args: Namespace, mixer: str) -> Parameters:
    """Parameters on a rank of a layer with one mixer and the norm before it."""
    tp, hidden = args.tensor_model_parallel_size, args.hidden_size
    if mixer == MAMBA:
        inner, convolved, projected = mamba_channels(args)
        others = (args.linear_conv_kernel_dim + 1) * convolved + inner + 3 * args.mamba_num_heads
        return Parameters(hidden + (hidden * (projected + inner) + others) / tp)
    if mixer == ATTENTION:
        groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
        return Parameters(hidden + 2 * hidden * (args.num_attention_heads + groups) * args.kv_channels / tp)
    matrices = (3 if is_gated(args) else 2) * hidden
    if mixer == MLP_ONLY:
        return Parameters(hidden + matrices * args.ffn_hidden_size / tp)
    shared = matrices * (args.moe_shared_expert_intermediate_size or 0) / tp
    ranks = (args.expert_tensor_parallel_size or tp) * args.expert_model_parallel_size
    routed = matrices * _expert_width(args) * args.num_experts / ranks
    return Parameters(hidden + hidden * args.num_experts + shared, routed)


def is_delta_net_layer(args: Namespace, layer: int) -> bool:
    """True if the layer with this index from 0 has a gated delta net instead of attention."""
    return args.experimental_attention_variant == VARIANT and bool(linear_layers(vars(args))[layer])


def _gates_and_delta_net(args: Namespace, layer: int) -> float:
    """Parameters of the gates of attention in one layer on a rank, or of a gated delta net minus those of attention."""
    tp, hidden = args.tensor_model_parallel_size, args.hidden_size
    queries = args.num_attention_heads * args.kv_channels
    if not is_delta_net_layer(args, layer):
        return hidden * queries / tp if args.attention_output_gate else 0.0
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    attention = 2 * hidden * (queries + groups * args.kv_channels) / tp
    norms = 2 * _norm_size(args) * args.kv_channels if args.qk_layernorm else 0
    keys = args.linear_num_key_heads * args.linear_key_head_dim
    values = args.linear_num_value_heads * args.linear_value_head_dim
    projections = hidden * (2 * keys + 3 * values + 2 * args.linear_num_value_heads)
    others = args.linear_conv_kernel_dim * (2 * keys + values) + 2 * args.linear_num_value_heads
    return (projections + others) / tp + args.linear_value_head_dim - attention - norms


def _expert_biases(args: Namespace, etp: int) -> float:
    """Parameters of the biases of all routed experts of a layer, on each expert-tensor-parallel rank."""
    if not args.add_bias_linear:
        return 0.0
    return args.num_experts * ((2 if is_gated(args) else 1) * _expert_width(args) / etp + args.hidden_size)


def gradient_bytes(args: Namespace) -> int:
    """Bytes per parameter of the buffer in which megatron's data-parallel wrapper accumulates gradients."""
    is_full = args.accumulate_allreduce_grads_in_fp32 or args.params_dtype == torch.float32
    return 4 if is_full else args.params_dtype.itemsize


def optimizer_bytes(args: Namespace, count: Parameters) -> float:
    """Bytes of the optimizer's state on a rank: moments, and in half precision the fp32 parameters.

    --use-distributed-optimizer shards it over the ranks that hold the same parameters: data- and context-parallel
    ranks, or for experts all ranks with the same experts.
    """
    sizes = {"adam": 8, "sgd": 4 if args.sgd_momentum else 0}.get(args.optimizer, 8)
    main = 0 if args.params_dtype == torch.float32 else 4
    if args.use_precision_aware_optimizer:
        sizes = args.exp_avg_dtype.itemsize + args.exp_avg_sq_dtype.itemsize
        main = args.main_params_dtype.itemsize if main else 0
    shared = expert = 1.0
    if args.use_distributed_optimizer:
        shared = args.data_parallel_size * args.context_parallel_size
        etp = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
        model = etp * args.expert_model_parallel_size * args.pipeline_model_parallel_size
        expert = max(1, args.world_size // model)
    on_device = 1.0 - args.optimizer_offload_fraction if args.optimizer_cpu_offload else 1.0
    return (sizes + main) * on_device * (count.shared / shared + count.expert / expert)


def _expert_width(args: Namespace) -> int:
    return args.moe_ffn_hidden_size or args.ffn_hidden_size
