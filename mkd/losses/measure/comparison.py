"""How alike student and teacher are, token by token: what is measured and never minimized."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup

from mkd.losses.chunking import loss_chunks
from mkd.losses.lm_head import LMHead
from mkd.losses.logits import LogitMap, statistics_dtype
from mkd.losses.sparse.teacher import SparseTeacher
from mkd.losses.vocab_shard import VocabShard

_LEAST = -1e4
"""Stands for a logit of -inf below a row's maximum: e to it is 0, and 0 times it is no NaN."""


class LogitSource(NamedTuple):
    """What one model's logits are made of: final hidden states and its shard of the LM head."""

    hidden: Tensor
    """[N, H], or this rank's rows of it under sequence parallelism."""
    weight: Tensor
    """[V/tp, H]"""
    logit_map: LogitMap = LogitMap()


@dataclass(frozen=True)
class Comparison:
    """Of N rows, each [N] fp32 (float64 of float64), at T = 1 and the same on all ranks of the group.

    What a sparse teacher does not tell is None: it has no entropy, at another temperature than 1 no probability, and
    of draws no most probable token.
    """

    student_entropy: Tensor
    """In nats."""
    teacher_entropy: Tensor | None
    agreement: Tensor | None
    """1 where the most probable token of both is the same, else 0; of equal logits the lowest id counts."""
    teacher_top: Tensor | None
    """The teacher's probability of its most probable token."""
    student_on_top: Tensor | None
    """The student's probability of that token."""


@torch.no_grad()
def compare_models(
    student: LogitSource,
    teacher: LogitSource | SparseTeacher,
    *,
    true_vocab: int,
    tp_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    chunk_rows: int | None = None,
) -> Comparison:
    """Entropies, top-1 agreement and what each gives to the teacher's most probable token.

    The definitions: `reference.entropy`, `reference.top1_agreement`, `reference.top_probabilities`. It costs another
    product of each LM head. Logits exist a chunk of rows at a time, in fp32: rounding them to bf16 would make many
    equal. One all-gather of 36 bytes a row over `tp_group`, and with `sequence_parallel` one of each model's hidden
    states.

    Args:
        student, teacher: not differentiated. The rows of a sparse teacher are whole on every rank.
        true_vocab, tp_group, sequence_parallel, chunk_rows: as in `fused_linear_loss`.

    Raises:
        ValueError: true_vocab and the shards do not fit.
    """
    shard = VocabShard.of(student.weight.shape[0], true_vocab, tp_group)
    sparse = teacher if isinstance(teacher, SparseTeacher) else None
    if sparse is None:
        shard.check_teacher(student.weight.shape[0], teacher.weight.shape[0])
        teacher = _on_all_ranks(teacher, shard, sequence_parallel)
    student = _on_all_ranks(student, shard, sequence_parallel)
    if sparse is not None:
        columns = _top_columns(sparse, shard)
        stats = _of_shard(student, None, columns, shard, chunk_rows)
        stats["teacher_max"] = torch.where(columns >= 0, 0.0, -torch.inf).to(stats["student_max"])
    else:
        stats = _of_shard(student, teacher, None, shard, chunk_rows)
    everywhere = shard.exchange(stats).wait()
    ours = _Merged.of(everywhere, "student")
    winner = everywhere["teacher_max"].argmax(dim=0, keepdim=True)
    at_top = everywhere["student_at"].gather(0, winner).squeeze(0)
    on_top = (at_top - ours.top - ours.log_sum_exp).exp()
    if sparse is None:
        theirs = _Merged.of(everywhere, "teacher")
        agreement = (ours.id == theirs.id).to(on_top.dtype)
        return Comparison(ours.entropy, theirs.entropy, agreement, (-theirs.log_sum_exp).exp(), on_top)
    if sparse.counts is not None:
        return Comparison(ours.entropy, None, None, None, None)
    agreement = (ours.id == _top_ids(sparse)).to(on_top.dtype)
    top = _top_probability(sparse, on_top.dtype)
    return Comparison(ours.entropy, None, agreement, top, None if top is None else on_top)


def _on_all_ranks(model: LogitSource, shard: VocabShard, sequence_parallel: bool) -> LogitSource:
    if not sequence_parallel or shard.size == 1:
        return model
    return model._replace(hidden=gather_from_sequence_parallel_region(model.hidden, group=shard.group))


