"""Inputs of the losses with every irregularity, and the results of the float64 reference."""

import os
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from mkd.config.loss_spec import LossSpec
from mkd.losses import LossOutput, fused_linear_loss, reference, vocab_parallel_loss
from mkd.losses.inputs import PLAIN_LOGITS, LogitMap, LogitMaps
from tests.support.tolerance import assert_close_norm

UPSTREAM = 3.7
"""Upstream gradient of the loss: not 1, so that dropping it or applying it twice is detected."""

INTERPRETED = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="Triton's interpreter is on only where there is no GPU"
)
"""Marks tests that run Triton's kernels on CPU."""


@dataclass(frozen=True)
class LossCase:
    """One set of inputs; tokens 1 to 3 are masked in different ways if there are that many."""

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
    biased: bool = False
    """Both LM heads have a bias."""
    maps: LogitMaps = PLAIN_LOGITS
    teacher_padding: int = 0
    """Padding columns that the teacher has more than the student; on one rank only."""
    logits_dtype: torch.dtype | None = None

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
    """Unsharded inputs. The padding of the LM heads is NaN and infinite; masked labels are outside the vocabulary."""

    student_hidden: Tensor
    student_weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    student_logits: Tensor
    teacher_logits: Tensor
    labels: Tensor
    ce_weight: Tensor | None
    kd_weight: Tensor | None
    student_bias: Tensor | None
    teacher_bias: Tensor | None


class Expected(NamedTuple):
    """Results of the float64 reference; gradients are of UPSTREAM * loss and 0 in padding."""

    loss: Tensor
    ce: Tensor | None
    kd: Tensor | None
    d_hidden: Tensor
    d_weight: Tensor
    d_logits: Tensor
    d_bias: Tensor | None


def make_inputs(case: LossCase) -> Inputs:
    """The same numbers in every process."""
    gen = torch.Generator().manual_seed(1234)
    n, v = case.rows, case.vocab
    teacher_v = v + case.teacher_padding

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64).to(case.dtype)

    hidden, teacher_hidden = normal(n, case.student_width), normal(n, case.teacher_width)
    weight, teacher_weight = normal(v, case.student_width), normal(teacher_v, case.teacher_width)
    bias, teacher_bias = (normal(v), normal(teacher_v)) if case.biased else (None, None)
    logits = _map(_linear(hidden, weight, bias), case.maps.student)
    teacher_logits = _map(_linear(teacher_hidden, teacher_weight, teacher_bias), case.maps.teacher)
    biases = (bias[None], teacher_bias[None]) if case.biased else ()
    for poisoned in (weight.t(), teacher_weight.t(), logits, teacher_logits, *biases):
        poisoned[:, case.true_vocab :] = torch.nan
        poisoned[:, case.true_vocab :: 2] = torch.inf
    labels = torch.randint(0, case.true_vocab, (n,), generator=gen)
    ce_weight = torch.rand(n, generator=gen) + 0.1
    kd_weight = torch.rand(n, generator=gen) + 0.1
    if n > 3:
        labels[1], labels[2], labels[0] = -100, case.vocab + 5, case.true_vocab - 1
        ce_weight[1] = ce_weight[2] = kd_weight[2] = kd_weight[3] = 0
        # token 2 is masked in both terms, token 3 for the teacher: their values must have no effect
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
        bias,
        teacher_bias,
    )


def _linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return hidden @ weight.t() if bias is None else hidden @ weight.t() + bias


def _map(products: Tensor, logit_map: LogitMap) -> Tensor:
    """Scale and cap by their formula."""
    z = logit_map.scale * products
    return z if logit_map.softcap is None else logit_map.softcap * torch.tanh(z / logit_map.softcap)


