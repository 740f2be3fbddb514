"""Rows are built on the first rank first, and its errors are those of all ranks."""

from collections.abc import Callable

import pytest
import torch.distributed as dist

from mkd.data.packing.row_sets import _first_rank_first
from mkd.errors import MkdDataError


def outcome(rank: int, world_size: int, fails: bool) -> str:
    def build() -> str:
        if fails and dist.get_rank() == 0:
            raise MkdDataError("chats.jsonl: none of its 6 samples can be used")
        return f"rows of rank {dist.get_rank()}"

    try:
        return _first_rank_first(build)
    except MkdDataError as error:
        return str(error)


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_rank_has_its_rows(gloo_pool: Callable, world_size: int) -> None:
    assert gloo_pool(world_size).run(outcome, False) == [f"rows of rank {rank}" for rank in range(world_size)]


def test_an_error_of_the_first_rank_is_raised_on_all(gloo_pool: Callable) -> None:
    assert gloo_pool(2).run(outcome, True) == ["chats.jsonl: none of its 6 samples can be used"] * 2
