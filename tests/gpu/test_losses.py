"""The losses on a GPU: Triton's kernels at the vocabularies of real models, half precision, more than 2^31 logits."""

import pytest
import torch
from torch import Tensor

from mkd.losses import LossOutput, LossSpec, fused_linear_loss, reference, vocab_parallel_loss
from mkd.losses.divergences import DIVERGENCES
from mkd.losses.inputs import PLAIN_LOGITS, LogitMap, LogitMaps
from tests.support.tolerance import FP32, HALF_FACTOR, assert_close_norm, norm_error

pytestmark = pytest.mark.gpu

UPSTREAM = 3.7
ROWS, VOCAB, TRUE_VOCAB = 301, 5000, 4999
HALF = (torch.bfloat16, torch.float16)


def spec_of(divergence: str = "forward_kl", temperature: float = 2.0) -> LossSpec:
    return LossSpec(divergence=divergence, temperature=temperature, z_loss=1e-3)


def terms(z: Tensor, u: Tensor, labels: Tensor, ce_weight: Tensor, kd_weight: Tensor, spec: LossSpec) -> Tensor:
    """The loss by its definition, from logits of the real columns."""
    ce = reference.cross_entropy(z, labels) + spec.z_loss * reference.z_loss(z)
    return (ce_weight * ce + kd_weight * reference.DIVERGENCES[spec.divergence](z, u, spec)).sum()


# from logits


def logits(vocab: int, dtype: torch.dtype, rows: int = 33) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(student, teacher, labels, CE weights, KD weights); student and teacher resemble one another."""
    gen = torch.Generator("cuda").manual_seed(vocab)
    shared, *own = (torch.randn(rows, vocab, generator=gen, device="cuda") for _ in range(3))
    student, teacher = (shared.mul(2).add(x).to(dtype) for x in own)
    labels = torch.randint(0, vocab, (rows,), generator=gen, device="cuda")
    weights = torch.rand(2, rows, generator=gen, device="cuda") + 0.1
    return student, teacher, labels, *weights


def by_definition(x: tuple[Tensor, ...], spec: LossSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(loss, gradient of the student's logits in their own dtype or better), all of it in `dtype`."""
    student = x[0].detach().clone().requires_grad_()
    if dtype == torch.float64:
        student = student.detach().double().requires_grad_()
    loss = terms(student.to(dtype), x[1].to(dtype), x[2], *(w.to(dtype) for w in x[3:]), spec)
    return loss.detach(), *torch.autograd.grad(UPSTREAM * loss, student)


def by_triton(x: tuple[Tensor, ...], spec: LossSpec) -> tuple[LossOutput, Tensor]:
    student = x[0].detach().requires_grad_()
    out = vocab_parallel_loss(student, *x[1:], spec=spec, true_vocab=student.shape[1], impl="triton")
    return out, *torch.autograd.grad(UPSTREAM * out.loss, student)


@pytest.mark.parametrize(
    "vocab, divergence, temperature",
    [(128256, name, 2.0) for name in DIVERGENCES]
    + [(vocab, name, 1.0) for vocab in (32000, 50257, 151936, 262144) for name in ("reverse_kl", "jsd")],
)
def test_fp32_logits(vocab: int, divergence: str, temperature: float) -> None:
    x, spec = logits(vocab, torch.float32), spec_of(divergence, temperature)
    loss, gradient = by_definition(x, spec, torch.float64)
    out, ours = by_triton(x, spec)
    assert_close_norm(out.loss, loss, FP32, "loss")
    kd = reference.DIVERGENCES[divergence](x[0].double(), x[1].double(), spec)
    assert_close_norm(out.kd, kd, FP32, "kd")
    assert_close_norm(out.ce, reference.cross_entropy(x[0].double(), x[2]), FP32, "ce")
    assert_close_norm(ours, gradient, FP32, "gradient")


