"""Change the parallel layout, the microbatch size or the packing, and training stays the same.

One run each from the same weights: an evaluation and steps of Adam, compared with the same models, samples and masks on
one rank. Every layout is there once; what else may vary is spread over them. Packed rows are compared with the same
texts padded, one a row.

Without `-m slow`, the table holds every pair of parallel dimensions, masks and packing once; `-m slow` runs the rest.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.support.dist.faults import EVERY_TOKEN
from tests.support.dist.kd_step import Layout, Models
from tests.support.dist.outcome import GetPool, Outcome, assert_equal, assert_same
from tests.support.slow import slow
from tests.support.tolerance import GRADIENT, STEP_LOSS, assert_close_norm

BOTH = Models(teacher_layers=2)
KD_ONLY = replace(BOTH, tied=False, ratio=1.0, temperature=1.0)
CE_ONLY = replace(BOTH, ratio=0.0)
OWN_MASK = replace(BOTH, masks="differ")
UNEVEN = replace(BOTH, masks="uneven", tied=False, ratio=0.6)
PACKED = replace(BOTH, data="packed")
FRACTIONS = replace(BOTH, masks="fractions")
EXPERTS = replace(BOTH, moe=True, teacher_moe=True, aux_loss=0.1)

# fmt: off
TABLE = {
    "packed": (1, Layout(), PACKED),
    "tp2-sp": (2, Layout(tp=2, sp=True, mbs=4), KD_ONLY),
    "pp2-vp2": (2, Layout(pp=2, vp=2), OWN_MASK),
    "pp2-3-and-1-layers": (2, Layout(pp=2, last=1), replace(BOTH, masks="differ", tied=False)),
    "cp2": (2, Layout(cp=2), UNEVEN),
    "dp2": (2, Layout(mbs=1), UNEVEN),
    "ep2": (2, Layout(ep=2, dist_opt=True), EXPERTS),
    "tp2-sp-pp2-vp2": (4, Layout(tp=2, sp=True, pp=2, vp=2), PACKED),
    "tp2-sp-cp2": (4, Layout(tp=2, sp=True, cp=2, mbs=4), CE_ONLY),
    "cp2-dp2-opt": (4, Layout(cp=2, dist_opt=True), UNEVEN),
    "ep2-tp2-sp": (4, Layout(ep=2, tp=2, sp=True), EXPERTS),
    "ep2-pp2": (4, Layout(ep=2, pp=2), EXPERTS),
    "pp2-cp2-fractions": (4, Layout(pp=2, cp=2), replace(FRACTIONS, ratio=0.6)),
    "pp2-vp2-cp2-dp2-opt": (8, Layout(pp=2, vp=2, cp=2, dist_opt=True), OWN_MASK),
}
MORE = {
    "tp2-pp2": (4, Layout(tp=2, pp=2), OWN_MASK),
    "mbs1": (1, Layout(mbs=1), BOTH),
    "dp2-opt": (2, Layout(mbs=4, dist_opt=True), BOTH),
    "tp2-sp-dp2-opt": (4, Layout(tp=2, sp=True, dist_opt=True), PACKED),
    "packed-fractions": (1, Layout(), replace(FRACTIONS, data="packed")),
    "mbs4": (1, Layout(mbs=4), OWN_MASK),
    "tp2": (2, Layout(tp=2), BOTH),
    "pp2": (2, Layout(pp=2, mbs=1), CE_ONLY),
    "pp2-cp2": (4, Layout(pp=2, cp=2), PACKED),
    "pp2-vp2-dp2-opt": (4, Layout(pp=2, vp=2, mbs=1, dist_opt=True), KD_ONLY),
    "tp2-sp-pp2-cp2": (8, Layout(tp=2, sp=True, pp=2, cp=2, mbs=4), UNEVEN),
    "tp2-pp2-dp2-opt": (8, Layout(tp=2, pp=2, dist_opt=True), UNEVEN),
    "tp2-sp-cp2-dp2": (8, Layout(tp=2, sp=True, cp=2, mbs=4), PACKED),
    "mbs1-fractions": (1, Layout(mbs=1), FRACTIONS),
    "dp2-fractions": (2, Layout(mbs=1), FRACTIONS),
}
# fmt: on


@pytest.fixture(scope="module")
def one_rank(gloo_pool: GetPool) -> Callable[..., Outcome]:
    """The truth for models, samples and masks: one rank, one text a row, microbatches of 2, losses over all tokens
    whether they have a weight or not. Each is computed once."""
    known: dict[tuple[Models, int], Outcome] = {}

    def truth(models: Models, steps: int = 2) -> Outcome:
        if models.data == "packed":
            models = replace(models, data="padded")
        if (models, steps) not in known:
            known[models, steps] = Outcome.of(gloo_pool, 1, Layout(), models, steps=steps, fault=EVERY_TOKEN)
        return known[models, steps]

    return truth


@pytest.mark.parametrize("name", [*TABLE, *slow(MORE)])
def test_layout(gloo_pool: GetPool, one_rank: Callable[..., Outcome], name: str) -> None:
    ranks, layout, models = (TABLE | MORE)[name]
    assert_same(Outcome.of(gloo_pool, ranks, layout, models, steps=2), one_rank(models))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TABLE, *MORE])
def test_three_steps(gloo_pool: GetPool, one_rank: Callable[..., Outcome], name: str) -> None:
    ranks, layout, models = (TABLE | MORE)[name]
    assert_same(Outcome.of(gloo_pool, ranks, layout, models, steps=3), one_rank(models, 3))


@pytest.mark.parametrize("name", ["cp2-dp2-opt", *slow(["ep2", "tp2-sp-pp2-vp2"])])
def test_the_same_layout_twice_is_bit_equal(gloo_pool: GetPool, name: str) -> None:
    first, second = (Outcome.of(gloo_pool, *TABLE[name], steps=2) for _ in range(2))
    assert_equal(first, second)


GRADIENT_ALONE, LOSS = "gradient of", "loss, evaluation"
"""First words of the comparison's message."""


