"""A teacher with another tokenizer: training is the same in every parallel layout, micro-batch size and packing.

As tests/dist/test_invariance.py; the truth of each loss is computed on one rank, with one text a row.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.dist.kd_step import Layout, Models
from tests.dist.outcome import GetPool, Outcome, assert_same

PARTITION = Models(teacher_layers=2, data="pairs", xtoken="partition_kl")
P_KL = replace(PARTITION, xtoken="p_kl")
GOLD = replace(PARTITION, xtoken="gold")
RELAXED = replace(PARTITION, xtoken="gold_relaxed")
KD_ONLY = replace(PARTITION, ratio=1.0, tied=False)
FEW = replace(PARTITION, data="few pairs")


def packed(models: Models) -> Models:
    return replace(models, data="packed pairs")


# fmt: off
TABLE = {
    "mbs1": (1, Layout(mbs=1), PARTITION),
    "packed-mbs4": (1, Layout(mbs=4), packed(GOLD)),
    "tp2": (2, Layout(tp=2), PARTITION),
    "tp2-sp-packed": (2, Layout(tp=2, sp=True, mbs=4), packed(P_KL)),
    "cp2": (2, Layout(cp=2), P_KL),
    "cp2-packed": (2, Layout(cp=2, mbs=1), packed(KD_ONLY)),
    "pp2": (2, Layout(pp=2, mbs=1), RELAXED),
    "dp2": (2, Layout(mbs=1), FEW),
    "cp2-few": (2, Layout(cp=2, mbs=1), FEW),
    "tp2-sp-cp2-packed": (4, Layout(tp=2, sp=True, cp=2), packed(PARTITION)),
    "tp2-pp2": (4, Layout(tp=2, pp=2), GOLD),
    "cp2-dp2-opt": (4, Layout(cp=2, mbs=1, dist_opt=True), RELAXED),
}
# fmt: on


@pytest.fixture(scope="module")
def one_rank(gloo_pool: GetPool) -> Callable[[Models], Outcome]:
    """The truth: one rank, one text a row, micro-batches of 2. Each is computed once."""
    known: dict[Models, Outcome] = {}

    def truth(models: Models) -> Outcome:
        if models.data == "packed pairs":
            models = replace(models, data="pairs")
        if models not in known:
            known[models] = Outcome.of(gloo_pool, 1, Layout(), models, steps=2)
        return known[models]

    return truth


@pytest.mark.parametrize("name", TABLE)
def test_layout(gloo_pool: GetPool, one_rank: Callable[[Models], Outcome], name: str) -> None:
    ranks, layout, models = TABLE[name]
    assert_same(Outcome.of(gloo_pool, ranks, layout, models, steps=2), one_rank(models))
