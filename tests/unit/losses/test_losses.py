"""The losses on one rank, without a process group: values, gradients, masks, padding, precision, what is kept."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from mkd.losses import LossOutput, LossSpec, fused_linear_loss, reference, vocab_parallel_loss
from mkd.losses.divergences import DIVERGENCES
from mkd.losses.inputs import LogitMap, LogitMaps
from tests.support.loss_cases import UPSTREAM, LossCase, check, check_values, expect, make_inputs, run_fused, run_logits
from tests.support.tolerance import FP32, FP64, HALF_FACTOR, assert_close_norm, norm_error

pytestmark = pytest.mark.usefixtures("poisoned")


def test_reference_against_torch() -> None:
    z, u = torch.randn(2, 5, 9, dtype=torch.float64)
    labels = torch.tensor([0, 8, 3, 3, 1])
    assert_close_norm(
        reference.cross_entropy(z, labels), F.cross_entropy(z, labels, reduction="none"), FP64, "cross-entropy"
    )
    kl = F.kl_div(F.log_softmax(z / 2, -1), F.softmax(u / 2, -1), reduction="none").sum(-1)
    assert_close_norm(reference.forward_kl(z, u, LossSpec(temperature=2.0)), 4 * kl, FP64, "with T^2")
    plain = LossSpec(temperature=2.0, temperature_squared=False)
    assert_close_norm(reference.forward_kl(z, u, plain), kl, FP64, "without T^2")


def test_every_divergence_has_a_reference() -> None:
    assert DIVERGENCES.keys() == reference.DIVERGENCES.keys()


@pytest.mark.parametrize("dtype, tol", [(torch.float32, FP32), (torch.float64, FP64)])
@pytest.mark.parametrize("temperature", [1.0, 2.0, 0.5])
@pytest.mark.parametrize(
    "terms, z_loss, divergence",
    [("ce", z, "forward_kl") for z in (0.0, 1e-2)]
    + [("kd", 0.0, name) for name in DIVERGENCES]
    + [("ce+kd", z, name) for z in (0.0, 1e-2) for name in DIVERGENCES],
)
def test_values_and_gradients(
    terms: str, z_loss: float, divergence: str, temperature: float, dtype: torch.dtype, tol: float
) -> None:
    check(LossCase(terms=terms, z_loss=z_loss, divergence=divergence, temperature=temperature, dtype=dtype), tol)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_without_temperature_squared(divergence: str) -> None:
    check(LossCase(divergence=divergence, temperature=2.0, temperature_squared=False), FP32)


@pytest.mark.parametrize(
    "changes",
    [
        {"divergence": "jsd", "beta": 0.1},
        {"divergence": "jsd", "beta": 0.9},
        {"divergence": "skew_forward_kl", "skew": 0.0},
        {"divergence": "skew_reverse_kl", "skew": 0.0},
        {"divergence": "skew_forward_kl", "skew": 0.7},
        {"divergence": "skew_reverse_kl", "skew": 0.7},
    ],
    ids=str,
)
def test_beta_and_skew(changes: dict) -> None:
    check(LossCase(temperature=2.0, **changes), FP32)


@pytest.mark.parametrize("divergence", ["forward_kl", "jsd"])
@pytest.mark.parametrize("chunk_rows", [1, 4, 5, 7, 13, 1000, None])
def test_chunk_size_does_not_change_results(chunk_rows: int | None, divergence: str) -> None:
    """13, 4, 3, 2 and 1 chunks: the LM head's gradient takes them in pairs."""
    check(LossCase(chunk_rows=chunk_rows, temperature=2.0, divergence=divergence, z_loss=1e-2, biased=True), FP32)


MAPS = {
    "scale": LogitMaps(LogitMap(scale=0.3), LogitMap(scale=2.5)),
    "softcap": LogitMaps(LogitMap(softcap=3.0), LogitMap(softcap=2.0)),
    "both": LogitMaps(LogitMap(0.5, 4.0), LogitMap(1.7, 3.0)),
    "teacher only": LogitMaps(teacher=LogitMap(0.5, 4.0)),
}


@pytest.mark.parametrize("dtype, tol", [(torch.float32, FP32), (torch.float64, FP64)])
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("maps", MAPS.values(), ids=MAPS)
def test_scale_softcap_and_bias(maps: LogitMaps, divergence: str, dtype: torch.dtype, tol: float) -> None:
    check(LossCase(maps=maps, divergence=divergence, temperature=2.0, z_loss=1e-2, biased=True, dtype=dtype), tol)


