"""Gradients that are computed in forward, also straight into the fp32 buffer that megatron's optimizer reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class MainGrad:
    """Where the LM head's gradient is accumulated while the loss is computed, before backward."""

    buffer: Tensor
    """fp32, as the weight."""
    upstream: Tensor | float
    """Scalar: the gradient that backward will pass. The sums are multiplied by it beforehand. A number stays one: a
    copy to the device would wait for it."""

    @classmethod
    def of(cls, weight: Tensor, upstream: Tensor | float | None) -> "MainGrad | None":
        """The weight's `main_grad`; None if the upstream gradient is not known, or there is no such fp32 buffer.

        fp16 is left out: its logit gradients are brought into range by a factor that only backward takes out again.
        """
        buffer = getattr(weight, "main_grad", None)
        if upstream is None or buffer is None or buffer.dtype != torch.float32 or weight.dtype == torch.float16:
            return None
        return cls(buffer, upstream)

    def check(self, upstream: Tensor) -> Tensor:
        """1, or NaN if backward passes something else than was said: such gradients must not be used."""
        return torch.where(upstream == self.upstream, 1.0, torch.nan)

    @staticmethod
    def stand_in(weight: Tensor) -> Tensor | None:
        """What autograd gets for the weight: nothing that counts, by the protocol of megatron's fused layers."""
        if getattr(weight, "zero_out_wgrad", False) or not hasattr(weight, "grad_added_to_main_grad"):
            # Also the embedding, whose gradient comes by autograd and is yet to be added by megatron's hook.
            return None
        weight.grad_added_to_main_grad = True  # the hook then leaves the stand-in alone, whatever is in it
        return torch.empty_like(weight)


def keep_gradients(
    ctx: Any,
    gradients: Sequence[Tensor | None],
    scale: Tensor | None,
    inputs: Sequence[Tensor | None],
    main_grad: MainGrad | None,
) -> None:
    """Leave to an autograd function's backward what its forward has computed.

    Args:
        ctx: of the function.
        gradients: of its inputs, None where none is wanted. The second is the LM head's, and None with `main_grad`.
        scale: what they are multiplied by already and backward takes out again; None for nothing.
        inputs: of which they are; their dtypes are those of the results.
        main_grad: where the LM head's gradient has gone; None if it is among the others.
    """
    ctx.save_for_backward(*gradients, scale)
    ctx.dtypes = [None if x is None else x.dtype for x in inputs]
    ctx.main_grad, ctx.weight = main_grad, inputs[1] if main_grad else None


def kept_gradients(ctx: Any, upstream: Tensor) -> list[Tensor | None]:
    """What `keep_gradients` has left, times the upstream scalar, each in the dtype of its input."""
    *gradients, scale = ctx.saved_tensors
    rest = upstream if scale is None else upstream / scale
    if ctx.main_grad:
        rest = ctx.main_grad.check(upstream)
    gradients = [
        # straight into the parameter's dtype: no second fp32 copy of the LM head
        None if g is None else torch.mul(g, rest, out=torch.empty_like(g, dtype=dtype))
        for g, dtype in zip(gradients, ctx.dtypes, strict=True)
    ]
    if ctx.weight is not None:
        gradients[1] = MainGrad.stand_in(ctx.weight)
    return gradients
