"""Logits that a model multiplies (--use-mup) are multiplied in the loss, the student's and the teacher's."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mkd.config.loss_spec import LossSpec
from mkd.data.batch import KDBatch
from mkd.losses import LogitMap, reference
from mkd.teacher.interface import HiddenSignal
from mkd.train.objective import LossContext, MicrobatchObjective, Objective
from mkd.train.step import MicrobatchLoss
from mkd.train.step_tokens import StepTokens
from tests.support.tolerance import FP32, assert_close_norm

VOCAB, WIDTH = 9, 4
RATIO = 0.4


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def student_config(scale: float) -> SimpleNamespace:
    """The attributes of Megatron's configuration that the loss reads."""
    return SimpleNamespace(use_mup=True, mup_output_mult=scale, sequence_parallel=False, grad_scale_func=None)


def defined(hidden, weight, teacher, labels, student_scale, teacher_scale):
    """Mean loss from whole logits: [3, 2, H] hidden states, labels [2, 3]."""
    logits = (student_scale * hidden @ weight.t()).flatten(0, 1).double()
    teacher_logits = (teacher_scale * teacher @ random(VOCAB, WIDTH).t()).flatten(0, 1).double()
    ce = nn.functional.cross_entropy(logits, labels.t().reshape(-1), reduction="none")
    kd = reference.forward_kl(logits, teacher_logits, LossSpec())
    teacher_ce = nn.functional.cross_entropy(teacher_logits, labels.t().reshape(-1), reduction="none")
    return ((1 - RATIO) * ce + RATIO * kd).sum(), teacher_ce


@pytest.mark.parametrize(("student_scale", "teacher_scale"), [(1.0, 1.0), (0.25, 3.0)])
def test_loss_and_gradients(student_scale, teacher_scale):
    one = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    context = LossContext(SimpleNamespace(tp=one), VOCAB)
    labels = torch.tensor([[1, 2, 3], [4, 8, 0]])
    batch = KDBatch(labels, labels, torch.ones(2, 3), torch.ones(2, 3), labels)
    signal = HiddenSignal(random(3, 2, WIDTH) + 1, random(VOCAB, WIDTH), LogitMap(teacher_scale))
    objective = Objective(RATIO, LossSpec(), StepTokens(batch.ce_mask.sum(), batch.kd_mask.sum()))

    layer, hidden = nn.Linear(WIDTH, VOCAB, bias=False), random(3, 2, WIDTH).requires_grad_()
    loss = MicrobatchLoss(MicrobatchObjective.of(context, batch, objective, signal))(
        hidden_states=hidden, output_layer=layer, output_weight=None, config=student_config(student_scale)
    )
    loss.backward()

    weight, again = layer.weight.detach().requires_grad_(), hidden.detach().requires_grad_()
    expected, _ = defined(again, weight, signal.hidden, labels, student_scale, teacher_scale)
    expected.backward()
    assert_close_norm(loss, expected, FP32, "loss")
    assert_close_norm(hidden.grad, again.grad, FP32, "hidden states")
    assert_close_norm(layer.weight.grad, weight.grad, FP32, "LM head")


def test_reports_of_an_evaluation():
    one = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    context = LossContext(SimpleNamespace(tp=one), VOCAB)
    labels = torch.tensor([[1, 2, 3], [4, 8, 0]])
    batch = KDBatch(labels, labels, torch.ones(2, 3), torch.ones(2, 3), labels)
    signal = HiddenSignal(random(3, 2, WIDTH) + 1, random(VOCAB, WIDTH), LogitMap(3.0))
    objective = Objective(RATIO, LossSpec(), StepTokens(*torch.full((2,), 6.0)), evaluating=True)
    microbatch_loss = MicrobatchLoss(MicrobatchObjective.of(context, batch, objective, signal))
    layer = nn.Linear(WIDTH, VOCAB, bias=False)
    loss = microbatch_loss(
        hidden_states=random(3, 2, WIDTH), output_layer=layer, output_weight=None, config=student_config(1.0)
    )
    _, _, report = microbatch_loss.report(loss)
    _, expected = defined(random(3, 2, WIDTH), layer.weight, signal.hidden, labels, 1.0, 3.0)
    assert_close_norm(report["teacher_ce"][0], expected.sum(), FP32, "the teacher's CE")
