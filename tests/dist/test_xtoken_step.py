"""A teacher with another tokenizer: training is the same in every parallel layout, microbatch size and packing.

As tests/dist/test_invariance.py; the truth of each loss is computed on one rank, with one text a row. Without `-m
slow`, each loss meets one split of the vocabulary, the row or the layers, and each split one loss; `-m slow` runs every
loss in every layout.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.dist.kd_step import Layout, Models
from tests.support.dist.outcome import GetPool, Outcome, assert_same
from tests.support.slow import slow
from tests.support.tolerance import STEP_LOSS

PARTITION = Models(teacher_layers=2, data="pairs", xtoken="partition_kl")
P_KL = replace(PARTITION, xtoken="p_kl")
GOLD = replace(PARTITION, xtoken="gold")
RELAXED = replace(PARTITION, xtoken="gold_relaxed")
KD_ONLY = replace(PARTITION, ratio=1.0, tied=False)
MIXED = replace(PARTITION, mixed=True)
FEW = replace(PARTITION, data="few pairs")


def packed(models: Models) -> Models:
    return replace(models, data="packed pairs")


# fmt: off
TABLE = {
    "mbs1": (1, Layout(mbs=1), PARTITION),
    "tp2-sp-packed": (2, Layout(tp=2, sp=True, mbs=4), packed(P_KL)),
    "cp2-few": (2, Layout(cp=2, mbs=1), FEW),
    "tp2-sp-cp2-packed": (4, Layout(tp=2, sp=True, cp=2), packed(PARTITION)),
    "tp2-pp2": (4, Layout(tp=2, pp=2), GOLD),
    "pp2-vp2-mixed-offloaded": (2, Layout(pp=2, vp=2, mbs=1), replace(MIXED, offload=True)),
    "cp2-dp2-opt": (4, Layout(cp=2, mbs=1, dist_opt=True), RELAXED),
}
MORE = {
    "cp2-packed": (2, Layout(cp=2, mbs=1), packed(KD_ONLY)),
    "packed-mbs4": (1, Layout(mbs=4), packed(GOLD)),
    "tp2": (2, Layout(tp=2), PARTITION),
    "cp2": (2, Layout(cp=2), P_KL),
    "pp2": (2, Layout(pp=2, mbs=1), RELAXED),
    "dp2": (2, Layout(mbs=1), FEW),
    "tp2-cp2-mixed-packed": (4, Layout(tp=2, cp=2, mbs=4), packed(MIXED)),
}
# fmt: on


@pytest.fixture(scope="module")
def one_rank(gloo_pool: GetPool) -> Callable[..., Outcome]:
    """The truth: one rank, one text a row, microbatches of 2. Each is computed once."""
    known: dict[tuple[Models, int], Outcome] = {}

    def truth(models: Models, steps: int = 1) -> Outcome:
        models = replace(models, offload=False, data="pairs" if models.data == "packed pairs" else models.data)
        if (models, steps) not in known:
            known[models, steps] = Outcome.of(gloo_pool, 1, Layout(), models, steps=steps)
        return known[models, steps]

    return truth


@pytest.mark.parametrize("name", [*TABLE, *slow(MORE)])
def test_layout(gloo_pool: GetPool, one_rank: Callable[..., Outcome], name: str) -> None:
    ranks, layout, models = (TABLE | MORE)[name]
    assert_same(Outcome.of(gloo_pool, ranks, layout, models, steps=1), one_rank(models))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TABLE, *MORE])
def test_two_steps(gloo_pool: GetPool, one_rank: Callable[..., Outcome], name: str) -> None:
    ranks, layout, models = (TABLE | MORE)[name]
    assert_same(Outcome.of(gloo_pool, ranks, layout, models, steps=2), one_rank(models, 2))


EVERY_LAYOUT = {
    "tp2": (2, Layout(tp=2, mbs=4)),
    "cp2": (2, Layout(cp=2, mbs=1)),
    "pp2": (2, Layout(pp=2)),
    "dp2": (2, Layout(mbs=1)),
    "tp2-cp2": (4, Layout(tp=2, cp=2, mbs=4)),
    "tp2-pp2": (4, Layout(tp=2, pp=2, mbs=1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("data", ["pairs", "packed pairs", "few pairs"])
@pytest.mark.parametrize("layout", EVERY_LAYOUT)
@pytest.mark.parametrize("models", [PARTITION, P_KL, GOLD, RELAXED], ids=lambda models: models.xtoken)
def test_every_loss_in_every_layout(
    gloo_pool: GetPool, one_rank: Callable[..., Outcome], models: Models, layout: str, data: str
) -> None:
    """With "few pairs" some texts have no target, and with DP 2 one rank has no text with a target."""
    ranks, cut = EVERY_LAYOUT[layout]
    models = replace(models, data=data)
    assert_same(Outcome.of(gloo_pool, ranks, cut, models, steps=2), one_rank(models, 2))


@pytest.mark.parametrize(
    ("fault", "layout", "models", "shows"),
    [
        pytest.param("doubled gradient between tokenizers", Layout(tp=2), PARTITION, "gradient of", id="gradient x tp"),
        pytest.param("chunks counted on every rank", Layout(cp=2), PARTITION, "loss, evaluation", id="chunks x cp"),
        pytest.param("chunk of the place", Layout(cp=2), PARTITION, "evaluation", id="not shifted"),
        pytest.param("teacher in another order", Layout(cp=2), PARTITION, "evaluation", id="contiguous order"),
    ],
)
def test_a_planted_fault_is_caught(
    gloo_pool: GetPool, one_rank: Callable[..., Outcome], fault: str, layout: Layout, models: Models, shows: str
) -> None:
    """By the comparison that the table uses, which these layouts pass without the fault."""
    first, seen = replace(one_rank(models), changes={}), Outcome.of(gloo_pool, 2, layout, models, steps=1, fault=fault)
    with pytest.raises(AssertionError, match=shows):
        assert_same(seen, first)


def test_each_teacher_counts_with_its_weight_and_its_own_number(one_rank: Callable[..., Outcome]) -> None:
    """Against the run in which the teacher with another tokenizer is alone."""
    both, alone = (one_rank(models).reports[1] for models in (MIXED, PARTITION))
    mean = {name: total / count for name, (total, count) in both.items()}
    assert mean["kd_2"] == pytest.approx(alone["kd"][0] / alone["kd"][1], rel=STEP_LOSS)
    assert mean["kd"] == pytest.approx(0.4 * mean["kd_1"] + 1.5 * mean["kd_2"], rel=STEP_LOSS)
    assert mean["loss"] == pytest.approx(0.7 * mean["ce"] + 0.3 * mean["kd"], rel=STEP_LOSS)
