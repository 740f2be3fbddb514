"""Definitions of the losses between models with different tokenizers: one text chunk, one rank, autograd.

The student writes a chunk in n tokens and the teacher in m. The logits of a chunk are those that predict its tokens, in
order; q is the student and p the teacher, per token softmax(logits / T). Results are in nats, with T^2 if the spec sets
it. `mkd.losses.reference.dense` holds the divergences.
"""

from dataclasses import replace

import torch
from torch import Tensor

from mkd.config.loss_spec import LossSpec
from mkd.losses.reference.dense import DIVERGENCES


def partition_kl(
    student_logits: Tensor,
    teacher_logits: Tensor,
    student_labels: Tensor,
    teacher_labels: Tensor,
    pairs: Tensor,
    spec: LossSpec,
) -> Tensor:
    """Divergence over a partition of the text's continuations.

    The outcomes are: the chunk itself, token by token, E = prod_k q_k(y_k); each common token, except the first tokens
    of the chunk, at the chunk's first token; and everything else, REST. If REST is empty for one model, it is dropped
    for both, and the other outcomes are normalized.

    Args:
        student_logits: [n, V_s], any float dtype.
        teacher_logits: [m, V_t], likewise.
        student_labels, teacher_labels: [n], [m] int64, the chunk's tokens.
        pairs: [c, 2] int64 ids (student, teacher) of the common tokens, each id at most once.
        spec: divergence and temperature.

    Returns:
        Scalar.
    """
    free = (pairs[:, 0] != student_labels[0]) & (pairs[:, 1] != teacher_labels[0])
    log_q = _outcomes(student_logits / spec.temperature, student_labels, pairs[free, 0])
    log_p = _outcomes(teacher_logits / spec.temperature, teacher_labels, pairs[free, 1])
    if log_q[-1] == -torch.inf or log_p[-1] == -torch.inf:
        log_q, log_p = log_q[:-1], log_p[:-1]
    return _divergence(log_q, log_p, spec)


def gold(student_logits: Tensor, teacher_logits: Tensor, pairs: Tensor, spec: LossSpec, uncommon_top_k: int) -> Tensor:
    """Divergence over the common tokens and REST, plus the distance of the sorted probabilities of the other tokens.

    The logits / T are averaged over a chunk's tokens: the softmax of the mean is the normalized geometric mean. Of the
    sorted probabilities (ULD, Boizard et al. 2024, "Toward cross-tokenizer distillation") the largest `uncommon_top_k`
    are compared, the shorter list padded with zeros.

    Args:
        student_logits, teacher_logits, pairs, spec: see `partition_kl`.
        uncommon_top_k: at least 1.
    """
    logs = [torch.log_softmax(z.mean(dim=0) / spec.temperature, dim=0) for z in (student_logits, teacher_logits)]
    common = [log_x[pairs[:, model]] for model, log_x in enumerate(logs)]
    others = [_without(log_x, pairs[:, model]) for model, log_x in enumerate(logs)]
    log_q, log_p = (torch.cat([a, _log_sum(b)]) for a, b in zip(common, others, strict=True))
    if log_q[-1] == -torch.inf or log_p[-1] == -torch.inf:
        log_q, log_p = log_q[:-1], log_p[:-1]
    sorted_ = [log_x.exp().sort(descending=True, stable=True).values[:uncommon_top_k] for log_x in others]
    length = max(len(x) for x in sorted_)
    u, v = (torch.nn.functional.pad(x, (0, length - len(x))) for x in sorted_)
    return _divergence(log_q, log_p, spec) + spec.temperature_factor * (u - v).abs().sum()


def p_kl(student_logits: Tensor, teacher_logits: Tensor, projection: Tensor, spec: LossSpec) -> Tensor:
    """Divergence between the student's distribution, projected to the teacher's vocabulary, and the teacher's.

    Both are arithmetic means over the chunk's tokens, normalized over the teacher's ids that the projection reaches.

    Args:
        student_logits, teacher_logits, spec: see `partition_kl`.
        projection: [V_s, V_t] non-negative shares of teacher tokens per student token.
    """
    q, p = (torch.softmax(z / spec.temperature, dim=1).mean(dim=0) for z in (student_logits, teacher_logits))
    reached = (projection > 0).any(dim=0)
    return _divergence((q @ projection)[reached].log(), p[reached].log(), spec)


def _outcomes(logits: Tensor, labels: Tensor, slots: Tensor) -> Tensor:
    """[slots + 2] log-probabilities of the slots, of the chunk, and of the rest."""
    logs = torch.log_softmax(logits, dim=1)
    first, continuation = logs[0], logs[1:].gather(1, labels[1:, None]).sum()
    others = _without(first, torch.cat([slots, labels[:1]]))
    left = _started_then_left(first[labels[0]], continuation) if len(labels) > 1 else first.new_full((), -torch.inf)
    chunk = first[labels[0]] + continuation
    return torch.cat([first[slots], chunk[None], _log_sum(torch.cat([others, left[None]]))])


def _started_then_left(log_first: Tensor, log_continuation: Tensor) -> Tensor:
    """ln of the probability of the chunk's first token followed by another continuation than the chunk's."""
    return log_first + torch.log(-torch.expm1(log_continuation))


def _without(values: Tensor, ids: Tensor) -> Tensor:
    keep = torch.ones_like(values, dtype=torch.bool)
    keep[ids] = False
    return values[keep]


def _log_sum(logs: Tensor) -> Tensor:
    """[1] ln sum exp; -inf, without NaN in the gradient, for an empty sum."""
    logs = logs[logs > -torch.inf]
    return torch.logsumexp(logs, 0, keepdim=True) if len(logs) else logs.new_full((1,), -torch.inf)


def _divergence(log_q: Tensor, log_p: Tensor, spec: LossSpec) -> Tensor:
    """Scalar divergence of log-masses, which are normalized first."""
    plain = replace(spec, temperature=1.0)
    return spec.temperature_factor * DIVERGENCES[spec.divergence](log_q[None], log_p[None], plain)[0]
