"""Gradients that are computed in forward, also directly into the fp32 buffer that Megatron's optimizer reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mkd.config.values import LossSpec
from mkd.losses.inputs import TokenWeights

FP16_HEADROOM = 1024.0
"""The largest possible logit gradient is scaled to about this before it is rounded to fp16, whose range is 6e-8 to
65504."""


@dataclass(frozen=True)
class MainGrad:
    """The buffer in which the LM head's gradient is accumulated while the loss is computed, before backward."""

    buffer: Tensor
    """fp32, in the shape of the weight."""
    upstream: Tensor | float
    """Scalar: the gradient that backward will pass, by which the sums are multiplied in advance. A number is not moved
    to the device: the copy would synchronize."""

    @classmethod
    def of(cls, weight: Tensor, upstream: Tensor | float | None) -> "MainGrad | None":
        """The weight's `main_grad`; None if the upstream gradient is not known or there is no such fp32 buffer.

        fp16 is excluded: its logit gradients are scaled into range by a factor that only backward divides out.
        """
        buffer = getattr(weight, "main_grad", None)
        if upstream is None or buffer is None or buffer.dtype != torch.float32 or weight.dtype == torch.float16:
            return None
        return cls(buffer, upstream)

    def check(self, upstream: Tensor) -> Tensor:
        """1, or NaN if backward passes another gradient than announced: such gradients must not be used."""
        return torch.where(upstream == self.upstream, 1.0, torch.nan)

    @staticmethod
    def placeholder(weight: Tensor) -> Tensor | None:
        """The weight's gradient for autograd: without meaning, by the protocol of Megatron's fused layers."""
        if getattr(weight, "zero_out_wgrad", False) or not hasattr(weight, "grad_added_to_main_grad"):
            # Also a tied embedding, whose own gradient comes by autograd and is added by Megatron's hook later.
            return None
        weight.grad_added_to_main_grad = True  # the hook then ignores the placeholder
        return torch.empty_like(weight)


def fp16_scale(tokens: TokenWeights, spec: LossSpec) -> Tensor:
    """A power of two (scalar, fp32) that brings the largest weight of a logit gradient to about `FP16_HEADROOM`.

    The gradient is computed before the loss scale of mixed-precision training is known, and most q_j of a large
    vocabulary are below fp16's smallest number.
    """
    weights = [(tokens.ce_weight, 1.0), (tokens.kd_weight, spec.scale / spec.temperature)]
    bound = torch.stack([w.abs().amax() * times for w, times in weights if w is not None]).sum()
    return torch.ldexp(torch.full_like(bound, FP16_HEADROOM), -torch.frexp(bound).exponent)


def keep_gradients(
    ctx: Any,
    gradients: Sequence[Tensor | None],
    scale: Tensor | None,
    inputs: Sequence[Tensor | None],
    main_grad: MainGrad | None,
) -> None:
    """Save the gradients that an autograd function's forward has computed for its backward.

    Args:
        ctx: context of the function.
        gradients: one per input, None where none is needed. The second is the LM head's, and None with `main_grad`.
        scale: factor that they carry and that backward divides out; None for 1.
        inputs: the differentiable inputs; their dtypes are those of the results.
        main_grad: holds the LM head's gradient; None if it is among the others.
    """
    ctx.save_for_backward(*gradients, scale)
    ctx.dtypes = [None if x is None else x.dtype for x in inputs]
    ctx.main_grad, ctx.weight = main_grad, inputs[1] if main_grad else None


def kept_gradients(ctx: Any, upstream: Tensor) -> list[Tensor | None]:
    """The gradients that `keep_gradients` has saved times the upstream scalar, each in the dtype of its input."""
    *gradients, scale = ctx.saved_tensors
    rest = upstream if scale is None else upstream / scale
    if ctx.main_grad:
        rest = ctx.main_grad.check(upstream)
    gradients = [
        # directly into the parameter's dtype: no second fp32 copy of the LM head
        None if g is None else torch.mul(g, rest, out=torch.empty_like(g, dtype=dtype))
        for g, dtype in zip(gradients, ctx.dtypes, strict=True)
    ]
    if ctx.weight is not None:
        gradients[1] = MainGrad.placeholder(ctx.weight)
    return gradients
