"""Losses over supervised tokens against losses over all tokens, in the same layout. One rank: tests/unit/train.

Without `-m slow`, each of SP, CP, PP with packed rows and two tokenizers is split once; `-m slow` adds CP with two
tokenizers and a teacher in its own layout.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mkd.data.supervised import SupervisedTokens
from mkd.train.supervised import select_hidden
from tests.support.dist.faults import EVERY_TOKEN
from tests.support.dist.kd_step import Layout, Models
from tests.support.dist.outcome import GetPool, Outcome
from tests.support.slow import slow
from tests.support.tolerance import assert_close_norm

ROUNDING = 1e-6
BOTH = Models(teacher_layers=2, masks="differ")
PAIRS = Models(teacher_layers=2, data="packed pairs", xtoken="partition_kl", mixed=True)

# fmt: off
TABLE = {
    "tp2-sp, few tokens": (2, Layout(tp=2, sp=True), replace(BOTH, masks="uneven", tied=False)),
    "tp2-sp-cp2, one token": (4, Layout(tp=2, sp=True, cp=2), replace(BOTH, masks="one token")),
    "pp2-vp2, packed": (2, Layout(pp=2, vp=2), replace(BOTH, data="packed", masks="same")),
}
MORE = {
    "tokenizers, tp2-sp": (2, Layout(tp=2, sp=True), PAIRS),
    "tp2-sp-dp2 / tp4": (4, Layout(tp=2, sp=True, teacher=Layout(tp=4, sp=True)), replace(BOTH, masks="uneven")),
    "tokenizers, tp2-sp-cp2": (4, Layout(tp=2, sp=True, cp=2), PAIRS),
}
# fmt: on


@pytest.mark.parametrize("name", [*TABLE, *slow(MORE)])
def test_gradients_and_means(gloo_pool: GetPool, name: str) -> None:
    case = (TABLE | MORE)[name]
    seen, expected = (Outcome.of(gloo_pool, *case, steps=1, fault=fault) for fault in (None, EVERY_TOKEN))
    for report, other in zip(seen.reports, expected.reports, strict=True):
        assert report.keys() == other.keys()
        for key, (value, count) in other.items():
            assert report[key] == (pytest.approx(value, rel=ROUNDING, abs=1e-12), count), key
    for key, value in expected.gradients.items():
        assert_close_norm(seen.gradients[key], value, ROUNDING, f"gradient of {key}")


def selected(rank: int, world_size: int, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Supervised hidden states on this rank, whose part of the others is NaN, and the gradient of its part."""
    tokens = SupervisedTokens.of(mask)
    part = torch.full((mask.numel(), 2), torch.nan)
    part[tokens.index] = tokens.index[:, None].float().expand(-1, 2)
    part = part.chunk(world_size)[rank].clone().requires_grad_()
    taken = select_hidden(part, tokens, torch.distributed.group.WORLD, sequence_parallel=True)
    (taken * (1 + torch.arange(len(taken))[:, None])).sum().backward()
    return taken.detach(), part.grad


@pytest.mark.parametrize("numbers", [[], [1], [6, 7], [0, 2, 3, 5, 7]])
def test_selection_under_sequence_parallelism(gloo_pool: GetPool, numbers: list[int]) -> None:
    mask = torch.zeros(1, 8)
    mask[0, numbers] = 1.0
    results = gloo_pool(2).run(selected, mask)
    for taken, _ in results:
        assert taken[:, 0].tolist() == numbers
    gradient = torch.cat([part for _, part in results])[:, 0].tolist()
    assert gradient == [numbers.index(n) + 1.0 if n in numbers else 0.0 for n in range(8)]
