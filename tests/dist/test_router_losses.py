"""The router losses of a student with experts are means over the text: no mask changes their gradient, in any layout.

The teacher is the student and R is 1, so KD adds no gradient, and all of it comes from the router losses. In plain
pretraining cross-entropy adds its own, which is measured in a run without router losses.

Without `-m slow`, each loss meets two masks, three masks the sum of losses, and each parallel dimension one mask;
`-m slow` runs the rest.
"""

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from tests.support.dist.kd_run import training_run
from tests.support.dist.kd_samples import ROW, ROWS, MaskName
from tests.support.dist.kd_step import Layout, Models
from tests.support.dist.outcome import GetPool, Outcome
from tests.support.tolerance import assert_close_norm

SAME = 1e-6
"""fp32: the same sums times another factor, and the rounding of a KD of 0."""
ROUTER = "decoder.layers.mlp.router.weight"
ALL = ("aux_loss", "seq_aux_loss", "global_aux_loss")
MODELS = Models(
    moe=True, teacher_is_student=True, ratio=1.0, temperature=1.0, aux_loss=5.0, balancing=ALL, router_z_loss=0.5
)

_KNOWN: dict[tuple[int, Layout, Models], Tensor] = {}


def router_gradient(gloo_pool: GetPool, ranks: int, layout: Layout, models: Models) -> Tensor:
    """[layers, experts, H] of the first step. Each is computed once."""
    case = ranks, layout, models
    if case not in _KNOWN:
        _KNOWN[case] = Outcome.of(gloo_pool, *case, steps=1, run=training_run).gradients[ROUTER]
    return _KNOWN[case]


def assert_same_with_masks(
    gloo_pool: GetPool, ranks: int, layout: Layout, models: Models, masks: tuple[MaskName, ...]
) -> None:
    expected = router_gradient(gloo_pool, ranks, layout, models)
    assert expected.norm() > 0.1
    for name in masks:
        seen = router_gradient(gloo_pool, ranks, layout, replace(models, masks=name))
        assert_close_norm(seen, expected, SAME, f"gradient of the router, masks {name!r}")


MASKS: tuple[MaskName, ...] = ("every token", "one token", "differ", "uneven", "kd for both", "no kd", "no ce")
EACH_LOSS: dict[str, dict[str, Any]] = {
    "aux": {"balancing": ("aux_loss",), "router_z_loss": None},
    "seq_aux": {"balancing": ("seq_aux_loss",), "router_z_loss": None},
    "global_aux": {"balancing": ("global_aux_loss",), "router_z_loss": None},
    "z": {"aux_loss": 0.0},
}


@pytest.mark.parametrize("loss", EACH_LOSS)
def test_no_mask_changes_a_router_loss(gloo_pool: GetPool, loss: str) -> None:
    assert_same_with_masks(gloo_pool, 1, Layout(), replace(MODELS, **EACH_LOSS[loss]), ("one token",))


def test_no_mask_changes_the_sum_of_router_losses(gloo_pool: GetPool) -> None:
    assert_same_with_masks(gloo_pool, 1, Layout(), MODELS, ("one token", "uneven", "no kd"))


@pytest.mark.slow
def test_every_mask_with_the_sum_of_router_losses(gloo_pool: GetPool) -> None:
    assert_same_with_masks(gloo_pool, 1, Layout(), MODELS, MASKS)


@pytest.mark.slow
@pytest.mark.parametrize("loss", EACH_LOSS)
def test_every_mask_with_every_router_loss(gloo_pool: GetPool, loss: str) -> None:
    assert_same_with_masks(gloo_pool, 1, Layout(), replace(MODELS, **EACH_LOSS[loss]), MASKS)


@pytest.mark.parametrize(
    ("ranks", "layout", "data"),
    [
        pytest.param(1, Layout(), "packed", id="packed", marks=pytest.mark.slow),
        pytest.param(1, Layout(mbs=1, variable=True), "padded", id="variable"),
        pytest.param(2, Layout(tp=2, sp=True), "padded", id="tp2-sp", marks=pytest.mark.slow),
        pytest.param(2, Layout(pp=2), "packed", id="pp2-packed", marks=pytest.mark.slow),
        pytest.param(2, Layout(pp=2, vp=2), "text", id="pp2-vp2"),
        pytest.param(2, Layout(cp=2), "packed", id="cp2-packed"),
        pytest.param(2, Layout(mbs=1), "padded", id="dp2"),
        pytest.param(2, Layout(ep=2, dist_opt=True), "text", id="ep2-opt"),
        pytest.param(4, Layout(ep=2, tp=2, sp=True), "packed", id="ep2-tp2-sp-packed"),
        pytest.param(8, Layout(tp=2, sp=True, pp=2, cp=2), "padded", id="tp2-sp-pp2-cp2", marks=pytest.mark.slow),
    ],
)
def test_layout(gloo_pool: GetPool, ranks: int, layout: Layout, data: Any) -> None:
    masks: tuple[MaskName, ...] = ("uneven",) if data == "text" else ("one token",)
    assert_same_with_masks(gloo_pool, ranks, layout, replace(MODELS, data=data), masks)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(pp=2, vp=2), Layout(ep=2, dist_opt=True)], ids=["pp2-vp2", "ep2-opt"])
