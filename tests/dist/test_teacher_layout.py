"""Losses and gradients with a teacher in a layout of its own equal those with one in the student's layout or on one
rank.

Without `-m slow`, each dimension of the teacher meets a student without it and each dimension of the student a teacher
without it; `-m slow` runs the rest.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.dist.test_layouts import compare
from tests.support.dist.faults import EVERY_TOKEN
from tests.support.dist.kd_step import Layout, Models
from tests.support.dist.outcome import GetPool, Outcome, assert_same
from tests.support.dist.teacher_layouts import compare_signals, index_copies, sharding_error
from tests.support.slow import slow

BOTH = Models(teacher_layers=2)
PACKED = replace(BOTH, data="packed", tied=False, ratio=0.6)
EXPERTS = replace(BOTH, teacher_moe=True, teacher_experts=4)
PAIRS = replace(BOTH, data="packed pairs", xtoken="p_kl")
TP4, CP2_TP2 = Layout(tp=4, sp=True), Layout(tp=2, cp=2, sp=True)

# fmt: off
TABLE = {
    "dp4 / tp4": (4, Layout(mbs=1, teacher=TP4), BOTH),
    "tp2-pp2-vp2 / dp4": (4, Layout(tp=2, pp=2, vp=2, teacher=Layout()), BOTH),
    "tp2-dp2 / tp2-cp2, packed": (4, Layout(tp=2, teacher=CP2_TP2), PACKED),
    "cp2-tp2-sp / cp2-dp2": (4, Layout(cp=2, tp=2, sp=True, teacher=Layout(cp=2)), BOTH),
    "tp4-sp / ep4, two idle": (4, Layout(tp=4, sp=True, mbs=4, teacher=Layout(ep=4)), EXPERTS),
    "pp2-dp2 / ep2-tp2-sp": (4, Layout(pp=2, teacher=Layout(ep=2, tp=2, sp=True)), replace(EXPERTS, offload=True)),
    "tp2 / cp2, pairs": (2, Layout(tp=2, teacher=Layout(cp=2)), PAIRS),
}
MORE = {
    "tp2-sp-dp2 / tp2-pp2": (4, Layout(tp=2, sp=True, teacher=Layout(tp=2, pp=2)), BOTH),
    "cp2-dp2 / tp4, packed": (4, Layout(cp=2, teacher=TP4), PACKED),
    "tp4-sp / etp4, two idle": (4, Layout(tp=4, sp=True, mbs=4, teacher=Layout(etp=4)), EXPERTS),
    "dp4 / ep4": (4, Layout(teacher=Layout(ep=4)), EXPERTS),
    "tp2-dp2 / cp2-tp2, pairs": (4, Layout(tp=2, teacher=CP2_TP2), replace(PAIRS, mixed=True)),
    "dp4 / tp4 without SP": (4, Layout(teacher=Layout(tp=4)), BOTH),
    "dp4 / tp2-pp2-sp": (4, Layout(teacher=Layout(tp=2, sp=True, pp=2)), BOTH),
    "pp4 / tp4": (4, Layout(pp=4, mbs=1, teacher=TP4), PACKED),
    "pp2-vp2-dp2 / cp4": (4, Layout(pp=2, vp=2, teacher=Layout(cp=4)), BOTH),
    "tp2-sp-cp2-dp2 / tp4-pp2": (8, Layout(tp=2, sp=True, cp=2, teacher=Layout(tp=4, pp=2, sp=True)), PACKED),
    "tp2-pp2-dp2 / ep4-cp2": (8, Layout(tp=2, pp=2, teacher=Layout(ep=4, cp=2)), EXPERTS),
    "dp8 / ep2-tp4": (8, Layout(mbs=1, teacher=Layout(ep=2, tp=4, sp=True)), EXPERTS),
    "cp2-dp4 / pp2-dp4": (8, Layout(cp=2, mbs=1, teacher=Layout(pp=2)), PACKED),
    "cp2-pp2 / tp4, pairs": (4, Layout(cp=2, pp=2, mbs=1, teacher=TP4), PAIRS),
}
# fmt: on
"""Student / teacher, compared with one rank: (ranks, layout, models)."""


@pytest.fixture(scope="module")
def one_rank(gloo_pool: GetPool) -> Callable[[Models], Outcome]:
    """Reference outcome for models and samples: one rank, one text per row, microbatches of 2. Each is computed
    once."""
    known: dict[Models, Outcome] = {}

    def reference(models: Models) -> Outcome:
        models = replace(
            models, offload=False, data={"packed": "padded", "packed pairs": "pairs"}.get(models.data, models.data)
        )
        if models not in known:
            known[models] = Outcome.of(gloo_pool, 1, Layout(), models, steps=1, fault=EVERY_TOKEN)
        return known[models]

    return reference


@pytest.mark.parametrize("name", [*TABLE, *slow(MORE)])
def test_layout(gloo_pool: GetPool, one_rank: Callable[[Models], Outcome], name: str) -> None:
    ranks, layout, models = (TABLE | MORE)[name]
    assert_same(Outcome.of(gloo_pool, ranks, layout, models, steps=1), one_rank(models))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(variable=True, teacher=Layout(tp=2, sp=True, pp=2)), id="dp4 / tp2-sp-pp2"),
        pytest.param(Layout(pp=2, variable=True, teacher=Layout(cp=2)), id="pp2-dp2 / cp2-dp2", marks=pytest.mark.slow),
    ],
)
def test_microbatches_of_differing_length(gloo_pool: GetPool, layout: Layout) -> None:
    compare(gloo_pool, 4, layout, Models(data="padded", teacher_layers=2))


@pytest.mark.parametrize("name", ["dp4 / tp4", *slow(["tp2-sp-dp2 / tp2-pp2", "cp2-dp2 / tp4, packed"])])
def test_signals_equal_those_in_the_students_layout(gloo_pool: GetPool, name: str) -> None:
    ranks, layout, models = (TABLE | MORE)[name]
    counts = gloo_pool(ranks).run(compare_signals, layout, models)
    assert max(counts) == 8 // layout.mbs * layout.tp * layout.pp * layout.cp // ranks


def test_routes_are_made_once_per_shape(gloo_pool: GetPool) -> None:
    """Two microbatches on each of two ranks, whose teacher has two replicas of two ranks: the routes of one pass are
    those of the other, and of later steps. Masks of supervised tokens differ, so their routes do too."""
    counts = gloo_pool(4).run(index_copies, Layout(mbs=2, tp=2, teacher=Layout(tp=2, cp=2, sp=True)), BOTH)
    assert [count[1] for count in counts] == [0] * 4
    assert all(0 < count[0] < count[2] for count in counts)


def test_megatron_reads_its_global_groups(gloo_pool: GetPool) -> None:
    """Even if it is given other groups; the reason for `ParallelLayout.active`, which is unnecessary once this
    fails."""
    assert gloo_pool(4).run(sharding_error, True) == [None] * 4
    assert any("access pattern" in (error or "") for error in gloo_pool(4).run(sharding_error, False))


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("hidden states in another order", "dp4 / tp4"),
        pytest.param("hidden states in contiguous order", "tp2-dp2 / tp2-cp2, packed", marks=pytest.mark.slow),
    ],
)
def test_planted_fault_is_detected(
    gloo_pool: GetPool, one_rank: Callable[[Models], Outcome], fault: str, name: str
) -> None:
    """By the comparison that these layouts pass without the fault."""
    ranks, layout, models = TABLE[name]
    seen = Outcome.of(gloo_pool, ranks, layout, models, steps=1, fault=fault)
    with pytest.raises(AssertionError, match="evaluation"):
        assert_same(seen, one_rank(models))
