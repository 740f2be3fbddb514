"""Agreement and entropies of student and teacher per token: measured, never minimized."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from mkd.losses.inputs import LinearLogits, LMHead, loss_chunks, statistics_dtype
from mkd.losses.sparse.teacher import SparseTeacher
from mkd.losses.vocab_shard import VocabLayout, VocabShard

_LEAST = -1e4
"""Replaces a logit of -inf, relative to the token's maximum: e to it is 0, and 0 times it is not NaN."""


@dataclass(frozen=True)
class Comparison:
    """Results for N tokens, each [N] fp32 (float64 for float64), at T = 1 and the same on all ranks of the group.

    None where a sparse teacher does not determine a result: its entropy, probabilities at another temperature than 1,
    and the most probable token of sampled targets.
    """

    student_entropy: Tensor
    """Entropy in nats."""
    teacher_entropy: Tensor | None
    """Entropy in nats."""
    agreement: Tensor | None
    """1 where the most probable token of both is the same, else 0; of equal logits the lowest id counts."""
    teacher_top_prob: Tensor | None
    """The teacher's probability of its most probable token."""
    student_prob_at_top: Tensor | None
    """The student's probability of that token."""


@torch.no_grad()
def compare_models(
    student: LinearLogits,
    teacher: LinearLogits | SparseTeacher,
    *,
    vocab: VocabLayout,
    chunk_rows: int | None = None,
) -> Comparison:
    """Entropies, top-1 agreement, and both models' probability of the teacher's most probable token.

    The definitions: `reference.entropy`, `reference.top1_agreement`, `reference.top_probabilities`. It costs another
    GEMM with each LM head. Logits exist one loss chunk at a time, in fp32: rounding them to bf16 would make many equal.
    One all-gather of 36 bytes per token over the tensor-parallel group, and under sequence parallelism one of each
    model's hidden states.

    Args:
        student: not differentiated.
        teacher: likewise; a sparse one holds all tokens on every rank.
        vocab: see `VocabLayout`.
        chunk_rows: tokens per loss chunk.

    Raises:
        ValueError: true_vocab and the shards do not fit.
    """
    shard = vocab.shard(student.weight.shape[0])
    sparse = teacher if isinstance(teacher, SparseTeacher) else None
    if sparse is None:
        shard.check_teacher(student.weight.shape[0], teacher.weight.shape[0])
        teacher = replace(teacher, hidden=vocab.gather_hidden(teacher.hidden))
    student = replace(student, hidden=vocab.gather_hidden(student.hidden))
    if sparse is not None:
        columns = _top_columns(sparse, shard)
        stats = _shard_statistics(student, None, columns, shard, chunk_rows)
        stats["teacher_max"] = torch.where(columns >= 0, 0.0, -torch.inf).to(stats["student_max"])
    else:
        stats = _shard_statistics(student, teacher, None, shard, chunk_rows)
    merged = shard.exchange(stats).wait()
    ours = _ModelStatistics.merge(merged, "student")
    winner = merged["teacher_max"].argmax(dim=0, keepdim=True)
    at_top = merged["student_at"].gather(0, winner).squeeze(0)
    on_top = (at_top - ours.top - ours.log_sum_exp).exp()
    if sparse is None:
        theirs = _ModelStatistics.merge(merged, "teacher")
        agreement = (ours.id == theirs.id).to(on_top.dtype)
        return Comparison(ours.entropy, theirs.entropy, agreement, (-theirs.log_sum_exp).exp(), on_top)
    if sparse.counts is not None:
        return Comparison(ours.entropy, None, None, None, None)
    agreement = (ours.id == _top_ids(sparse)).to(on_top.dtype)
    top = _top_probability(sparse, on_top.dtype)
    return Comparison(ours.entropy, None, agreement, top, None if top is None else on_top)