def _of_shard(
    student: LogitSource, teacher: LogitSource | None, columns: Tensor | None, shard: VocabShard, chunk_rows: int | None
) -> dict[str, Tensor]:
    """What the ranks tell each other, name -> [N].

    Of each model the largest logit of the shard, its global id (fp32 holds ids up to 2^24 exactly), and sums of e^d and
    of d e^d over d, the logits less that maximum. `student_at`: the student's logit in the teacher's best column of the
    shard, or in the given `columns` [N], where -1 is none.
    """
    rows, dtype = student.hidden.shape[0], statistics_dtype(student.hidden)
    names = [f"{m}_{what}" for m in ("student", "teacher") for what in ("max", "id", "mass", "moment")]
    stats = {name: student.hidden.new_zeros(rows, dtype=dtype) for name in (*names, "student_at")}
    stats["student_max"][:] = stats["teacher_max"][:] = -torch.inf
    if shard.columns == 0:
        return stats  # padding only
    heads = [None if m is None else LMHead.of(m.weight[: shard.columns], None) for m in (student, teacher)]
    chunks = loss_chunks(rows, 2 * shard.columns, dtype, chunk_rows)
    buffer = student.hidden.new_empty((chunks[0].stop, shard.columns), dtype=dtype)
    for span in chunks:
        place = None if columns is None else columns[span].clamp_min(0)
        if teacher is not None:
            logits = heads[1].logits(teacher.hidden[span], buffer[: span.stop - span.start])
            place = _describe(teacher.logit_map.apply_(logits), "teacher", stats, span, shard)
        logits = heads[0].logits(student.hidden[span], buffer[: span.stop - span.start])
        logits = student.logit_map.apply_(logits)
        stats["student_at"][span] = logits.gather(1, place[:, None]).squeeze(1)
        _describe(logits, "student", stats, span, shard)
    return stats


def _describe(logits: Tensor, model: str, stats: dict[str, Tensor], span: slice, shard: VocabShard) -> Tensor:
    """Fill a model's statistics of some rows; overwrites `logits`. Returns the columns [rows] of the maxima."""
    places = logits.argmax(dim=1)  # the first of equal ones
    top = logits.gather(1, places[:, None])
    distance = logits.sub_(top.clamp_min(torch.finfo(logits.dtype).min / 4)).clamp_min_(_LEAST)
    weight = distance.exp()
    stats[f"{model}_max"][span] = top.squeeze(1)
    stats[f"{model}_id"][span] = (places + shard.start).to(logits.dtype)
    stats[f"{model}_mass"][span] = weight.sum(dim=1)
    stats[f"{model}_moment"][span] = weight.mul_(distance).sum(dim=1)
    return places


class _Merged(NamedTuple):
    """One model's softmax over all shards; each [N]."""

    top: Tensor
    id: Tensor
    log_sum_exp: Tensor
    """ln sum e^(z - top)"""
    entropy: Tensor

    @classmethod
    def of(cls, stats: dict[str, Tensor], model: str) -> "_Merged":
        """From what all shards tell, name -> [tp, N]."""
        tops, ids, mass, moment = (stats[f"{model}_{what}"] for what in ("max", "id", "mass", "moment"))
        top, winner = tops.amax(dim=0), tops.argmax(dim=0, keepdim=True)  # ids grow with the shard
        shift = (tops - top).clamp_min(_LEAST)
        weight = shift.exp()
        total = (weight * mass).sum(dim=0)
        mean = (weight * (moment + shift * mass)).sum(dim=0) / total
        return cls(top, ids.gather(0, winner).squeeze(0), total.log(), total.log() - mean)


def _top_ids(teacher: SparseTeacher) -> Tensor:
    """[N] id of the largest logit that is named; of equal ones the lowest."""
    logits = teacher.logits.masked_fill(teacher.ids < 0, -torch.inf)
    best = (logits == logits.amax(dim=1, keepdim=True)) & (teacher.ids >= 0)
    return torch.where(best, teacher.ids, torch.iinfo(teacher.ids.dtype).max).amin(dim=1)


def _top_columns(teacher: SparseTeacher, shard: VocabShard) -> Tensor:
    """[N] the column of the teacher's most probable token in this shard, -1 if it is in another."""
    columns = _top_ids(teacher).long() - shard.start
    return torch.where((columns >= 0) & (columns < shard.columns), columns, -1)


def _top_probability(teacher: SparseTeacher, dtype: torch.dtype) -> Tensor | None:
    """[N] the largest of the named probabilities at T = 1; None if the sum at that temperature is not known."""
    if teacher.temperature != 1.0 or (teacher.lse is None and teacher.tail_lse is None):
        return None
    logits = teacher.logits.to(dtype).masked_fill(teacher.ids < 0, -torch.inf)
    lse = teacher.lse
    if lse is None:
        lse = torch.logaddexp(torch.logsumexp(logits, dim=1), teacher.tail_lse.to(dtype))
    return (logits.amax(dim=1) - lse.to(dtype)).exp()
