"""Extreme inputs: huge and infinite logits, one-hot teachers, equal models, NaN."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from mkd.losses import LossSpec, reference, vocab_parallel_loss
from mkd.losses.divergences import DIVERGENCES
from tests.support.loss_cases import INTERPRETED
from tests.support.tolerance import FP32, assert_close_norm

VOCAB = 37
INF = torch.inf

pytestmark = [
    pytest.mark.usefixtures("poisoned", "small_blocks"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy's, of infinities that are meant
]
every_divergence = pytest.mark.parametrize("name", DIVERGENCES)
every_implementation = pytest.mark.parametrize("impl", ["eager", pytest.param("triton", marks=INTERPRETED)])


class Result(NamedTuple):
    """Terms per token, and the gradient of their sum by the student's logits."""

    ce: Tensor
    kd: Tensor
    gradient: Tensor


def models(rows: int = 4) -> tuple[Tensor, Tensor]:
    """(student, teacher) logits, in float32."""
    student, teacher = torch.randn(2, rows, VOCAB, generator=torch.Generator().manual_seed(8))
    return student, teacher


def fast(student: Tensor, teacher: Tensor, spec: LossSpec, impl: str, kd_weight: Tensor | None = None) -> Result:
    ones = torch.ones(len(student))
    student = student.clone().requires_grad_()
    kd_weight = ones if kd_weight is None else kd_weight
    labels = torch.arange(len(student))
    out = vocab_parallel_loss(student, teacher, labels, ones, kd_weight, spec=spec, true_vocab=VOCAB, impl=impl)
    return Result(out.ce, out.kd, *torch.autograd.grad(out.loss, student))


def truth(student: Tensor, teacher: Tensor, spec: LossSpec) -> Result:
    student = student.double().requires_grad_()
    ce = reference.cross_entropy(student, torch.arange(len(student)))
    kd = reference.DIVERGENCES[spec.divergence](student, teacher.double(), spec)
    return Result(ce.detach(), kd.detach(), *torch.autograd.grad((ce + kd).sum(), student))


def check_same(actual: Result, expected: Result) -> None:
    """Infinite values where the reference's are, all others close; gradients of the tokens where it has finite ones.

    A gradient of reverse KL is q (ln q/p - KL): it cannot be closer than fp32's rounding of the KL.
    """
    for name in ("ce", "kd"):
        a, e = getattr(actual, name), getattr(expected, name)
        assert torch.equal(a.isinf(), e.isinf()), f"{name}: {a}, expected {e}"
        assert_close_norm(a[e.isfinite()], e[e.isfinite()], FP32, name)
    finite = expected.gradient.isfinite().all(dim=1)
    assert finite.any()
    for row in finite.nonzero().flatten().tolist():
        size = torch.linalg.vector_norm(expected.gradient[row]).item()
        rounding = 4 * torch.finfo(torch.float32).eps * expected.kd[row].nan_to_num(0, 0).item() / size
        assert_close_norm(actual.gradient[row], expected.gradient[row], FP32 + rounding, f"gradient of row {row}")


@every_implementation
@every_divergence
def test_huge_logits(name: str, impl: str) -> None:
    student, teacher = models()
    student[0, 3], student[0, 30], student[1, 20], student[2] = 1e4, -1e4, -1e4, student[2] * 3e3
    teacher[0, 30], teacher[0, 3], teacher[1, 18], teacher[2] = 1e4, -1e4, 1e4, teacher[2] * 3e3
    spec = LossSpec(divergence=name, temperature=0.5)
    check_same(fast(student, teacher, spec, impl), truth(student, teacher, spec))


@every_implementation
@every_divergence
@pytest.mark.parametrize(
    "where", [*(pytest.param(one, marks=pytest.mark.slow) for one in ("student", "teacher")), "both"]
)
def test_impossible_columns(name: str, where: str, impl: str) -> None:
    """-inf in a real column, and in the first and the last blocks, of one token each."""
    student, teacher = models()
    for row, columns in ((1, slice(5, 6)), (2, slice(0, 16)), (3, slice(16, 37))):
        if where != "teacher":
            student[row, columns] = -INF
        if where != "student":
            teacher[row, columns] = -INF
    spec = LossSpec(divergence=name, temperature=0.5)
    check_same(fast(student, teacher, spec, impl), truth(student, teacher, spec))


