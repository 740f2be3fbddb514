"""The loss from hidden states on a GPU: half-precision GEMMs with fp32 results, and fp16 under a loss scale."""

import pytest
import torch
from torch import Tensor

from mkd.losses import LossSpec, fused_linear_loss, reference
from tests.tolerance import FP32, HALF_FACTOR, norm_error

pytestmark = pytest.mark.gpu

ROWS, VOCAB, TRUE_VOCAB = 301, 5000, 4999
SPEC = LossSpec(temperature=2.0)


def make_inputs(dtype: torch.dtype, weight: float) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """([student hidden, LM head, teacher hidden, LM head], labels, CE weights, KD weights), weights up to `weight`."""
    gen = torch.Generator("cuda").manual_seed(3)
    shapes = [(ROWS, 64), (VOCAB, 64), (ROWS, 96), (VOCAB, 96)]
    tensors = [torch.randn(s, generator=gen, device="cuda").mul(0.6).to(dtype) for s in shapes]
    labels = torch.randint(0, TRUE_VOCAB, (ROWS,), generator=gen, device="cuda")
    weights = torch.rand(2, ROWS, generator=gen, device="cuda") * weight
    return tensors, labels, *weights


def plain_gradients(
    dtype: torch.dtype, tensors: list[Tensor], labels: Tensor, ce_weight: Tensor, kd_weight: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Gradients of (student hidden, LM head) by autograd: GEMMs in `dtype`, softmaxes in float64."""
    hidden, head, teacher_hidden, teacher_head = (t.detach().to(dtype) for t in tensors)
    hidden.requires_grad_(), head.requires_grad_()
    z = (hidden @ head.t())[:, :TRUE_VOCAB].double()
    u = (teacher_hidden @ teacher_head.t())[:, :TRUE_VOCAB].double()
    terms = ce_weight * reference.cross_entropy(z, labels) + kd_weight * reference.forward_kl(z, u, SPEC)
    return torch.autograd.grad(scale * terms.sum(), (hidden, head))


@pytest.mark.parametrize("weight, scale", [(1.0, 3.7), (1e-4, 65536.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_gradients(dtype: torch.dtype, weight: float, scale: float) -> None:
    """fp32 within FP32 of float64; half precision at most twice as far from it as eager torch in the same dtype."""
    tensors, *rows = make_inputs(dtype, weight)
    hidden, head, *teacher = tensors
    out = fused_linear_loss(
        hidden.requires_grad_(),
        head.requires_grad_(),
        *teacher,
        *rows,
        spec=SPEC,
        true_vocab=TRUE_VOCAB,
        chunk_rows=100,
    )
    ours = torch.autograd.grad(scale * out.loss, (hidden, head))
    truth = plain_gradients(torch.float64, tensors, *rows, scale)
    eager = plain_gradients(dtype, tensors, *rows, scale)
    for name, mine, theirs, right in zip(("hidden", "head"), ours, eager, truth, strict=True):
        error, yardstick = norm_error(mine, right), norm_error(theirs, right)
        print(f"{dtype} {name}: error {error:.2e}, eager {yardstick:.2e}")
        assert mine.dtype == dtype
        assert error <= (FP32 if dtype in (torch.float32, torch.float64) else HALF_FACTOR * yardstick), name
