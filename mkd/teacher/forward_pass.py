"""Forward passes of a frozen teacher over one microbatch or several: joined before the pass, split after it.

A frozen teacher keeps no activations, so its passes may be larger than the student's microbatches: fewer launches, and
larger matrix products. Results of a joined pass differ from those of its microbatches by rounding only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.distributed import ProcessGroup

from mkd.data.batch import KDBatch
from mkd.data.segments import join_segments


@dataclass(frozen=True)
class PassSize:
    """Upper bound of a forward pass."""

    rows: int
    """Rows of one pass; a larger microbatch is a pass of its own."""
    row_tokens: int
    """Tokens of a row in the teacher's tokenizer, on all context-parallel ranks together."""

    def divide(self, batches: Sequence[KDBatch], cp: int) -> list[tuple[KDBatch, ...]]:
        """Divide microbatches into runs of consecutive ones of equal shape, one per forward pass.

        Args:
            batches: this rank's part of each microbatch.
            cp: number of context-parallel ranks.
        """
        runs: list[list[KDBatch]] = []
        rows = 0
        for batch in batches:
            own = self._rows(batch, cp)
            if runs and _form(runs[-1][0]) == _form(batch) and rows + own <= self.rows:
                runs[-1].append(batch)
                rows += own
            else:
                runs.append([batch])
                rows = own
        return [tuple(run) for run in runs]

    def _rows(self, batch: KDBatch, cp: int) -> int:
        """Rows of --seq-length in a microbatch; a packed one has them in one row."""
        if batch.packed is None:
            return batch.tokens.shape[0]
        return -(-batch.tokens.shape[1] * cp // self.row_tokens)


def _form(batch: KDBatch) -> tuple[bool, tuple[int, ...]]:
    return batch.packed is not None, tuple(batch.tokens.shape)


@dataclass(frozen=True)
class ForwardPass:
    """The input of one forward pass, and the microbatches that it consists of."""

    batches: tuple[KDBatch, ...]
    """One or more of equal shape."""
    tokens: Tensor
    """[k b, s/cp] int64; [1, k s/cp] if packed."""
    position_ids: Tensor
    """The same."""
    packed: PackedSeqParams | None
    """Bounds of the segments of all microbatches."""

    @classmethod
    def of(cls, batches: Sequence[KDBatch], cp: int) -> "ForwardPass":
        """Join microbatches, without a wait for the device; a single one is taken as it is.

        Args:
            batches: this rank's part of each microbatch, on the device.
            cp: number of context-parallel ranks.
        """
        first, *others = batches
        if not others:
            return cls((first,), first.tokens, first.position_ids, first.packed)
        dim, packed = 0, None
        if first.packed is not None:
            dim, packed = 1, join_segments([batch.packed for batch in batches], first.tokens.shape[1] * cp)
        tokens, positions = (
            torch.cat(x, dim) for x in zip(*((b.tokens, b.position_ids) for b in batches), strict=True)
        )
        return cls(tuple(batches), tokens, positions, packed)

    def split(self, hidden: Tensor, slices: ProcessGroup | None) -> list[Tensor]:
        """[s/cp, b, H] of each microbatch (or its sequence-parallel slice) from those of the whole pass.

        Args:
            hidden: [s/cp, k b, H], or [k s/cp, 1, H] if packed; a slice of it under sequence parallelism.
            slices: ranks that the sequence is split over, which is collective over them for packed rows: each sends
                slices of other ranks once. None without sequence parallelism.
        """
        count = len(self.batches)
        if count == 1:
            return [hidden]
        if self.packed is None:
            return [part.contiguous() for part in hidden.chunk(count, dim=1)]
        if slices is not None and slices.size() > 1:
            hidden = _slice_each_row(hidden, count, slices)
        return list(hidden.chunk(count))


def _slice_each_row(hidden: Tensor, rows: int, group: ProcessGroup) -> Tensor:
    """From a rank's contiguous part of k rows, one after the other, its slice of each row.

    Rows are cut into one block per rank. A rank holds k consecutive blocks of all k * tp, and needs those whose number
    modulo tp is its own.

    Args:
        hidden: [k s / tp, 1, H] on each of tp ranks.
        rows: k.
        group: the ranks. One all-to-all, in which each rank receives at most as much as it holds.
    """
    rank, size = group.rank(), group.size()
    blocks = hidden.view(rows, -1, *hidden.shape[1:])

    def sent(source: int, target: int) -> list[int]:
        return [block for block in range(rows) if (source * rows + block) % size == target]

    outgoing = [sent(rank, target) for target in range(size)]
    incoming = [len(sent(source, rank)) for source in range(size)]
    order = [block for target in outgoing for block in target]
    ordered = torch.stack([blocks[block] for block in order])
    received = torch.empty_like(ordered)
    dist.all_to_all_single(received, ordered, incoming, [len(blocks) for blocks in outgoing], group=group)
    return received.flatten(0, 1)
