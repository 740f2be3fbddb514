"""Losses against a sparse teacher, as their definitions: one rank, any float dtype.

The teacher lists K slots of (id, logit) per token. The divergences are those of `reference`, over fewer categories:

    bucket       the K top columns and one category for all others together, the tail
    renormalize  the K top columns alone; both models' probabilities are divided by their sum over them

A slot with a negative id is empty, and its logit is not read. Of slots with the same id the first counts.
"""

from dataclasses import replace

import torch
from torch import Tensor

from mkd.config.loss_spec import LossSpec
from mkd.losses import reference
from mkd.losses.sparse.teacher import check_temperature


def top_k(
    student_logits: Tensor,
    ids: Tensor,
    teacher_logits: Tensor,
    teacher_lse: Tensor | None,
    spec: LossSpec,
    tail: str = "bucket",
    *,
    lse_temperature: float = 1.0,
    teacher_tail_lse: Tensor | None = None,
) -> Tensor:
    """The divergence per token over the top columns and, with the bucket, the tail.

    Args:
        student_logits: [N, V], any float dtype.
        ids: [N, K] integer, below V.
        teacher_logits: [N, K] at no temperature, not normalized.
        teacher_lse: [N] ln sum_j exp(u_j / lse_temperature) over the whole vocabulary; unread without a bucket.
        spec: divergence and temperature.
        tail: bucket or renormalize.
        lse_temperature: temperature of the sums.
        teacher_tail_lse: [N] the same sum over all other columns. Without it the teacher's tail has the probability 1 -
            that of the top columns, and at least the dtype's epsilon.

    Returns:
        [N] in nats, with T^2 if the spec sets it; 0 for a token without a slot.

    Raises:
        ValueError: a bucket whose sums are at another temperature than the spec's.
    """
    present = _counted_slots(ids)
    s = student_logits / spec.temperature
    t = torch.where(present, teacher_logits / spec.temperature, -torch.inf)
    log_q, log_p = torch.where(present, s.gather(1, ids.clamp_min(0).long()), -torch.inf), t
    if tail == "bucket":
        check_temperature(spec.temperature, lse_temperature)
        if teacher_tail_lse is None:
            rest = (1.0 - (t - teacher_lse[:, None]).exp().sum(1)).clamp_min(torch.finfo(t.dtype).eps)
            rest = torch.where(present.sum(1) == s.shape[1], 0, rest)
            teacher_tail_lse = teacher_lse + rest.log()
        student_tail = torch.logsumexp(s.masked_fill(_is_listed(ids, s.shape[1]), -torch.inf), dim=1)
        log_q, log_p = (torch.cat((a, b[:, None]), 1) for a, b in ((log_q, student_tail), (t, teacher_tail_lse)))
    some = (log_p > -torch.inf).any(1)
    log_q, log_p = (torch.where(some[:, None], x, 0.0) for x in (log_q, log_p))
    categories = reference.DIVERGENCES[spec.divergence](log_q, log_p, replace(spec, temperature=1.0))
    return torch.where(some, spec.temperature_factor * categories, 0.0)


def sampled(
    student_logits: Tensor,
    ids: Tensor,
    counts: Tensor,
    teacher_logits: Tensor,
    teacher_lse: Tensor,
    spec: LossSpec,
    *,
    lse_temperature: float = 1.0,
) -> Tensor:
    """An unbiased estimate of `reference.forward_kl`, of value and gradient, from ids sampled from the teacher.

    sum_k c_k (ln p_k - ln q_k) with c_k = counts_k / sum of the token's counts and q the student's softmax over the
    whole vocabulary. E[c_k] = p_k. A single token's value may be negative.

    Args:
        student_logits: [N, V], any float dtype.
        ids: [N, K] integer; slots with the same id add up.
        counts: [N, K] how often each was sampled from softmax(u / lse_temperature); 0 is an empty slot.
        teacher_logits, teacher_lse, lse_temperature: as in `top_k`.
        spec: forward_kl.

    Returns:
        [N] in nats, with T^2 if the spec sets it; 0 for a token without a sample.

    Raises:
        ValueError: another divergence, or samples at another temperature than the spec's.
    """
    if spec.divergence != "forward_kl":
        raise ValueError(f"sampled targets estimate forward_kl, not {spec.divergence}")
    check_temperature(spec.temperature, lse_temperature)
    present = (ids >= 0) & (counts > 0)
    columns = torch.where(present, ids, 0).long()
    share = torch.where(present, counts, 0).to(student_logits.dtype)
    share = share / share.sum(1, keepdim=True).clamp_min(1)
    log_q = torch.log_softmax(student_logits / spec.temperature, dim=1).gather(1, columns)
    log_p = teacher_logits / spec.temperature - teacher_lse[:, None]
    ratio = torch.where(present, log_p, 0) - torch.where(present, log_q, 0)
    return spec.temperature_factor * (share * ratio).sum(1)


def _counted_slots(ids: Tensor) -> Tensor:
    """[N, K] bool: the slot is neither empty nor a repetition."""
    repeated = (ids[:, :, None] == ids[:, None, :]).tril(-1).any(2)
    return (ids >= 0) & ~repeated


def _is_listed(ids: Tensor, vocab: int) -> Tensor:
    """[N, V] bool: the column is listed."""
    return (ids[:, :, None] == torch.arange(vocab, device=ids.device)).any(1)
