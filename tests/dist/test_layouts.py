"""Every parallel layout gives the losses and the gradients of one rank, parameter by parameter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.kd_step import Layout, Models, kd_step, step_with_doubled_gradient
from tests.dist.pool import Pool
from tests.tolerance import GRADIENT, STEP_LOSS, assert_close_norm

GetPool = Callable[[int], Pool]

DENSE = [
    pytest.param(1, Layout(mbs=1), id="mbs1"),
    pytest.param(1, Layout(mbs=4), id="mbs4"),
    pytest.param(2, Layout(tp=2), id="tp2"),
    pytest.param(2, Layout(tp=2, sp=True), id="tp2-sp"),
    pytest.param(2, Layout(pp=2), id="pp2"),
    pytest.param(2, Layout(pp=2, vp=2), id="pp2-vp2"),
    pytest.param(2, Layout(mbs=1), id="dp2-mbs1"),
    pytest.param(2, Layout(mbs=4), id="dp2-mbs4"),
    pytest.param(4, Layout(tp=2, pp=2), id="tp2-pp2"),
    pytest.param(4, Layout(tp=2, pp=2, vp=2, sp=True), id="tp2-sp-pp2-vp2"),
    pytest.param(4, Layout(tp=2, sp=True), id="tp2-sp-dp2"),
    pytest.param(4, Layout(pp=2, mbs=1), id="pp2-dp2"),
    pytest.param(8, Layout(tp=2, pp=2, sp=True, mbs=1), id="tp2-sp-pp2-dp2"),
]


def combine(results: list[dict[str, Any]]) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Mean losses over all data-parallel ranks, and whole gradients; copies of one place must agree."""
    sums: dict[str, Tensor] = {}
    whole: dict[str, Tensor] = {}
    for result in results:
        for name, value in result["reports"].items():
            sums[name] = sums.get(name, 0) + value
        for key, shape, place, values in result["gradients"]:
            full = whole.setdefault(key, torch.full(shape, torch.nan))
            seen = full[place].view(values.shape)
            if not seen.isnan().all():
                assert_close_norm(values, seen, GRADIENT, f"copies of the gradient of {key}")
            full[place] = values.view(seen.shape if seen.dim() == full.dim() else full[place].shape)
    for key, value in whole.items():
        assert not value.isnan().any(), f"part of the gradient of {key} is on no rank"
    return {name: (value[0] / value[1]).item() for name, value in sums.items()}, whole


def one_rank(gloo_pool: GetPool, models: Models, cache: dict = {}) -> tuple[dict[str, float], dict[str, Tensor]]:  # noqa: B006
    """The truth for these models: one rank, micro-batches of 2. Computed once."""
    if models not in cache:
        cache[models] = combine(gloo_pool(1).run(kd_step, Layout(), models))
    return cache[models]


def compare(gloo_pool: GetPool, ranks: int, layout: Layout, models: Models, truth: Models | None = None) -> None:
    losses, expected = one_rank(gloo_pool, truth or models)
    seen_losses, seen = combine(gloo_pool(ranks).run(kd_step, layout, models))
    assert seen_losses.keys() == losses.keys()
    for name, value in losses.items():
        assert seen_losses[name] == pytest.approx(value, rel=STEP_LOSS), name
    assert seen.keys() == expected.keys()
    for key, value in expected.items():
        assert value.norm() > 0, f"{key} has no gradient: the comparison would show nothing"
        assert_close_norm(seen[key], value, GRADIENT, key)


@pytest.mark.parametrize(("ranks", "layout"), DENSE)
def test_dense(gloo_pool: GetPool, ranks: int, layout: Layout) -> None:
    compare(gloo_pool, ranks, layout, Models())


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(2, Layout(tp=2, sp=True), id="tp2-sp"),
        pytest.param(2, Layout(pp=2), id="pp2"),
        pytest.param(4, Layout(tp=2, pp=2, vp=2, sp=True), id="tp2-sp-pp2-vp2"),
    ],
)
@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_untied_with_one_term_only(gloo_pool: GetPool, ranks: int, layout: Layout, ratio: float) -> None:
    compare(gloo_pool, ranks, layout, Models(tied=False, ratio=ratio, temperature=1.0))


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(2, Layout(ep=2), id="ep2"),
        pytest.param(2, Layout(ep=2, mbs=1), id="ep2-mbs1"),
        pytest.param(2, Layout(tp=2, sp=True), id="tp2-sp"),
        pytest.param(4, Layout(ep=2, pp=2), id="ep2-pp2"),
        pytest.param(4, Layout(ep=2, tp=2, sp=True), id="ep2-tp2-sp"),
    ],
)
def test_mixture_of_experts(gloo_pool: GetPool, ranks: int, layout: Layout) -> None:
    compare(gloo_pool, ranks, layout, Models(moe=True))


@pytest.mark.parametrize(("ranks", "layout"), [(1, Layout()), (2, Layout(pp=2))])
def test_offloaded_teacher_changes_nothing(gloo_pool: GetPool, ranks: int, layout: Layout) -> None:
    compare(gloo_pool, ranks, layout, Models(offload=True), truth=Models())


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(1, Layout(), id="one rank"),
        pytest.param(2, Layout(tp=2, sp=True), id="tp2-sp"),
        pytest.param(2, Layout(pp=2, vp=2), id="pp2-vp2"),
    ],
)
def test_a_teacher_that_is_the_student_teaches_nothing(gloo_pool: GetPool, ranks: int, layout: Layout) -> None:
    """KD and its gradient are 0 to fp32 rounding, against the size of a cross-entropy gradient of the same model."""
    _, cross_entropy = one_rank(gloo_pool, Models(ratio=0.0, temperature=1.0))
    losses, seen = combine(gloo_pool(ranks).run(kd_step, layout, Models(teacher_is_student=True, ratio=1.0)))
    assert abs(losses["kd"]) < 1e-6
    for key, value in seen.items():
        assert value.norm() < 1e-5 * cross_entropy[key].norm(), key


def test_a_gradient_that_is_tp_times_too_large_is_caught(gloo_pool: GetPool) -> None:
    losses, expected = one_rank(gloo_pool, Models())
    seen_losses, seen = combine(gloo_pool(2).run(step_with_doubled_gradient, Layout(tp=2), Models()))
    assert seen_losses == pytest.approx(losses, rel=STEP_LOSS)
    for key, value in expected.items():
        with pytest.raises(AssertionError, match="norm-relative"):
            assert_close_norm(seen[key], value, GRADIENT, key)
