"""What a step does with numbers that are not finite."""

from types import SimpleNamespace

import pytest
import torch

from mkd.config import LossSpec
from mkd.data.batch import KDBatch
from mkd.data.counts import StepTokens
from mkd.step import ForwardStep, Objective, StepInput, _HeadLoss
from mkd.teacher.base import HiddenSignal


def head_loss(hidden: torch.Tensor, kd_mask: torch.Tensor) -> _HeadLoss:
    one = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    owner = ForwardStep(SimpleNamespace(tp=one, is_last_stage=True), true_vocab=9, check_finite=True)
    tokens = torch.zeros(2, 3, dtype=torch.long)
    batch = KDBatch(tokens, tokens, torch.ones(2, 3), kd_mask, tokens)
    objective = Objective(ratio=0.5, spec=LossSpec(), evaluating=False, plain=False)
    tokens = StepTokens(batch.ce_mask.sum(), batch.kd_mask.sum())
    return _HeadLoss(owner, StepInput(batch, objective, tokens, lambda: HiddenSignal(hidden, torch.zeros(9, 4))))


def test_a_teacher_that_is_not_finite_is_named() -> None:
    hidden, mask = torch.zeros(3, 2, 4), torch.ones(2, 3)
    hidden[2, 1, 3] = torch.nan
    with pytest.raises(RuntimeError, match="NaN in the teacher's final hidden states"):
        head_loss(hidden, mask).report(torch.zeros(()))
    mask[1, 2] = 0  # sample 1, position 2: not distilled
    head_loss(hidden, mask).report(torch.zeros(()))
