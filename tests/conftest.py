"""Fixtures and markers of all tests."""

import gc
import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    # Triton's kernels run in its interpreter. Triton reads this when it is imported; workers inherit it.
    os.environ.setdefault("TRITON_INTERPRET", "1")

import mkd.cpu

if mkd.cpu.wanted():
    mkd.cpu.activate()  # before any test module imports megatron

from tests.support.poison import poisoned_memory
from tests.support.quick_megatron import make_quick

make_quick()
gc.disable()  # until pytest_collection_finish: imports leave no garbage


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device."""
    if not mkd.cpu.wanted():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Leave what was imported and collected to no later collection of garbage."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def poisoned() -> Iterator[None]:
    """The test runs with `tests.support.poison.poisoned_memory`."""
    with poisoned_memory():
        yield


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of the Triton kernels have more than one step, with the small vocabularies of tests too."""
    from mkd.losses.kernels import triton_launchers

    for name in ("SOFTMAX_STATS_BLOCK", "DIVERGENCE_STATS_BLOCK", "GRADIENT_BLOCK", "ALL_PASSES_BLOCK"):
        monkeypatch.setattr(triton_launchers, name, 16)
