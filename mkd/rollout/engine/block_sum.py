"""Outputs of attention and of the MLP in forward passes over one token per text.

Such a pass computes few values with many kernels, each of which lasts a few microseconds. After a row-parallel linear
layer these are an all-reduce, the addition to the residual stream and the norm in front of the next linear layer. Here
they are one kernel: a rank writes the output of its own inputs into memory that all ranks of the host read.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.nn import functional

from mkd.models.parameter_sync import finish_parameter_sync

_LINEARS = ("RowParallelLinear", "TERowParallelLinear")
_NORMS = ("RMSNorm", "TELayerNormColumnParallelLinear")
"""Names of the classes of norms, those of linear layers with a norm of their own included."""
_BUFFERS = 2
"""Outputs that ranks read: attention's and the MLP's, which take turns."""


def add_outputs_reference(
    partials: Sequence[Tensor], residual: Tensor, norm: tuple[Tensor, float, bool]
) -> tuple[Tensor, Tensor]:
    """The sum of the outputs of all ranks, added to the residual stream, and its norm: the definition.

    Args:
        partials: [R, H] output of each rank, of its own inputs.
        residual: [R, 1, H].
        norm: [H] weight of an RMSNorm, its epsilon, and True if 1 is added to the weight.

    Returns:
        ([R, 1, H] residual stream, [R, 1, H] its norm). Sums are rounded to the dtype of the residual stream, norms
        are computed in fp32.
    """
    weight, eps, is_zero_centered = norm
    total = sum(partial.float() for partial in partials).to(residual.dtype)
    hidden = residual + total.view_as(residual)
    values = hidden.float()
    scale = torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)
    return hidden, (values * scale * (weight.float() + is_zero_centered)).to(residual.dtype)


@dataclass(frozen=True)
class _Output:
    """A row-parallel linear layer of a transformer layer, the addition of its output, and what reads the sum."""

    linear: nn.Module
    layer: TransformerLayer
    addition: str
    """Name of the layer's function that adds the output."""
    norm: nn.Module
    """The next norm, or the linear layer that it is a part of."""


def _outputs(chunk: GPTModel) -> Iterator[_Output]:
    """The outputs of all layers of a model on one pipeline stage, in their order."""
    layers = chunk.decoder.layers
    for number, layer in enumerate(layers):
        norm = _norm_of(layer.pre_mlp_layernorm, layer.mlp.linear_fc1)
        yield _Output(layer.self_attention.linear_proj, layer, "self_attn_bda", norm)
        if number + 1 < len(layers):
            following = layers[number + 1]
            norm = _norm_of(following.input_layernorm, following.self_attention.linear_qkv)
        else:
            norm = chunk.decoder.final_layernorm
        yield _Output(layer.mlp.linear_fc2, layer, "mlp_bda", norm)


def _norm_of(norm: nn.Module, linear: nn.Module) -> nn.Module:
    return linear if isinstance(norm, IdentityOp) else norm


def reason_against_block_sums(chunk: nn.Module) -> str | None:
    """The reason for which the outputs of a model's layers stay as they are; None if `BlockSums` computes them.

    Args:
        chunk: all layers of the model, without wrappers.
    """
    if not isinstance(chunk, GPTModel):
        return f"the model is a {type(chunk).__name__}"
    config = chunk.config
    if config.add_bias_linear or config.fp32_residual_connection or config.normalization != "RMSNorm":
        return "layers have biases, LayerNorm or a residual stream in fp32"
    for layer in chunk.decoder.layers:
        parts = type(layer), type(layer.self_attention), type(layer.mlp)
        if parts != (TransformerLayer, SelfAttention, MLP) or not isinstance(layer.cross_attention, IdentityOp):
            return f"layer {layer.layer_number} consists of {', '.join(part.__name__ for part in parts)}"
    for output in _outputs(chunk):
        for module, names in ((output.linear, _LINEARS), (output.norm, _NORMS)):
            if type(module).__name__ not in names or "forward" in vars(module):
                return f"layer {output.layer.layer_number} has a {type(module).__name__}"
            if module._forward_hooks:
                return f"adapters or factors change a {type(module).__name__}"
        bias = getattr(output.linear, "bias", None)  # attention's may have one beside an MLP without
        if bias is not None and bias.numel() > 0:
            return f"layer {output.layer.layer_number} has a {type(output.linear).__name__} with a bias"
        if getattr(output.layer, output.addition) is not get_bias_dropout_add:
            return f"layer {output.layer.layer_number} adds outputs in a way of its own"
    return None


