"""The definitions of the losses: against torch, formulas in probabilities, and their own limits; all in float64."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mkd.losses import LossSpec
from mkd.losses.reference.dense import DIVERGENCES, cross_entropy, forward_kl, jsd, reverse_kl, z_loss
from tests.support.tolerance import FP32, FP64, assert_close_norm

BETA, SKEW = 0.3, 0.2
LARGE = 1e4
"""A difference of logits that no exp survives: e^-10000 is 0 in float64."""

every_divergence = pytest.mark.parametrize("name", list(DIVERGENCES))


def spec_of(name: str, **changes: float) -> LossSpec:
    return LossSpec(divergence=name, **{"beta": BETA, "skew": SKEW, **changes})


def logits(rows: int = 6, columns: int = 9, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """(student, teacher) [rows, columns]."""
    z, u = torch.randn(2, rows, columns, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return scale * z, scale * u


def value_and_gradient(name: str, z: Tensor, u: Tensor, **changes: float) -> tuple[Tensor, Tensor]:
    """([rows] values, d sum / d student logits)."""
    z = z.clone().requires_grad_()
    values = DIVERGENCES[name](z, u, spec_of(name, **changes))
    return values.detach(), *torch.autograd.grad(values.sum(), z)


def in_probabilities(name: str, q: Tensor, p: Tensor) -> Tensor:
    """The divergence by its formula, for probabilities > 0."""

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a / b).log()).sum(dim=1)

    m = BETA * p + (1 - BETA) * q
    return {
        "forward_kl": kl(p, q),
        "reverse_kl": kl(q, p),
        "jsd": BETA * kl(p, m) + (1 - BETA) * kl(q, m),
        "skew_forward_kl": kl(p, SKEW * p + (1 - SKEW) * q),
        "skew_reverse_kl": kl(q, (1 - SKEW) * p + SKEW * q),
        "tvd": 0.5 * (p - q).abs().sum(dim=1),
    }[name]


def gradient_by_formula(name: str, q: Tensor, p: Tensor) -> Tensor:
    """d divergence / d (z / T) as docs/losses.md gives it."""

    def row(terms: Tensor) -> Tensor:
        return terms.sum(dim=1, keepdim=True)

    if name == "forward_kl":
        return q - p
    if name == "reverse_kl":
        return q * ((q / p).log() - row(q * (q / p).log()))
    if name == "jsd":
        ratio = (q / (BETA * p + (1 - BETA) * q)).log()
        return (1 - BETA) * q * (ratio - row(q * ratio))
    if name == "skew_forward_kl":
        ratio = p / (SKEW * p + (1 - SKEW) * q)
        return (1 - SKEW) * q * (row(q * ratio) - ratio)
    if name == "skew_reverse_kl":
        share = q / ((1 - SKEW) * p + SKEW * q)
        term = share.log() - SKEW * share
        return q * (term - row(q * term))
    sign = (q - p).sign()
    return 0.5 * q * (sign - row(q * sign))


def softmaxes(z: Tensor, u: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    return torch.softmax(z / temperature, dim=1), torch.softmax(u / temperature, dim=1)


def test_cross_entropy_and_kls_against_torch() -> None:
    z, u = logits()
    labels = torch.tensor([0, 8, 3, 3, 1, 7])
    assert_close_norm(cross_entropy(z, labels), F.cross_entropy(z, labels, reduction="none"), FP64, "cross-entropy")
    log_q, log_p = F.log_softmax(z, dim=1), F.log_softmax(u, dim=1)
    for function, target, given in ((forward_kl, log_p, log_q), (reverse_kl, log_q, log_p)):
        wanted = F.kl_div(given, target, log_target=True, reduction="none").sum(dim=1)
        assert_close_norm(function(z, u, LossSpec()), wanted, FP64, function.__name__)


@every_divergence
@pytest.mark.parametrize("temperature, squared", [(1.0, True), (2.0, True), (2.0, False), (0.5, True)])
def test_value_and_gradient_by_formula(name: str, temperature: float, squared: bool) -> None:
    z, u = logits()
    values, gradient = value_and_gradient(name, z, u, temperature=temperature, temperature_squared=squared)
    q, p = softmaxes(z, u, temperature)
    factor = temperature**2 if squared else 1.0
    assert_close_norm(values, factor * in_probabilities(name, q, p), FP64, "value")
    assert_close_norm(gradient, factor / temperature * gradient_by_formula(name, q, p), FP64, "gradient")


@every_divergence
def test_gradient_against_differences(name: str) -> None:
    z, u = logits(rows=3, columns=5)
    spec = spec_of(name, temperature=2.0)
    assert torch.autograd.gradcheck(lambda z: DIVERGENCES[name](z, u, spec), z.requires_grad_())


@every_divergence
def test_float32_stays_float32(name: str) -> None:
    z, u = logits()
    values, gradient = value_and_gradient(name, z.float(), u.float())
    assert values.dtype == gradient.dtype == torch.float32
    wanted = value_and_gradient(name, z.float().double(), u.float().double())
    assert_close_norm(values, wanted[0], FP32, "value")
    assert_close_norm(gradient, wanted[1], FP32, "gradient")


@every_divergence
def test_identical_distributions(name: str) -> None:
    z, _ = logits(scale=5.0)
    # For tvd the logits too must be equal: its gradient jumps at p = q, so that rounding decides there.
    values, gradient = value_and_gradient(name, z, z if name == "tvd" else z + 3.0)
    assert values.abs().max() < FP64 and gradient.abs().max() < FP64


@every_divergence
def test_column_masked_in_both_models_has_no_effect(name: str) -> None:
    z, u = logits()
    wanted = value_and_gradient(name, z[:, 1:], u[:, 1:])
    z[:, 0] = u[:, 0] = -torch.inf
    values, gradient = value_and_gradient(name, z, u)
    assert_close_norm(values, wanted[0], FP64, "value")
    assert_close_norm(gradient[:, 1:], wanted[1], FP64, "gradient")
    assert not gradient[:, 0].any()


@every_divergence
@pytest.mark.parametrize("side", ["student", "teacher"])
def test_column_masked_in_one_model(name: str, side: str) -> None:
    """Equivalent to a logit whose probability is 0 in float64; the KLs are infinite where that diverges."""
    masked, low = logits(), logits()
    index = ("student", "teacher").index(side)
    masked[index][:, 4], low[index][:, 4] = -torch.inf, -LARGE
    values, gradient = value_and_gradient(name, *masked)
    if (name, side) in (("forward_kl", "student"), ("reverse_kl", "teacher")):
        assert (values == torch.inf).all()
    else:
        assert_close_norm(values, value_and_gradient(name, *low)[0], FP64, "value")
    if (name, side) != ("reverse_kl", "teacher"):
        assert_close_norm(gradient, value_and_gradient(name, *low)[1], FP64, "gradient")


@every_divergence
@pytest.mark.parametrize("off", [-LARGE, -torch.inf])
def test_one_hot_teacher(name: str, off: float) -> None:
    z, u = logits()
    u = torch.full_like(u, off)
    u[:, 2] = 0.0
    values, gradient = value_and_gradient(name, z, u)
    q = torch.softmax(z, dim=1)
    at = q[:, 2]
    others = (q.sum(dim=1) - at).clamp(0)
    entropy = -(q * q.log()).sum(dim=1)
    m = BETA + (1 - BETA) * at
    wanted = {
        "forward_kl": -at.log(),
        "reverse_kl": others * -off - entropy,
        "jsd": -BETA * m.log() + (1 - BETA) * (at * (at / m).log() - others * math.log1p(-BETA)),
        "skew_forward_kl": -(SKEW + (1 - SKEW) * at).log(),
        "skew_reverse_kl": at * (at / (1 - SKEW + SKEW * at)).log() - others * math.log(SKEW),
        "tvd": 1 - at,
    }[name]
    if name == "reverse_kl" and off == -torch.inf:
        assert (values == torch.inf).all()
        return
    assert_close_norm(values, wanted, FP64, "value")
    assert gradient.isfinite().all()
    if name == "forward_kl":
        assert_close_norm(gradient, q - F.one_hot(torch.full((6,), 2), 9), FP64, "gradient")


@every_divergence
def test_opposite_one_hots(name: str) -> None:
    z = torch.tensor([[LARGE, 0.0, -LARGE]], dtype=torch.float64)
    values, gradient = value_and_gradient(name, z, -z)
    entropy = -BETA * math.log(BETA) - (1 - BETA) * math.log(1 - BETA)
    wanted = {
        "forward_kl": 2 * LARGE,
        "reverse_kl": 2 * LARGE,
        "jsd": entropy,
        "skew_forward_kl": -math.log(SKEW),
        "skew_reverse_kl": -math.log(SKEW),
        "tvd": 1.0,
    }[name]
    assert values.item() == pytest.approx(wanted, rel=FP64)
    forward = torch.tensor([[1.0, 0.0, -1.0]], dtype=torch.float64)
    assert_close_norm(gradient, forward if name == "forward_kl" else torch.zeros_like(forward), FP64, "gradient")


@pytest.mark.parametrize("name, limit", [("skew_forward_kl", "forward_kl"), ("skew_reverse_kl", "reverse_kl")])
@pytest.mark.parametrize("masked", [None, "student", "teacher", "both"])
def test_skew_zero_is_the_kl(name: str, limit: str, masked: str | None) -> None:
    z, u = logits()
    if masked in ("student", "both"):
        z[:, 1] = -torch.inf
    if masked in ("teacher", "both"):
        u[:, 1] = -torch.inf
    for skewed, plain in zip(value_and_gradient(name, z, u, skew=0.0), value_and_gradient(limit, z, u), strict=True):
        assert torch.equal(skewed.nan_to_num(), plain.nan_to_num())


@pytest.mark.parametrize("name, limit", [("skew_forward_kl", "forward_kl"), ("skew_reverse_kl", "reverse_kl")])
def test_small_skew_tends_to_the_kl(name: str, limit: str) -> None:
    z, u = logits()
    for skewed, plain in zip(value_and_gradient(name, z, u, skew=1e-9), value_and_gradient(limit, z, u), strict=True):
        assert_close_norm(skewed, plain, 1e-7, "limit")


@pytest.mark.parametrize("beta, share, limit", [(1e-7, 1e-7, "forward_kl"), (1 - 1e-7, 1e-7, "reverse_kl")])
def test_jsd_at_its_ends_is_a_vanishing_kl(beta: float, share: float, limit: str) -> None:
    z, u = logits()
    for value, kl in zip(value_and_gradient("jsd", z, u, beta=beta), value_and_gradient(limit, z, u), strict=True):
        assert_close_norm(value / share, kl, 1e-5, "limit")


def test_symmetries() -> None:
    z, u = logits()
    assert_close_norm(jsd(z, u, LossSpec(beta=0.5)), jsd(u, z, LossSpec(beta=0.5)), FP64, "jsd")
    assert_close_norm(jsd(z, u, LossSpec(beta=0.3)), jsd(u, z, LossSpec(beta=0.7)), FP64, "jsd, other way round")
    for one, other in (
        ("forward_kl", "reverse_kl"),
        ("skew_forward_kl", "skew_reverse_kl"),
        ("tvd", "tvd"),
    ):
        assert_close_norm(DIVERGENCES[one](z, u, spec_of(one)), DIVERGENCES[other](u, z, spec_of(other)), FP64, one)


@pytest.mark.parametrize("scale", [0.01, 1.0, 10.0, 1000.0])
@pytest.mark.parametrize("beta", [0.5, BETA])
def test_bounds(scale: float, beta: float) -> None:
    z, u = logits(rows=40, scale=scale)
    bounds = {
        "forward_kl": math.inf,
        "reverse_kl": math.inf,
        "jsd": -beta * math.log(beta) - (1 - beta) * math.log(1 - beta),
        "skew_forward_kl": -math.log(SKEW),
        "skew_reverse_kl": -math.log(SKEW),
        "tvd": 1.0,
    }
    assert bounds.keys() == DIVERGENCES.keys()
    for name, bound in bounds.items():
        values, gradient = value_and_gradient(name, z, u, beta=beta)
        assert (values >= -FP64).all() and (values <= bound + FP64).all(), name
        assert gradient.isfinite().all(), name
        assert gradient.sum(dim=1).abs().max() <= FP64 * max(1.0, scale), (
            "a common offset of the logits changes nothing"
        )


def test_z_loss() -> None:
    z, _ = logits()
    z[:, 3] = -torch.inf
    z[1] += LARGE
    z.requires_grad_()
    values = z_loss(z)
    lse = z.detach().exp().sum(dim=1).log()
    lse[1] = LARGE + (z.detach()[1] - LARGE).exp().sum().log()
    assert_close_norm(values, lse**2, FP64, "value")
    (gradient,) = torch.autograd.grad(values.sum(), z)
    assert_close_norm(gradient, 2 * lse[:, None] * torch.softmax(z, dim=1), FP64, "gradient")
    assert not gradient[:, 3].any()
