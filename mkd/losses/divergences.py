"""The table of divergences: everything in which they differ.

With p the teacher and q the student, a divergence is a sum over the vocabulary of a density d(ln q_j, ln p_j). Its
gradient by a tempered logit s_j = z_j / T follows from the slopes e_j = d density_j / d ln q_j:

    dD / ds_j = e_j - q_j * sum_k e_k

so two sums a row, of density and slope, are all that the vocabulary shards must exchange. Both need the normalized
probabilities, hence a second round of communication. The KLs escape it: their sums follow from an expectation of the
log ratio, which is independent of the normalizers.

To add a divergence: an entry here, its definition in `reference.DIVERGENCES`, its name in `config.Divergence`, and its
density and slope in `triton_math` for GPUs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mkd.config.kd_config import LossSpec


@dataclass(frozen=True)
class ExpectedLogRatio:
    """A KL whose value and slope sum come from one expectation, in the first round."""

    under: Literal["student", "teacher"]
    """Whose expectation it is: of ln(this model / the other)."""
    slope_sum: Callable[[Tensor], Tensor]
    """[rows] divergence -> [rows] sum of its slopes."""


@dataclass(frozen=True)
class RowDivergence:
    """One divergence. Tensors are [rows, columns] of log-probabilities; -inf is probability 0."""

    density: Callable[[Tensor, Tensor, LossSpec], Tensor]
    """(ln q, ln p, spec) -> summands of the divergence, without T^2."""
    slope: Callable[[Tensor, Tensor, LossSpec], Tensor]
    """(ln q, ln p, spec) -> derivative of the density by ln q, up to a multiple of q, which cancels in the gradient."""
    one_round: ExpectedLogRatio | None = None
    """How one round is enough; None if it is not."""


def _weighted(weight: Tensor, logarithm: Tensor) -> Tensor:
    """weight * logarithm, and 0 where the weight is 0, whatever the logarithm is there; NaN stays NaN."""
    return torch.where(weight == 0, 0, weight * logarithm)


def _mixture(log_a: Tensor, log_b: Tensor, share: float) -> Tensor:
    """share * a + (1 - share) * b."""
    return share * log_a.exp() + (1.0 - share) * log_b.exp()


def _forward_kl_density(log_q: Tensor, log_p: Tensor, spec: LossSpec) -> Tensor:
    return _weighted(log_p.exp(), log_p - log_q)


def _forward_kl_slope(log_q: Tensor, log_p: Tensor, spec: LossSpec) -> Tensor:
    return -log_p.exp()


def _reverse_kl(log_q: Tensor, log_p: Tensor, spec: LossSpec) -> Tensor:
    """Density, and slope less q."""
    return _weighted(log_q.exp(), log_q - log_p)


def _jsd_density(log_q: Tensor, log_p: Tensor, spec: LossSpec) -> Tensor:
    log_m = _mixture(log_p, log_q, spec.beta).log()
    teacher_part = _weighted(log_p.exp(), log_p - log_m)
    return spec.beta * teacher_part + (1.0 - spec.beta) * _weighted(log_q.exp(), log_q - log_m)


def _jsd_slope(log_q: Tensor, log_p: Tensor, spec: LossSpec) -> Tensor:
    log_m = _mixture(log_p, log_q, spec.beta).log()
    return (1.0 - spec.beta) * _weighted(log_q.exp(), log_q - log_m)


def _skew_forward_kl_density(log_q: Tensor, log_p: Tensor, spec: LossSpec) -> Tensor:
    return _weighted(log_p.exp(), log_p - _mixture(log_p, log_q, spec.skew).log())


def _skew_forward_kl_slope(log_q: Tensor, log_p: Tensor, spec: LossSpec) -> Tensor:
    q = log_q.exp()
    return torch.where(q > 0, (spec.skew - 1.0) * q * log_p.exp() / _mixture(log_p, log_q, spec.skew), 0)


def _skew_reverse_kl_density(log_q: Tensor, log_p: Tensor, spec: LossSpec) -> Tensor:
    return _weighted(log_q.exp(), log_q - _mixture(log_q, log_p, spec.skew).log())


def _skew_reverse_kl_slope(log_q: Tensor, log_p: Tensor, spec: LossSpec) -> Tensor:
    """Less q."""
    q, m = log_q.exp(), _mixture(log_q, log_p, spec.skew)
    return _weighted(q, log_q - m.log() - spec.skew * q / m)


def _tvd_density(log_q: Tensor, log_p: Tensor, spec: LossSpec) -> Tensor:
    return 0.5 * (log_p.exp() - log_q.exp()).abs()


def _tvd_slope(log_q: Tensor, log_p: Tensor, spec: LossSpec) -> Tensor:
    q = log_q.exp()
    return 0.5 * q * (q - log_p.exp()).sign()


DIVERGENCES: dict[str, RowDivergence] = {
    "forward_kl": RowDivergence(
        _forward_kl_density, _forward_kl_slope, ExpectedLogRatio("teacher", lambda value: torch.full_like(value, -1.0))
    ),
    "reverse_kl": RowDivergence(_reverse_kl, _reverse_kl, ExpectedLogRatio("student", lambda value: value)),
    "jsd": RowDivergence(_jsd_density, _jsd_slope),
    "skew_forward_kl": RowDivergence(_skew_forward_kl_density, _skew_forward_kl_slope),
    "skew_reverse_kl": RowDivergence(_skew_reverse_kl_density, _skew_reverse_kl_slope),
    "tvd": RowDivergence(_tvd_density, _tvd_slope),
}
"""`LossSpec.divergence` -> how its rows are computed."""
