"""The table of divergences: everything that distinguishes one from another.

With p the teacher and q the student, a divergence is a sum over the vocabulary of pointwise terms d(ln q_j, ln p_j).
Its gradient by a tempered logit s_j = z_j / T follows from their derivatives e_j = d d_j / d ln q_j ("dlogq"):

    dD / ds_j = e_j - q_j * sum_k e_k

so the vocabulary shards must exchange only two sums per token, one of the pointwise terms and one of their derivatives.
Both need the normalized probabilities, hence a second pass and a second exchange. The KLs need neither: their sums
follow from an expectation of the log ratio, which does not depend on the normalizers.

To add a divergence: an entry here, its definition in `reference.DIVERGENCES`, its name in `config.Divergence`, and its
pointwise term and derivative in `triton_math` for GPUs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mkd.config.loss_spec import LossSpec


@dataclass(frozen=True)
class ExpectedLogRatio:
    """A KL whose value and sum of derivatives follow from one expectation, taken in the softmax pass."""

    under: Literal["student", "teacher"]
    """The model that the expectation of ln(this model / the other) is taken under."""
    dlogq_sum: Callable[[Tensor], Tensor]
    """[N] divergence -> [N] sum over the vocabulary of its derivatives by ln q."""


@dataclass(frozen=True)
class TokenDivergence:
    """One divergence. Tensors are [N, columns] log-probabilities; -inf is probability 0."""

    pointwise: Callable[[Tensor, Tensor, LossSpec], Tensor]
    """(ln q, ln p, spec) -> terms of the divergence, without T^2."""
    dlogq: Callable[[Tensor, Tensor, LossSpec], Tensor]
    """(ln q, ln p, spec) -> derivative of each term by ln q, up to a multiple of q, which cancels in the gradient."""
    single_pass: ExpectedLogRatio | None = None
    """For divergences that need the softmax pass only; None for the others."""


def weighted(weight: Tensor, logarithm: Tensor) -> Tensor:
    """weight * logarithm, and 0 where the weight is 0, whatever the logarithm is there; a NaN weight gives NaN."""
    return torch.where(weight == 0, 0, weight * logarithm)


def _mixture(log_a: Tensor, log_b: Tensor, share: float) -> Tensor:
    """share * a + (1 - share) * b."""
    return share * log_a.exp() + (1.0 - share) * log_b.exp()


def _forward_kl_pointwise(log_q: Tensor, log_p: Tensor, spec: LossSpec) -> Tensor:
    return weighted(log_p.exp(), log_p - log_q)


def _forward_kl_dlogq(log_q: Tensor, log_p: Tensor, spec: LossSpec) -> Tensor:
    return -log_p.exp()


def _reverse_kl(log_q: Tensor, log_p: Tensor, spec: LossSpec) -> Tensor:
    """The pointwise term, and the derivative minus q."""
    return weighted(log_q.exp(), log_q - log_p)


def _jsd_pointwise(log_q: Tensor, log_p: Tensor, spec: LossSpec) -> Tensor:
    log_m = _mixture(log_p, log_q, spec.beta).log()
    teacher_part = weighted(log_p.exp(), log_p - log_m)
    return spec.beta * teacher_part + (1.0 - spec.beta) * weighted(log_q.exp(), log_q - log_m)


def _jsd_dlogq(log_q: Tensor, log_p: Tensor, spec: LossSpec) -> Tensor:
    log_m = _mixture(log_p, log_q, spec.beta).log()
    return (1.0 - spec.beta) * weighted(log_q.exp(), log_q - log_m)


def _skew_forward_kl_pointwise(log_q: Tensor, log_p: Tensor, spec: LossSpec) -> Tensor:
    return weighted(log_p.exp(), log_p - _mixture(log_p, log_q, spec.skew).log())


def _skew_forward_kl_dlogq(log_q: Tensor, log_p: Tensor, spec: LossSpec) -> Tensor:
    q = log_q.exp()
    return torch.where(q > 0, (spec.skew - 1.0) * q * log_p.exp() / _mixture(log_p, log_q, spec.skew), 0)


def _skew_reverse_kl_pointwise(log_q: Tensor, log_p: Tensor, spec: LossSpec) -> Tensor:
    return weighted(log_q.exp(), log_q - _mixture(log_q, log_p, spec.skew).log())


def _skew_reverse_kl_dlogq(log_q: Tensor, log_p: Tensor, spec: LossSpec) -> Tensor:
    """The derivative minus q."""
    q, m = log_q.exp(), _mixture(log_q, log_p, spec.skew)
    return weighted(q, log_q - m.log() - spec.skew * q / m)


def _tvd_pointwise(log_q: Tensor, log_p: Tensor, spec: LossSpec) -> Tensor:
    return 0.5 * (log_p.exp() - log_q.exp()).abs()


def _tvd_dlogq(log_q: Tensor, log_p: Tensor, spec: LossSpec) -> Tensor:
    q = log_q.exp()
    return 0.5 * q * (q - log_p.exp()).sign()


DIVERGENCES: dict[str, TokenDivergence] = {
    "forward_kl": TokenDivergence(
        _forward_kl_pointwise,
        _forward_kl_dlogq,
        ExpectedLogRatio("teacher", lambda value: torch.full_like(value, -1.0)),
    ),
    "reverse_kl": TokenDivergence(_reverse_kl, _reverse_kl, ExpectedLogRatio("student", lambda value: value)),
    "jsd": TokenDivergence(_jsd_pointwise, _jsd_dlogq),
    "skew_forward_kl": TokenDivergence(_skew_forward_kl_pointwise, _skew_forward_kl_dlogq),
    "skew_reverse_kl": TokenDivergence(_skew_reverse_kl_pointwise, _skew_reverse_kl_dlogq),
    "tvd": TokenDivergence(_tvd_pointwise, _tvd_dlogq),
}
"""`LossSpec.divergence` -> how it is computed."""
