"""Forward passes of the teacher over several microbatches give the losses and gradients of a pass for each
microbatch."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

from mkd.compat.random_states import without_dropout_states
from mkd.data.microbatches import next_microbatches
from mkd.distributed.groups import Groups
from mkd.teacher.online import OnlineTeacher
from tests.dist.test_layouts import compare
from tests.support.dist.faults import EVERY_TOKEN
from tests.support.dist.kd_samples import VOCAB, microbatches
from tests.support.dist.kd_step import Layout, Models, build_teacher, parallel_state
from tests.support.dist.outcome import GetPool, Outcome, assert_same
from tests.support.slow import slow

SMALL = Models(teacher_layers=2, teacher_rows=3)
PACKED = replace(SMALL, data="packed", tied=False)

# fmt: off
TABLE = {
    "one rank": (1, Layout(mbs=1), SMALL),
    "tp2-sp, packed": (2, Layout(tp=2, sp=True, mbs=1), PACKED),
    "pp2, the last pass is smaller": (2, Layout(pp=2, mbs=1), SMALL),
    "dp4 / tp4, packed": (4, Layout(mbs=1, teacher=Layout(tp=4, sp=True)), PACKED),
}
MORE = {
    "pp2-cp2, packed": (4, Layout(pp=2, cp=2, mbs=1), PACKED),
    "tp2-sp-pp2-vp2": (4, Layout(tp=2, sp=True, pp=2, vp=2, mbs=1), SMALL),
    "dp2 / pp2": (2, Layout(mbs=1, teacher=Layout(pp=2)), SMALL),
    "lengths differ, pp2-dp2": (4, Layout(pp=2, mbs=1, variable=True), replace(SMALL, data="padded")),
    "offload, tp2": (2, Layout(tp=2, mbs=1), replace(PACKED, offload=True)),
    "dp2 / ep2": (2, Layout(mbs=1, teacher=Layout(ep=2)), replace(SMALL, teacher_moe=True)),
}
# fmt: on


@pytest.mark.parametrize("name", [*TABLE, *slow(MORE)])
def test_losses_and_gradients(gloo_pool: GetPool, name: str) -> None:
    ranks, layout, models = (TABLE | MORE)[name]
    data = "padded" if models.data == "packed" else models.data
    compare(gloo_pool, ranks, layout, models, truth=replace(models, teacher_rows=None, offload=False, data=data))


@pytest.mark.slow
def test_evaluation_and_another_tokenizer(gloo_pool: GetPool) -> None:
    models = Models(teacher_layers=2, data="pairs", xtoken="p_kl", mixed=True)
    packed = replace(models, data="packed pairs", teacher_rows=3)
    truth = Outcome.of(gloo_pool, 1, Layout(), models, steps=1, fault=EVERY_TOKEN)
    assert_same(Outcome.of(gloo_pool, 2, Layout(mbs=1), packed, steps=1), truth)


def count_passes(rank: int, world_size: int, layout: Layout, models: Models) -> list[tuple[int, ...]]:
    """Shapes of the tokens of each forward pass of the teacher; its signals are compared with one pass per microbatch,
    to the last bit where passes are not larger than microbatches."""
    with parallel_state(layout):
        groups = Groups.from_megatron()
        collated = microbatches(models.data, layout.segment_cp, layout.mbs, groups.dp.rank(), groups.dp.size())
        batches = next_microbatches(iter(collated), len(collated), VOCAB)
        parts = [batch.with_supervised().on_rank(groups.cp) for batch in batches]
        expected = build_teacher(layout, replace(models, teacher_rows=None), groups).signals(parts)
        with _passes() as shapes:
            seen = build_teacher(layout, models, groups).signals(parts)
        for one, other in zip(seen, expected, strict=True):
            same = torch.equal if models.teacher_rows <= layout.mbs else torch.allclose
            assert same(one.hidden, other.hidden)
        return shapes


@contextmanager
def _passes() -> Iterator[list[tuple[int, ...]]]:
    """Records the shapes of the tokens of each pass."""
    shapes, forward = [], OnlineTeacher._forward

    def recorded(teacher: OnlineTeacher, one) -> torch.Tensor:
        shapes.append(tuple(one.tokens.shape))
        return forward(teacher, one)

    OnlineTeacher._forward = recorded
    try:
        yield shapes
    finally:
        OnlineTeacher._forward = forward


@pytest.mark.parametrize(
    ("layout", "models", "expected"),
    [
        pytest.param(Layout(mbs=1), SMALL, [(3, 24), (3, 24), (2, 24)], id="remainder"),
        pytest.param(Layout(mbs=2), replace(SMALL, teacher_rows=2), [(2, 24)] * 4, id="as the student"),
        pytest.param(Layout(mbs=2), replace(PACKED, teacher_rows=100), [(1, 8 * 24)], id="the whole step"),
        pytest.param(Layout(mbs=2), replace(PACKED, teacher_rows=1), [(1, 2 * 24)] * 4, id="smaller than a microbatch"),
    ],
)
def test_sizes_of_passes(gloo_pool: GetPool, layout: Layout, models: Models, expected: list[tuple[int, ...]]) -> None:
    assert gloo_pool(1).run(count_passes, layout, models) == [expected]


def count_switches(rank: int, world_size: int) -> tuple[int, int]:
    """Switches of random states in the passes of a teacher under sequence parallelism, as always and without them."""
    layout, switches, fork = Layout(tp=2, sp=True), [], CudaRNGStatesTracker.fork
    counted = patch.object(CudaRNGStatesTracker, "fork", lambda self: switches.append(1) or fork(self))
    with parallel_state(layout), counted:
        groups = Groups.from_megatron()
        batches = next_microbatches(iter(microbatches("text", 1, 2, 0, 1)), 4, VOCAB)
        parts = [batch.on_rank(groups.cp) for batch in batches]
        teacher = build_teacher(layout, replace(SMALL, teacher_rows=None), groups)
        plain, always = teacher.signals(parts), len(switches)
        with without_dropout_states(teacher.model):
            seen = teacher.signals(parts)
        assert all(torch.equal(one.hidden, other.hidden) for one, other in zip(seen, plain, strict=True))
        return always, len(switches) - always


def test_megatron_switches_random_states_without_dropout(gloo_pool: GetPool) -> None:
    """The reason for `without_dropout_states`, which is unnecessary once this fails."""
    for always, without in gloo_pool(2).run(count_switches):
        assert always > 0 and without == 0
