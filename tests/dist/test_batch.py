"""check_same_batch: ranks of one model replica that read different microbatches are found out."""

from collections.abc import Callable

import pytest
import torch

from mkd.data.batch import KDBatch
from mkd.data.microbatches import check_same_batch
from mkd.errors import MkdDataError


def verdict(rank: int, world_size: int, odd_rank: int | None, name: str, pairs: bool = False) -> str:
    """This rank's error message; on `odd_rank` one element of one tensor is changed. Four ranks are one group, or pairs
    in two directions, as the context-parallel ranks of a replica and its other ranks.
    """
    tokens = torch.arange(15).view(3, 5)
    parts = {"tokens": tokens, "labels": tokens + 1, "position_ids": tokens % 5, "ce_mask": torch.ones(3, 5)}
    parts["kd_mask"] = torch.ones(3, 5)
    if rank == odd_rank:
        parts[name] = parts[name].clone()
        parts[name][1, 2] = 0
    groups = [torch.distributed.group.WORLD]
    if pairs:
        rows, columns = ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
        groups = [torch.distributed.new_subgroups_by_enumeration(ranks)[0] for ranks in (rows, columns)]
    try:
        check_same_batch(KDBatch(**parts), *groups)
    except MkdDataError as error:
        return str(error)
    return "same"


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_equal_batches(gloo_pool: Callable, world_size: int) -> None:
    assert gloo_pool(world_size).run(verdict, None, "tokens") == ["same"] * world_size


@pytest.mark.parametrize("odd_rank", [0, 2, 3])
@pytest.mark.parametrize("name", ["tokens", "labels", "ce_mask", "kd_mask"])
@pytest.mark.parametrize("pairs", [False, True])
def test_one_rank_that_differs(gloo_pool: Callable, odd_rank: int, name: str, pairs: bool) -> None:
    """All ranks raise the error, so that none waits for the others."""
    for message in gloo_pool(4).run(verdict, odd_rank, name, pairs):
        assert "different tokens" in message and "--data-path" in message