@dataclass
class BlockSums:
    """Computes the outputs of layers, and the norms of their sums, inside Megatron's modules."""

    rank: int
    partials: tuple[tuple[Tensor, ...], ...]
    """Outputs that take turns; of each, [R, H] memory of every rank."""
    flags: tuple[Tensor, ...]
    """See `add_outputs_triton`."""
    _normed: Tensor | None = field(default=None, init=False)
    """[R, 1, H] norm of the last sum."""

    @classmethod
    def of(cls, memory: Sequence[Tensor], rank: int, shape: tuple[int, int], dtype: torch.dtype) -> "BlockSums":
        """Sums of outputs of a shape [R, H].

        Args:
            memory: [at least `bytes_of`] uint8 zeros of each rank.
            rank: this rank.
            shape: R and H.
            dtype: of the residual stream.
        """
        size = shape[0] * shape[1] * dtype.itemsize
        parts = [[one[i * size : (i + 1) * size].view(dtype).view(shape) for one in memory] for i in range(_BUFFERS)]
        flags = [one[_BUFFERS * size :].view(torch.int32).view(shape[0], len(memory)) for one in memory]
        return cls(rank, tuple(tuple(part) for part in parts), tuple(flags))

    @staticmethod
    def bytes_of(shape: tuple[int, int], dtype: torch.dtype, ranks: int) -> int:
        """Bytes of each rank."""
        return _BUFFERS * shape[0] * shape[1] * dtype.itemsize + shape[0] * ranks * torch.int32.itemsize

    def changes(self, chunk: GPTModel) -> Iterator[tuple[nn.Module, str, Callable[..., Any]]]:
        """(module, attribute, value) of a model for which `reason_against_block_sums` is None."""
        for number, output in enumerate(_outputs(chunk)):
            partials = self.partials[number % _BUFFERS]
            yield output.linear, "forward", _product(output.linear, partials[self.rank])
            yield output.layer, output.addition, self._addition(partials, output.norm)
            yield output.norm, "forward", self._after_norm(output.norm)

    def _addition(self, partials: Sequence[Tensor], norm: nn.Module) -> Callable[..., Any]:
        """The function that takes the place of `get_bias_dropout_add`."""
        fused = hasattr(norm, "layer_norm_weight")
        weight = norm.layer_norm_weight if fused else norm.weight
        options = weight.detach(), norm.eps, bool(getattr(norm, "zero_centered_gamma", False))

        @torch.no_grad()
        def add(output: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
            finish_parameter_sync(norm)
            if residual.is_cuda:
                from mkd.rollout.engine.block_sum_kernel import add_outputs_triton

                hidden, self._normed = add_outputs_triton(partials, self.flags, self.rank, residual, options)
            else:
                hidden, self._normed = add_outputs_reference(partials, residual, options)
            return hidden

        return lambda training, fusion: add

    def _after_norm(self, norm: nn.Module) -> Callable[[Tensor], Any]:
        """The forward method of a norm whose output is known, or of the linear layer that it is a part of."""
        if not hasattr(norm, "layer_norm_weight"):
            return lambda hidden: self._normed
        bias = norm.bias if norm.use_bias else None
        return lambda hidden: (functional.linear(self._normed, norm.weight, bias), None)


def _product(linear: nn.Module, partial: Tensor) -> Callable[[Tensor], tuple[Tensor, None]]:
    """The forward method of a row-parallel linear layer that writes the output of this rank's inputs to memory."""

    def forward(values: Tensor) -> tuple[Tensor, None]:
        torch.mm(values.flatten(0, -2), linear.weight.detach().t(), out=partial)
        return partial, None

    return forward