@pytest.mark.parametrize(
    "vocab, dtype, divergence",
    [(151936, torch.bfloat16, name) for name in DIVERGENCES]
    + [(50257, torch.float16, name) for name in ("forward_kl", "jsd")],
)
def test_half_precision_logits(vocab: int, dtype: torch.dtype, divergence: str) -> None:
    """The gradient is rounded once; eager torch takes its softmaxes in fp32 too."""
    x, spec = logits(vocab, dtype), spec_of(divergence)
    loss, gradient = by_definition(x, spec, torch.float64)
    out, ours = by_triton(x, spec)
    _, eager = by_definition(x, spec, torch.float32)
    assert_close_norm(out.loss, loss, FP32, "loss")  # fp32 arithmetic on the same rounded logits
    assert ours.dtype == eager.dtype == dtype
    assert norm_error(ours, gradient) <= HALF_FACTOR * norm_error(eager, gradient)


@pytest.mark.parametrize("divergence", ["forward_kl", "jsd"])
def test_more_than_2_to_31_logits(divergence: str) -> None:
    """Offsets of the last rows do not fit into 32 bits."""
    rows, vocab = 16400, 131072
    spec, gen = spec_of(divergence), torch.Generator("cuda").manual_seed(9)
    student, teacher = (torch.empty(rows, vocab, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    for half in (student, teacher):
        half.normal_(generator=gen)
    labels = torch.randint(0, vocab, (rows,), generator=gen, device="cuda")
    weights = torch.rand(2, rows, generator=gen, device="cuda") + 0.1
    out, ours = by_triton((student, teacher, labels, *weights), spec)
    for part in (slice(0, 3), slice(16383, 16386), slice(rows - 3, rows)):
        x = (student.detach()[part], teacher[part], labels[part], *weights[:, part])
        _, gradient = by_definition(x, spec, torch.float64)
        _, eager = by_definition(x, spec, torch.float32)
        kd = reference.DIVERGENCES[divergence](x[0].double(), x[1].double(), spec)
        assert_close_norm(out.kd[part], kd, FP32, "kd")
        assert_close_norm(out.ce[part], reference.cross_entropy(x[0].double(), x[2]), FP32, "ce")
        assert norm_error(ours[part], gradient) <= HALF_FACTOR * norm_error(eager, gradient)


@pytest.mark.parametrize("who", ["student", "teacher"])
def test_nan_is_loud_and_masked_rows_are_not_read(who: str) -> None:
    student, teacher, labels, ce_weight, kd_weight = logits(50257, torch.float32)
    bad = student if who == "student" else teacher
    bad[7, 50256] = torch.nan
    out, _ = by_triton((student, teacher, labels, ce_weight, kd_weight), spec_of("jsd"))
    assert out.kd.isnan().nonzero().tolist() == [[7]]
    ce_weight[7] = kd_weight[7] = 0
    out, gradient = by_triton((student, teacher, labels, ce_weight, kd_weight), spec_of("jsd"))
    assert out.loss.isfinite() and gradient.isfinite().all() and not gradient[7].any()


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_equal_models(divergence: str) -> None:
    student, _, labels, _, kd_weight = logits(50257, torch.float32)
    z, spec = student.clone().requires_grad_(), spec_of(divergence)
    out = vocab_parallel_loss(z, student, labels, None, kd_weight, spec=spec, true_vocab=50257, impl="triton")
    assert_close_norm(out.kd, torch.zeros_like(out.kd), FP32, "value")
    assert_close_norm(*torch.autograd.grad(out.loss, z), torch.zeros_like(z), FP32, "gradient")


# from hidden states


def make_inputs(dtype: torch.dtype, weight: float = 1.0) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """([student hidden, LM head, teacher hidden, LM head], labels, CE weights, KD weights), weights up to `weight`."""
    gen = torch.Generator("cuda").manual_seed(3)
    shapes = [(ROWS, 64), (VOCAB, 64), (ROWS, 96), (VOCAB, 96)]
    tensors = [torch.randn(s, generator=gen, device="cuda").mul(0.6).to(dtype) for s in shapes]
    labels = torch.randint(0, TRUE_VOCAB, (ROWS,), generator=gen, device="cuda")
    weights = torch.rand(2, ROWS, generator=gen, device="cuda") * weight
    return tensors, labels, *weights


def mapped(products: Tensor, logit_map: LogitMap) -> Tensor:
    z = products * logit_map.scale
    return z if logit_map.softcap is None else logit_map.softcap * torch.tanh(z / logit_map.softcap)


def plain_gradients(
    dtype: torch.dtype,
    tensors: list[Tensor],
    rows: tuple[Tensor, Tensor, Tensor],
    scale: float,
    spec: LossSpec,
    maps: LogitMaps = PLAIN_LOGITS,
) -> tuple[Tensor, Tensor]:
    """Gradients of (student hidden, LM head) by autograd: GEMMs in `dtype`, softmaxes in float64."""
    hidden, head, teacher_hidden, teacher_head = (t.detach().to(dtype) for t in tensors)
    hidden.requires_grad_(), head.requires_grad_()
    z = mapped((hidden @ head.t())[:, :TRUE_VOCAB].double(), maps.student)
    u = mapped((teacher_hidden @ teacher_head.t())[:, :TRUE_VOCAB].double(), maps.teacher)
    return torch.autograd.grad(scale * terms(z, u, *rows, spec), (hidden, head))


def fused(
    tensors: list[Tensor], rows: tuple[Tensor, Tensor, Tensor], scale: float, spec: LossSpec, **options: object
) -> tuple[LossOutput, Tensor, Tensor]:
    """(output, gradient of hidden states, of LM head)."""
    hidden, head = (t.detach().requires_grad_() for t in tensors[:2])
    common = {"spec": spec, "true_vocab": TRUE_VOCAB, "chunk_rows": 100, **options}
    out = fused_linear_loss(hidden, head, *tensors[2:], *rows, **common)
    return out, *torch.autograd.grad(scale * out.loss, (hidden, head))


def check(
    ours: tuple[Tensor, Tensor], eager: tuple[Tensor, Tensor], truth: tuple[Tensor, Tensor], dtype: torch.dtype
) -> None:
    """fp32 within FP32 of float64; half precision at most twice as far from it as eager torch in the same dtype."""
    for name, mine, theirs, right in zip(("hidden", "head"), ours, eager, truth, strict=True):
        error, yardstick = norm_error(mine, right), norm_error(theirs, right)
        print(f"{dtype} {name}: error {error:.2e}, eager {yardstick:.2e}")
        assert error <= (HALF_FACTOR * yardstick if dtype in HALF else FP32), name


@pytest.mark.parametrize("weight, scale", [(1.0, UPSTREAM), (1e-4, 65536.0)])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF, torch.float64])
@pytest.mark.parametrize("divergence", ["forward_kl", "jsd"])
def test_gradients(divergence: str, dtype: torch.dtype, weight: float, scale: float) -> None:
    tensors, *rows = make_inputs(dtype, weight)
    spec = spec_of(divergence)
    _, *ours = fused(tensors, rows, scale, spec)
    assert all(g.dtype == dtype for g in ours)
    truth = plain_gradients(torch.float64, tensors, rows, scale, spec)
    check(ours, plain_gradients(dtype, tensors, rows, scale, spec), truth, dtype)


