"""The result of every loss."""

from typing import NamedTuple

from torch import Tensor


class LossOutput(NamedTuple):
    """The sum that is minimized, and the terms of each token for reports."""

    loss: Tensor
    """Scalar, fp32 (float64 for float64 inputs), differentiable: sum over tokens of ce_weight * (ce + z_loss *
    log_sum_exp^2) + kd_weight * kd."""
    ce: Tensor | None
    """[N] detached cross-entropy in nats, unweighted; 0 where its weight is 0; None without CE weights."""
    kd: Tensor | None
    """[N] detached divergence in nats, unweighted, with T^2 if the spec sets it; 0 where its weight is 0; None without
    KD weights."""
