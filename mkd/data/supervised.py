"""The supervised tokens of a microbatch: those that enter LM heads, losses, and the signals that teachers keep or send.

A token is supervised if its cross-entropy or its divergence has a weight. The others (prompts, padding) have a weight
of 0 in both terms: their logits have no effect, so none are computed. Their number is known when the batch is made, on
the host, and no collective or copy waits for the device to learn it.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

NEARLY_ALL = 0.95
"""Above this share of supervised tokens, all tokens of a microbatch are used: a copy of the rows would save nothing.
Text without masks therefore has the numbers of a loss over all tokens, to the last bit."""


@dataclass(frozen=True)
class SupervisedTokens:
    """The supervised tokens among the [s * b] tokens of hidden states, sequence first as in Megatron.

    All tensor-parallel ranks have the same ones. Under sequence parallelism each holds the hidden states of one of tp
    equal parts of the tokens, with unequal numbers of supervised ones; every rank has the number of each part.
    """

    mask: Tensor
    """[b, s/cp] bool, on the host."""
    whole: Tensor
    """[b, s] bool, on the host: the mask of the whole microbatch."""
    index: Tensor
    """[M] int64 numbers of the supervised tokens among [s/cp * b], ascending."""

    @classmethod
    def of(cls, *weights: Tensor) -> "SupervisedTokens | None":
        """Tokens of a whole microbatch on the host with a weight other than 0; None if nearly all have one.

        Args:
            weights: [b, s] each.
        """
        mask = torch.stack([weight != 0 for weight in weights]).any(dim=0)
        return None if int(mask.sum()) > NEARLY_ALL * mask.numel() else cls(mask, mask, _index(mask))

    def cp_slice(self, positions: Tensor) -> "SupervisedTokens":
        """Those of a context-parallel rank, which holds these positions [s/cp] of each row."""
        mask = self.mask.index_select(1, positions)
        return replace(self, mask=mask, index=_index(mask))

    def to_device(self) -> "SupervisedTokens":
        """The same with `index` on the current device."""
        return replace(self, index=self.index.to("cuda", non_blocking=True))

    @property
    def share(self) -> float:
        """Supervised tokens / tokens."""
        return len(self.index) / max(self.mask.numel(), 1)

    def counts(self, parts: int) -> list[int]:
        """The number of supervised tokens in each of `parts` equal parts of all tokens."""
        return self.mask.t().reshape(parts, -1).sum(dim=1).tolist()

    def part(self, rank: int, parts: int) -> tuple[slice, Tensor]:
        """(range of one part's tokens in `index`, their numbers [m] inside the part)."""
        if parts == 1:
            return slice(0, len(self.index)), self.index
        counts = self.counts(parts)
        first = sum(counts[:rank])
        inside = slice(first, first + counts[rank])
        return inside, self.index[inside] - rank * (self.mask.numel() // parts)

    def take(self, hidden: Tensor, rank: int = 0, parts: int = 1) -> Tensor:
        """[m, H] supervised tokens of one part's hidden states [N / parts, H]."""
        return hidden.index_select(0, self.part(rank, parts)[1])

    def gather(self, taken: Tensor, group: ProcessGroup) -> Tensor:
        """[M, H] from what each rank of the group has taken of its part.

        One all-gather, in which each rank sends as many tokens as the part with most: at most those of a gather of all
        tokens.
        """
        counts = self.counts(group.size())
        most = max(counts)
        if most == 0:
            return taken
        sent = taken.new_empty((most, *taken.shape[1:]))
        sent[: len(taken)] = taken
        gathered = taken.new_empty((group.size() * most, *taken.shape[1:]))
        dist.all_gather_into_tensor(gathered, sent, group=group)
        return torch.cat([gathered[rank * most : rank * most + count] for rank, count in enumerate(counts)])

    def spread(self, values: Tensor, rank: int = 0, parts: int = 1) -> Tensor:
        """[N / parts, ...] from values [m, ...] of one part's supervised tokens, 0 elsewhere."""
        _, own = self.part(rank, parts)
        return values.new_zeros((self.mask.numel() // parts, *values.shape[1:])).index_copy_(0, own, values)


def _index(mask: Tensor) -> Tensor:
    """[b, s] bool -> [M] numbers of its tokens among [s * b]."""
    return mask.t().reshape(-1).nonzero().squeeze(1)
