"""Context parallelism, packed rows and microbatches of differing length where tests/dist/test_invariance.py has none:
losses and every parameter's gradient equal those of one rank whose rows hold one text each, padded behind it, computed
by megatron's own attention. `-m slow` adds CP 4 without packing, other schedules of microbatches of differing length
and the 8-rank layout.
"""

from collections.abc import Callable

import pytest
import torch
from megatron.core.transformer.moe import router
from megatron.core.transformer.moe.moe_utils import get_tokens_per_expert_and_token_count

from mkd.compat.experts import balance_experts_over_unequal_ranks
from tests.dist.test_layouts import compare
from tests.support.dist.kd_step import Layout, Models, kd_step
from tests.support.dist.pool import Pool, WorkerError

GetPool = Callable[[int], Pool]


@pytest.mark.parametrize(
    ("ranks", "layout", "data"),
    [
        pytest.param(4, Layout(cp=4), "text", id="cp4", marks=pytest.mark.slow),
        pytest.param(4, Layout(cp=4), "packed", id="cp4-packed"),
        pytest.param(4, Layout(cp=2, pp=2, vp=2), "packed", id="cp2-pp2-vp2-packed"),
        pytest.param(2, Layout(variable=True), "padded", id="dp2-variable"),
        pytest.param(2, Layout(pp=2, variable=True), "padded", id="pp2-variable", marks=pytest.mark.slow),
        pytest.param(2, Layout(pp=2, vp=2, variable=True), "padded", id="pp2-vp2-variable"),
        pytest.param(4, Layout(cp=2, tp=2, sp=True, variable=True), "padded", id="cp2-tp2-sp-variable"),
        pytest.param(
            8,
            Layout(cp=2, tp=2, sp=True, pp=2, variable=True),
            "padded",
            id="cp2-tp2-sp-pp2-variable",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_layout(gloo_pool: GetPool, ranks: int, layout: Layout, data: str) -> None:
    compare(gloo_pool, ranks, layout, Models(data=data), truth=Models(data="padded") if data == "packed" else None)


@pytest.mark.parametrize(
    ("ranks", "layout", "data"),
    [
        pytest.param(2, Layout(cp=2), "packed", id="cp2-packed"),
        pytest.param(4, Layout(cp=2, pp=2, variable=True), "padded", id="cp2-pp2-variable"),
    ],
)
def test_paired_layers(gloo_pool: GetPool, ranks: int, layout: Layout, data: str) -> None:
    """The term of intermediate layers is taken at the same tokens."""
    models = Models(data=data, hidden_loss="1:2,3:8")
    compare(gloo_pool, ranks, layout, models, truth=Models(data="padded", hidden_loss="1:2,3:8"))


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(1, Layout(variable=True), id="variable"),
        pytest.param(2, Layout(cp=2), id="cp2"),
        pytest.param(4, Layout(tp=2, sp=True, pp=2), id="tp2-sp-pp2"),
    ],
)
def test_padding_is_no_part_of_the_balance_of_experts(gloo_pool: GetPool, ranks: int, layout: Layout) -> None:
    """The balance loss is that of the texts, however much padding there is and on whichever stage the router is."""
    compare(gloo_pool, ranks, layout, Models(data="padded", moe=True, aux_loss=0.1))


def counted_tokens(rank: int, world_size: int) -> list[float]:
    """This rank's token count by megatron alone, and then with mkd's repair: 3 on rank 0, 1 on rank 1."""
    choices = torch.tensor([[1, 0], [0, 1], [1, 0], [0, 0]] if rank == 0 else [[0, 0], [0, 1], [0, 0], [0, 0]])
    group = torch.distributed.group.WORLD
    seen = [float(get_tokens_per_expert_and_token_count(choices.clone(), group, 1, with_padding_mask=True)[1])]
    balance_experts_over_unequal_ranks()
    _, here, total = router.get_tokens_per_expert_and_token_count(choices, group, 1, with_padding_mask=True)
    return [*seen, float(here), float(total)]


def test_megatron_still_takes_all_tokens_for_those_of_a_rank(gloo_pool: GetPool) -> None:
    """If this fails on the first value, `balance_experts_over_unequal_ranks` is needed no longer."""
    assert gloo_pool(2).run(counted_tokens) == [[4.0, 2.0, 4.0]] * 2


def test_recomputed_activations(gloo_pool: GetPool) -> None:
    """Keys and values are gathered once more in the backward pass."""
    models = Models(data="packed", recompute=True)
    compare(gloo_pool, 2, Layout(cp=2), models, truth=Models(data="padded"))


def with_shorter_second_batch(rank: int, world_size: int) -> None:
    """Stages that do not know of differing lengths."""
    from tests.support.dist import kd_step as module

    whole = module.microbatches

    def shorter(*args: object) -> list[dict]:
        first, second, *_ = whole(*args)
        return [first, {name: value[:, :8] for name, value in second.items()}]

    module.microbatches = shorter
    try:
        kd_step(rank, world_size, Layout(pp=2), Models())
    finally:
        module.microbatches = whole


def test_lengths_that_differ_without_the_flag(gloo_pool: GetPool) -> None:
    with pytest.raises(WorkerError, match=r"MkdDataError: microbatches of one step .*--kd-variable-seq-lengths"):
        gloo_pool(2).run(with_shorter_second_batch)
