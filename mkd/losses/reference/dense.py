"""Each loss as its definition, on one rank, in the float dtype of its inputs: the ground truth of all tests.

Logits are [N tokens, V] and hold the real vocabulary only (no padding columns). Gradients come from autograd.
p is the teacher and q the student, both softmax(logits / T); divergences are in nats.

A logit of either model may be -inf: that column has probability 0 and 0 ln 0 is 0, in value and gradient. A KL whose
second distribution is 0 where the first is not is +inf, which only the KLs without skew can be.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from mkd.config.loss_spec import LossSpec


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """-ln softmax(logits)[label] of each token, always at T = 1.

    Args:
        logits: [N, V], any float dtype.
        labels: [N] int64, each in [0, V).

    Returns:
        [N] in the dtype of the logits, in nats.
    """
    return -torch.log_softmax(logits, dim=-1).gather(1, labels[:, None]).squeeze(1)


def z_loss(logits: Tensor) -> Tensor:
    """(ln sum_j exp z_j)^2 of each token, at T = 1 and without its coefficient.

    Source: Chowdhery et al. 2022, "PaLM: scaling language modeling with pathways", section 5.

    Args:
        logits: [N, V], any float dtype.

    Returns:
        [N] in the dtype of the logits.
    """
    return torch.logsumexp(logits, dim=-1).square()


def forward_kl(student_logits: Tensor, teacher_logits: Tensor, spec: LossSpec) -> Tensor:
    """KL(p || q) = sum_j p_j (ln p_j - ln q_j) of each token, times T^2 if the spec sets it.

    +inf where some q_j = 0 < p_j; the gradient is finite even there.
    Source of T^2: Hinton et al. 2015, "Distilling the knowledge in a neural network", section 2.

    Args:
        student_logits: [N, V], any float dtype.
        teacher_logits: [N, V], same.
        spec: temperature and T^2.

    Returns:
        [N] in the dtype of the logits, in nats.
    """
    log_q, log_p = _log_probabilities(student_logits, teacher_logits, spec)
    return spec.temperature_factor * _kl(log_p, log_q)


def reverse_kl(student_logits: Tensor, teacher_logits: Tensor, spec: LossSpec) -> Tensor:
    """KL(q || p), otherwise as `forward_kl`.

    +inf, and without a finite gradient, where some p_j = 0 < q_j.
    """
    log_q, log_p = _log_probabilities(student_logits, teacher_logits, spec)
    return spec.temperature_factor * _kl(log_q, log_p)


def jsd(student_logits: Tensor, teacher_logits: Tensor, spec: LossSpec) -> Tensor:
    """beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q, otherwise as `forward_kl`.

    Always finite. Tends to 0 as beta tends to 0 (as beta KL(p || q)) or to 1 (as (1 - beta) KL(q || p)).
    Source: Agarwal et al. 2024, "On-policy distillation of language models", section 2.
    """
    log_q, log_p = _log_probabilities(student_logits, teacher_logits, spec)
    log_m = _log_mixture(log_p, log_q, spec.beta)
    return spec.temperature_factor * (spec.beta * _kl(log_p, log_m) + (1.0 - spec.beta) * _kl(log_q, log_m))


def skew_forward_kl(student_logits: Tensor, teacher_logits: Tensor, spec: LossSpec) -> Tensor:
    """KL(p || skew p + (1 - skew) q), otherwise as `forward_kl`.

    At most -ln skew; `forward_kl` at skew 0.
    Source: Ko et al. 2024, "DistiLLM: toward streamlined distillation for large language models", section 3.
    """
    log_q, log_p = _log_probabilities(student_logits, teacher_logits, spec)
    return spec.temperature_factor * _kl(log_p, _log_mixture(log_p, log_q, spec.skew))


def skew_reverse_kl(student_logits: Tensor, teacher_logits: Tensor, spec: LossSpec) -> Tensor:
    """KL(q || (1 - skew) p + skew q), otherwise as `forward_kl`.

    At most -ln skew; `reverse_kl` at skew 0. Source: as `skew_forward_kl`.
    """
    log_q, log_p = _log_probabilities(student_logits, teacher_logits, spec)
    return spec.temperature_factor * _kl(log_q, _log_mixture(log_q, log_p, spec.skew))


def tvd(student_logits: Tensor, teacher_logits: Tensor, spec: LossSpec) -> Tensor:
    """Total variation distance 0.5 sum_j |p_j - q_j|, in [0, 1] before T^2, otherwise as `forward_kl`.

    Where p_j = q_j the derivative of |p_j - q_j| counts as 0.
    """
    log_q, log_p = _log_probabilities(student_logits, teacher_logits, spec)
    return spec.temperature_factor * 0.5 * (log_p.exp() - log_q.exp()).abs().sum(dim=-1)


def top1_agreement(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """1 where the most probable token of both models is the same, else 0; of equal logits the lowest id counts.

    Args:
        student_logits: [N, V], any float dtype.
        teacher_logits: [N, V], same.

    Returns:
        [N] in the dtype of the student's logits. Without a gradient.
    """
    ids = torch.arange(student_logits.shape[-1], device=student_logits.device)
    top = [
        torch.where(z == z.amax(dim=-1, keepdim=True), ids, len(ids)).amin(dim=-1)
        for z in (student_logits, teacher_logits)
    ]
    return (top[0] == top[1]).to(student_logits.dtype)


def entropy(logits: Tensor) -> Tensor:
    """-sum_j p_j ln p_j of p = softmax(logits) of each token, at T = 1.

    Args:
        logits: [N, V], any float dtype.

    Returns:
        [N] in the dtype of the logits, in nats.
    """
    log_p = torch.log_softmax(logits, dim=-1)
    p = log_p.exp()
    return -(p * torch.where(p > 0, log_p, 0)).sum(dim=-1)


def top_probabilities(student_logits: Tensor, teacher_logits: Tensor) -> tuple[Tensor, Tensor]:
    """The teacher's probability of its most probable token, and the student's of the same token, at T = 1; of equal
    logits the lowest id counts.

    Args:
        student_logits: [N, V], any float dtype.
        teacher_logits: [N, V], same.

    Returns:
        Two of [N], in the dtypes of teacher and student.
    """
    top = torch.where(
        teacher_logits == teacher_logits.amax(dim=-1, keepdim=True),
        torch.arange(teacher_logits.shape[-1], device=teacher_logits.device),
        teacher_logits.shape[-1],
    ).amin(dim=-1, keepdim=True)
    p, q = (torch.softmax(z, dim=-1).gather(1, top).squeeze(1) for z in (teacher_logits, student_logits))
    return p, q


def _log_probabilities(student_logits: Tensor, teacher_logits: Tensor, spec: LossSpec) -> tuple[Tensor, Tensor]:
    """(ln q, ln p), each [N, V]."""
    log_q = torch.log_softmax(student_logits / spec.temperature, dim=-1)
    log_p = torch.log_softmax(teacher_logits / spec.temperature, dim=-1)
    return log_q, log_p


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """[N] sum_j a_j (ln a_j - ln b_j) of log-probabilities [N, V].

    The inputs are cut off where a_j = 0, and not only the product: 0 * inf would be NaN in the gradient.
    """
    a = log_a.exp()
    ratio = torch.where(a > 0, log_a, 0) - torch.where(a > 0, log_b, 0)
    return (a * ratio).sum(dim=-1)


def _log_mixture(log_a: Tensor, log_b: Tensor, share: float) -> Tensor:
    """ln(share a + (1 - share) b) of log-probabilities [N, V], for 0 <= share < 1.

    Where both are 0 it is -inf, without the NaN that logaddexp has in its gradient there.
    """
    if share == 0.0:
        return log_b
    dead = (log_a == -torch.inf) & (log_b == -torch.inf)
    log_a, log_b = (log_x.masked_fill(dead, 0) for log_x in (log_a, log_b))
    mixed = torch.logaddexp(log_a + math.log(share), log_b + math.log1p(-share))
    return mixed.masked_fill(dead, -torch.inf)


DIVERGENCES: dict[str, Callable[[Tensor, Tensor, LossSpec], Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "skew_forward_kl": skew_forward_kl,
    "skew_reverse_kl": skew_reverse_kl,
    "tvd": tvd,
}
"""`LossSpec.divergence` -> its definition."""
