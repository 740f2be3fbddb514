"""Process groups and collectives for tools and jobs that read or write folders together."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from mkd.errors import MkdError


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone: megatron needs one to save and load checkpoints."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def all_ranks() -> Iterator[tuple[int, int]]:
    """(rank, number of ranks) of the existing process group, of torchrun's processes, or of this process alone."""
    if dist.is_initialized():
        yield dist.get_rank(), dist.get_world_size()
    elif int(os.environ.get("WORLD_SIZE", "1")) == 1:
        with one_rank():
            yield 0, 1
    else:
        dist.init_process_group("gloo")
        try:
            yield dist.get_rank(), dist.get_world_size()
        finally:
            dist.destroy_process_group()


def gather_objects(value: Any) -> list[Any]:
    """The value of every rank, by rank. Collective over all ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def run_on_all_ranks(action: Callable[[], None]) -> list[str | None]:
    """Run `action` on this rank and return the error of every rank, None where it succeeded.

    Collective over all ranks: a rank that fails takes part in the exchange, so no rank waits for one that is gone.
    """
    problem = None
    try:
        action()
    except (MkdError, OSError) as error:
        problem = str(error)
    return gather_objects(problem)
