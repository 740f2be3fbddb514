"""Megatron's fused weight gradients: straight into the fp32 buffer that its optimizer reads."""

from dataclasses import dataclass

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
