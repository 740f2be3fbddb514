"""What the student's layers keep for the backward pass, and what a layer needs while it works.

The terms are those of Korthikanti et al. 2022 (https://arxiv.org/abs/2205.05198), eq. 1 to 4, taken apart by tensor,
for grouped queries, gated feed-forward layers, attention that does not keep its scores, and dropout only where there is
some. Transformer Engine's fused norm and projection keeps its input and the normalized input; every other projection
keeps its input; what the paper counts as sbh bytes for a mask exists with dropout only.

megatron.training.theoretical_memory_usage is not used: it takes MLPs to be 4 times as wide as the model where there is
no sequence parallelism, knows neither context parallelism, experts, grouped queries nor recomputation of whole layers,
and counts the logits of all tokens, which mkd never has.
"""

from argparse import Namespace
from dataclasses import dataclass

import torch

from mkd.memory.parameters import is_gated, is_moe_layer


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer and one microbatch on one rank."""

    kept: float
    """From its forward pass to its backward pass."""
    forward: float
    """Most at one time while it works forward, without what it keeps: all of it where no gradient is wanted."""
    backward: float
    """Most at one time while it works backward, beside what it has kept."""


@dataclass(frozen=True)
class _Terms:
    """Bytes a layer would keep, part by part."""

    entrance: float
    """The layer's input."""
    attention: float
    scores: float
    """0 where attention does not keep them."""
    middle: float
    """Input of the feed-forward part."""
    norm: float
    """The same, normalized."""
    feed_forward: float
    activation: float
    """What of `feed_forward` is the output of the activation function."""
    dropout: float


def tokens_of(args: Namespace) -> int:
    """Of a microbatch, on a rank: context parallelism cuts it."""
    return args.seq_length * args.micro_batch_size // args.context_parallel_size


def layer_bytes(args: Namespace, layer: int, on_gpu: bool) -> LayerBytes:
    """Of one layer.

    Args:
        args: Megatron's, of the model.
        layer: counted from 0.
        on_gpu: whether kernels are Transformer Engine's; else megatron's own without fusions.
    """
    terms = _terms(args, is_moe_layer(args, layer), on_gpu)
    full = (
        terms.entrance + terms.attention + terms.scores + terms.middle + terms.norm + terms.feed_forward + terms.dropout
    )
    kept = full - _recomputed(args, is_moe_layer(args, layer), terms)
    # The feed-forward part's gradients: of its output, of its two inner tensors less the one that is done with.
    gradients = terms.middle + max(terms.feed_forward - terms.activation, 0.0)
    forward = terms.entrance + max(terms.norm + terms.feed_forward, terms.norm + terms.attention + terms.scores)
    return LayerBytes(kept, forward, gradients + full - kept)


