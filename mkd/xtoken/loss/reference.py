"""The losses between models with different tokenizers as their definitions: one chunk, one rank, autograd.

A chunk is a piece of text that the student writes in n tokens and the teacher in m. The rows of the chunk are the
logits that predict those tokens, in order; q is the student, p the teacher, each token's softmax(logits / T). All
results are in nats, with T^2 if the spec says so. `mkd.losses.reference.dense` holds the divergences.
"""

from dataclasses import replace

import torch
from torch import Tensor

from mkd.config.kd_config import LossSpec
from mkd.losses.reference.dense import DIVERGENCES


def partition_kl(
    student_logits: Tensor,
    teacher_logits: Tensor,
    student_labels: Tensor,
    teacher_labels: Tensor,
    pairs: Tensor,
    spec: LossSpec,
) -> Tensor:
    """Divergence of what both models say of the same outcomes.

    What follows the text so far is one of: the chunk itself, token by token, E = prod_k q_k(y_k); a token that both
    vocabularies have, other than the first tokens of the chunk, at its first row; anything else, REST. Where a side has
    nothing in REST, both sides are taken without it and normalized.

    Args:
        student_logits: [n, V_s], any float dtype.
        teacher_logits: [m, V_t], same.
        student_labels, teacher_labels: [n], [m] int64, the chunk's tokens.
        pairs: [c, 2] int64 ids (student, teacher) of the tokens that both have, each id at most once.
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
    """Divergence over the common tokens and REST, and the distance of the sorted probabilities of the others.

    Over a chunk's rows the logits / T are averaged: their softmax is the normalized geometric mean of the rows'.
    The sorted probabilities (Boizard et al. 2024, "Toward cross-tokenizer distillation", ULD) are compared in their
    largest `uncommon_top_k` places, the shorter list going on in zeros.

    Args:
        student_logits, teacher_logits, pairs, spec: see `partition_kl`.
        uncommon_top_k: at least 1.
    """
    logs = [torch.log_softmax(z.mean(dim=0) / spec.temperature, dim=0) for z in (student_logits, teacher_logits)]
    common = [log_x[pairs[:, side]] for side, log_x in enumerate(logs)]
    others = [_without(log_x, pairs[:, side]) for side, log_x in enumerate(logs)]
    log_q, log_p = (torch.cat([a, _log_sum(b)]) for a, b in zip(common, others, strict=True))
    if log_q[-1] == -torch.inf or log_p[-1] == -torch.inf:
        log_q, log_p = log_q[:-1], log_p[:-1]
    sorted_ = [log_x.exp().sort(descending=True, stable=True).values[:uncommon_top_k] for log_x in others]
    length = max(len(x) for x in sorted_)
    u, v = (torch.nn.functional.pad(x, (0, length - len(x))) for x in sorted_)
    return _divergence(log_q, log_p, spec) + spec.scale * (u - v).abs().sum()


def p_kl(student_logits: Tensor, teacher_logits: Tensor, projection: Tensor, spec: LossSpec) -> Tensor:
    """Divergence between the student's distribution, projected to the teacher's vocabulary, and the teacher's.

    Both are arithmetic means over the rows of the chunk. Both are normalized over the teacher's ids that the projection
    reaches at all.

    Args:
        student_logits, teacher_logits, spec: see `partition_kl`.
        projection: [V_s, V_t] non-negative: how a student token is written in teacher tokens.
    """
    q, p = (torch.softmax(z / spec.temperature, dim=1).mean(dim=0) for z in (student_logits, teacher_logits))
    reached = (projection > 0).any(dim=0)
    return _divergence((q @ projection)[reached].log(), p[reached].log(), spec)


def _outcomes(logits: Tensor, labels: Tensor, slots: Tensor) -> Tensor:
    """[slots + 2] log-probabilities of the slots, of the chunk, and of the rest."""
    logs = torch.log_softmax(logits, dim=1)
    first, then = logs[0], logs[1:].gather(1, labels[1:, None]).sum()
    others = _without(first, torch.cat([slots, labels[:1]]))
    beside = _without_chain(first[labels[0]], then) if len(labels) > 1 else first.new_full((), -torch.inf)
    return torch.cat([first[slots], (first[labels[0]] + then)[None], _log_sum(torch.cat([others, beside[None]]))])


def _without_chain(log_first: Tensor, log_then: Tensor) -> Tensor:
    """ln of the probability that the chunk's first token is written and then the chunk is left."""
    return log_first + torch.log(-torch.expm1(log_then))


def _without(values: Tensor, ids: Tensor) -> Tensor:
    keep = torch.ones_like(values, dtype=torch.bool)
    keep[ids] = False
    return values[keep]


def _log_sum(logs: Tensor) -> Tensor:
    """[1] ln sum exp; -inf, and no NaN in the gradient, where nothing is to be summed."""
    logs = logs[logs > -torch.inf]
    return torch.logsumexp(logs, 0, keepdim=True) if len(logs) else logs.new_full((1,), -torch.inf)


def _divergence(log_q: Tensor, log_p: Tensor, spec: LossSpec) -> Tensor:
    """Scalar: of log-masses, which are normalized first."""
    plain = replace(spec, temperature=1.0)
    return spec.scale * DIVERGENCES[spec.divergence](log_q[None], log_p[None], plain)[0]
