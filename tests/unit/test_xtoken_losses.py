"""Losses between tokenizers on one rank against their float64 definitions."""

import pytest
import torch
from torch import Tensor

from mkd.losses import LossOutput
from mkd.losses.divergences import DIVERGENCES
from mkd.xtoken.losses import xtoken_loss
from tests.loss_cases import UPSTREAM
from tests.poison import poisoned_memory
from tests.tolerance import FP32, FP64, assert_close_norm
from tests.xtoken_cases import KINDS, XTokenCase, check_values, expect, make


def run(case: XTokenCase) -> tuple[LossOutput, Tensor, Tensor]:
    """(output, d_hidden, d_weight)."""
    x, vocabulary = make(case), make(case).vocabulary(case)
    leaves = [x.student_hidden.requires_grad_(), x.student_weight.requires_grad_()]
    with poisoned_memory():
        out = xtoken_loss(
            *leaves,
            x.teacher_hidden,
            x.teacher_weight[vocabulary.teacher_columns],
            x.labels,
            x.ce_weight,
            x.teacher_labels,
            x.chunks,
            kind=case.kind,
            vocabulary=vocabulary,
            spec=case.spec,
            chunk_rows=case.chunk_rows,
            maps=case.maps,
            uncommon_top_k=case.uncommon_top_k,
        )
        return out, *torch.autograd.grad(UPSTREAM * out.loss, leaves)


def check(case: XTokenCase, tol: float) -> None:
    out, d_hidden, d_weight = run(case)
    expected = expect(case)
    check_values(out, expected, tol)
    assert_close_norm(d_hidden, expected.d_hidden, tol, "d_hidden")
    assert_close_norm(d_weight, expected.d_weight, tol, "d_weight")
    assert not d_weight[case.student_vocab :].any()
    assert not d_hidden[make(case).student_hidden.isnan()].any()


every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_every_divergence(kind: str, divergence: str) -> None:
    check(XTokenCase(kind, divergence, temperature=2.0, z_loss=1e-2), FP32)


@every_kind
@pytest.mark.parametrize("divergence", ["forward_kl", "tvd"])
@pytest.mark.parametrize("temperature, squared", [(1.0, True), (0.7, False)])
def test_temperatures(kind: str, divergence: str, temperature: float, squared: bool) -> None:
    check(XTokenCase(kind, divergence, temperature, squared, z_loss=1e-2, dtype=torch.float64), FP64)