@pytest.mark.parametrize("logits_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_bf16_with_both_logits_dtypes(divergence: str, logits_dtype: torch.dtype) -> None:
    tensors, *rows = make_inputs(torch.bfloat16)
    spec = spec_of(divergence)
    _, *ours = fused(tensors, rows, UPSTREAM, spec, logits_dtype=logits_dtype)
    truth = plain_gradients(torch.float64, tensors, rows, UPSTREAM, spec)
    check(ours, plain_gradients(torch.bfloat16, tensors, rows, UPSTREAM, spec), truth, torch.bfloat16)


@pytest.mark.parametrize("divergence", ["reverse_kl", "jsd"])
def test_scale_and_softcap(divergence: str) -> None:
    maps = LogitMaps(LogitMap(0.5, 4.0), LogitMap(1.7, 3.0))
    tensors, *rows = make_inputs(torch.float32)
    spec = spec_of(divergence)
    _, *ours = fused(tensors, rows, UPSTREAM, spec, maps=maps)
    truth = plain_gradients(torch.float64, tensors, rows, UPSTREAM, spec, maps)
    check(ours, truth, truth, torch.float32)


@pytest.mark.parametrize("teacher_dtype", [torch.float32, torch.float16, torch.float64])
def test_teacher_of_another_dtype(teacher_dtype: torch.dtype) -> None:
    """A bf16 student, whose logits are bf16, with a teacher that no GEMM brings to bf16."""
    tensors, *rows = make_inputs(torch.bfloat16)
    mixed = [*tensors[:2], *(t.to(teacher_dtype) for t in tensors[2:])]
    _, *ours = fused(mixed, rows, UPSTREAM, spec_of())
    truth = plain_gradients(torch.float64, tensors, rows, UPSTREAM, spec_of())
    check(ours, plain_gradients(torch.bfloat16, tensors, rows, UPSTREAM, spec_of()), truth, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_triton_is_as_eager(dtype: torch.dtype) -> None:
    tensors, *rows = make_inputs(dtype)
    (fast, *ours), (plain, *theirs) = (
        fused(tensors, rows, UPSTREAM, spec_of("jsd"), impl=impl, logits_dtype=torch.float32)
        for impl in ("triton", "eager")
    )
    for name in ("loss", "ce", "kd"):
        assert_close_norm(getattr(fast, name), getattr(plain, name), FP32, name)
    for a, b in zip(ours, theirs, strict=True):
        assert_close_norm(a, b, FP32 if dtype == torch.float32 else torch.finfo(dtype).eps, "gradient")


@pytest.mark.parametrize("divergence", ["forward_kl", "jsd"])
def test_repeats_bit_for_bit(divergence: str) -> None:
    tensors, *rows = make_inputs(torch.bfloat16)
    (one, *first), (two, *second) = (fused(tensors, rows, UPSTREAM, spec_of(divergence)) for _ in range(2))
    for a, b in zip((*one, *first), (*two, *second), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("divergence", ["forward_kl", "jsd"])
def test_main_grad(divergence: str, dtype: torch.dtype) -> None:
    """Added to what is there, not rounded to the weight's dtype; another upstream than was said is loud."""
    tensors, *rows = make_inputs(dtype)
    spec = spec_of(divergence)
    truth = plain_gradients(torch.float64, tensors, rows, UPSTREAM, spec)
    eager = plain_gradients(dtype, tensors, rows, UPSTREAM, spec)
    before = 2.0**-6  # so small that adding to it rounds nothing away
    for factor in (1.0, 2.0):
        hidden, head = tensors[0].detach().requires_grad_(), torch.nn.Parameter(tensors[1])
        head.main_grad = torch.full(head.shape, before, device="cuda")
        head.grad_added_to_main_grad = False
        common = {"spec": spec, "true_vocab": TRUE_VOCAB, "chunk_rows": 100, "upstream": UPSTREAM}
        out = fused_linear_loss(hidden, head, *tensors[2:], *rows, **common)
        (factor * UPSTREAM * out.loss).backward()
        assert head.grad_added_to_main_grad
        assert bool((head.main_grad[TRUE_VOCAB:] == before).all())
        if factor == 1.0:
            check((hidden.grad, head.main_grad - before), eager, truth, dtype)
        else:
            assert hidden.grad.isnan().all()
