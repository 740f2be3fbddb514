"""This rank's part of the vocabulary, and the one way in which the parts talk to each other."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work


@dataclass(frozen=True)
class Exchange:
    """An all-gather of row statistics that may be under way."""

    names: tuple[str, ...]
    gathered: Tensor
    """[tp, names, rows]"""
    work: Work | None

    def wait(self) -> dict[str, Tensor]:
        """Name -> [tp, rows]. On a GPU the stream waits, not the host."""
        if self.work is not None:
            self.work.wait()
        return dict(zip(self.names, self.gathered.unbind(dim=1), strict=True))


@dataclass(frozen=True)
class VocabShard:
    """Global ids start .. start + columns; shard r is the r-th of equal parts."""

    group: ProcessGroup | None
    rank: int
    size: int
    start: int
    columns: int
    """Real columns: those below the true vocabulary. They come first; the padding columns of the shard follow."""
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

        On one rank the two may be padded to different widths. Cut over several, different widths put the same column
        on different ranks.
        """
        if self.size > 1 and teacher_width != student_width:
            raise ValueError(
                f"the teacher has {teacher_width} vocabulary columns on each of {self.size} ranks and the student "
                f"{student_width}: pad the teacher's head to the student's width before it is cut"
            )
        if teacher_width < self.columns:
            raise ValueError(f"the teacher has {teacher_width} vocabulary columns, true_vocab is {self.true_vocab}")

    def exchange(self, stats: dict[str, Tensor]) -> Exchange:
        """Begin one all-gather of all statistics, name -> [rows], over the shards."""
        packed = torch.stack(list(stats.values()))
        if self.size == 1:
            return Exchange(tuple(stats), packed[None], None)
        gathered = packed.new_empty((self.size * packed.shape[0], packed.shape[1]))
        work = torch.distributed.all_gather_into_tensor(gathered, packed, group=self.group, async_op=True)
        return Exchange(tuple(stats), gathered.view(self.size, *packed.shape), work)
