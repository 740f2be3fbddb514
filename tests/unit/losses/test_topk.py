"""The losses against a sparse teacher on one rank: values and gradients against the float64 definitions."""

from dataclasses import replace

import pytest
import torch

from mkd.losses import LossSpec, SparseTeacher, fused_linear_topk_loss, reference, topk_loss, vocab_parallel_loss
from mkd.losses.divergences import DIVERGENCES
from mkd.losses.inputs import LogitMap, LogitMaps
from mkd.losses.reference import topk as reference_topk
from tests.support.loss_cases import INTERPRETED, LossCase
from tests.support.sparse_cases import SparseCase, check_sparse
from tests.support.tolerance import FP32, FP64, assert_close_norm

pytestmark = pytest.mark.usefixtures("poisoned")

every_divergence = pytest.mark.parametrize("divergence", DIVERGENCES)


@every_divergence
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
def test_values_and_gradients(tail: str, temperature: float, divergence: str) -> None:
    full = LossCase(divergence=divergence, temperature=temperature, z_loss=1e-2)
    check_sparse(SparseCase(full, tail=tail), FP32)
    double = replace(full, dtype=torch.float64, terms="kd", temperature_squared=False)
    check_sparse(SparseCase(double, tail=tail, with_tail_lse=False), FP64)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_sampled(temperature: float) -> None:
    check_sparse(SparseCase(LossCase(temperature=temperature, z_loss=1e-2), sampled=True), FP32)


@pytest.mark.parametrize("tail, divergence", [("bucket", "forward_kl"), ("bucket", "jsd"), ("renormalize", "tvd")])
def test_maps_chunks_and_definition(tail: str, divergence: str) -> None:
    maps = LogitMaps(LogitMap(0.5, 4.0))
    full = LossCase(divergence=divergence, temperature=2.0, maps=maps, chunk_rows=3, z_loss=1e-2)
    check_sparse(SparseCase(full, tail=tail), FP32)
    check_sparse(SparseCase(full, tail=tail), FP32, "reference")


@INTERPRETED
@pytest.mark.parametrize(
    "divergence, temperature, tail",
    [
        ("forward_kl", 2.0, "bucket"),
        ("reverse_kl", 2.0, "bucket"),
        pytest.param("reverse_kl", 1.0, "renormalize", marks=pytest.mark.slow),
        ("jsd", 1.0, "bucket"),
        ("tvd", 2.0, "renormalize"),
    ],
)
def test_triton(divergence: str, temperature: float, tail: str) -> None:
    maps = LogitMaps(LogitMap(0.5, 4.0))
    full = LossCase(divergence=divergence, temperature=temperature, z_loss=1e-2, maps=maps)
    check_sparse(SparseCase(full, tail=tail), FP32, "triton")


@INTERPRETED
def test_triton_sampled() -> None:
    check_sparse(SparseCase(LossCase(temperature=2.0, z_loss=1e-2), sampled=True), FP32, "triton")


def rows_of(n: int = 6, vocab: int = 31) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Student and teacher logits in fp32, and labels."""
    z, u = torch.randn(2, n, vocab, generator=torch.Generator().manual_seed(9)) * 2
    return z, u, torch.arange(n)


def sparse(u: torch.Tensor, k: int, temperature: float = 1.0) -> dict[str, torch.Tensor | float]:
    top = u.topk(k, 1)
    tail = u.scatter(1, top.indices, -torch.inf)
    return {
        "ids": top.indices,
        "teacher_logits": top.values,
        "teacher_lse": torch.logsumexp(u / temperature, 1),
        "teacher_tail_lse": torch.logsumexp(tail / temperature, 1),
        "lse_temperature": temperature,
    }


@every_divergence
@pytest.mark.parametrize("tail, with_tail_lse", [("bucket", True), ("bucket", False), ("renormalize", True)])
def test_all_columns_equal_the_full_loss(divergence: str, tail: str, with_tail_lse: bool) -> None:
    z, u, labels = rows_of()
    ones, spec = torch.ones(6), LossSpec(divergence=divergence, temperature=2.0)
    teacher = sparse(u, 31, 2.0) | ({} if with_tail_lse else {"teacher_tail_lse": None})
    seen, truth = z.clone().requires_grad_(), z.clone().requires_grad_()
    rows = {"labels": labels, "ce_weight": ones, "kd_weight": ones, "spec": spec, "true_vocab": 31}
    out = topk_loss(seen, **teacher, **rows, tail=tail)
    full = vocab_parallel_loss(truth, u, **rows)
    assert_close_norm(out.kd, full.kd, FP32, "kd")
    out.loss.backward(), full.loss.backward()
    assert_close_norm(seen.grad, truth.grad, FP32, "gradient")


@every_divergence
@pytest.mark.parametrize("with_tail_lse", [True, False])
def test_top_columns_with_all_probability_are_finite(divergence: str, with_tail_lse: bool) -> None:
    z, u, labels = rows_of()
    u[:, 3] = 60.0  # e^-60 is nothing to fp32's 1
    teacher = sparse(u, 4) | ({} if with_tail_lse else {"teacher_tail_lse": None})
    z[1:3, 3] = 80.0
    z = z.requires_grad_()
    spec, ones = LossSpec(divergence=divergence), torch.ones(6)
    out = topk_loss(z, **teacher, labels=labels, ce_weight=None, kd_weight=ones, spec=spec, true_vocab=31)
    out.loss.backward()
    assert out.kd.isfinite().all() and z.grad.isfinite().all() and z.grad[0].any()


@every_divergence
@pytest.mark.parametrize("with_tail_lse", [True, False])
def test_identical_models_have_no_gradient(divergence: str, with_tail_lse: bool) -> None:
    z, _, labels = rows_of()
    teacher = sparse(z, 5, 2.0) | ({} if with_tail_lse else {"teacher_tail_lse": None})
    z = z.requires_grad_()
    spec, ones = LossSpec(divergence=divergence, temperature=2.0), torch.ones(6)
    out = topk_loss(z, **teacher, labels=labels, ce_weight=None, kd_weight=ones, spec=spec, true_vocab=31)
    out.loss.backward()
    assert out.kd.abs().max() < 2e-6
    # of equal probabilities rounding decides tvd's sign
    assert divergence == "tvd" or z.grad.abs().max() < 2e-6


def test_tail_below_rounding_is_kept() -> None:
    """The student's tail has probability e^-30: 1 - that of the top columns would be 0 and its logarithm infinite."""
    z = torch.tensor([[30.0, 0.0, 0.0]]).requires_grad_()
    teacher = {
        "ids": torch.tensor([[0]]),
        "teacher_logits": torch.zeros(1, 1),
        "teacher_lse": torch.tensor([2.0]).log(),
    }
    one = torch.ones(1)
    out = topk_loss(
        z, **teacher, labels=torch.zeros(1).long(), ce_weight=None, kd_weight=one, spec=LossSpec(), true_vocab=3
    )
    assert out.kd.item() == pytest.approx(
        0.5 * (30 - torch.tensor(2.0).log().item()) - torch.tensor(2.0).log().item(), rel=1e-6
    )