@pytest.mark.parametrize("divergence", ["forward_kl", "tvd"])
@pytest.mark.parametrize("padding", [-3, -1, 5])
def test_teacher_padded_to_another_width(padding: int, divergence: str) -> None:
    """On one rank; -3 leaves it no padding at all."""
    check(LossCase(teacher_padding=padding, divergence=divergence, biased=True), FP32)


def test_logits_in_any_memory_order() -> None:
    case = LossCase(divergence="jsd")
    x, expected = make_inputs(case), expect(case)
    student, teacher = (t.t().contiguous().t() for t in (x.student_logits, x.teacher_logits))
    student.requires_grad_()
    out = vocab_parallel_loss(student, teacher, *x[6:9], spec=case.spec, true_vocab=29)
    assert_close_norm(*torch.autograd.grad(UPSTREAM * out.loss, student), expected.d_logits, FP32, "d_logits")


@pytest.mark.parametrize("case", [LossCase(rows=0), LossCase(all_masked=True)], ids=["no rows", "all masked"])
@pytest.mark.parametrize("terms", ["ce", "kd", "ce+kd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_zero_weights_give_a_connected_zero(case: LossCase, terms: str, dtype: torch.dtype) -> None:
    case = dataclasses.replace(case, terms=terms, dtype=dtype)
    out, *gradients, _ = run_fused(case)
    logits_out, d_logits = run_logits(case)
    for loss in (out.loss, logits_out.loss):
        assert loss.item() == 0 and loss.requires_grad
    for gradient in (*gradients, d_logits):
        assert not gradient.any() and not gradient.isnan().any()


@pytest.mark.parametrize("temperature", [1.0, 2.0, 0.3])
def test_teacher_equal_to_student(temperature: float) -> None:
    gen = torch.Generator().manual_seed(5)
    hidden, weight = torch.randn(6, 8, generator=gen), torch.randn(31, 8, generator=gen).requires_grad_()
    spec = LossSpec(temperature=temperature)
    ones = torch.ones(6)
    out = fused_linear_loss(hidden, weight, hidden, weight, torch.zeros(6).long(), None, ones, spec=spec, true_vocab=29)
    out.loss.backward()
    assert out.loss.item() == 0 and not out.kd.any() and not weight.grad.any()


def test_large_logits_are_exact() -> None:
    """All numbers are multiples of 2^-10 under 2^13: exact in fp32 with and without the offset."""
    gen = torch.Generator().manual_seed(6)
    z, u = (torch.randn(2, 5, 40, generator=gen) * 1024).round() / 1024
    labels, ones = torch.arange(5), torch.ones(5)
    gradients, values = [], []
    for offset in (0.0, 8000.0):
        logits = (z + offset).requires_grad_()
        out = vocab_parallel_loss(logits, u - offset, labels, ones, ones, spec=LossSpec(), true_vocab=40)
        gradients.append(*torch.autograd.grad(out.loss, logits))
        values.append(torch.stack([out.ce, out.kd]))
    assert_close_norm(values[1], values[0], 1e-6, "values")
    assert_close_norm(gradients[1], gradients[0], 1e-6, "gradient")


@pytest.mark.parametrize("label", [-1, 29, 31])
def test_supervised_label_outside_the_vocabulary_gives_nan(label: int) -> None:
    x = make_inputs(LossCase())
    x.labels[7] = label
    out = vocab_parallel_loss(x.student_logits, None, x.labels, x.ce_weight, None, spec=LossSpec(), true_vocab=29)
    assert out.loss.isnan() and out.ce.isnan().nonzero().tolist() == [[7]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("terms", ["ce", "kd", "ce+kd"])
def test_half_precision_error(dtype: torch.dtype, terms: str) -> None:
    """Error against fp32 at most twice that of eager torch in the same dtype, with fp32 softmaxes there too."""
    case = LossCase(rows=61, true_vocab=509, vocab=512, dtype=dtype, terms=terms, student_width=64, chunk_rows=16)
    expected = expect(case)
    _, d_hidden, d_weight, _ = run_fused(case)
    x = make_inputs(case)
    hidden = x.student_hidden.nan_to_num(0).requires_grad_()
    weight = x.student_weight[: case.true_vocab].clone().requires_grad_()
    logits = (hidden @ weight.t()).float()
    teacher = (x.teacher_hidden.nan_to_num(0, 0, 0) @ x.teacher_weight[: case.true_vocab].t()).float()
    loss = torch.zeros(())
    if x.ce_weight is not None:
        labels = torch.where(x.ce_weight != 0, x.labels, 0)
        loss = loss + (x.ce_weight * F.cross_entropy(logits, labels, reduction="none")).sum()
    if x.kd_weight is not None:
        loss = loss + (x.kd_weight * reference.forward_kl(logits, teacher, case.spec)).sum()
    eager = torch.autograd.grad(UPSTREAM * loss, (hidden, weight))
    for name, ours, theirs, truth in (
        ("d_hidden", d_hidden, eager[0], expected.d_hidden),
        ("d_weight", d_weight[: case.true_vocab], eager[1], expected.d_weight[: case.true_vocab]),
    ):
        assert ours.dtype == dtype
        assert norm_error(ours, truth) <= HALF_FACTOR * norm_error(theirs, truth), name
    assert_close_norm(run_logits(case)[1], expected.d_logits, torch.finfo(dtype).eps, "d_logits")


@pytest.mark.parametrize("chunk_rows", [1, 5, None])
def test_unneeded_gradients_are_not_computed(chunk_rows: int | None) -> None:
    """GEMMs for frozen weights or hidden states are skipped; without gradients only those of the logits remain."""
    case = LossCase()
    x = make_inputs(case)
    hidden, weight = x.student_hidden, x.student_weight

    def flops(hidden_grad: bool, weight_grad: bool) -> int:
        hidden.requires_grad_(hidden_grad), weight.requires_grad_(weight_grad)
        with FlopCounterMode(display=False) as counter:
            out = fused_linear_loss(*x[:4], *x[6:9], spec=case.spec, true_vocab=29, chunk_rows=chunk_rows)
            assert out.loss.requires_grad == (hidden_grad or weight_grad)
        return counter.get_total_flops()

    product = 2 * case.rows * case.true_vocab
    logits = product * (case.student_width + case.teacher_width)
    assert flops(False, False) == logits
    assert flops(True, False) == logits + product * case.student_width
    # the counter does not know addmm_, by which all chunks but the first two are added
    weight_only = flops(False, True)
    assert logits < weight_only <= logits + product * case.student_width
    assert flops(True, True) == weight_only + product * case.student_width


def test_frozen_hidden_and_teacher_get_no_gradient() -> None:
    case = LossCase()
    x = make_inputs(case)
    hidden, weight, teacher_hidden, teacher_weight = (t.requires_grad_() for t in x[:4])
    hidden.requires_grad_(False)
    args = (x.labels, x.ce_weight, x.kd_weight)
    fused_linear_loss(
        hidden, weight, teacher_hidden, teacher_weight, *args, spec=case.spec, true_vocab=29
    ).loss.backward()
    assert teacher_hidden.grad is None and teacher_weight.grad is None and hidden.grad is None
    assert_close_norm(UPSTREAM * weight.grad, expect(case).d_weight, FP32, "d_weight")


def test_only_gradients_are_saved_and_backward_runs_twice() -> None:
    x = make_inputs(LossCase())
    hidden, weight = x.student_hidden.requires_grad_(), x.student_weight.requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        out = fused_linear_loss(*x[:4], *x[6:9], spec=LossSpec(), true_vocab=29, chunk_rows=3)
    assert kept == [tuple(hidden.shape), tuple(weight.shape)]
    first = torch.autograd.grad(2 * out.loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(4 * out.loss, (hidden, weight))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(2 * a, b)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_reference_implementation(divergence: str) -> None:
    """`impl="reference"` has the same rules for masks, padding and labels outside the vocabulary."""
    maps = LogitMaps(LogitMap(0.5, 4.0), LogitMap(1.7, 3.0))
    case = LossCase(divergence=divergence, temperature=2.0, z_loss=1e-2, biased=True, maps=maps)
    expected = expect(case)
    out, *gradients = run_fused(case, "reference")
    check_values(out, expected, FP32)
    for gradient, truth in zip(gradients, (expected.d_hidden, expected.d_weight, expected.d_bias), strict=True):
        assert_close_norm(gradient, truth, FP32, "gradient")
    assert not gradients[0][2].any() and not gradients[1][case.true_vocab :].any()


def with_main_grad(case: LossCase, upstream: float | None) -> tuple[LossOutput, Tensor, Tensor]:
    """(output, hidden states, LM head with a main_grad full of ones), before backward."""
    x = make_inputs(case)
    hidden, weight = x.student_hidden.requires_grad_(), torch.nn.Parameter(x.student_weight)
    weight.main_grad = torch.ones(weight.shape)
    heads, rows = (hidden, weight, *x[2:4]), x[6:9]
    common = {"spec": case.spec, "true_vocab": case.true_vocab, "chunk_rows": case.chunk_rows}
    return fused_linear_loss(*heads, *rows, **common, upstream=upstream), hidden, weight


@pytest.mark.parametrize("chunk_rows", [5, 7, 13])
@pytest.mark.parametrize("divergence", ["reverse_kl", "jsd"])
def test_main_grad_accumulates(divergence: str, chunk_rows: int) -> None:
    """By Megatron's protocol: the weight's own gradient is a placeholder, and a flag marks it as such."""
    case = LossCase(divergence=divergence, chunk_rows=chunk_rows)
    expected = expect(case)
    out, hidden, weight = with_main_grad(case, UPSTREAM)
    weight.grad_added_to_main_grad = False
    (UPSTREAM * out.loss).backward()
    assert_close_norm(weight.main_grad - 1, expected.d_weight, FP32, "main_grad")
    assert torch.equal(weight.main_grad[case.true_vocab :], torch.ones(3, case.student_width))
    assert_close_norm(hidden.grad, expected.d_hidden, FP32, "d_hidden")
    assert weight.grad_added_to_main_grad and weight.grad.shape == weight.shape


def test_main_grad_of_tied_weights() -> None:
    """The embedding's gradient comes through autograd and must still count: no placeholder, no flag."""
    out, _, weight = with_main_grad(LossCase(), UPSTREAM)
    weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, True
    (UPSTREAM * out.loss + weight[:4].sum()).backward()
    assert not weight.grad_added_to_main_grad
    assert torch.equal(weight.grad[:4], torch.ones(4, 7)) and not weight.grad[4:].any()
    assert_close_norm(weight.main_grad - 1, expect(LossCase()).d_weight, FP32, "main_grad")


def test_unexpected_upstream_gives_nan() -> None:
    out, hidden, weight = with_main_grad(LossCase(), UPSTREAM)
    (2 * UPSTREAM * out.loss).backward()
    assert hidden.grad.isnan().all() and weight.grad is None


def test_main_grad_needs_a_known_upstream_and_a_gradient() -> None:
    out, _, weight = with_main_grad(LossCase(), None)
    (UPSTREAM * out.loss).backward()
    assert torch.equal(weight.main_grad, torch.ones_like(weight))
    assert_close_norm(weight.grad, expect(LossCase()).d_weight, FP32, "d_weight")
    with torch.no_grad():
        _, _, weight = with_main_grad(LossCase(), UPSTREAM)
    assert torch.equal(weight.main_grad, torch.ones_like(weight))


def test_half_precision_with_main_grad() -> None:
    """bf16: the fp32 buffer gets the gradient before rounding. fp16: the whole gradient goes through autograd."""
    case = LossCase(dtype=torch.bfloat16)
    out, _, weight = with_main_grad(case, UPSTREAM)
    (UPSTREAM * out.loss).backward()
    assert_close_norm(weight.main_grad - 1, expect(case).d_weight, FP32, "main_grad")
    case = LossCase(dtype=torch.float16)
    out, _, weight = with_main_grad(case, UPSTREAM)
    (UPSTREAM * out.loss).backward()
    assert torch.equal(weight.main_grad, torch.ones_like(weight.main_grad))
    assert_close_norm(weight.grad, expect(case).d_weight, torch.finfo(case.dtype).eps, "d_weight")


@pytest.mark.parametrize("divergence", ["forward_kl", "tvd"])
def test_logits_in_bf16(divergence: str) -> None:
    """From fp32 hidden states: off by bf16's rounding of logits, and by no more than that of eager torch."""
    case = LossCase(rows=61, divergence=divergence, logits_dtype=torch.bfloat16, biased=True, chunk_rows=16)
    x, expected = make_inputs(case), expect(case)
    hidden, weight = x.student_hidden.nan_to_num(0).requires_grad_(), x.student_weight[:29].clone().requires_grad_()
    teacher = x.teacher_hidden.nan_to_num(0, 0, 0) @ x.teacher_weight[:29].t() + x.teacher_bias[:29]
    logits = (hidden @ weight.t() + x.student_bias[:29]).bfloat16().float()
    labels = torch.where(x.ce_weight != 0, x.labels, 0)
    kd = reference.DIVERGENCES[divergence](logits, teacher.bfloat16().float(), case.spec)
    loss = (x.ce_weight * reference.cross_entropy(logits, labels) + x.kd_weight * kd).sum()
    eager = torch.autograd.grad(UPSTREAM * loss, (hidden, weight))
    _, d_hidden, d_weight, _ = run_fused(case)
    for ours, theirs, truth in (
        (d_hidden, eager[0], expected.d_hidden),
        (d_weight[:29], eager[1], expected.d_weight[:29]),
    ):
        assert FP32 < norm_error(ours, truth) <= HALF_FACTOR * norm_error(theirs, truth)


def test_wrong_shapes_are_errors() -> None:
    x = make_inputs(LossCase())
    h, w, th, tw = x[:4]
    spec = LossSpec()
    with pytest.raises(ValueError, match="nothing to compute"):
        fused_linear_loss(h, w, th, tw, x.labels, None, None, spec=spec, true_vocab=29)
    with pytest.raises(ValueError, match="teacher_hidden is None"):
        fused_linear_loss(h, w, None, None, x.labels, None, x.kd_weight, spec=spec, true_vocab=29)
    with pytest.raises(ValueError, match="28 vocabulary columns"):
        fused_linear_loss(h, w, th, tw[:28], x.labels, None, x.kd_weight, spec=spec, true_vocab=29)
    with pytest.raises(ValueError, match="must be given together"):
        fused_linear_loss(h, w, th, None, x.labels, None, x.kd_weight, spec=spec, true_vocab=29)
    with pytest.raises(ValueError, match="teacher has 12 tokens"):
        fused_linear_loss(h, w, th[:-1], tw, x.labels, None, x.kd_weight, spec=spec, true_vocab=29)
    for name in ("student_bias", "teacher_bias"):
        with pytest.raises(ValueError, match=name):
            bias = {name: torch.zeros(33)}
            fused_linear_loss(h, w, th, tw, x.labels, None, x.kd_weight, spec=spec, true_vocab=29, **bias)
    with pytest.raises(ValueError, match="of one dtype"):
        fused_linear_loss(h.double(), w, th, tw, x.labels, x.ce_weight, None, spec=spec, true_vocab=29)
    with pytest.raises(ValueError, match="true_vocab is 33"):
        fused_linear_loss(h, w, th, tw, x.labels, x.ce_weight, None, spec=spec, true_vocab=33)
    with pytest.raises(ValueError, match="labels has shape"):
        fused_linear_loss(h, w, th, tw, x.labels[:-1], x.ce_weight, None, spec=spec, true_vocab=29)
    with pytest.raises(ValueError, match="chunk_rows is 0"):
        fused_linear_loss(h, w, th, tw, x.labels, x.ce_weight, None, spec=spec, true_vocab=29, chunk_rows=0)
    with pytest.raises(ValueError, match="teacher_logits has shape None"):
        vocab_parallel_loss(x.student_logits, None, x.labels, None, x.kd_weight, spec=spec, true_vocab=29)
    with pytest.raises(ValueError, match="28 vocabulary columns"):
        vocab_parallel_loss(
            x.student_logits, x.teacher_logits[:, :28], x.labels, None, x.kd_weight, spec=spec, true_vocab=29
        )
    with pytest.raises(ValueError, match="kd_weight has shape"):
        vocab_parallel_loss(
            x.student_logits, x.teacher_logits, x.labels, None, x.kd_weight[:, None], spec=spec, true_vocab=29
        )
    for impl, words in (("cuda", "known are"), ("reference", "known are")):
        with pytest.raises(ValueError, match=words):
            vocab_parallel_loss(
                x.student_logits, None, x.labels, x.ce_weight, None, spec=spec, true_vocab=29, impl=impl
            )
    with pytest.raises(ValueError, match=r"no float64.*--kd-loss-impl"):
        vocab_parallel_loss(
            x.student_logits.double(), None, x.labels, x.ce_weight, None, spec=spec, true_vocab=29, impl="triton"
        )
    with pytest.raises(ValueError, match="softcap is 0"):
        LogitMap(softcap=0.0)
