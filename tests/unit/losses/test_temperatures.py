"""High temperatures: both distributions are nearly uniform, and T^2 multiplies a divergence that nearly vanishes."""

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mkd.losses import LinearLogits, LossSpec, VocabLayout, reference, teacher_top_k, vocab_parallel_loss
from mkd.losses.divergences import DIVERGENCES
from mkd.losses.inputs import MAX_FP32_TEMPERATURE, KernelContext
from mkd.losses.kernels import eager
from mkd.losses.kernels.select import choose
from tests.support.loss_cases import INTERPRETED, UPSTREAM, LossCase, check, check_values, expect, run_fused
from tests.support.sparse_cases import SparseCase, check_sparse
from tests.support.tolerance import FP32, assert_close_norm

pytestmark = [
    pytest.mark.usefixtures("poisoned", "small_blocks"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
]
every_divergence = pytest.mark.parametrize("divergence", DIVERGENCES)
TEMPERATURES = [1.0, 4.0, 100.0, 1000.0]
every_temperature = pytest.mark.parametrize("temperature", TEMPERATURES)
every_implementation = pytest.mark.parametrize("impl", ["eager", pytest.param("triton", marks=INTERPRETED)])


@pytest.mark.parametrize(
    "temperature, impl",
    [
        *((temperature, "eager") for temperature in TEMPERATURES),
        *(pytest.param(temperature, "triton", marks=INTERPRETED) for temperature in TEMPERATURES[1:]),
        pytest.param(1.0, "triton", marks=[INTERPRETED, pytest.mark.slow]),  # every day in test_triton.py
    ],
)
@every_divergence
def test_values_and_gradients(divergence: str, temperature: float, impl: str) -> None:
    case = LossCase(5, true_vocab=21, vocab=23, terms="kd", divergence=divergence, temperature=temperature)
    check(case, FP32, impl)
    check(dataclasses.replace(case, terms="ce+kd", z_loss=1e-2), FP32, impl)


@every_temperature
@every_divergence
def test_reference_from_hidden_states(divergence: str, temperature: float) -> None:
    case = LossCase(5, terms="kd", divergence=divergence, temperature=temperature)
    expected = expect(case)
    out, d_hidden, d_weight, _ = run_fused(case, "reference")
    check_values(out, expected, FP32)
    assert out.loss.dtype == out.kd.dtype == torch.float32
    assert_close_norm(d_hidden, expected.d_hidden, FP32, "d_hidden")
    assert_close_norm(d_weight, expected.d_weight, FP32, "d_weight")


@functools.cache
def models(vocab: int = 20_000) -> tuple[Tensor, Tensor]:
    """Student and teacher logits as those of language models: far from 0, and the student near the teacher."""
    generator = torch.Generator().manual_seed(3)
    teacher = 3.0 * torch.randn(6, vocab, generator=generator) - 12.0
    return teacher + 0.5 * torch.randn(6, vocab, generator=generator) + 2.0, teacher


@every_divergence
@pytest.mark.parametrize("temperature", [1.0, 4.0, MAX_FP32_TEMPERATURE, 100.0, 1000.0])
def test_large_vocabulary(divergence: str, temperature: float) -> None:
    spec = LossSpec(divergence=divergence, temperature=temperature)
    student, teacher = models()
    z = student.clone().requires_grad_()
    ones, labels = torch.ones(len(z)), torch.zeros(len(z), dtype=torch.int64)
    out = vocab_parallel_loss(z, teacher, labels, None, ones, spec=spec, true_vocab=z.shape[1])
    assert out.loss.dtype == out.kd.dtype == torch.float32
    truth = student.double().requires_grad_()
    values = reference.DIVERGENCES[divergence](truth, teacher.double(), spec)
    of_values = of_gradients = FP32
    if 1.0 < temperature <= MAX_FP32_TEMPERATURE:
        # fp32: the rounding of a value is multiplied by T^2. The sign in tvd is arbitrary where p and q round to one
        # number.
        of_values, of_gradients = FP32 * temperature**2, 1e-2 if divergence == "tvd" else 2 * FP32
    assert_close_norm(out.kd, values.detach(), of_values, "values")
    assert_close_norm(*torch.autograd.grad(out.loss, z), *torch.autograd.grad(values.sum(), truth), of_gradients, "z")


@every_implementation
@pytest.mark.parametrize("temperature", [100.0, 1000.0])
@pytest.mark.parametrize(
    "changes", [{}, {"tail": "renormalize"}, {"with_tail_lse": False}, {"sampled": True}, {"k": 29}]
)
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd", "tvd"])
def test_sparse_teachers(divergence: str, changes: dict, temperature: float, impl: str) -> None:
    if changes.get("sampled") and divergence != "forward_kl":
        pytest.skip("samples estimate forward_kl")
    full = LossCase(divergence=divergence, temperature=temperature, terms="kd")
    check_sparse(SparseCase(full, **changes), FP32, impl)


def test_sums_of_a_teacher_are_as_precise_as_the_loss() -> None:
    """The top-k teacher's sums at T = 1000, against float64."""
    hidden, weight = torch.randn(9, 16), torch.randn(300, 16)
    how = dict(vocab=VocabLayout(300), chunk_rows=4)
    one, high = teacher_top_k(LinearLogits(hidden, weight), 8, temperatures=(1.0, 1000.0), **how)
    (alone,) = teacher_top_k(LinearLogits(hidden, weight), 8, temperatures=(1.0,), **how)
    logits = (hidden @ weight.t()).double()
    assert (high.lse - torch.logsumexp(logits / 1000.0, dim=1)).abs().max() < 1e-9
    assert one.logits.dtype == torch.float32 and torch.equal(one.ids, alone.ids)
    assert torch.equal(one.logits, alone.logits)
    for name in ("lse", "tail_lse"):
        assert_close_norm(getattr(one, name), getattr(alone, name), FP32, name)


@pytest.mark.parametrize("factor, precise", [(0.01, False), (1.0, False), (1.001, True)])
def test_ordinary_temperatures_keep_their_kernels(factor: float, precise: bool) -> None:
    temperature = factor * MAX_FP32_TEMPERATURE
    context = KernelContext(LossSpec(temperature=temperature), VocabLayout(8).shard(8))
    expected = torch.float64 if precise else torch.float32
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert context.statistics_dtype(torch.zeros(1, dtype=dtype)) == expected
    without_teacher = dataclasses.replace(context, with_kd=False)
    assert not without_teacher.needs_float64
    assert context.needs_float64 == precise


@INTERPRETED
def test_triton_has_no_float64() -> None:
    known: Callable = functools.partial(choose, "triton", torch.device("cpu"), torch.float32)
    assert known(True) is eager and known(False) is not eager


def test_upstream_gradient_is_applied_once() -> None:
    case = LossCase(5, terms="kd", temperature=1000.0)
    _, d_hidden, _, _ = run_fused(case)
    assert_close_norm(d_hidden / UPSTREAM, expect(case).d_hidden / UPSTREAM, FP32, "d_hidden")
