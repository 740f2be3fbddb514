"""Activation memory of transformer layers: tensors kept for the backward pass, and temporary tensors of a running
layer.

The terms are those of Korthikanti et al. 2022 (https://arxiv.org/abs/2205.05198), eq. 1 to 4, split by tensor and
extended to grouped queries, gated feed-forward layers, attention that does not keep its scores, and dropout of 0.
Transformer Engine's fused norm and projection keeps its input and the normalized input; every other projection keeps
its input. The paper's sbh bytes for dropout masks exist only with dropout.

megatron.training.theoretical_memory_usage is not used here: without sequence parallelism it assumes an MLP width of 4
times the hidden size, it ignores context parallelism, experts, grouped queries and full recomputation, and it counts
the logits of all tokens, which mkd never holds.
"""

from argparse import Namespace
from dataclasses import dataclass, replace

import torch

from mkd.job.memory.parameters import is_delta_net_layer, is_gated, is_moe_layer, mamba_channels, mixers_of
from mkd.models import delta_rule
from mkd.models.delta_rule import missing_kernel
from mkd.models.layer_options import AROUND, ATTENTION, MAMBA, LayerOptions
from mkd.models.state_space import BLOCK, CHUNK, block_length


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer and one microbatch on one rank."""

    kept: float
    """Kept from the forward pass to the backward pass."""
    forward: float
    """Peak of the forward pass without kept tensors: the full need of a frozen model."""
    backward: float
    """Peak of the backward pass in addition to `kept`."""


@dataclass(frozen=True)
class _Terms:
    """Bytes that a layer keeps without recomputation, per part."""

    layer_input: float
    attention: float
    scores: float
    """0 if attention does not keep them."""
    mlp_input: float
    """Input of the feed-forward part."""
    norm: float
    """The normalized input of the feed-forward part."""
    feed_forward: float
    activation: float
    """Share of `feed_forward`: output of the activation function."""
    dropout: float


def tokens_of(args: Namespace) -> int:
    """Tokens of a microbatch on one context-parallel rank."""
    return args.seq_length * args.micro_batch_size // args.context_parallel_size


def layer_bytes(args: Namespace, layer: int, on_gpu: bool) -> LayerBytes:
    """Activation memory of one layer.

    Args:
        args: Megatron's arguments of the model.
        layer: index of the layer from 0.
        on_gpu: True for Transformer Engine's kernels, False for megatron's local layers without fusions.
    """
    terms = _terms(args, is_moe_layer(args, layer), on_gpu)
    mixing = [0.0, 0.0]  # forward and backward
    if is_delta_net_layer(args, layer):
        has_kernel = [on_gpu and missing_kernel(trains, args.deterministic_mode) is None for trains in (False, True)]
        attention = terms.norm + tokens_of(args) * args.params_dtype.itemsize * _delta_net(args, has_kernel[1])
        terms = replace(terms, attention=attention, scores=0.0)
        mixing = [0.0 if has else _delta_rule(args) for has in has_kernel]
    mixers = mixers_of(args)
    if mixers is not None:
        terms, working = _one_half(args, terms, mixers[layer])
        mixing = [working, working]
    first_half = terms.layer_input + terms.attention + terms.scores
    full = first_half + terms.mlp_input + terms.norm + terms.feed_forward + terms.dropout
    kept = full - _recomputed(args, is_moe_layer(args, layer), terms)
    # Gradients in the feed-forward part: of its output and of its inner tensors, minus the one that is freed.
    output = residual_bytes(args) if mixers is None else terms.mlp_input
    gradients = output + max(terms.feed_forward - terms.activation, 0.0)
    if mixers is not None:
        gradients += first_half
    forward = residual_bytes(args) + max(terms.norm + terms.feed_forward, terms.norm + terms.attention + terms.scores)
    return LayerBytes(kept, forward + mixing[0], gradients + full - kept + mixing[1])


def kept_by_layers(args: Namespace, layers: range, on_gpu: bool) -> float:
    """Bytes that the layers of one virtual stage keep per microbatch."""
    if args.recompute_granularity != "full":
        return sum(layer_bytes(args, layer, on_gpu).kept for layer in layers)
    layer_input = residual_bytes(args)
    if args.distribute_saved_activations and not args.sequence_parallel:
        layer_input /= args.tensor_model_parallel_size
    unit = args.recompute_num_layers or 1
    if args.recompute_method == "uniform":
        return -(-len(layers) // unit) * layer_input
    not_recomputed = sum(layer_bytes(args, layer, on_gpu).kept for layer in layers[unit:])
    return min(unit, len(layers)) * layer_input + not_recomputed


def backward_working_bytes(args: Namespace, layers: range, on_gpu: bool) -> float:
    """Peak of temporary tensors in the backward pass of one virtual stage, in addition to `kept_by_layers`.

    The peak is reached in the last layers, while all others still keep their tensors.
    """
    if not layers:
        return 0.0
    last = layer_bytes(args, layers[-1], on_gpu)
    if args.recompute_granularity != "full":
        return last.backward
    unit = args.recompute_num_layers or 1
    if args.recompute_method == "block":
        return last.backward + (last.kept if len(layers) <= unit else 0.0)
    return last.backward + sum(layer_bytes(args, layer, on_gpu).kept for layer in layers[-unit:])


def residual_bytes(args: Namespace) -> float:
    """Hidden states of a microbatch on one rank, which sequence parallelism shards: the input of every layer."""
    shards = args.tensor_model_parallel_size if args.sequence_parallel else 1
    return tokens_of(args) * args.hidden_size * args.params_dtype.itemsize / shards


def _terms(args: Namespace, moe: bool, on_gpu: bool) -> _Terms:
    tokens, size, residual = tokens_of(args), args.params_dtype.itemsize, residual_bytes(args)
    feed_forward, activation = _experts(args, on_gpu) if moe else _mlp(args, args.ffn_hidden_size, on_gpu)
    scale, scores = tokens * size, _scores(args, on_gpu)
    # Without fusions a norm keeps its input before and after scaling.
    norm = residual if on_gpu else 2 * residual
    if LayerOptions.of(args).norm_placement == AROUND:
        norm *= 2
    masks = 2 * residual / size if args.hidden_dropout > 0 else 0.0
    layer_input, mlp_input, mlp_norm = residual, residual, norm
    if LayerOptions.of(args).parallel_block:
        # One norm for attention and MLP, computed in fp32: it keeps its input in fp32, and its output is kept once.
        layer_input, norm = 4 / size * residual, residual
        mlp_input = mlp_norm = 0.0
    return _Terms(
        layer_input=layer_input,
        attention=norm + scale * _attention(args, repeats_keys=scores > 0) + _statistics(args, tokens),
        scores=scores,
        mlp_input=mlp_input,
        norm=mlp_norm,
        feed_forward=scale * feed_forward,
        activation=scale * activation,
        dropout=masks,
    )


def _attention(args: Namespace, repeats_keys: bool) -> float:
    """Elements per token that attention keeps after its normalized input: queries, keys, values and its output.

    Args:
        args: Megatron's arguments of the model.
        repeats_keys: True if keys and values are repeated for every query head, as without fused kernels.
    """
    tp, heads = args.tensor_model_parallel_size, args.num_attention_heads
    if args.multi_latent_attention:
        query = heads * (args.qk_head_dim + args.qk_pos_emb_head_dim)
        value = heads * args.v_head_dim
        latent = 2 * ((args.q_lora_rank or 0) + args.kv_lora_rank) + args.qk_pos_emb_head_dim
        return (2 * query + 2 * value) / tp + latent
    query = heads * args.kv_channels
    key = (args.num_query_groups if args.group_query_attention else heads) * args.kv_channels
    normed = 0
    # Without fused kernels a norm keeps its input and, if it scales, its output before that too.
    if LayerOptions.of(args).whole_width_qk_norms:  # its inputs are copies
        normed = (3 if repeats_keys else 2) * (query + key)
    elif args.qk_l2_norm:
        normed = (2 if repeats_keys else 1) * (query + key)
    elif args.qk_layernorm:
        normed = (3 if repeats_keys else 1) * (query + key)
    gates = 2 * query if args.attention_output_gate else 0  # the gate, and attention's output before it
    return (2 * query + 2 * (query if repeats_keys else key) + normed + gates) / tp


def _delta_net(args: Namespace, has_kernel: bool) -> float:
    """Elements per token that a gated delta net keeps after its normalized input: its projections, the convolved
    queries, keys and values, those of each value head, its output before and after norm and gate. The kernels keep the
    matrices of chunks, PyTorch's operations the states between blocks."""
    heads, width = args.linear_num_value_heads, args.linear_value_head_dim
    keys, values = args.linear_num_key_heads * args.linear_key_head_dim, heads * width
    projected, convolved = 2 * keys + 2 * values + 2 * heads, 2 * keys + values
    by_head = 2 * heads * args.linear_key_head_dim + values
    kept = projected + 2 * convolved + by_head + 3 * values
    kept += heads * delta_rule.CHUNK if has_kernel else 2 * values * args.linear_key_head_dim / BLOCK
    return kept / args.tensor_model_parallel_size