def test_sampled_targets_are_unbiased() -> None:
    """Averages over many tokens of one sample each are value and gradient of the full forward KL; top-k's are not."""
    rows, vocab, spec = 40_000, 7, LossSpec(temperature=2.0)
    z, u = torch.randn(2, vocab, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    full = z.clone().requires_grad_()
    value = reference.forward_kl(full[None], u[None], spec).sum()
    (truth,) = torch.autograd.grad(value, full)
    p = torch.softmax(u / 2, 0)
    ids = torch.multinomial(p.expand(rows, -1), 2, replacement=True, generator=torch.Generator().manual_seed(4))
    logits = z.expand(rows, -1).clone().requires_grad_()
    share = torch.full((rows,), 1.0 / rows)
    common = {
        "labels": torch.zeros(rows).long(),
        "ce_weight": None,
        "kd_weight": share,
        "spec": spec,
        "true_vocab": vocab,
    }
    lse = torch.logsumexp(u / 2, 0).expand(rows)
    out = topk_loss(logits, ids, u[ids], lse, **common, lse_temperature=2.0, counts=torch.ones_like(ids))
    (gradient,) = torch.autograd.grad(out.loss, logits)
    # standard errors of a mean over 80,000 draws are about 1/280 of one draw's deviation, which is about 1
    assert (gradient.sum(0) - truth).abs().max() < 0.02 and abs(out.loss.item() - value.item()) < 0.03
    top = u.topk(2).indices.expand(rows, -1)
    biased = topk_loss(logits, top, u[top], lse, **common, lse_temperature=2.0, tail="renormalize")
    assert (torch.autograd.grad(biased.loss, logits)[0].sum(0) - truth).abs().max() > 0.1


def test_id_beyond_the_vocabulary_gives_nan() -> None:
    z, u, labels = rows_of()
    teacher = sparse(u, 4)
    teacher["ids"][2, 1] = 31
    for tail in ("bucket", "renormalize"):
        out = topk_loss(
            z,
            **teacher,
            labels=labels,
            ce_weight=None,
            kd_weight=torch.ones(6),
            spec=LossSpec(),
            true_vocab=31,
            tail=tail,
        )
        assert out.kd.isnan().nonzero().tolist() == [[2]] and out.loss.isnan()


def test_invalid_targets_are_errors() -> None:
    z, u, labels = rows_of()
    ones = torch.ones(6)
    rows = {"labels": labels, "ce_weight": None, "kd_weight": ones, "true_vocab": 31}
    tempered = LossSpec(temperature=2.0)
    with pytest.raises(ValueError, match="temperature is 2 and the teacher's"):
        topk_loss(z, **sparse(u, 4), **rows, spec=tempered)
    topk_loss(z, **sparse(u, 4), **rows, spec=tempered, tail="renormalize")  # needs no sum
    with pytest.raises(ValueError, match="temperature is 2 and the teacher's"):
        reference_topk.top_k(z, *list(sparse(u, 4).values())[:3], tempered)
    with pytest.raises(ValueError, match="teacher_lse is None"):
        topk_loss(z, **sparse(u, 4) | {"teacher_lse": None, "teacher_tail_lse": None}, **rows, spec=LossSpec())
    with pytest.raises(ValueError, match="estimate forward_kl"):
        counts = torch.ones(6, 4)
        topk_loss(z, **sparse(u, 4), **rows, spec=LossSpec(divergence="jsd"), counts=counts)
    with pytest.raises(ValueError, match="tail is 'zero'"):
        topk_loss(z, **sparse(u, 4), **rows, spec=LossSpec(), tail="zero")
    with pytest.raises(ValueError, match="teacher_logits has shape"):
        topk_loss(z, **sparse(u, 4) | {"teacher_logits": u}, **rows, spec=LossSpec())
    with pytest.raises(ValueError, match=r"needed: \[6, K\]"):
        topk_loss(z, **sparse(u, 4) | {"ids": u}, **rows, spec=LossSpec())
    with pytest.raises(ValueError, match="scale is -1"):
        teacher = SparseTeacher(torch.zeros(6, 1).long(), torch.zeros(6, 1), ones)
        fused_linear_topk_loss(z, z[:, :31], teacher, **rows, spec=LossSpec(), student_map=LogitMap(-1.0))