@pytest.mark.parametrize(
    ("fault", "layout", "models", "shows"),
    [
        pytest.param("doubled gradient", Layout(tp=2), BOTH, GRADIENT_ALONE, id="gradient x tp"),
        pytest.param("doubled gradient", Layout(cp=2), BOTH, GRADIENT_ALONE, id="gradient x cp"),
        pytest.param("local divisor", Layout(), BOTH, GRADIENT_ALONE, id="local divisor"),
        pytest.param("label across a segment border", Layout(cp=2), PACKED, LOSS, id="label across a border"),
        pytest.param("KD at the next position", Layout(tp=2), BOTH, LOSS, id="KD at the next position"),
        pytest.param("teacher in another order", Layout(cp=2), BOTH, LOSS, id="teacher in contiguous order"),
    ],
)
def test_a_planted_fault_is_caught(
    gloo_pool: GetPool, one_rank: Callable[..., Outcome], fault: str, layout: Layout, models: Models, shows: str
) -> None:
    """By the comparison that the table uses, which these layouts pass without the fault."""
    truth, seen = one_rank(models), Outcome.of(gloo_pool, 2, layout, models, steps=1, fault=fault)
    first = replace(truth, reports=truth.reports[:2], grad_norms=truth.grad_norms[:1], changes={})
    with pytest.raises(AssertionError, match=shows):
        assert_same(seen, first)


def first_step(gloo_pool: GetPool, models: Models) -> Outcome:
    """On one rank."""
    return Outcome.of(gloo_pool, 1, Layout(), models, steps=1)


def test_each_term_is_divided_by_its_own_tokens(gloo_pool: GetPool) -> None:
    """Against two runs that have one divisor each: next to no KD, and KD alone whose mask is also that of CE."""
    ce = first_step(gloo_pool, replace(BOTH, ratio=1e-9))
    kd = first_step(gloo_pool, replace(BOTH, ratio=1.0, masks="kd for both"))
    for masks, of_ce, of_kd in (("differ", 0.7, 0.3), ("no kd", 0.7, 0.0), ("no ce", 0.0, 0.3)):
        seen = first_step(gloo_pool, replace(BOTH, ratio=0.3, masks=masks))
        for key, value in seen.gradients.items():
            expected = of_ce * ce.gradients[key] + of_kd * kd.gradients[key]
            assert_close_norm(value, expected, GRADIENT, f"{masks}: gradient of {key}")
        report = {name: value / count for name, (value, count) in seen.reports[1].items()}
        expected = {name: one.reports[1][name][0] / one.reports[1][name][1] for name, one in (("ce", ce), ("kd", kd))}
        assert report["ce"] == pytest.approx(expected["ce"] * (of_ce > 0), rel=STEP_LOSS)
        assert report["kd"] == pytest.approx(expected["kd"] * (of_kd > 0), rel=STEP_LOSS)
        assert report["loss"] == pytest.approx(0.7 * report["ce"] + 0.3 * report["kd"], rel=STEP_LOSS)


def test_the_load_balancing_loss_of_the_student_does_not_see_distillation(gloo_pool: GetPool) -> None:
    """Its gradients and megatron's metrics of it are those of pretraining without a teacher, though the teacher has
    routers with such a loss too."""
    added, balance = [], []
    for ratio in (0.0, 0.5):
        experts = replace(EXPERTS, ratio=ratio, aux_loss=0.0)
        with_it = first_step(gloo_pool, replace(experts, aux_loss=5.0))
        without = first_step(gloo_pool, experts)
        added.append({key: value - without.gradients[key] for key, value in with_it.gradients.items()})
        balance.append(with_it.balance)
    assert added[0]["decoder.layers.mlp.router.weight"].norm() > 0.1
    for key, value in added[0].items():
        if value.norm() > 0.01:
            assert_close_norm(added[1][key], value, 1e-3, f"what is added to the gradient of {key}")
    assert balance[0].keys() == balance[1].keys() == {"seq_load_balancing_loss"}
    assert all(torch.equal(balance[1][name], value) and value.all() for name, value in balance[0].items())


def test_something_agrees(one_rank: Callable[..., Outcome]) -> None:
    """Or the table would compare zeros."""
    agreeing, tokens = one_rank(PACKED).reports[0]["agreement"]
    assert 0 < agreeing < tokens