def _delta_rule(args: Namespace) -> float:
    """Bytes of temporary tensors of PyTorch's delta rule, which the backward pass computes again in fp32 for a block of
    tokens at a time: queries, keys and values in several products, the matrices between the tokens of a chunk (some in
    float64), states, and the gradients of these."""
    width, key_width = args.linear_value_head_dim, args.linear_key_head_dim
    chunk = min(delta_rule.CHUNK, args.seq_length)
    elements = 11 * key_width + 9 * width + 9 * chunk + 3 * key_width * width / chunk
    rows = args.micro_batch_size
    at_a_time = min(args.seq_length, block_length(rows, delta_rule.CHUNK)) * rows
    ranks = args.tensor_model_parallel_size * args.context_parallel_size
    return 4 * at_a_time * args.linear_num_value_heads * elements / ranks


def _one_half(args: Namespace, terms: _Terms, mixer: str) -> tuple[_Terms, float]:
    """(the terms of a layer with one mixer, bytes of temporary tensors between the projections of a Mamba layer).

    The backward pass of a Mamba layer computes those again, in fp32, for a block of tokens at a time.
    """
    if mixer not in (MAMBA, ATTENTION):
        return replace(terms, layer_input=0.0, attention=0.0, scores=0.0), 0.0
    terms = replace(terms, mlp_input=0.0, feed_forward=0.0, activation=0.0)
    if mixer == ATTENTION:
        return replace(terms, norm=0.0), 0.0
    inner, convolved, projected = mamba_channels(args)
    tokens, tp = tokens_of(args), args.tensor_model_parallel_size
    kept = terms.norm + tokens * args.params_dtype.itemsize * (projected + inner) / tp
    states = args.mamba_num_heads * args.mamba_state_dim
    chunk = min(CHUNK, args.seq_length)
    # Taps of the convolution and its activation; products between the tokens of a chunk; keys and queries of each head
    # with their decays; states before chunks and what they add; the norm.
    elements = (args.linear_conv_kernel_dim + 2) * convolved + 3 * args.mamba_num_heads * chunk
    elements += 2 * states + 3 * states * args.mamba_head_dim / chunk + 7 * inner
    # Context-parallel ranks have whole rows of a share of the heads.
    at_a_time = args.micro_batch_size * min(args.seq_length, block_length(args.micro_batch_size, CHUNK))
    heads = tp * args.context_parallel_size
    return replace(terms, norm=0.0, attention=kept, scores=0.0), 4 * at_a_time * elements / heads


