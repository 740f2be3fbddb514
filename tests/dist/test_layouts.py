"""One step in a parallel layout has the losses and the gradients of one rank, parameter by parameter: special cases.
The table of all layouts is in test_invariance.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from tests.support.dist.kd_samples import VOCAB
from tests.support.dist.kd_step import Layout, Models, kd_step
from tests.support.dist.outcome import Outcome, total, whole_tensors
from tests.support.dist.pool import Pool
from tests.support.tolerance import GRADIENT, STEP_LOSS, assert_close_norm

GetPool = Callable[[int], Pool]


def combine(results: list[dict[str, Any]]) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Mean losses over all data-parallel ranks, and whole gradients; copies of a parameter must agree."""
    sums = total([result["reports"] for result in results])
    parts = [part for result in results for part in result["gradients"]]
    losses = {name: value / count for name, (value, count) in sums.items() if count}  # else a mean over no token
    return losses, whole_tensors(parts, "gradient")


def one_rank(gloo_pool: GetPool, models: Models, cache: dict = {}) -> tuple[dict[str, float], dict[str, Tensor]]:  # noqa: B006
    """Reference for these models: one rank, microbatches of 2. Computed once."""
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
        assert value.norm() > 0, f"{key} has no gradient: the comparison would be empty"
        assert_close_norm(seen[key], value, GRADIENT, key)


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(2, Layout(tp=2, sp=True), id="tp2-sp"),
        pytest.param(2, Layout(pp=2), id="pp2"),
        pytest.param(4, Layout(tp=2, pp=2, vp=2, sp=True), id="tp2-sp-pp2-vp2"),
    ],
)
def test_untied_without_kd_in_this_step(gloo_pool: GetPool, ranks: int, layout: Layout) -> None:
    compare(gloo_pool, ranks, layout, Models(tied=False, ratio=0.0, temperature=1.0))


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
def test_teacher_equal_to_the_student_gives_no_gradient(gloo_pool: GetPool, ranks: int, layout: Layout) -> None:
    """KD and its gradient are 0 to fp32 rounding, relative to the cross-entropy gradient of the same model."""
    _, cross_entropy = one_rank(gloo_pool, Models(ratio=0.0, temperature=1.0))
    losses, seen = combine(gloo_pool(ranks).run(kd_step, layout, Models(teacher_is_student=True, ratio=1.0)))
    assert abs(losses["kd"]) < 1e-6
    for key, value in seen.items():
        assert value.norm() < 1e-5 * cross_entropy[key].norm(), key


def test_padding_columns_of_the_vocabulary(gloo_pool: GetPool) -> None:
    """A run that never uses its teacher has Megatron's own cross-entropy, which covers them; any other run does not."""
    models = Models(tied=False, ratio=0.0, temperature=1.0)
    plain = Outcome.of(gloo_pool, 1, Layout(), models, steps=1)
    losses, gradients = one_rank(gloo_pool, models)
    total_ce, count = plain.reports[1]["ce"]
    assert total_ce / count > losses["ce"] + 1e-3
    head = "output_layer.weight"
    assert plain.gradients[head][VOCAB:].any() and not gradients[head][VOCAB:].any()
