"""How many supervised tokens a whole step has: what its terms are divided by."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mkd.data.batch import KDBatch


@dataclass(frozen=True)
class StepTokens:
    """Counts over all microbatches and all ranks that hold other tokens, fp64 scalars on the batches' device.

    The gradient of a step is divided once, by the sum of `divisor` over microbatches and ranks. Where distillation has
    a mask of its own, `kd_scale` in front of its term makes that division one by the term's own count.
    """

    ce: Tensor
    """Tokens with cross-entropy."""
    kd: Tensor
    """Tokens with a divergence."""

    @classmethod
    def of(cls, batches: Sequence[KDBatch], group: ProcessGroup) -> "StepTokens":
        """Count the tokens of a step: one all-reduce of 16 bytes over `group`, nothing that the host waits for.

        Args:
            batches: this rank's microbatches.
            group: the data- and context-parallel ranks.
        """
        masks = [(batch.ce_mask, batch.kd_mask) for batch in batches]
        counts = torch.stack([torch.stack([m.sum(dtype=torch.float64) for m in pair]) for pair in masks]).sum(dim=0)
        dist.all_reduce(counts, group=group)
        return cls(*counts)

    def divisor(self, batch: KDBatch) -> Tensor:
        """One microbatch's share of what the step's gradient is divided by, a scalar: its tokens with cross-entropy, or
        those with a divergence in a step where no token has cross-entropy."""
        return torch.where(self.ce > 0, batch.ce_mask.sum(), batch.kd_mask.sum())

    @property
    def kd_scale(self) -> Tensor:
        """The step's divisor over its tokens with a divergence, fp32 scalar; exactly 1 where the masks are equal, and 1
        where one of them is empty."""
        both = (self.ce > 0) & (self.kd > 0)
        return torch.where(both, self.ce / self.kd.clamp(min=1.0), 1.0).float()
