"""A teacher in a parallel layout of its own teaches what one in the student's layout, or on one rank, does."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.dist.kd_step import Layout, Models
from tests.dist.outcome import GetPool, Outcome, assert_same

BOTH = Models(teacher_layers=2)
PACKED = replace(BOTH, data="packed")
EXPERTS = replace(BOTH, teacher_moe=True)

# fmt: off
TABLE = {
    "dp4-tp4": (4, Layout(teacher=Layout(tp=4, sp=True)), BOTH),
    "dp4-tp4-no-sp": (4, Layout(teacher=Layout(tp=4)), BOTH),
    "dp4-tp2pp2": (4, Layout(teacher=Layout(tp=2, pp=2, sp=True)), BOTH),
    "tp2spdp2-pp2tp2": (4, Layout(tp=2, sp=True, teacher=Layout(tp=2, sp=True, pp=2)), BOTH),
    "pp2tp2-dp4": (4, Layout(pp=2, tp=2, teacher=Layout()), BOTH),
    "tp2dp2-cp2tp2": (4, Layout(tp=2, teacher=Layout(tp=2, cp=2, sp=True)), PACKED),
    "cp2dp2-tp4": (4, Layout(cp=2, teacher=Layout(tp=4, sp=True)), PACKED),
}
# fmt: on


@pytest.fixture(scope="module")
def one_rank(gloo_pool: GetPool) -> Callable[[Models], Outcome]:
    """The truth for models and samples: one rank, one text a row, micro-batches of 2. Each is computed once."""
    known: dict[Models, Outcome] = {}

    def truth(models: Models) -> Outcome:
        if models.data == "packed":
            models = replace(models, data="padded")
        if models not in known:
            known[models] = Outcome.of(gloo_pool, 1, Layout(), models, steps=1)
        return known[models]

    return truth


@pytest.mark.parametrize("name", TABLE)
def test_layout(gloo_pool: GetPool, one_rank: Callable[[Models], Outcome], name: str) -> None:
    ranks, layout, models = TABLE[name]
    assert_same(Outcome.of(gloo_pool, ranks, layout, models, steps=1), one_rank(models))