def test_one_token_in_layouts_of_uneven_masks(gloo_pool: GetPool, layout: Layout) -> None:
    assert_same_with_masks(gloo_pool, 2, layout, replace(MODELS, data="text"), ("one token",))


def test_recomputed_activations(gloo_pool: GetPool) -> None:
    assert_same_with_masks(gloo_pool, 1, Layout(), replace(MODELS, recompute=True), ("one token",))


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(2, Layout(tp=2, sp=True), id="tp2-sp", marks=pytest.mark.slow),
        pytest.param(2, Layout(pp=2), id="pp2", marks=pytest.mark.slow),
        pytest.param(2, Layout(cp=2), id="cp2"),
        pytest.param(2, Layout(mbs=1), id="dp2", marks=pytest.mark.slow),
        pytest.param(4, Layout(ep=2, tp=2, sp=True), id="ep2-tp2-sp", marks=pytest.mark.slow),
        pytest.param(1, Layout(variable=True), id="variable", marks=pytest.mark.slow),
    ],
)
def test_layouts_agree(gloo_pool: GetPool, ranks: int, layout: Layout) -> None:
    """Losses that do not depend on the grouping of texts: z-loss anywhere, and one sequence's balance, one per row."""
    models = replace(MODELS, data="padded", masks="one token", balancing=("seq_aux_loss",))
    expected = router_gradient(gloo_pool, 1, Layout(mbs=1), models)
    seen = router_gradient(gloo_pool, ranks, replace(layout, mbs=1), models)
    assert_close_norm(seen, expected, 1e-5, "gradient of the router")


def test_packed_equals_unpacked(gloo_pool: GetPool) -> None:
    """The z-loss; a packed row is one sequence for the losses of balance."""
    models = replace(MODELS, aux_loss=0.0, masks="one token")
    packed, padded = (
        router_gradient(gloo_pool, 1, Layout(), replace(models, data=data)) for data in ("packed", "padded")
    )
    assert_close_norm(packed, padded, 1e-5, "gradient of the router")


def test_plain_pretraining(gloo_pool: GetPool) -> None:
    """The router losses of a run without a teacher are the same under any mask."""
    plain = replace(MODELS, teacher_is_student=False, ratio=0.0, aux_loss=50.0, router_z_loss=5.0)
    silent = replace(plain, aux_loss=0.0, router_z_loss=None)
    added = []
    for masks in ("every token", "one token"):
        with_losses, without = (
            router_gradient(gloo_pool, 1, Layout(), replace(models, masks=masks)) for models in (plain, silent)
        )
        added.append(with_losses - without)
    assert_close_norm(added[1], added[0], 1e-5, "what is added to the gradient of the router")


@pytest.mark.parametrize("ratio", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_megatrons_own_numbers_if_every_token_is_supervised(gloo_pool: GetPool, ratio: float) -> None:
    """To the last bit: the factor is exactly 1."""
    models = replace(MODELS, ratio=ratio, masks="every token")
    seen = Outcome.of(gloo_pool, 1, Layout(), models, steps=1)
    assert seen.reports[1]["loss"][1] == ROW * ROWS
    megatron = Outcome.of(gloo_pool, 1, Layout(), models, steps=1, fault="router losses as in Megatron")
    assert all((seen.gradients[key] == value).all() for key, value in megatron.gradients.items())


def test_megatron_still_divides_router_losses_by_supervised_tokens(gloo_pool: GetPool) -> None:
    """If this fails, `mkd.train.router_losses` is needed no longer."""
    models = replace(MODELS, masks="one token")
    right = router_gradient(gloo_pool, 1, Layout(), models)
    megatron = Outcome.of(gloo_pool, 1, Layout(), models, steps=1, fault="router losses as in Megatron")
    supervised = megatron.reports[1]["loss"][1]
    assert_close_norm(megatron.gradients[ROUTER], right * (ROW * ROWS / supervised), 1e-5, "gradient of the router")
