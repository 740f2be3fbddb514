"""The amount of text in a step's microbatches."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mkd.data.batch import KDBatch


@dataclass(frozen=True)
class TextSize:
    """Amount of text in microbatches."""

    tokens: int
    """Tokens of text, padding not counted."""
    squares: int
    """Sum over texts of their length squared, which the cost of causal attention is proportional to."""
    positions: int
    """Tokens that are computed: text and padding."""

    @classmethod
    def of(cls, batches: Iterable[KDBatch]) -> "TextSize":
        """Measure whole microbatches on the host."""
        batches = list(batches)
        lengths = [text.stop - text.start for batch in batches for _, text in batch.segments()]
        positions = sum(batch.tokens.numel() for batch in batches)
        return cls(sum(lengths), sum(length * length for length in lengths), positions)

    def summed(self, group: ProcessGroup) -> Tensor:
        """[3] int64 on the device, the three fields summed over ranks that read other texts. Communication: one
        all-reduce of 24 bytes; the host does not wait for it."""
        sizes = torch.tensor([self.tokens, self.squares, self.positions]).pin_memory().to("cuda", non_blocking=True)
        dist.all_reduce(sizes, group=group)
        return sizes
