"""--kd-teachers-mode select equals its definition in every layout and packing.

Without `-m slow`, each of TP with SP, CP, PP and DP runs with one of the two pairs of teachers, packed or not;
`-m slow` runs the rest.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.dist.kd_step import Layout, Models
from tests.support.dist.outcome import GetPool, Outcome, assert_same, whole_tensors
from tests.support.dist.select_truth import clear_case, select_truth
from tests.support.slow import slow
from tests.support.tolerance import GRADIENT, STEP_LOSS, assert_close_norm

SAME = Models(teacher_layers=2, data="padded", select=True)
MIXED = Models(teacher_layers=2, data="pairs", xtoken="partition_kl", mixed=True, select=True)
PACKED = {SAME.data: "packed", MIXED.data: "packed pairs"}


def packed(models: Models) -> Models:
    return replace(models, data=PACKED[models.data])


# fmt: off
TABLE = {
    "same-packed-mbs4": (1, Layout(mbs=4), packed(SAME)),
    "same-pp2-packed": (2, Layout(pp=2, mbs=1), packed(SAME)),
    "mixed-tp2-packed": (2, Layout(tp=2, sp=True, mbs=4), packed(MIXED)),
    "mixed-cp2-packed": (2, Layout(cp=2, mbs=4), packed(MIXED)),
    "mixed-dp2-packed": (2, Layout(mbs=1), packed(MIXED)),
}
MORE = {
    "same-tp2-sp": (2, Layout(tp=2, sp=True, mbs=4), SAME),
    "same-cp2-packed": (2, Layout(cp=2), packed(SAME)),
    "same-dp2": (2, Layout(mbs=1), SAME),
    "mixed-packed": (1, Layout(mbs=4), packed(MIXED)),
    "mixed-cp2": (2, Layout(cp=2), MIXED),
    "mixed-pp2": (2, Layout(pp=2, mbs=4), MIXED),
}
# fmt: on


@pytest.fixture(scope="module")
def one_rank(gloo_pool: GetPool) -> Callable[[Models], Outcome]:
    """Reference outcome: one rank, one text per row, microbatches of 2. Each is computed once."""
    known: dict[Models, Outcome] = {}

    def reference(models: Models) -> Outcome:
        if models not in known:
            known[models] = Outcome.of(gloo_pool, 1, Layout(), models, steps=1)
        return known[models]

    return reference


@pytest.mark.parametrize("models", [SAME, MIXED], ids=["same", "mixed"])
def test_definition(gloo_pool: GetPool, one_rank: Callable[[Models], Outcome], models: Models) -> None:
    [truth] = gloo_pool(1).run(select_truth, models)
    seen = one_rank(models)
    for report in seen.reports:  # one of an evaluation and one of a step
        mean = {name: total / count for name, (total, count) in report.items()}
        assert mean["loss"] == pytest.approx(truth["loss"], rel=STEP_LOSS)
        assert [round(report[name][0]) for name in ("selected_1", "selected_2")] == truth["selected"]
        assert report["selected_1"][1] == sum(truth["selected"])
        assert mean["kd"] == pytest.approx(mean["kd_1"] + mean["kd_2"], rel=STEP_LOSS)
    assert min(truth["selected"]) > 1
    expected = whole_tensors(truth["gradients"], "gradient")
    assert seen.gradients.keys() == expected.keys()
    for name, value in expected.items():
        assert_close_norm(seen.gradients[name], value, GRADIENT, f"gradient of {name}")


@pytest.mark.parametrize("name", [*TABLE, *slow(MORE)])
def test_layout(gloo_pool: GetPool, one_rank: Callable[[Models], Outcome], name: str) -> None:
    ranks, layout, models = (TABLE | MORE)[name]
    unpacked = replace(models, data=MIXED.data if models.xtoken else SAME.data)
    assert_same(Outcome.of(gloo_pool, ranks, layout, models, steps=1), one_rank(unpacked))


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(cp=2)], ids=["tp2", "cp2"])
def test_better_teacher_is_selected(gloo_pool: GetPool, layout: Layout) -> None:
    """Without supervised tokens, the first teacher."""
    for chosen, supervised in gloo_pool(2).run(clear_case, layout):
        assert chosen == [1, 0, 0, 0]
        assert supervised == [True, True, True, False]
