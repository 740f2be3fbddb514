"""Inputs of the losses with a sparse teacher, and the results of the float64 definitions."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from mkd.losses import LogitMap, LossOutput, SparseTeacher, fused_linear_topk_loss, reference, topk_loss
from mkd.losses.reference import topk as reference_topk
from tests.support.loss_cases import UPSTREAM, Inputs, LossCase, make_inputs
from tests.support.tolerance import assert_close_norm


@dataclass(frozen=True)
class SparseCase:
    """A case of the full losses whose teacher lists some columns only."""

    full: LossCase = LossCase()  # noqa: RUF009
    k: int = 5
    tail: str = "bucket"
    with_tail_lse: bool = True
    sampled: bool = False


class Sparse(NamedTuple):
    """The inputs, and the teacher in the dtype of the case's weights."""

    inputs: Inputs
    teacher: SparseTeacher


def make_sparse(case: SparseCase) -> Sparse:
    """The top K columns or 2 K samples; token 4 repeats an id, 5 has an empty slot, 6 has empty slots only.

    Values that must not be read, in empty slots and in tokens 2 and 3 without a KD weight, are NaN or invalid ids.
    """
    x, spec = make_inputs(case.full), case.full.spec
    teacher = x.teacher_logits.double()[:, : case.full.true_vocab].nan_to_num(0, 0, 0)
    probabilities = torch.softmax(teacher / spec.temperature, 1)
    counts = None
    if case.sampled:
        generator = torch.Generator().manual_seed(8)
        draws = torch.multinomial(probabilities, 2 * case.k, replacement=True, generator=generator)
        ids, counts = draws, torch.ones_like(draws)
    else:
        ids = teacher.topk(case.k, 1).indices
    if case.full.rows > 6:
        ids[5, 1], ids[6] = -1, -1
        if case.k < case.full.true_vocab:
            ids[4, 3] = ids[4, 0]
    present = ids >= 0
    logits = teacher.gather(1, ids.clamp_min(0))
    tail_logits = teacher.scatter(1, ids.clamp_min(0), torch.where(present, -torch.inf, logits))
    for row in range(len(ids)):  # an empty slot must not bring column 0 back
        tail_logits[row, ids[row][present[row]]] = -torch.inf
    lse = torch.logsumexp(teacher / spec.temperature, 1)
    tail_lse = torch.logsumexp(tail_logits / spec.temperature, 1)
    logits[~present] = torch.nan
    if case.full.rows > 4:
        ids[2], logits[2:4], lse[2:4], tail_lse[2:4] = 10**6, torch.nan, torch.nan, torch.nan
    dtype = torch.promote_types(case.full.dtype, torch.float32)
    logits, lse, tail_lse = logits.to(dtype), lse.to(dtype), tail_lse.to(dtype)
    tail_lse = tail_lse if case.with_tail_lse and not case.sampled else None
    return Sparse(x, SparseTeacher(ids.int(), logits, lse, tail_lse, spec.temperature, counts))


class ExpectedSparse(NamedTuple):
    """Results of the definitions; gradients are of UPSTREAM * loss and 0 in padding."""

    loss: Tensor
    ce: Tensor | None
    kd: Tensor
    d_hidden: Tensor
    d_weight: Tensor
    d_logits: Tensor


def expect_sparse(case: SparseCase) -> ExpectedSparse:
    """In float64 by autograd, from the inputs as they are rounded."""
    (x, teacher), v = make_sparse(case), case.full.true_vocab
    hidden = x.student_hidden.double().nan_to_num(0).requires_grad_()
    weight = x.student_weight.double()[:v].requires_grad_()
    products, student_map = hidden @ weight.t(), case.full.maps.student
    z = student_map.scale * products
    z = z if student_map.softcap is None else student_map.softcap * torch.tanh(z / student_map.softcap)
    loss, ce, kd = _terms(case, x, teacher, z)
    d_hidden, d_weight = torch.autograd.grad(UPSTREAM * loss, (hidden, weight))
    z = x.student_logits.double()[:, :v].nan_to_num(0).requires_grad_()
    (d_logits,) = torch.autograd.grad(UPSTREAM * _terms(case, x, teacher, z)[0], z)
    pad = torch.nn.functional.pad
    padding = case.full.vocab - v
    return ExpectedSparse(
        loss.detach(), ce, kd, d_hidden, pad(d_weight, (0, 0, 0, padding)), pad(d_logits, (0, padding))
    )


