"""The weight of the router losses of a student with experts (load balancing, z-loss) in the gradient of a step.

Megatron adds to the gradient a sum over all tokens of text, whatever their masks, and divides the whole gradient of the
step by its number of supervised tokens. Here the sum is multiplied by supervised tokens / tokens of text, so that a
router loss is the mean over the text, with any mask. If every token of text is supervised, the factor is exactly 1.
Definition: docs/losses.md, "Router losses".
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mkd.data.batch import KDBatch


def scale_router_losses(
    model: nn.Module | list[nn.Module], batches: Sequence[KDBatch], group: ProcessGroup, *, plain: bool
) -> None:
    """Set the factor of the router losses for the next training step. Does nothing for a dense model.

    Args:
        model: the student's chunk or chunks on this rank. Megatron's schedules read the config of the first.
        batches: this rank's part of the step's microbatches, on its device.
        group: the data- and context-parallel ranks. Collective: one all-reduce of 24 bytes, without a wait of the host.
        plain: the gradient is divided by the tokens with cross-entropy even if there is none (a run without a teacher).
    """
    config = get_model_config(model[0] if isinstance(model, list) else model)
    if config.num_moe_experts is None:
        return
    factor = router_loss_factor(batches, group, plain=plain)

    def scale() -> Tensor:
        # A new tensor per call: Megatron keeps the first one and overwrites it.
        ones = torch.ones(1, device=factor.device)
        return factor * (ones if config.grad_scale_func is None else config.grad_scale_func(ones))

    config.moe_grad_scale_func = scale


def router_loss_factor(batches: Sequence[KDBatch], group: ProcessGroup, *, plain: bool) -> Tensor:
    """Divisor of the step's gradient / tokens of text of the step; [1] fp32, equal on all ranks. See
    `scale_router_losses`."""
    counts = torch.stack([_counts(batch) for batch in batches]).sum(dim=0)
    dist.all_reduce(counts, group=group)
    ce, kd, text = counts
    divisor = ce if plain else torch.where(ce > 0, ce, kd)
    # Megatron divides by 1 in a step without a supervised token.
    return (divisor.clamp(min=1.0) / text.clamp(min=1.0)).float().view(1)


def _counts(batch: KDBatch) -> Tensor:
    """[3] fp64: tokens with cross-entropy, tokens with a divergence, tokens of text."""
    text = torch.ones_like(batch.ce_mask) if batch.padding is None else ~batch.padding
    return torch.stack([(mask != 0).sum(dtype=torch.float64) for mask in (batch.ce_mask, batch.kd_mask, text)])
