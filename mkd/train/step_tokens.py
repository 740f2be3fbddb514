"""Token counts of a whole step: the number by which its gradient is divided."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mkd.data.batch import KDBatch


@dataclass(frozen=True)
class StepTokens:
    """Token counts over all microbatches and all ranks that hold other tokens; fp64 scalars on the batches' device.

    The gradient of a step is divided once, by its supervised tokens (`Objective.divisor`). Where distillation has
    a mask of its own, the factor `kd_scale` of its term turns that division into one by the term's own count.
    """

    ce: Tensor
    """Tokens with cross-entropy."""
    kd: Tensor
    """Tokens with a divergence."""
    chunks: tuple[Tensor, ...] = ()
    """Text chunks with a divergence, per view in `KDBatch.teacher_views`."""
    kd_scale: Tensor = field(init=False)
    """`scale` of the tokens with a divergence; exactly 1 where the masks are equal or one of them is empty."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kd_scale", self.scale(self.kd))

    @classmethod
    def of(cls, batches: Sequence[KDBatch], group: ProcessGroup, cp_rank: int = 0) -> "StepTokens":
        """Count the tokens of a step: one all-reduce of 16 bytes and 8 per view, without a wait of the host.

        Args:
            batches: this rank's microbatches.
            group: the data- and context-parallel ranks.
            cp_rank: rank among the context-parallel ones, each of which holds all text chunks of a microbatch.
        """
        masks = [(batch.ce_mask, batch.kd_mask) for batch in batches]
        counts = torch.stack([torch.stack([m.sum(dtype=torch.float64) for m in pair]) for pair in masks]).sum(dim=0)
        chunks = [[view.chunks if cp_rank == 0 else 0 for view in batch.teacher_views] for batch in batches]
        counts = torch.cat([counts, torch.tensor(chunks, dtype=torch.float64).sum(dim=0).to(counts.device)])
        dist.all_reduce(counts, group=group)
        return cls(counts[0], counts[1], tuple(counts[2:]))

    def scale(self, count: Tensor) -> Tensor:
        """The step's divisor over the count of a term, fp32 scalar; 1 where one of them is 0."""
        divisor = torch.where(self.ce > 0, self.ce, self.kd)
        both = (divisor > 0) & (count > 0)
        return torch.where(both, divisor / count.clamp(min=1.0), 1.0).float()