@every_implementation
def test_forward_kl_is_infinite_with_a_finite_gradient(impl: str) -> None:
    """The student excludes a column that the teacher expects: the gradient stays q - p."""
    student, teacher = models()
    student[0, 30] = -INF
    actual = fast(student, teacher, LossSpec(), impl)
    assert actual.kd[0] == INF and actual.kd[1:].isfinite().all()
    q, p = student.double().softmax(1), teacher.double().softmax(1)
    one_hot = torch.eye(VOCAB, dtype=torch.float64)[: len(student)]
    assert_close_norm(actual.gradient, (q - p) + (q - one_hot), FP32, "gradient")


@every_implementation
def test_excluded_label(impl: str) -> None:
    """CE is +inf, and its gradient q - 1 at the label."""
    student, teacher = models()
    student[1, 1] = -INF
    teacher[1, 1] = -INF
    spec = LossSpec(divergence="jsd")
    actual = fast(student, teacher, spec, impl)
    assert actual.ce[1] == INF and actual.ce.isfinite().sum() == 3
    assert actual.gradient.isfinite().all()
    assert abs(actual.gradient[1, 1].item() + 1) <= FP32


@every_implementation
@every_divergence
def test_one_hot_teacher(name: str, impl: str) -> None:
    student, teacher = models()
    for row, rest, column in ((1, -INF, 0), (2, -INF, 36), (3, -1e4, 17)):
        teacher[row] = rest
        teacher[row, column] = 2.0
    spec = LossSpec(divergence=name, temperature=2.0)
    check_same(fast(student, teacher, spec, impl), truth(student, teacher, spec))


@every_implementation
@every_divergence
def test_equal_models(name: str, impl: str) -> None:
    """Value and gradient of the divergence are 0 up to rounding, also if the teacher's logits are shifted."""
    student, _ = models()
    spec = LossSpec(divergence=name, temperature=0.5)
    for shift in (0.0, 4.0):
        student = (student * 1024).round() / 1024  # exact with and without the shift
        z = student.clone().requires_grad_()
        ones, labels = torch.ones(4), torch.zeros(4).long()
        out = vocab_parallel_loss(z, student + shift, labels, None, ones, spec=spec, true_vocab=VOCAB, impl=impl)
        assert_close_norm(out.kd, torch.zeros(4), FP32, "value")
        assert_close_norm(*torch.autograd.grad(out.loss, z), torch.zeros(4, VOCAB), FP32, "gradient")


@every_implementation
@every_divergence
@pytest.mark.parametrize("who", ["student", "teacher"])
def test_nan_of_a_used_token_propagates(name: str, who: str, impl: str) -> None:
    student, teacher = models()
    for row, column in ((1, 2), (3, 33)):
        (student if who == "student" else teacher)[row, column] = torch.nan
    actual = fast(student, teacher, LossSpec(divergence=name), impl)
    assert actual.kd.isnan().tolist() == [False, True, False, True]
    assert not actual.gradient[[0, 2]].isnan().any()


@every_implementation
@every_divergence
def test_unused_token_has_no_effect(name: str, impl: str) -> None:
    student, teacher = models()
    spec, kd_weight = LossSpec(divergence=name, temperature=2.0), torch.tensor([1.0, 0.0, 1.0, 0.0])
    clean = fast(student, teacher, spec, impl, kd_weight)
    for row, bad in ((1, torch.nan), (3, INF)):
        teacher[row, 1], teacher[row, 20:] = bad, torch.nan
    for a, b in zip(fast(student, teacher, spec, impl, kd_weight), clean, strict=True):
        assert torch.equal(a, b)