def kept_by_layers(args: Namespace, layers: range, on_gpu: bool) -> float:
    """Bytes that the layers of one virtual stage keep of one microbatch."""
    if args.recompute_granularity != "full":
        return sum(layer_bytes(args, layer, on_gpu).kept for layer in layers)
    entrance = _input_bytes(args)
    if args.distribute_saved_activations and not args.sequence_parallel:
        entrance /= args.tensor_model_parallel_size
    unit = args.recompute_num_layers or 1
    if args.recompute_method == "uniform":
        return -(-len(layers) // unit) * entrance
    whole = sum(layer_bytes(args, layer, on_gpu).kept for layer in layers[unit:])
    return min(unit, len(layers)) * entrance + whole


def at_work_backward(args: Namespace, layers: range, on_gpu: bool) -> float:
    """Most bytes in the backward pass of one virtual stage's last layers, beside what `kept_by_layers` counts."""
    if not layers:
        return 0.0
    of_last = layer_bytes(args, layers[-1], on_gpu)
    if args.recompute_granularity != "full":
        return of_last.backward
    unit = args.recompute_num_layers or 1
    if args.recompute_method == "block":
        return of_last.backward + (of_last.kept if len(layers) <= unit else 0.0)
    return of_last.backward + sum(layer_bytes(args, layer, on_gpu).kept for layer in layers[-unit:])


def _input_bytes(args: Namespace) -> float:
    """A layer's input: the residual stream, which sequence parallelism cuts."""
    cut = args.tensor_model_parallel_size if args.sequence_parallel else 1
    return tokens_of(args) * args.hidden_size * args.params_dtype.itemsize / cut


def _terms(args: Namespace, moe: bool, on_gpu: bool) -> _Terms:
    tokens, size, residual = tokens_of(args), args.params_dtype.itemsize, _input_bytes(args)
    feed_forward, activation = _experts(args, on_gpu) if moe else _mlp(args, args.ffn_hidden_size, on_gpu)
    scale, scores = tokens * size, _scores(args, on_gpu)
    # Without fusions a norm keeps its input before and after it was scaled.
    norm = residual if on_gpu else 2 * residual
    masks = 2 * residual / size if args.hidden_dropout > 0 else 0.0
    return _Terms(
        entrance=residual,
        attention=norm + scale * _attention(args, repeats=scores > 0) + _statistics(args, tokens),
        scores=scores,
        middle=residual,
        norm=norm,
        feed_forward=scale * feed_forward,
        activation=scale * activation,
        dropout=masks,
    )


def _attention(args: Namespace, repeats: bool) -> float:
    """Elements a token that attention keeps behind its normalized input: queries, keys, values and its output.

    Args:
        args: Megatron's, of the model.
        repeats: whether each head has keys and values of its own, as where no kernel knows grouped queries.
    """
    tp, heads = args.tensor_model_parallel_size, args.num_attention_heads
    if args.multi_latent_attention:
        query = heads * (args.qk_head_dim + args.qk_pos_emb_head_dim)
        value = heads * args.v_head_dim
        latent = 2 * ((args.q_lora_rank or 0) + args.kv_lora_rank) + args.qk_pos_emb_head_dim
        return (2 * query + 2 * value) / tp + latent
    query = heads * args.kv_channels
    key = (args.num_query_groups if args.group_query_attention else heads) * args.kv_channels
    normed = query + key if args.qk_layernorm else 0
    return (2 * query + 2 * (query if repeats else key) + normed) / tp


def _statistics(args: Namespace, tokens: int) -> float:
    """Bytes of the softmax's log-sum-exp, fp32 a token and head."""
    return 4 * tokens * args.num_attention_heads / args.tensor_model_parallel_size


def _scores(args: Namespace, on_gpu: bool) -> float:
    """Bytes of attention's probabilities, where they are kept: everywhere but in fused kernels, which Transformer
    Engine has in half precision."""
    half = args.params_dtype != torch.float32
    if on_gpu and half and args.transformer_impl != "local" and str(args.attention_backend) != "AttnBackend.unfused":
        return 0.0
    each = 4 + (args.params_dtype.itemsize if half else 0)
    pairs = args.micro_batch_size * args.seq_length**2 / args.context_parallel_size
    return each * pairs * args.num_attention_heads / args.tensor_model_parallel_size


def _mlp(args: Namespace, width: int, on_gpu: bool) -> tuple[float, float]:
    """Elements a token inside a feed-forward layer, and of its activation function's output."""
    inner = width / args.tensor_model_parallel_size
    fused = args.bias_swiglu_fusion if args.swiglu else args.bias_gelu_fusion
    # Unfused, a gate is kept after its activation function too, and what it multiplies once more.
    factors = (2 if fused and on_gpu else 4) if is_gated(args) else 1
    return (factors + 1) * inner, inner


def _experts(args: Namespace, on_gpu: bool) -> tuple[float, float]:
    """As `_mlp`, of a mixture of experts whose tokens are spread evenly."""
    tp = args.tensor_model_parallel_size
    etp = args.expert_tensor_parallel_size or tp
    width = (args.moe_ffn_hidden_size or args.ffn_hidden_size) * tp / etp
    inside, activation = _mlp(args, width, on_gpu)
    # With sequence parallelism a rank dispatches its slice of the tokens, and every slot goes to one expert rank.
    slots = args.moe_router_topk / (tp if args.sequence_parallel else 1)
    slots *= etp if args.sequence_parallel else 1
    routed = slots * inside, slots * activation
    shared = _mlp(args, args.moe_shared_expert_intermediate_size or 0, on_gpu)
    dispatched = 2 * slots * (args.moe_latent_size or args.hidden_size)
    return routed[0] + shared[0] + dispatched, routed[1] + shared[1]


def _recomputed(args: Namespace, moe: bool, terms: _Terms) -> float:
    """Bytes that --recompute-granularity selective does not keep."""
    if args.recompute_granularity != "selective":
        return 0.0
    modules = set(args.recompute_modules or ["core_attn"])
    saved = terms.scores if "core_attn" in modules else 0.0
    if ("moe" if moe else "mlp") in modules:
        return saved + terms.norm + terms.feed_forward
    if moe and "moe_act" in modules:
        saved += terms.activation
    return saved
