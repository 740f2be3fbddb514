"""Pairs of layers: gradients against autograd of the definition, and the same in every parallel layout.

Without `-m slow`, each layout runs one of the two distances; `-m slow` runs both.
"""

import pytest
import torch

from tests.dist.test_layouts import GetPool, combine, compare, one_rank
from tests.support.dist.hidden_term import hidden_term
from tests.support.dist.kd_step import Layout, Models, kd_step
from tests.support.tolerance import GRADIENT, STEP_LOSS, assert_close_norm

# The models have 4 and 8 layers. Under PP2 the student's layer 2 is on the first stage and the teacher's 6 on the
# second, 3 and 2 the other way round. Two pairs share a student's layer, two a teacher's, and the last layers are
# paired too.
PAIRS = "2:6,3:2,3:6,4:8"
MSE = Models(hidden_loss=PAIRS)
COSINE = Models(hidden_loss=PAIRS, hidden_loss_type="cosine", tied=False, ratio=1.0)
SAME_WIDTH = Models(hidden_loss=PAIRS, same_width=True)


@pytest.mark.parametrize("models", [MSE, COSINE, SAME_WIDTH], ids=["mse", "cosine", "same width"])
def test_gradients_are_those_of_the_definition(gloo_pool: GetPool, models: Models) -> None:
    losses, seen = one_rank(gloo_pool, models)
    without, expected = one_rank(gloo_pool, Models(same_width=models.same_width, tied=models.tied, ratio=models.ratio))
    (term,) = gloo_pool(1).run(hidden_term, models)
    (result,) = gloo_pool(1).run(kd_step, Layout(), models)
    count = result["reports"]["hidden"][1]
    hidden = (term["sum"] / count).item()
    assert losses["hidden"] == pytest.approx(hidden, rel=STEP_LOSS)
    extra = models.ratio * models.kd.hidden_loss_weight * hidden
    assert losses["loss"] == pytest.approx(without["loss"] + extra, rel=STEP_LOSS)
    _, added = combine([{"reports": {}, "gradients": term["gradients"]}])
    assert seen.keys() == added.keys()
    assert len(seen.keys() - expected.keys()) == (0 if models.same_width else 4)
    for key, value in added.items():
        whole = value / count + expected.get(key, torch.zeros_like(value))
        if "output_layer" not in key and "final_layernorm" not in key:
            assert (value / count).norm() > 0.01 * whole.norm(), f"{key}: the term hardly shows"
        assert_close_norm(seen[key], whole, GRADIENT, key)


LAYOUTS = {
    "tp2": (2, Layout(tp=2)),
    "tp2-sp": (2, Layout(tp=2, sp=True)),
    "pp2": (2, Layout(pp=2)),
    "pp2-3-and-1-layers": (2, Layout(pp=2, last=1)),
    "pp2-vp2": (2, Layout(pp=2, vp=2)),
    "dp2-mbs1": (2, Layout(mbs=1)),
    "tp2-sp-pp2-vp2": (4, Layout(tp=2, pp=2, vp=2, sp=True)),
}


DISTANCES = {"mse": MSE, "cosine": COSINE}
QUICK = {"mse": ["tp2-sp", "pp2-vp2", "pp2-3-and-1-layers", "dp2-mbs1"], "cosine": ["tp2", "pp2", "tp2-sp-pp2-vp2"]}


@pytest.mark.parametrize(
    ("distance", "name"),
    [
        pytest.param(distance, name, marks=() if name in quick else pytest.mark.slow)
        for distance, quick in QUICK.items()
        for name in LAYOUTS
    ],
)
def test_layouts(gloo_pool: GetPool, distance: str, name: str) -> None:
    compare(gloo_pool, *LAYOUTS[name], DISTANCES[distance])


@pytest.mark.parametrize(
    ("ranks", "layout"), [(2, Layout(tp=2, sp=True)), pytest.param(2, Layout(pp=2, vp=2), marks=pytest.mark.slow)]
)
def test_without_maps(gloo_pool: GetPool, ranks: int, layout: Layout) -> None:
    compare(gloo_pool, ranks, layout, SAME_WIDTH)


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(1, Layout(), marks=pytest.mark.slow),
        (2, Layout(tp=2, sp=True)),
        pytest.param(2, Layout(pp=2), marks=pytest.mark.slow),
        (2, Layout(pp=2, vp=2)),
    ],
)
def test_recomputed_activations_change_nothing(gloo_pool: GetPool, ranks: int, layout: Layout) -> None:
    """Under pipeline parallelism other microbatches' forward passes lie between a forward and its recomputation."""
    compare(gloo_pool, ranks, layout, Models(hidden_loss=PAIRS, recompute=True), truth=MSE)


def test_mixture_of_experts(gloo_pool: GetPool) -> None:
    compare(gloo_pool, 2, Layout(ep=2, mbs=1), Models(moe=True, hidden_loss=PAIRS))


def test_offloaded_teacher_changes_nothing(gloo_pool: GetPool) -> None:
    compare(gloo_pool, 1, Layout(), Models(hidden_loss=PAIRS, offload=True), truth=MSE)


@pytest.mark.parametrize(("ranks", "layout"), [(1, Layout()), (2, Layout(pp=2))])
def test_the_loss_scale_reaches_every_stage(gloo_pool: GetPool, ranks: int, layout: Layout) -> None:
    _, expected = one_rank(gloo_pool, MSE)
    _, seen = combine(gloo_pool(ranks).run(kd_step, layout, Models(hidden_loss=PAIRS, loss_scale=8.0)))
    for key, value in expected.items():
        assert_close_norm(seen[key], 8.0 * value, GRADIENT, key)
