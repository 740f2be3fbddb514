"""Inputs of the losses with everything that can go wrong in them, and what the float64 reference says of them."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mkd.config import LossSpec
from mkd.losses import reference

UPSTREAM = 3.7
"""The gradient that comes into the loss: not 1, so that one that is dropped or applied twice shows."""


@dataclass(frozen=True)
class LossCase:
    """One set of inputs; rows 1 to 3 are masked in different ways when there are that many."""

    rows: int = 13
    true_vocab: int = 29
    vocab: int = 32
    """With padding columns, over all ranks."""
    terms: str = "ce+kd"
    divergence: str = "forward_kl"
    beta: float = 0.5
    skew: float = 0.1
    z_loss: float = 0.0
    temperature: float = 1.0
    temperature_squared: bool = True
    dtype: torch.dtype = torch.float32
    chunk_rows: int | None = 5
    all_masked: bool = False
    student_width: int = 7
    teacher_width: int = 10

    @property
    def spec(self) -> LossSpec:
        return LossSpec(
            divergence=self.divergence,
            beta=self.beta,
            skew=self.skew,
            temperature=self.temperature,
            temperature_squared=self.temperature_squared,
            z_loss=self.z_loss,
        )


class Inputs(NamedTuple):
    """Unsharded inputs. Padding rows of the LM heads are NaN and infinite; masked labels are illegal."""

    student_hidden: Tensor
    student_weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    student_logits: Tensor
    teacher_logits: Tensor
    labels: Tensor
    ce_weight: Tensor | None
    kd_weight: Tensor | None


class Expected(NamedTuple):
    """Of the float64 reference; gradients are of UPSTREAM * loss and have padding rows and columns of 0."""

    loss: Tensor
    ce: Tensor | None
    kd: Tensor | None
    d_hidden: Tensor
    d_weight: Tensor
    d_logits: Tensor


def make_inputs(case: LossCase) -> Inputs:
    """The same numbers in every process."""
    gen = torch.Generator().manual_seed(1234)
    n, v = case.rows, case.vocab

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64).to(case.dtype)

    hidden, teacher_hidden = normal(n, case.student_width), normal(n, case.teacher_width)
    weight, teacher_weight = normal(v, case.student_width), normal(v, case.teacher_width)
    logits, teacher_logits = hidden @ weight.t(), teacher_hidden @ teacher_weight.t()
    for poisoned in (weight.t(), teacher_weight.t(), logits, teacher_logits):
        poisoned[:, case.true_vocab :] = torch.nan
        poisoned[:, case.true_vocab :: 2] = torch.inf
    labels = torch.randint(0, case.true_vocab, (n,), generator=gen)
    ce_weight = torch.rand(n, generator=gen) + 0.1
    kd_weight = torch.rand(n, generator=gen) + 0.1
    if n > 3:
        labels[1], labels[2], labels[0] = -100, case.vocab + 5, case.true_vocab - 1
        ce_weight[1] = ce_weight[2] = kd_weight[2] = kd_weight[3] = 0
        # row 2 is masked in both terms, and row 3 of the teacher: whatever is there must not matter
        for masked, row in ((hidden, 2), (logits, 2), (teacher_hidden, 2), (teacher_logits, 2)):
            masked[row] = torch.nan
        teacher_hidden[3], teacher_logits[3] = torch.inf, torch.inf
    if case.all_masked:
        ce_weight.zero_(), kd_weight.zero_()
    return Inputs(
        hidden,
        weight,
        teacher_hidden,
        teacher_weight,
        logits,
        teacher_logits,
        labels,
        ce_weight if "ce" in case.terms else None,
        kd_weight if "kd" in case.terms else None,
    )


def expect(case: LossCase) -> Expected:
    """The reference in float64 through autograd, from the inputs as they are rounded to the case's dtype.

    d_logits is for the case's own logits, which for half precision are not exactly hidden @ weight.
    """
    x = make_inputs(case)
    hidden, weight = x.student_hidden.double().nan_to_num(0), x.student_weight.double()[: case.true_vocab]
    teacher_hidden = x.teacher_hidden.double().nan_to_num(0, 0, 0)
    teacher_logits = teacher_hidden @ x.teacher_weight.double()[: case.true_vocab].t()
    hidden.requires_grad_(), weight.requires_grad_()
    loss, ce, kd = _reference_terms(case, x, hidden @ weight.t(), teacher_logits)
    d_hidden, d_weight = torch.autograd.grad(UPSTREAM * loss, (hidden, weight))
    logits = x.student_logits.double()[:, : case.true_vocab].nan_to_num(0).requires_grad_()
    teacher_logits = x.teacher_logits.double()[:, : case.true_vocab].nan_to_num(0, 0, 0)
    (d_logits,) = torch.autograd.grad(UPSTREAM * _reference_terms(case, x, logits, teacher_logits)[0], logits)
    padding = case.vocab - case.true_vocab
    pad = torch.nn.functional.pad
    return Expected(loss.detach(), ce, kd, d_hidden, pad(d_weight, (0, 0, 0, padding)), pad(d_logits, (0, padding)))


def _reference_terms(
    case: LossCase, x: Inputs, logits: Tensor, teacher_logits: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(loss, ce, kd) with terms of weight 0 set to 0."""
    loss, ce, kd = logits.new_zeros(()), None, None
    if x.ce_weight is not None:
        ce = reference.cross_entropy(logits, torch.where(x.ce_weight != 0, x.labels, 0))
        loss = loss + (x.ce_weight * (ce + case.z_loss * reference.z_loss(logits))).sum()
        ce = torch.where(x.ce_weight != 0, ce, 0).detach()
    if x.kd_weight is not None:
        kd = reference.DIVERGENCES[case.spec.divergence](logits, teacher_logits, case.spec)
        loss = loss + (x.kd_weight * kd).sum()
        kd = torch.where(x.kd_weight != 0, kd, 0).detach()
    return loss, ce, kd
