"""The packed rows that a cache job reads, and the assignment of their texts to data-parallel ranks, each text once."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from mkd.compat.stopping import WorkerSignals
from mkd.data.batch import KDBatch


class TextRow(NamedTuple):
    """A packed row and the texts in it."""

    sample: dict[str, Tensor]
    texts: list[tuple[bytes, int]]
    """Key and number of tokens of each."""


class RowDataset(Dataset):
    """The first rows of several datasets, dataset after dataset."""

    def __init__(self, sets: Sequence[tuple[Any, int]], true_vocab: int) -> None:
        """Concatenate datasets, each with the number of its rows to use."""
        self._sets, self._true_vocab = [samples for samples, _ in sets], true_vocab
        self._ends = list(accumulate(count for _, count in sets))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> TextRow:
        number = bisect_right(self._ends, index)
        sample = self._sets[number][index - (self._ends[number - 1] if number else 0)]
        batch = KDBatch.from_sample(default_collate([sample]), self._true_vocab)
        return TextRow(sample, [(key, positions.stop - positions.start) for key, positions in batch.segments()])


def windows(rows: RowDataset, size: int, rank: int, ranks: int, workers: int) -> Iterator[list[TextRow]]:
    """Every `ranks`-th row, `size` at a time. All ranks get equally many windows; the last ones may be empty.

    Args:
        rows: all rows.
        size: rows per window.
        rank: this data-parallel rank.
        ranks: number of data-parallel ranks.
        workers: reader processes.
    """
    loader = DataLoader(
        rows,
        batch_size=size,
        sampler=range(rank, len(rows), ranks),
        num_workers=workers,
        collate_fn=list,
        worker_init_fn=_install_worker_signals,
    )
    own = iter(loader)
    for _ in range(-(-len(rows) // (size * ranks))):
        yield next(own, [])


def _install_worker_signals(worker: int) -> None:
    WorkerSignals().__enter__()


class Ledger:
    """Keys of the texts that are stored or assigned to a rank; identical on all ranks, without reading the folder."""

    def __init__(self, known: Iterable[bytes], dp: dist.ProcessGroup) -> None:
        """Start from the stored texts.

        Args:
            known: keys of the stored texts, the same on all ranks.
            dp: data-parallel ranks, which divide the other texts among them.
        """
        self._known, self._dp = set(known), dp
        self.waiting = [0] * dp.size()
        """Rows per data-parallel rank that its teacher has not run on yet."""
        self.tokens = self.segments = 0
        """Tokens and texts assigned so far, over all ranks."""

    def claim(self, window: Sequence[TextRow]) -> tuple[list[TextRow], set[bytes]]:
        """Assign the unknown texts of this rank's window to this rank.

        A text in the windows of several ranks is assigned to the first. Collective over the data-parallel ranks.

        Returns:
            The rows with a newly assigned text, and the keys of those texts.
        """
        gathered: list[Any] = [None] * self._dp.size()
        dist.all_gather_object(gathered, [row.texts for row in window], group=self._dp)
        rows, keys = [], set()
        for rank, texts_of_rows in enumerate(gathered):
            for number, texts in enumerate(texts_of_rows):
                new = {key: length for key, length in texts if key not in self._known}
                if not new:
                    continue
                self._known.update(new)
                self.waiting[rank] += 1
                self.segments += len(new)
                self.tokens += sum(new.values())
                if rank == self._dp.rank():
                    rows.append(window[number])
                    keys.update(new)
        return rows, keys
