"""Triton's kernels in Triton's interpreter, on CPU and one rank, held to the same float64 reference as eager torch.

Blocks are 16 columns wide, so that every loop over a row runs more than once.
"""

import dataclasses

import pytest
import torch

from mkd.losses import LossSpec, fused_linear_loss, vocab_parallel_loss
from mkd.losses.divergences import DIVERGENCES
from mkd.losses.inputs import LogitMap, LogitMaps
from mkd.losses.kernels.select import choose
from tests.support.loss_cases import (
    INTERPRETED,
    LossCase,
    check,
    check_values,
    expect,
    make_inputs,
    run_fused,
    run_logits,
)
from tests.support.tolerance import FP32, HALF_FACTOR, assert_close_norm, norm_error

pytestmark = [
    INTERPRETED,
    pytest.mark.usefixtures("poisoned", "small_blocks"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy's, of infinities that are meant
]

SMALL = LossCase(rows=5, true_vocab=37, vocab=39, chunk_rows=3, student_width=2, teacher_width=3)
"""Three blocks a row, the last of them ragged; rows 1 to 3 are masked."""


@pytest.mark.parametrize(
    "terms, z_loss, divergence, temperature",
    [("ce", 0.0, "forward_kl", 1.0), ("ce", 1e-2, "forward_kl", 2.0)]
    + [("kd", 0.0, name, 0.5) for name in DIVERGENCES]
    + [("ce+kd", 1e-2, name, 2.0) for name in DIVERGENCES]
    + [pytest.param("ce+kd", 1e-2, name, 1.0, marks=pytest.mark.slow) for name in DIVERGENCES],
)
def test_values_and_gradients(terms: str, z_loss: float, divergence: str, temperature: float) -> None:
    changes = {"terms": terms, "z_loss": z_loss, "divergence": divergence, "temperature": temperature}
    check(dataclasses.replace(SMALL, **changes), FP32, "triton")


@pytest.mark.parametrize("true_vocab, vocab", [(1, 1), (16, 16), (17, 32), (32, 33)])
@pytest.mark.parametrize("divergence", ["reverse_kl", pytest.param("jsd", marks=pytest.mark.slow)])
def test_odd_widths(true_vocab: int, vocab: int, divergence: str) -> None:
    check(dataclasses.replace(SMALL, true_vocab=true_vocab, vocab=vocab, divergence=divergence), FP32, "triton")


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_scale_softcap_and_bias(divergence: str) -> None:
    maps = LogitMaps(LogitMap(0.5, 4.0), LogitMap(1.7, 3.0))
    changes = {"maps": maps, "biased": True, "divergence": divergence, "temperature": 2.0, "z_loss": 1e-2}
    check(dataclasses.replace(SMALL, **changes), FP32, "triton")


@pytest.mark.parametrize(
    "changes", [{"beta": 0.1, "divergence": "jsd"}, {"skew": 0.0, "divergence": "skew_forward_kl"}]
)
def test_beta_and_skew(changes: dict) -> None:
    check(dataclasses.replace(SMALL, **changes), FP32, "triton")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_half_precision(divergence: str, dtype: torch.dtype) -> None:
    """Values are those of the rounded logits to fp32; gradients are rounded once. No worse than eager torch."""
    case = dataclasses.replace(SMALL, dtype=dtype, divergence=divergence, temperature=2.0)
    expected = expect(case)
    out, d_logits = run_logits(case, "triton")
    assert d_logits.dtype == dtype
    assert_close_norm(out.kd, run_logits(case, "eager")[0].kd, FP32, "kd")
    assert_close_norm(d_logits, expected.d_logits, torch.finfo(dtype).eps, "d_logits")
    _, d_hidden, d_weight, _ = run_fused(case, "triton")
    _, *eager, _ = run_fused(case, "eager")
    for name, ours, theirs in (("d_hidden", d_hidden, eager[0]), ("d_weight", d_weight, eager[1])):
        truth = getattr(expected, name)
        assert norm_error(ours, truth) <= HALF_FACTOR * norm_error(theirs, truth), name


def test_logits_dtype_of_chunks() -> None:
    """Logits in bf16 from fp32 hidden states: the error is bf16's, as with eager torch."""
    case = dataclasses.replace(SMALL, logits_dtype=torch.bfloat16)
    expected = expect(case)
    errors = [norm_error(run_fused(case, impl)[2], expected.d_weight) for impl in ("triton", "eager")]
    assert FP32 < errors[0] <= HALF_FACTOR * errors[1]


@pytest.mark.parametrize(
    "case", [LossCase(rows=0), dataclasses.replace(SMALL, all_masked=True)], ids=["none", "masked"]
)
@pytest.mark.parametrize("divergence", ["forward_kl", "tvd"])
def test_nothing_to_learn(case: LossCase, divergence: str) -> None:
    case = dataclasses.replace(case, divergence=divergence)
    out, d_hidden, d_weight, _ = run_fused(case, "triton")
    logits_out, d_logits = run_logits(case, "triton")
    assert out.loss.item() == 0 and logits_out.loss.item() == 0
    for gradient in (d_hidden, d_weight, d_logits):
        assert not gradient.any() and not gradient.isnan().any()


def test_strided_logits() -> None:
    """Views of a wider tensor are read in place; columns that are not contiguous are copied."""
    case = dataclasses.replace(SMALL, divergence="jsd")
    x, expected = make_inputs(case), expect(case)
    wide = torch.full((case.rows, case.vocab + 10), torch.nan)
    wide[:, : case.vocab] = x.student_logits
    for student in (wide[:, : case.vocab], x.student_logits.t().contiguous().t()):
        student = student.detach().requires_grad_()
        out = vocab_parallel_loss(
            student,
            x.teacher_logits.t().contiguous().t(),
            *x[6:9],
            spec=case.spec,
            true_vocab=case.true_vocab,
            impl="triton",
        )
        check_values(out, expected, FP32)
        assert_close_norm(*torch.autograd.grad(3.7 * out.loss, student), expected.d_logits, FP32, "d_logits")


def test_supervised_label_outside_the_vocabulary_gives_nan() -> None:
    x = make_inputs(SMALL)
    x.labels[4] = SMALL.true_vocab
    rows = (x.labels, x.ce_weight, None)
    out = vocab_parallel_loss(x.student_logits, None, *rows, spec=LossSpec(), true_vocab=37, impl="triton")
    assert out.ce.isnan().nonzero().tolist() == [[4]]


def test_auto_is_eager_on_cpu() -> None:
    assert choose("auto", torch.device("cpu"), torch.float32).__name__ == "mkd.losses.kernels.eager"
    assert choose("triton", torch.device("cpu"), torch.float32).__name__ == "mkd.losses.kernels.triton_launchers"


def test_triton_needs_a_gpu_or_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    choose.cache_clear()
    x = make_inputs(SMALL)
    with pytest.raises(ValueError, match="there is no GPU"):
        fused_linear_loss(*x[:4], *x[6:9], spec=LossSpec(), true_vocab=37, impl="triton")
