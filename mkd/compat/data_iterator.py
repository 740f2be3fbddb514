"""Patches of Megatron's data iterators and loaders."""

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any


class _Peekable:
    """An iterator whose next items can be read without advancing it."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator, self._peeked = iterator, deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._peeked.popleft() if self._peeked else next(self._iterator)

    def peek(self, count: int) -> list[Any]:
        """The next items; fewer at the end."""
        self._peeked.extend(islice(self._iterator, max(count - len(self._peeked), 0)))
        return list(islice(self._peeked, count))


def peek(iterator: Any, count: int) -> list[Any]:
    """The next samples of one of megatron's data iterators; none for any other iterator.

    megatron-core 0.19 replays a suspicious step with the samples that were read from its `RerunDataIterator`. Peeked
    samples must not be among them, so peeking happens below it.
    """
    from megatron.core.rerun_state_machine import RerunDataIterator

    if not isinstance(iterator, RerunDataIterator):
        return []
    if not isinstance(iterator.iterable, _Peekable):
        iterator.iterable = _Peekable(iterator.iterable)
    return iterator.iterable.peek(count)


def keep_random_state() -> None:
    """Let data loaders have random numbers of their own.

    torch's loaders take a seed for their workers from the default random state of the CPU when an iterator begins. On
    CPU that is also the state of dropout, and a resumed job begins its iterators after it has read the state.
    """
    import torch
    from megatron.training import training

    build = training.build_pretraining_data_loader

    def build_with_generator(dataset: Any, consumed: int) -> Any:
        loader = build(dataset, consumed)
        if loader is not None:
            loader.generator = torch.Generator()
        return loader

    training.build_pretraining_data_loader = build_with_generator


def allow_finished_jobs() -> None:
    """Build a loader without samples for a job that has made all its steps, so that it evaluates and ends.

    megatron-core 0.19 asserts that samples are left. Its own training sets have more than a job reads; mkd's rows have
    exactly as many (`mkd.data.packing.row_sets`).
    """
    from megatron.training import training
    from torch.utils.data import DataLoader

    build = training.build_pretraining_data_loader

    def build_or_empty(dataset: Any, consumed: int) -> Any:
        args = training.get_args()
        is_finished = dataset is not None and args.iteration >= args.train_iters
        # Validation and test sets always have samples left.
        return DataLoader([]) if is_finished and consumed >= len(dataset) else build(dataset, consumed)

    training.build_pretraining_data_loader = build_or_empty