def _statistics(args: Namespace, tokens: int) -> float:
    """Bytes of the softmax's log-sum-exp: fp32 per token and attention head."""
    return 4 * tokens * args.num_attention_heads / args.tensor_model_parallel_size


def _scores(args: Namespace, on_gpu: bool) -> float:
    """Bytes of attention probabilities; 0 in fused kernels, which Transformer Engine has in half precision only."""
    half, capped = args.params_dtype != torch.float32, LayerOptions.of(args).attention_softcap is not None
    fused = on_gpu and half and not capped
    if fused and args.transformer_impl != "local" and str(args.attention_backend) != "AttnBackend.unfused":
        return 0.0
    bytes_per_pair = (8 if capped else 4) + (args.params_dtype.itemsize if half else 0)
    pairs = args.micro_batch_size * args.seq_length**2 / args.context_parallel_size
    return bytes_per_pair * pairs * args.num_attention_heads / args.tensor_model_parallel_size


def _mlp(args: Namespace, width: int, on_gpu: bool) -> tuple[float, float]:
    """(elements per token inside a feed-forward layer, those of its activation function's output)."""
    inner = width / args.tensor_model_parallel_size
    fused = args.bias_swiglu_fusion if args.swiglu else args.bias_gelu_fusion
    fused = fused and not LayerOptions.of(args).gelu_tanh
    # Unfused, the gate is also kept after its activation function, and the other factor once more.
    factors = (2 if fused and on_gpu else 4) if is_gated(args) else 1
    return (factors + 1) * inner, inner


def _experts(args: Namespace, on_gpu: bool) -> tuple[float, float]:
    """Like `_mlp`, for a mixture of experts with balanced routing."""
    tp = args.tensor_model_parallel_size
    etp = args.expert_tensor_parallel_size or tp
    width = (args.moe_ffn_hidden_size or args.ffn_hidden_size) * tp / etp
    inside, activation = _mlp(args, width, on_gpu)
    # Under sequence parallelism a rank dispatches its slice of the tokens, and every slot is sent to one expert rank.
    slots = args.moe_router_topk / (tp if args.sequence_parallel else 1)
    slots *= etp if args.sequence_parallel else 1
    routed = slots * inside, slots * activation
    shared = _mlp(args, args.moe_shared_expert_intermediate_size or 0, on_gpu)
    dispatched = 2 * slots * (args.moe_latent_size or args.hidden_size)
    return routed[0] + shared[0] + dispatched, routed[1] + shared[1]


def _recomputed(args: Namespace, moe: bool, terms: _Terms) -> float:
    """Bytes that --recompute-granularity selective saves."""
    if args.recompute_granularity != "selective":
        return 0.0
    modules = set(args.recompute_modules or ["core_attn"])
    saved = terms.scores if "core_attn" in modules else 0.0
    if ("moe" if moe else "mlp") in modules:
        return saved + terms.norm + terms.feed_forward
    if moe and "moe_act" in modules:
        saved += terms.activation
    return saved
