"""How many tokens a whole step has: what its terms are divided by, and how much text it is."""

from collections.abc import Iterable, Sequence
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
    chunks: tuple[Tensor, ...] = ()
    """Chunks with a divergence, of each side in `KDBatch.others`."""

    @classmethod
    def of(cls, batches: Sequence[KDBatch], group: ProcessGroup, cp_rank: int = 0) -> "StepTokens":
        """Count the tokens of a step: one all-reduce of 16 bytes and 8 a side, nothing that the host waits for.

        Args:
            batches: this rank's microbatches.
            group: the data- and context-parallel ranks.
            cp_rank: rank among the context-parallel ones, each of which knows all chunks of a microbatch.
        """
        masks = [(batch.ce_mask, batch.kd_mask) for batch in batches]
        counts = torch.stack([torch.stack([m.sum(dtype=torch.float64) for m in pair]) for pair in masks]).sum(dim=0)
        chunks = [[other.chunks if cp_rank == 0 else 0 for other in batch.others] for batch in batches]
        counts = torch.cat([counts, torch.tensor(chunks, dtype=torch.float64).sum(dim=0).to(counts.device)])
        dist.all_reduce(counts, group=group)
        return cls(counts[0], counts[1], tuple(counts[2:]))

    def divisor(self, batch: KDBatch) -> Tensor:
        """One microbatch's share of what the step's gradient is divided by, a scalar: its tokens with cross-entropy, or
        those with a divergence in a step where no token has cross-entropy."""
        return torch.where(self.ce > 0, batch.ce_mask.sum(), batch.kd_mask.sum())

    @property
    def kd_scale(self) -> Tensor:
        """Of the tokens with a divergence; exactly 1 where the masks are equal, and 1 where one of them is empty."""
        return self.scale(self.kd)

    def scale(self, count: Tensor) -> Tensor:
        """The step's divisor over the count of a term, fp32 scalar; 1 where one of them is 0."""
        divisor = torch.where(self.ce > 0, self.ce, self.kd)
        both = (divisor > 0) & (count > 0)
        return torch.where(both, divisor / count.clamp(min=1.0), 1.0).float()


@dataclass(frozen=True)
class TextSize:
    """How much text microbatches hold."""

    tokens: int
    """Tokens of text, padding not counted."""
    squares: int
    """Sum over texts of their length squared: what causal attention within each of them costs."""
    places: int
    """Tokens that are computed: text and padding."""

    @classmethod
    def of(cls, batches: Iterable[KDBatch]) -> "TextSize":
        """Of whole microbatches on the host."""
        batches = list(batches)
        lengths = [text.stop - text.start for batch in batches for _, text in batch.segments()]
        places = sum(batch.tokens.numel() for batch in batches)
        return cls(sum(lengths), sum(length * length for length in lengths), places)

    def summed(self, group: ProcessGroup) -> Tensor:
        """[3] int64 on the device, the three in order, summed over ranks that have read other texts: one all-reduce of
        24 bytes, nothing that the host waits for."""
        sizes = torch.tensor([self.tokens, self.squares, self.places]).pin_memory().to("cuda", non_blocking=True)
        dist.all_reduce(sizes, group=group)
        return sizes
