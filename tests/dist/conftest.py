"""Fixtures of distributed tests."""

from collections.abc import Callable, Iterator

import pytest

from tests.support.dist.pool import Pool, pool, stop_all


@pytest.fixture(scope="package")
def gloo_pool() -> Iterator[Callable[[int], Pool]]:
    """`gloo_pool(world_size).run(func, *args)`: see `tests.support.dist.pool.Pool.run`."""
    yield pool
    stop_all()
