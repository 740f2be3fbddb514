"""The worker pool itself: results by rank, failures with their traceback, recovery."""

import os
import time
from collections.abc import Callable

import pytest
import torch

from tests.support.dist.pool import Pool, WorkerError


def sum_of_ranks(rank: int, world_size: int, offset: float) -> tuple[int, float, int]:
    total = torch.tensor(rank + offset)
    torch.distributed.all_reduce(total)
    return rank, total.item(), os.getpid()


def fail_on_last(rank: int, world_size: int) -> None:
    if rank == world_size - 1:
        raise KeyError("a planted fault")
    torch.distributed.barrier()


def hang_on_last(rank: int, world_size: int) -> None:
    if rank == world_size - 1:
        time.sleep(60)


def die_on_last(rank: int, world_size: int) -> None:
    if rank == world_size - 1:
        os._exit(7)


def test_results_come_by_rank_from_the_same_processes(gloo_pool: Callable[[int], Pool]) -> None:
    first = gloo_pool(2).run(sum_of_ranks, 0.5)
    second = gloo_pool(2).run(sum_of_ranks, 0.5)
    assert [r[:2] for r in first] == [(0, 2.0), (1, 2.0)]
    assert first == second


@pytest.mark.parametrize(
    "func, message",
    [
        (fail_on_last, r"rank 1 of 2: Traceback[\s\S]*a planted fault"),
        (hang_on_last, r"no answer within 1 s from ranks \[1\]"),
        (die_on_last, r"rank 1 of 2: the process died \(exit code 7\)"),
    ],
)
def test_failure_is_reported_and_the_pool_recovers(func: Callable, message: str) -> None:
    workers = Pool(2)
    try:
        with pytest.raises(WorkerError, match=message):
            workers.run(func, timeout=1.0 if func is hang_on_last else 60.0)
        assert workers.run(sum_of_ranks, 0.0)[1][1] == 1.0
    finally:
        workers.stop()
