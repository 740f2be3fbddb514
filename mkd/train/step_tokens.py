"""Token counts and weights of a whole step: the number by which its gradient is divided."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mkd.data.batch import KDBatch


@dataclass(frozen=True)
class StepTokens:
    """Sums over all microbatches and all ranks that hold other tokens; fp64 scalars on the batches' device.

    The gradient of a step is divided once, by the whole number of its supervised tokens (`Objective.divisor`), because
    Megatron counts in integers. The factors `ce_scale` and `kd_scale` of the two terms turn that division into one by
    the sum of the term's own weights.
    """

    ce: Tensor
    """Sum of the weights of cross-entropy: the number of tokens with it, unless messages have fractional weights."""
    kd: Tensor
    """Sum of the weights of the divergence."""
    chunks: tuple[Tensor, ...] = ()
    """Sum of the weights of text chunks with a divergence, per view in `KDBatch.teacher_views`."""
    ce_tokens: Tensor | None = None
    """Tokens with cross-entropy; None: all weights are 0 or 1."""
    kd_tokens: Tensor | None = None
    """Tokens with a divergence."""
    divisor: Tensor = field(init=False)
    """The number that the step's gradient is divided by: tokens with cross-entropy, or with a divergence if there are
    none."""
    ce_scale: Tensor = field(init=False)
    """`scale` of the weights of cross-entropy; exactly 1 where all weights are 0 or 1, or all are 0."""
    kd_scale: Tensor = field(init=False)
    """`scale` of the weights of the divergence; exactly 1 where the masks are equal and 0 or 1, or one of them is
    empty."""

    def __post_init__(self) -> None:
        ce = self.ce if self.ce_tokens is None else self.ce_tokens
        kd = self.kd if self.kd_tokens is None else self.kd_tokens
        object.__setattr__(self, "divisor", torch.where(ce > 0, ce, kd))
        object.__setattr__(self, "ce_scale", self.scale(self.ce))
        object.__setattr__(self, "kd_scale", self.scale(self.kd))

    @classmethod
    def of(cls, batches: Sequence[KDBatch], group: ProcessGroup, cp_rank: int = 0) -> "StepTokens":
        """Sum over a step: one all-reduce of 32 bytes and 8 per view, without a wait of the host.

        Args:
            batches: this rank's microbatches.
            group: the data- and context-parallel ranks.
            cp_rank: rank among the context-parallel ones, each of which holds all text chunks of a microbatch.
        """
        masks = [(b.ce_mask, b.kd_mask, b.ce_mask != 0, b.kd_mask != 0) for b in batches]
        counts = torch.stack([torch.stack([m.sum(dtype=torch.float64) for m in four]) for four in masks]).sum(dim=0)
        chunks = [[view.weight_of_chunks if cp_rank == 0 else 0 for view in batch.teacher_views] for batch in batches]
        counts = torch.cat([counts, torch.tensor(chunks, dtype=torch.float64).sum(dim=0).to(counts.device)])
        dist.all_reduce(counts, group=group)
        return cls(counts[0], counts[1], tuple(counts[4:]), counts[2], counts[3])

    def scale(self, total: Tensor) -> Tensor:
        """The step's divisor over the sum of a term's weights, fp32 scalar; 1 where one of them is 0."""
        both = (self.divisor > 0) & (total > 0)
        return torch.where(both, self.divisor / torch.where(total > 0, total, 1.0), 1.0).float()