def expect(case: LossCase) -> Expected:
    """The reference in float64 through autograd, from the inputs as they are rounded to the case's dtype.

    d_logits is for the case's own logits, which for half precision are not exactly hidden @ weight.
    """
    x = make_inputs(case)
    hidden, weight = x.student_hidden.double().nan_to_num(0), x.student_weight.double()[: case.true_vocab]
    teacher_hidden = x.teacher_hidden.double().nan_to_num(0, 0, 0)
    bias, teacher_bias = (
        None if b is None else b.double()[: case.true_vocab] for b in (x.student_bias, x.teacher_bias)
    )
    teacher_logits = _linear(teacher_hidden, x.teacher_weight.double()[: case.true_vocab], teacher_bias)
    leaves = [t.requires_grad_() for t in (hidden, weight, bias) if t is not None]
    logits = _map(_linear(hidden, weight, bias), case.maps.student)
    loss, ce, kd = _reference_terms(case, x, logits, _map(teacher_logits, case.maps.teacher))
    d_hidden, d_weight, *d_bias = torch.autograd.grad(UPSTREAM * loss, leaves)
    logits = x.student_logits.double()[:, : case.true_vocab].nan_to_num(0).requires_grad_()
    teacher_logits = x.teacher_logits.double()[:, : case.true_vocab].nan_to_num(0, 0, 0)
    (d_logits,) = torch.autograd.grad(UPSTREAM * _reference_terms(case, x, logits, teacher_logits)[0], logits)
    padding = case.vocab - case.true_vocab
    pad = torch.nn.functional.pad
    d_weight, d_logits = pad(d_weight, (0, 0, 0, padding)), pad(d_logits, (0, padding))
    return Expected(
        loss.detach(), ce, kd, d_hidden, d_weight, d_logits, pad(d_bias[0], (0, padding)) if d_bias else None
    )


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


def run_fused(case: LossCase, impl: str = "eager") -> tuple[LossOutput, Tensor, Tensor, Tensor | None]:
    """(output, d_hidden, d_weight, d_bias or None)."""
    x = make_inputs(case)
    leaves = [t.requires_grad_() for t in (x.student_hidden, x.student_weight, x.student_bias) if t is not None]
    out = fused_linear_loss(
        *x[:4],
        x.labels,
        x.ce_weight,
        x.kd_weight,
        spec=case.spec,
        true_vocab=case.true_vocab,
        chunk_rows=case.chunk_rows,
        student_bias=x.student_bias,
        teacher_bias=x.teacher_bias,
        maps=case.maps,
        logits_dtype=case.logits_dtype,
        impl=impl,
    )
    gradients = torch.autograd.grad(UPSTREAM * out.loss, leaves)
    return out, *gradients, *([] if case.biased else [None])


def run_logits(case: LossCase, impl: str = "eager") -> tuple[LossOutput, Tensor]:
    """(output, d_logits)."""
    x = make_inputs(case)
    rows = (x.labels, x.ce_weight, x.kd_weight)
    logits = x.student_logits.requires_grad_()
    out = vocab_parallel_loss(logits, x.teacher_logits, *rows, spec=case.spec, true_vocab=case.true_vocab, impl=impl)
    return out, *torch.autograd.grad(UPSTREAM * out.loss, logits)


def check_values(out: LossOutput, expected: Expected, tol: float) -> None:
    assert_close_norm(out.loss, expected.loss, tol, "loss")
    for name in ("ce", "kd"):
        actual, wanted = getattr(out, name), getattr(expected, name)
        assert (actual is None) == (wanted is None), name
        if wanted is not None:
            assert not actual.requires_grad
            assert_close_norm(actual, wanted, tol, name)


def check(case: LossCase, tol: float, impl: str = "eager") -> None:
    """Both losses: values and gradients against the reference, exact zeros in padding and masked rows."""
    expected = expect(case)
    out, d_hidden, d_weight, d_bias = run_fused(case, impl)
    check_values(out, expected, tol)
    assert_close_norm(d_hidden, expected.d_hidden, tol, "d_hidden")
    assert_close_norm(d_weight, expected.d_weight, tol, "d_weight")
    assert not d_weight[case.true_vocab :].any()
    if case.biased:
        assert_close_norm(d_bias, expected.d_bias, tol, "d_bias")
        assert not d_bias[case.true_vocab :].any()
    out, d_logits = run_logits(case, impl)
    check_values(out, expected, tol)
    assert_close_norm(d_logits, expected.d_logits, tol, "d_logits")
    assert not d_logits[:, case.true_vocab :].any()
    if case.rows > 3:
        assert not d_hidden[2].any() and not d_logits[2].any()
