"""The microbatches of a step, read from collated samples, and compared between ranks."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mkd.data.batch import TEACHER_VIEWS, KDBatch
from mkd.errors import MkdDataError


def next_microbatches(
    iterator: Iterator[Mapping[str, Tensor]],
    count: int,
    true_vocab: int,
    micro_batch_size: int | None = None,
    length_multiple: int | None = None,
) -> list[KDBatch]:
    """The next `count` microbatches, whole and on the host.

    Args:
        iterator: collated samples, see `KDBatch.from_sample`.
        count: microbatches.
        true_vocab: see `KDBatch.from_sample`.
        micro_batch_size: required number of rows; None for any.
        length_multiple: trim unpacked rows to the longest text of each microbatch, rounded up to a multiple of it; None
            leaves them whole.

    Raises:
        MkdDataError: see `KDBatch.from_sample`; or a microbatch has another number of rows.
    """
    batches = []
    for number in range(count):
        sample = next(iterator)
        rows = sample["tokens"].shape[0]
        if micro_batch_size is not None and rows != micro_batch_size:
            raise MkdDataError(
                f"the data loader gives {rows} samples at a time, the schedule expects {micro_batch_size}: correct "
                "--micro-batch-size or --eval-micro-batch-size"
            )
        if length_multiple is not None:
            sample = _without_padding(sample, length_multiple)
        batches.append(replace(KDBatch.from_sample(sample, true_vocab), number=number))
    return batches


def _without_padding(sample: Mapping[str, Any], length_multiple: int) -> dict[str, Any]:
    """An unpacked sample trimmed to its longest text, each view by itself."""
    if "length" not in sample:
        return dict(sample)

    def longest(view: Mapping[str, Any]) -> int:
        return -(-int(view["length"].max()) // length_multiple) * length_multiple

    def trim(view: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value[:, : longest(view)] if value.dim() > 1 else value for name, value in view.items()}

    views = [
        {**trim(view), "student_chunk": view["student_chunk"][:, : longest(sample)]}
        for view in sample.get(TEACHER_VIEWS, ())
    ]
    return {**trim({name: value for name, value in sample.items() if name != TEACHER_VIEWS}), TEACHER_VIEWS: views}


def check_same_batch(batch: KDBatch, *groups: dist.ProcessGroup) -> None:
    """Raise MkdDataError unless every rank of one model replica has read the same microbatch.

    Each rank reads the data itself, and ranks that read different tokens would train on garbage with a plausible loss.

    Args:
        batch: the whole microbatch.
        groups: groups that together connect all ranks of this replica: its tensor- and pipeline-parallel ranks, and its
            context-parallel ranks. Communication: two all-reduces of 8 bytes in each.
    """
    low = batch.content_hash().to("cuda")
    high = low.clone()
    for group in groups:
        dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
        dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    if low.item() != high.item():
        raise MkdDataError(
            "ranks of one model replica read different tokens: make --data-path and --data-cache-path show the same "
            "files on every node, and remove a stale index cache"
        )
