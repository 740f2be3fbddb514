"""The vocabulary over tensor-parallel ranks: its layout, a rank's shard, and the exchange of token statistics.

Megatron is imported only where hidden states cross several ranks: the losses alone run without it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work


@dataclass(frozen=True)
class PendingGather:
    """An all-gather of token statistics that may still be running."""

    names: tuple[str, ...]
    gathered: Tensor
    """[tp, names, N]"""
    work: Work | None

    def wait(self) -> dict[str, Tensor]:
        """Name -> [tp, N]. On a GPU the stream waits, not the host."""
        if self.work is not None:
            self.work.wait()
        return dict(zip(self.names, self.gathered.unbind(dim=1), strict=True))


@dataclass(frozen=True)
class VocabShard:
    """This rank's columns of the logits: global ids `start` to `start + columns - 1`."""

    group: ProcessGroup | None
    rank: int
    size: int
    """Number of shards, all of the same width."""
    start: int
    columns: int
    """Real columns: those below `true_vocab`. They come first; the padding columns of the shard follow."""
    true_vocab: int

    @classmethod
    def of(cls, width: int, true_vocab: int, group: ProcessGroup | None) -> "VocabShard":
        """The shard of a rank whose logits have `width` columns, padding included.

        Raises:
            ValueError: the true vocabulary is empty or larger than all shards together.
        """
        rank, size = (0, 1) if group is None else (group.rank(), group.size())
        if not 1 <= true_vocab <= width * size:
            raise ValueError(f"true_vocab is {true_vocab}; {size} shards of {width} columns hold 1 to {width * size}")
        start = rank * width
        return cls(group, rank, size, start, min(max(true_vocab - start, 0), width), true_vocab)

    def check_teacher(self, student_width: int, teacher_width: int) -> None:
        """Raise ValueError unless the teacher's shard holds the same real columns as the student's.

        On one rank the two may be padded to different widths. Over several ranks, different widths put the same column
        on different ranks.
        """
        if self.size > 1 and teacher_width != student_width:
            raise ValueError(
                f"the teacher has {teacher_width} vocabulary columns on each of {self.size} ranks and the student "
                f"{student_width}: pad the teacher's head to the student's width before it is cut"
            )
        if teacher_width < self.columns:
            raise ValueError(f"the teacher has {teacher_width} vocabulary columns, true_vocab is {self.true_vocab}")

    def exchange(self, stats: dict[str, Tensor]) -> PendingGather:
        """Start one all-gather of all statistics, name -> [N], over the shards."""
        packed = torch.stack(list(stats.values()))
        if self.size == 1:
            return PendingGather(tuple(stats), packed[None], None)
        gathered = packed.new_empty((self.size * packed.shape[0], packed.shape[1]))
        work = torch.distributed.all_gather_into_tensor(gathered, packed, group=self.group, async_op=True)
        return PendingGather(tuple(stats), gathered.view(self.size, *packed.shape), work)


@dataclass(frozen=True)
class VocabLayout:
    """Layout of the vocabulary, and of the tokens of a loss, over the tensor-parallel group.

    Logits and LM heads have one shard of V/tp columns per rank; rank r holds the global ids r * V/tp and up. Columns of
    ids from `true_vocab` up are padding: their probability is 0 and their gradient exactly 0, whatever they hold.

    Hidden states are [N, H] and equal on all ranks of the group; under sequence parallelism each rank holds [N/tp, H],
    in rank order. Labels, token weights and sparse teachers always cover all N tokens on every rank.
    """

    true_vocab: int
    tp_group: ProcessGroup | None = None
    """None: this rank holds the whole vocabulary."""
    sequence_parallel: bool = False

    @property
    def rank(self) -> int:
        return 0 if self.tp_group is None else self.tp_group.rank()

    @property
    def size(self) -> int:
        return 1 if self.tp_group is None else self.tp_group.size()

    def shard(self, width: int) -> VocabShard:
        """The shard of this rank, whose logits have `width` columns, padding included.

        Raises:
            ValueError: the true vocabulary is empty or larger than all shards together.
        """
        return VocabShard.of(width, self.true_vocab, self.tp_group)

    def gather_hidden(self, hidden: Tensor) -> Tensor:
        """Frozen hidden states of all tokens [N, H]: one all-gather under sequence parallelism, else nothing."""
        if self.size == 1 or not self.sequence_parallel:
            return hidden
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

        return gather_from_sequence_parallel_region(hidden, group=self.tp_group)

    def gather_trained_hidden(self, hidden: Tensor) -> Tensor:
        """Hidden states of all tokens [N, H]; backward sums their gradient over the vocabulary shards.

        The sum is one all-reduce, or one reduce-scatter under sequence parallelism.
        """
        if self.size == 1:
            return hidden
        from megatron.core.tensor_parallel.mappings import (
            copy_to_tensor_model_parallel_region,
            gather_from_sequence_parallel_region,
        )

        if not self.sequence_parallel:
            return copy_to_tensor_model_parallel_region(hidden, group=self.tp_group)
        return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=self.tp_group)
