"""Which rows the teacher has to read, and on which data-parallel rank: every text once."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from mkd.compat.stopping import WorkerSignals
from mkd.data.batch import KDBatch


class Row(NamedTuple):
    """A row of a data set, and the texts in it."""

    sample: dict[str, Tensor]
    texts: list[tuple[bytes, int]]
    """Key and number of tokens of each."""


class Rows(Dataset):
    """The first rows of several data sets, one set after the other."""

    def __init__(self, sets: Sequence[tuple[Any, int]], true_vocab: int) -> None:
        """Take data sets, and of each how many rows."""
        self._sets, self._true_vocab = [samples for samples, _ in sets], true_vocab
        self._ends = list(accumulate(count for _, count in sets))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Row:
        number = bisect_right(self._ends, index)
        sample = self._sets[number][index - (self._ends[number - 1] if number else 0)]
        batch = KDBatch.from_sample(default_collate([sample]), self._true_vocab)
        return Row(sample, [(key, places.stop - places.start) for key, places in batch.segments()])


def windows(rows: Rows, size: int, rank: int, ranks: int, workers: int) -> Iterator[list[Row]]:
    """This rank's share of the rows, `size` at a time; every rank gets as many windows, of which the last may be empty.

    Args:
        rows: all of them.
        size: rows of a window.
        rank: of `ranks` data-parallel ones.
        ranks: as rank.
        workers: processes that read.
    """
    loader = DataLoader(
        rows,
        batch_size=size,
        sampler=range(rank, len(rows), ranks),
        num_workers=workers,
        collate_fn=list,
        worker_init_fn=_worker,
    )
    own = iter(loader)
    for _ in range(-(-len(rows) // (size * ranks))):
        yield next(own, [])


def _worker(number: int) -> None:
    WorkerSignals().__enter__()


class Ledger:
    """Which texts are stored or somebody's task: the same on all ranks, without a word with the folder."""

    def __init__(self, known: Iterable[bytes], dp: dist.ProcessGroup) -> None:
        """Take the keys that are stored, the same on all ranks, and the data-parallel ranks, which share the rest."""
        self._known, self._dp = set(known), dp
        self.waiting = [0] * dp.size()
        """Of each data-parallel rank: rows that it has to ask its teacher about."""
        self.tokens = self.segments = 0
        """Of all ranks' tasks so far."""

    def claim(self, window: Sequence[Row]) -> tuple[list[Row], set[bytes]]:
        """Of this rank's window the rows with a text that is nobody's yet, and the keys of those texts.

        Collective over the data-parallel ranks.
        """
        everywhere: list[Any] = [None] * self._dp.size()
        dist.all_gather_object(everywhere, [row.texts for row in window], group=self._dp)
        rows, keys = [], set()
        for rank, texts_of_rows in enumerate(everywhere):
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
