"""The losses against a sparse teacher on a GPU: Triton's kernel for the tail at the vocabularies of real models."""

import pytest
import torch
from torch import Tensor

from mkd.losses import (
    LinearLogits,
    LossSpec,
    SparseTeacher,
    VocabLayout,
    fused_linear_topk_loss,
    reference,
    teacher_top_k,
    topk_loss,
)
from mkd.losses.divergences import DIVERGENCES
from mkd.losses.reference import topk as reference_topk
from tests.gpu.test_losses import ROWS, TRUE_VOCAB, UPSTREAM, check, logits, make_inputs
from tests.support.tolerance import FP32, HALF_FACTOR, assert_close_norm, norm_error

pytestmark = pytest.mark.gpu

K = 64


def spec_of(divergence: str = "forward_kl") -> LossSpec:
    return LossSpec(divergence=divergence, temperature=2.0, z_loss=1e-3)


def sparse(u: Tensor, k: int = K) -> dict[str, Tensor | float]:
    """The k most probable of teacher logits [N, V], as `topk_loss` takes them."""
    top = u.topk(k, 1)
    lse, tail = (torch.logsumexp(x / 2.0, 1).float() for x in (u, u.scatter(1, top.indices, -torch.inf)))
    return {"ids": top.indices, "teacher_logits": top.values, "teacher_lse": lse, "teacher_tail_lse": tail}


def terms(z: Tensor, teacher: dict, labels: Tensor, ce_weight: Tensor, kd_weight: Tensor, spec: LossSpec, tail: str):
    """(loss, divergence [N]) by their definitions."""
    ids, *values = (teacher[n].to(z.dtype) if teacher[n].is_floating_point() else teacher[n] for n in teacher)
    kd = reference_topk.top_k(z, ids, *values[:2], spec, tail, lse_temperature=2.0, teacher_tail_lse=values[2])
    ce = reference.cross_entropy(z, labels) + spec.z_loss * reference.z_loss(z)
    return (ce_weight * ce + kd_weight * kd).sum(), kd


@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
@pytest.mark.parametrize("vocab", [50257, 128256, 262144])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_logits(dtype: torch.dtype, vocab: int, tail: str) -> None:
    student, teacher, *rows = logits(vocab, dtype)
    student, teacher = 3 * student, 3 * teacher  # most of the mass is in the head, and the divergence is not tiny
    spec, known = spec_of("jsd" if vocab == 50257 else "forward_kl"), sparse(teacher.float())
    z, doubled = student.clone().requires_grad_(), student.double().requires_grad_()
    out = topk_loss(z, **known, lse_temperature=2.0, labels=rows[0], ce_weight=rows[1], kd_weight=rows[2], spec=spec,
                    tail=tail, true_vocab=vocab, impl="triton")  # fmt: skip
    loss, kd = terms(doubled, known, *rows, spec, tail)
    assert_close_norm(out.kd, kd, FP32, "kd")
    assert_close_norm(out.loss, loss, FP32, "loss")
    ours, truth = (torch.autograd.grad(UPSTREAM * x, y)[0] for x, y in ((out.loss, z), (loss, doubled)))
    if dtype == torch.float32:
        assert_close_norm(ours, truth, FP32, "gradient")
    else:
        assert norm_error(ours, truth) <= HALF_FACTOR * norm_error(truth.to(dtype), truth)


def gradients(dtype: torch.dtype, tensors: list[Tensor], known: SparseTeacher, rows: list[Tensor], spec: LossSpec):
    """Gradients of (student hidden, LM head) by autograd: GEMM in `dtype`, the rest in float64."""
    hidden, head = (t.detach().to(dtype).requires_grad_() for t in tensors[:2])
    z = (hidden @ head.t())[:, :TRUE_VOCAB].double()
    teacher = {"ids": known.ids, "logits": known.logits, "lse": known.lse, "tail_lse": known.tail_lse}
    loss, _ = terms(z, teacher, *rows, spec, "bucket")
    return torch.autograd.grad(UPSTREAM * loss, (hidden, head))


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_hidden_states(dtype: torch.dtype, divergence: str) -> None:
    tensors, *rows = make_inputs(dtype)
    spec = spec_of(divergence)
    model, vocab = LinearLogits(*tensors[2:]), VocabLayout(TRUE_VOCAB)
    (known,) = teacher_top_k(model, K, temperatures=(2.0,), vocab=vocab, chunk_rows=100)
    hidden, head = (t.detach().requires_grad_() for t in tensors[:2])
    out = fused_linear_topk_loss(hidden, head, known, *rows, spec=spec, true_vocab=TRUE_VOCAB, chunk_rows=100)
    ours = torch.autograd.grad(UPSTREAM * out.loss, (hidden, head))
    truth, eager = (gradients(d, tensors, known, rows, spec) for d in (torch.float64, dtype))
    check(ours, eager, truth, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_teacher_top_k(dtype: torch.dtype) -> None:
    """Ids and logits are those of the whole product; the sums are over all columns, and over the others alone."""
    _, _, hidden, head = make_inputs(dtype)[0]
    model, vocab, temperatures = LinearLogits(hidden, head), VocabLayout(TRUE_VOCAB), (1.0, 2.0)
    found, warm = teacher_top_k(model, K, temperatures=temperatures, vocab=vocab, chunk_rows=100)
    whole = (hidden.float() @ head.float().t())[:, :TRUE_VOCAB]
    assert found.ids.shape == (ROWS, K)
    assert_close_norm(found.logits.float().sort(1).values, whole.topk(K, 1).values.sort(1).values, FP32, "logits")
    assert_close_norm(found.logits.float(), whole.gather(1, found.ids.long()), FP32, "ids")
    rest = whole.double().scatter(1, found.ids.long(), -torch.inf)
    for teacher, t in zip((found, warm), temperatures, strict=True):
        assert_close_norm(teacher.lse, torch.logsumexp(whole.double() / t, 1), FP32, "lse")
        assert_close_norm(teacher.tail_lse, torch.logsumexp(rest / t, 1), FP32, "tail")
