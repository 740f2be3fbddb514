"""Each loss as its definition, on one rank, in whatever float dtype comes in: the truth in all tests.

Rows are tokens. Logits hold the real vocabulary only (no padding columns). Gradients come from autograd.
p is the teacher and q the student, both softmax(logits / T).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from mkd.config import LossSpec


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """-ln softmax(logits)[label] of each row, always at T = 1.

    Args:
        logits: [N, V], any float dtype.
        labels: [N] int64, each in [0, V).

    Returns:
        [N] in the dtype of the logits, in nats.
    """
    return -torch.log_softmax(logits, dim=-1).gather(1, labels[:, None]).squeeze(1)


def forward_kl(student_logits: Tensor, teacher_logits: Tensor, spec: LossSpec) -> Tensor:
    """KL(p || q) = sum_j p_j (ln p_j - ln q_j) of each row, times T^2 if the spec says so.

    Source of T^2: Hinton et al. 2015, "Distilling the knowledge in a neural network", section 2.

    Args:
        student_logits: [N, V], any float dtype.
        teacher_logits: [N, V], same.
        spec: temperature and T^2.

    Returns:
        [N] in the dtype of the logits, in nats.
    """
    log_q = torch.log_softmax(student_logits / spec.temperature, dim=-1)
    log_p = torch.log_softmax(teacher_logits / spec.temperature, dim=-1)
    return spec.scale * (log_p.exp() * (log_p - log_q)).sum(dim=-1)


DIVERGENCES: dict[str, Callable[[Tensor, Tensor, LossSpec], Tensor]] = {"forward_kl": forward_kl}
"""`LossSpec.divergence` -> its definition."""
