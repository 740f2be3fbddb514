"""Context parallelism and packed rows: losses and every parameter's gradient equal those of one rank whose rows hold
one text each, padded behind it, computed by megatron's own attention.
"""

from collections.abc import Callable

import pytest

from tests.dist.kd_step import Layout, Models
from tests.dist.pool import Pool
from tests.dist.test_layouts import compare

GetPool = Callable[[int], Pool]

LAYOUTS = [
    pytest.param(2, Layout(cp=2), id="cp2"),
    pytest.param(4, Layout(cp=2, tp=2, sp=True), id="cp2-tp2-sp"),
    pytest.param(4, Layout(cp=2, pp=2, vp=2), id="cp2-pp2-vp2"),
    pytest.param(4, Layout(cp=4), id="cp4"),
    pytest.param(8, Layout(cp=2, tp=2, pp=2, mbs=1), id="cp2-tp2-pp2"),
]


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
def test_whole_rows(gloo_pool: GetPool, ranks: int, layout: Layout) -> None:
    compare(gloo_pool, ranks, layout, Models())


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(1, Layout(), id="one rank"),
        pytest.param(1, Layout(mbs=1), id="mbs1"),
        pytest.param(2, Layout(tp=2, sp=True), id="tp2-sp"),
        pytest.param(2, Layout(pp=2), id="pp2"),
        *LAYOUTS,
    ],
)
def test_packed_rows(gloo_pool: GetPool, ranks: int, layout: Layout) -> None:
    compare(gloo_pool, ranks, layout, Models(data="packed"), truth=Models(data="padded"))
