"""The divergence to minimize, its temperature and T²: `LossSpec`."""

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from mkd.config.values import require_choice, require_temperature
from mkd.errors import MkdConfigError

Divergence = Literal["forward_kl", "reverse_kl", "jsd", "skew_forward_kl", "skew_reverse_kl", "tvd"]
"""Divergences between teacher p and student q, both softmax(logits / T)."""

SKEWED = ("skew_forward_kl", "skew_reverse_kl")
"""The divergences with a `skew`."""


def divergence_text(divergence: str, beta: float, skew: float) -> str:
    """The name of a divergence with its parameter, such as jsd (beta 0.5)."""
    if divergence == "jsd":
        return f"jsd (beta {beta:g})"
    return f"{divergence} (skew {skew:g})" if divergence in SKEWED else divergence


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """The divergence to minimize and its temperature. Formulas: docs/losses.md."""

    divergence: Divergence = "forward_kl"
    """With p the teacher and q the student: forward_kl is KL(p || q), reverse_kl KL(q || p), tvd 0.5 sum |p - q|;
    jsd is beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q; skew_forward_kl is
    KL(p || skew p + (1 - skew) q), skew_reverse_kl KL(q || (1 - skew) p + skew q)."""

    beta: float = 0.5
    """Teacher's share of the mixture in jsd, 0 < beta < 1. Other divergences do not read it."""

    skew: float = 0.1
    """Share of the first distribution in the mixture of the skewed KLs, 0 <= skew < 1; at 0 they are the KLs. Other
    divergences do not read it."""

    temperature: float = 1.0
    """T from 0.01 to 1000: both distributions are softmax(logits / T)."""

    temperature_squared: bool = True
    """Multiply the divergence by T^2, in value and gradient, so that its gradient keeps its size as T grows
    (Hinton et al. 2015, section 2)."""

    z_loss: float = 0.0
    """Coefficient >= 0: CE becomes CE + z_loss * (ln sum_j exp z_j)^2, at T = 1 and with CE's weight. The reported
    CE excludes it."""

    temperature_factor: float = field(init=False, repr=False, compare=False)
    """The factor in front of the divergence: T^2, or 1."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature_factor", self.temperature**2 if self.temperature_squared else 1.0)
        require_choice("--kd-loss", self.divergence, get_args(Divergence))
        require_temperature("--kd-temperature", self.temperature)
        if self.divergence == "jsd" and not 0.0 < self.beta < 1.0:
            raise MkdConfigError(
                f"--kd-beta is {self.beta}; jsd needs 0 < beta < 1. Its endpoints are not the KL divergences (there "
                "it is 0 for every student): for KL(teacher || student) give --kd-loss forward_kl, for "
                "KL(student || teacher) --kd-loss reverse_kl"
            )
        if self.divergence in SKEWED and not 0.0 <= self.skew < 1.0:
            raise MkdConfigError(
                f"--kd-skew is {self.skew}; {self.divergence} needs 0 <= skew < 1 (at 0 it is the KL without skew, at "
                "1 it is 0 for every student)"
            )
        if not (math.isfinite(self.z_loss) and self.z_loss >= 0.0):
            raise MkdConfigError(f"--kd-z-loss is {self.z_loss}; a coefficient must be a finite number >= 0")