def _terms(case: SparseCase, x: Inputs, teacher: SparseTeacher, z: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    used = x.kd_weight != 0
    ids = torch.where(used[:, None], teacher.ids, -1)
    logits = teacher.logits.double().nan_to_num(0)
    lse, tail_lse = (None if s is None else torch.where(used, s.double(), 0) for s in (teacher.lse, teacher.tail_lse))
    common = {"spec": case.full.spec, "lse_temperature": teacher.temperature}
    if teacher.counts is not None:
        kd = reference_topk.sampled(z, ids, teacher.counts, logits, lse, **common)
    else:
        kd = reference_topk.top_k(z, ids, logits, lse, tail=case.tail, teacher_tail_lse=tail_lse, **common)
    kd = torch.where(used, kd, 0)
    loss, ce = (x.kd_weight * kd).sum(), None
    if x.ce_weight is not None:
        ce = reference.cross_entropy(z, torch.where(x.ce_weight != 0, x.labels, 0))
        loss = loss + (x.ce_weight * (ce + case.full.z_loss * reference.z_loss(z))).sum()
        ce = torch.where(x.ce_weight != 0, ce, 0).detach()
    return loss, ce, kd.detach()


def run_topk(case: SparseCase, impl: str = "eager") -> tuple[LossOutput, Tensor]:
    """(output, d_logits)."""
    x, t = make_sparse(case)
    logits = x.student_logits.requires_grad_()
    out = topk_loss(
        logits,
        t.ids,
        t.logits,
        t.lse,
        *x[6:9],
        spec=case.full.spec,
        tail=case.tail,
        true_vocab=case.full.true_vocab,
        lse_temperature=t.temperature,
        teacher_tail_lse=t.tail_lse,
        counts=t.counts,
        impl=impl,
    )
    return out, *torch.autograd.grad(UPSTREAM * out.loss, logits)


def run_fused_topk(case: SparseCase, impl: str = "eager") -> tuple[LossOutput, Tensor, Tensor]:
    """(output, d_hidden, d_weight)."""
    x, teacher = make_sparse(case)
    hidden, weight = x.student_hidden.requires_grad_(), x.student_weight.requires_grad_()
    out = fused_linear_topk_loss(
        hidden,
        weight,
        teacher,
        *x[6:9],
        spec=case.full.spec,
        tail=case.tail,
        true_vocab=case.full.true_vocab,
        chunk_rows=case.full.chunk_rows,
        student_map=case.full.maps.student,
        impl=impl,
    )
    return out, *torch.autograd.grad(UPSTREAM * out.loss, (hidden, weight))


def check_values(out: LossOutput, expected: ExpectedSparse, tol: float) -> None:
    """Loss, CE and KD."""
    assert_close_norm(out.loss, expected.loss, tol, "loss")
    assert_close_norm(out.kd, expected.kd, tol, "kd")
    assert (out.ce is None) == (expected.ce is None)
    if out.ce is not None:
        assert_close_norm(out.ce, expected.ce, tol, "ce")


def check_sparse(case: SparseCase, tol: float, impl: str = "eager") -> None:
    """Both losses: values and gradients against the definitions, exact zeros in padding and masked rows."""
    expected = expect_sparse(case)
    out, d_hidden, d_weight = run_fused_topk(case, impl)
    check_values(out, expected, tol)
    assert_close_norm(d_hidden, expected.d_hidden, tol, "d_hidden")
    assert_close_norm(d_weight, expected.d_weight, tol, "d_weight")
    assert not d_weight[case.full.true_vocab :].any() and not d_hidden[2].any()
    if impl != "reference":
        out, d_logits = run_topk(replace(case, full=case.full), impl)
        assert_close_norm(out.kd, expected.kd, tol, "kd of logits") if case.full.maps.student == LogitMap() else None
        assert_close_norm(d_logits, expected.d_logits, tol, "d_logits")
        assert not d_logits[:, case.full.true_vocab :].any() and not d_logits[2].any()
