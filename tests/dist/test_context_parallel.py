"""Context parallelism, packed rows and micro-batches of differing length where tests/dist/test_invariance.py has none:
losses and every parameter's gradient equal those of one rank whose rows hold one text each, padded behind it, computed
by megatron's own attention.
"""

from collections.abc import Callable

import pytest

from tests.dist.kd_step import Layout, Models, kd_step
from tests.dist.pool import Pool, WorkerError
from tests.dist.test_layouts import compare

GetPool = Callable[[int], Pool]


@pytest.mark.parametrize(
    ("ranks", "layout", "data"),
    [
        pytest.param(4, Layout(cp=4), "text", id="cp4"),
        pytest.param(4, Layout(cp=4), "packed", id="cp4-packed"),
        pytest.param(4, Layout(cp=2, pp=2, vp=2), "packed", id="cp2-pp2-vp2-packed"),
        pytest.param(2, Layout(variable=True), "padded", id="dp2-variable"),
        pytest.param(2, Layout(pp=2, variable=True), "padded", id="pp2-variable"),
        pytest.param(2, Layout(pp=2, vp=2, variable=True), "padded", id="pp2-vp2-variable"),
        pytest.param(8, Layout(cp=2, tp=2, sp=True, pp=2, variable=True), "padded", id="cp2-tp2-sp-pp2-variable"),
    ],
)
def test_layout(gloo_pool: GetPool, ranks: int, layout: Layout, data: str) -> None:
    compare(gloo_pool, ranks, layout, Models(data=data), truth=Models(data="padded") if data == "packed" else None)


@pytest.mark.parametrize(
    ("ranks", "layout", "data"),
    [
        pytest.param(2, Layout(cp=2), "packed", id="cp2-packed"),
        pytest.param(4, Layout(cp=2, pp=2, variable=True), "padded", id="cp2-pp2-variable"),
    ],
)
def test_paired_layers(gloo_pool: GetPool, ranks: int, layout: Layout, data: str) -> None:
    """The term of intermediate layers is taken at the same tokens."""
    models = Models(data=data, hidden_loss="1:2,3:8")
    compare(gloo_pool, ranks, layout, models, truth=Models(data="padded", hidden_loss="1:2,3:8"))


def test_recomputed_activations(gloo_pool: GetPool) -> None:
    """Keys and values are gathered once more in the backward pass."""
    models = Models(data="packed", recompute=True)
    compare(gloo_pool, 2, Layout(cp=2), models, truth=Models(data="padded"))


def with_shorter_second_batch(rank: int, world_size: int) -> None:
    """Stages that do not know of differing lengths."""
    from tests.dist import kd_step as module

    whole = module.microbatches

    def shorter(*args: object) -> list[dict]:
        first, second, *_ = whole(*args)
        return [first, {name: value[:, :8] for name, value in second.items()}]

    module.microbatches = shorter
    try:
        kd_step(rank, world_size, Layout(pp=2), Models())
    finally:
        module.microbatches = whole


def test_lengths_that_differ_without_the_flag(gloo_pool: GetPool) -> None:
    with pytest.raises(WorkerError, match=r"MkdDataError: microbatches of one step .*--kd-variable-seq-lengths"):
        gloo_pool(2).run(with_shorter_second_batch)