def _shard_statistics(
    student: LinearLogits,
    teacher: LinearLogits | None,
    columns: Tensor | None,
    shard: VocabShard,
    chunk_rows: int | None,
) -> dict[str, Tensor]:
    """Statistics that the ranks exchange, name -> [N].

    For each model the largest logit of the shard, its global id (fp32 represents ids up to 2^24 exactly), and sums of
    e^d and of d e^d over d, the logits minus that maximum. `student_at`: the student's logit in the teacher's best
    column of the shard, or in the given `columns` [N], where -1 is none.
    """
    tokens, dtype = student.hidden.shape[0], statistics_dtype(student.hidden)
    names = [f"{m}_{name}" for m in ("student", "teacher") for name in ("max", "id", "sum_exp", "moment")]
    stats = {name: student.hidden.new_zeros(tokens, dtype=dtype) for name in (*names, "student_at")}
    stats["student_max"][:] = stats["teacher_max"][:] = -torch.inf
    if shard.columns == 0:
        return stats  # padding only
    heads = [None if m is None else LMHead.of_columns(m, shard.columns) for m in (student, teacher)]
    chunks = loss_chunks(tokens, 2 * shard.columns, dtype, chunk_rows)
    buffer = student.hidden.new_empty((chunks[0].stop, shard.columns), dtype=dtype)
    for span in chunks:
        best = None if columns is None else columns[span].clamp_min(0)
        if teacher is not None:
            logits = heads[1].logits(teacher.hidden[span], buffer[: span.stop - span.start])
            best = _summarize(teacher.logit_map.apply_(logits), "teacher", stats, span, shard)
        logits = heads[0].logits(student.hidden[span], buffer[: span.stop - span.start])
        logits = student.logit_map.apply_(logits)
        stats["student_at"][span] = logits.gather(1, best[:, None]).squeeze(1)
        _summarize(logits, "student", stats, span, shard)
    return stats


def _summarize(logits: Tensor, model: str, stats: dict[str, Tensor], span: slice, shard: VocabShard) -> Tensor:
    """Fill a model's statistics of some tokens; overwrites `logits`. Returns the columns [N] of the maxima."""
    columns = logits.argmax(dim=1)  # the first of equal ones
    top = logits.gather(1, columns[:, None])
    distance = logits.sub_(top.clamp_min(torch.finfo(logits.dtype).min / 4)).clamp_min_(_LEAST)
    weight = distance.exp()
    stats[f"{model}_max"][span] = top.squeeze(1)
    stats[f"{model}_id"][span] = (columns + shard.start).to(logits.dtype)
    stats[f"{model}_sum_exp"][span] = weight.sum(dim=1)
    stats[f"{model}_moment"][span] = weight.mul_(distance).sum(dim=1)
    return columns


class _ModelStatistics(NamedTuple):
    """One model's softmax, merged over all shards; each [N]."""

    top: Tensor
    id: Tensor
    log_sum_exp: Tensor
    """ln sum e^(z - top)"""
    entropy: Tensor

    @classmethod
    def merge(cls, stats: dict[str, Tensor], model: str) -> "_ModelStatistics":
        """Merge the statistics of all shards, name -> [tp, N]."""
        tops, ids, sum_exp, moment = (stats[f"{model}_{name}"] for name in ("max", "id", "sum_exp", "moment"))
        top, winner = tops.amax(dim=0), tops.argmax(dim=0, keepdim=True)  # ids grow with the shard
        shift = (tops - top).clamp_min(_LEAST)
        weight = shift.exp()
        total = (weight * sum_exp).sum(dim=0)
        mean = (weight * (moment + shift * sum_exp)).sum(dim=0) / total
        return cls(top, ids.gather(0, winner).squeeze(0), total.log(), total.log() - mean)


def _top_ids(teacher: SparseTeacher) -> Tensor:
    """[N] id of the largest listed logit; of equal ones the lowest."""
    logits = teacher.logits.masked_fill(teacher.ids < 0, -torch.inf)
    best = (logits == logits.amax(dim=1, keepdim=True)) & (teacher.ids >= 0)
    return torch.where(best, teacher.ids, torch.iinfo(teacher.ids.dtype).max).amin(dim=1)


def _top_columns(teacher: SparseTeacher, shard: VocabShard) -> Tensor:
    """[N] the column of the teacher's most probable token in this shard, -1 if another shard has it."""
    columns = _top_ids(teacher).long() - shard.start
    return torch.where((columns >= 0) & (columns < shard.columns), columns, -1)


def _top_probability(teacher: SparseTeacher, dtype: torch.dtype) -> Tensor | None:
    """[N] the largest of the listed probabilities at T = 1; None if the sum at that temperature is not known."""
    if teacher.temperature != 1.0 or (teacher.lse is None and teacher.tail_lse is None):
        return None
    logits = teacher.logits.to(dtype).masked_fill(teacher.ids < 0, -torch.inf)
    lse = teacher.lse
    if lse is None:
        lse = torch.logaddexp(torch.logsumexp(logits, dim=1), teacher.tail_lse.to(dtype))
    return (logits.amax(dim=1) - lse.to(dtype)).exp()
