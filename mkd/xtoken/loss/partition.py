"""partition_kl on vocabulary shards: the divergence over a partition of the text's continuations.

`mkd.xtoken.loss.reference.partition_kl` is the definition. With s = logits / T at the first token of a chunk, the
log-masses of the outcomes are

    slots   s_j of each common token, except those that the chunk begins with for either model
    E       s_y - L, with y the chunk's first token and L = sum over its further tokens of -ln q(token)
    REST    the other columns, and s_y + ln(1 - e^-L): the chunk is started and then left

The slots are compared by the kernels of `mkd.losses`, which take E and REST as one more vocabulary shard: the
divergences are those of models with one tokenizer. All other columns only have a share of REST or, at a further token,
of the odds of any other token; for the same kernels they are the tail of a sparse teacher. The chunk's own tokens are
first taken out of the logits (`take_columns`).
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from mkd.losses.inputs import KernelContext, LogitMap, LogitMaps, TokenWeights
from mkd.losses.kernels.interface import Chunk, Kernels, TailCoeffs
from mkd.losses.statistics import Statistics
from mkd.xtoken.loss.chunk_groups import GroupValues, GroupWeights
from mkd.xtoken.loss.chunks import ChunkGroup
from mkd.xtoken.loss.partition_stats import CrossEntropies, PartitionStats
from mkd.xtoken.loss.shards import gather_parts, put_columns, take_columns
from mkd.xtoken.loss.slots import Extras, SlotDivergence, SlotStatistics, no_labels, slots_context, used_chunk
from mkd.xtoken.vocabulary.cross_vocabulary import CrossVocabulary

Columns = tuple[Tensor, Tensor]
"""([n] column, [n] bool: this shard holds it)."""


class _Products(NamedTuple):
    """One model's products in a group, without the columns of the chunk's own tokens."""

    slots: Tensor
    """[chunks, slots] at first tokens."""
    columns: Tensor
    """[chunks, other columns] at first tokens."""
    continuation: Tensor
    """[n - chunks, columns] at further tokens, and at tokens without a chunk."""
    labels: Statistics
    """Logits, -inf if another shard holds them: "label" [n] of the label, "other" [chunks] of the token that the other
    model's chunk begins with."""


class _Merged(NamedTuple):
    """Statistics merged over all shards."""

    q: PartitionStats
    p: PartitionStats
    slots: SlotStatistics
    """Slots, and E and REST as extras; REST is -inf if it is empty for one of the models."""
    label: Tensor
    """[n] the student's logits of its labels."""
    other: Tensor
    """[chunks] the student's logits of the tokens that the teacher's chunks begin with."""
    continuation_top: Tensor
    """[n - chunks] the student's largest logit."""
    ce: CrossEntropies | None


@dataclass(frozen=True)
class Partition:
    """A `GroupLoss`.

    Communication: one all-gather of at most 48 bytes per chunk and 16 per further token for the student, 24 and 12 for
    the teacher, and for jsd, the skewed KLs and tvd one of 8 per chunk.
    """

    vocabulary: CrossVocabulary
    context: KernelContext
    kernels: Kernels

    def __call__(
        self, products: Tensor, teacher: Tensor, group: ChunkGroup, weights: GroupWeights, gradient: Tensor | None
    ) -> GroupValues:
        vocabulary, chunks, maps = self.vocabulary, len(group.numbers), self.context.maps
        y, t = group.student.labels, group.teacher.labels
        of_label = vocabulary.student_columns_of(y)
        of_other = vocabulary.student_columns_of(_except(vocabulary.pair_of_teacher[t[:chunks]], y[:chunks]))
        of_pair = vocabulary.teacher_columns_of(_except(vocabulary.pair_of_student[y[:chunks]], t[:chunks]))
        dtype = self.context.statistics_dtype(products)
        labels = _take_labels(products, of_label, of_other, maps.student, dtype)
        slots, columns = (products[:chunks].index_select(1, c) for c in (vocabulary.slots, vocabulary.uncommon))
        own = _Products(slots, columns, products[chunks:], labels)
        labels = _take_labels(teacher, vocabulary.teacher_columns_of(t), of_pair, maps.teacher, dtype)
        slots, columns = teacher[:chunks].tensor_split([len(vocabulary.slots)], dim=1)
        target = _Products(slots, columns, teacher[chunks:], labels)

        merged = self._softmax_stats(own, target, group, with_ce=weights.ce is not None)
        compared = SlotDivergence.of(own.slots, target.slots, merged.slots, self.context, self.kernels)
        if gradient is not None:
            self._write_gradient(own, target, (of_label, of_other), merged, compared, group, weights, gradient)
        ce = log_sum = None
        if merged.ce is not None:
            used, legal = weights.ce != 0, (y >= 0) & (y < vocabulary.student_vocab)
            ce = torch.where(used, torch.where(legal, merged.ce.values, torch.nan), 0)
            log_sum = torch.where(used, merged.ce.log_sum, 0)
        return GroupValues(compared.value * self.context.spec.temperature_factor, ce, log_sum)

    def _softmax_stats(self, student: _Products, teacher: _Products, group: ChunkGroup, with_ce: bool) -> _Merged:
        context, temperature = self.context, self.context.temperature
        teacher_context = replace(context, maps=LogitMaps(student=context.maps.teacher))
        chunk = used_chunk(student.slots, teacher.slots, with_ce)
        parts = {
            "student": student.labels,
            "teacher": teacher.labels,
            "slots": self.kernels.softmax_stats(chunk, context),
            "columns": self.kernels.softmax_stats(used_chunk(student.columns), context),
            "continuation": self.kernels.softmax_stats(used_chunk(student.continuation), context),
            "teacher_columns": self.kernels.softmax_stats(used_chunk(teacher.columns), teacher_context),
            "teacher_continuation": self.kernels.softmax_stats(used_chunk(teacher.continuation), teacher_context),
        }
        unused = {"label_logit"} if with_ce else {"label_logit", "ce_sum_exp"}
        used = {part: {name: x for name, x in stats.items() if name not in unused} for part, stats in parts.items()}
        merged = gather_parts(context.shard, used)
        slots, columns, further = (merged[part] for part in ("slots", "columns", "continuation"))
        q = PartitionStats.of(merged["student"], slots["student_max"], columns, further, group.student, temperature)
        teacher_stats = merged["teacher_columns"], merged["teacher_continuation"]
        p = PartitionStats.of(merged["teacher"], slots["teacher_max"], *teacher_stats, group.teacher, temperature)
        has_rest = (q.rest > -torch.inf) & (p.rest > -torch.inf)
        extras_q, extras_p = (torch.stack([m.chunk, m.rest.masked_fill(~has_rest, -torch.inf)]) for m in (q, p))
        ce = CrossEntropies.of(merged["student"], (slots, columns, further), q.zero) if with_ce else None
        extras = Extras(q.zero, extras_q), Extras(p.zero, extras_p)
        slots = SlotStatistics.of(slots, *extras, context, None if ce is None else ce.first_uncommon.exp())
        label, other = (merged["student"][name].amax(dim=0) for name in ("label", "other"))
        top = torch.maximum(further["student_max"].amax(dim=0), q.continuation_label)
        return _Merged(q, p, slots, label, other, top, ce)

    def _write_gradient(
        self,
        student: _Products,
        teacher: _Products,
        own_columns: tuple[Columns, Columns],
        merged: _Merged,
        compared: SlotDivergence,
        group: ChunkGroup,
        weights: GroupWeights,
        gradient: Tensor,
    ) -> None:
        """Write the gradient by the student's products.

        `own_columns`: columns of the labels [n] and of the tokens that the teacher's chunks begin with [chunks].
        """
        chunks, spec, q, zero = len(group.numbers), self.context.spec, merged.q, merged.q.zero
        kd = weights.kd * weights.factor
        by_chunk, by_rest = compared.by_extras * (kd * (spec.temperature_factor / spec.temperature))
        # The gradient by a column of log-mass m in REST is by_rest * exp(m - rest).
        rest = merged.slots.student.masses[1].masked_fill(merged.slots.student.masses[1] == -torch.inf, torch.inf)
        by_total_loss = by_rest * (q.chunk - rest).exp() - by_chunk
        by_further = by_total_loss[group.student.chunks[chunks:]] if chunks else torch.zeros_like(q.continuation_loss)
        ce, log_sum, at_label = self._ce_gradient(merged, weights)
        by_first = by_chunk + by_rest * (q.started_then_left - rest).exp()
        at_label = at_label + torch.cat([by_first, by_further * torch.expm1(-q.continuation_loss)])
        at_other = by_rest * (q.other - rest).exp() + ce[:chunks] * (merged.other - log_sum[:chunks]).exp()

        ce_slots = ce[:chunks]
        if spec.temperature == 1.0:  # the kernels then use one softmax for CE and for slots, E and REST
            ce_slots = ce_slots * (merged.slots.softmaxes.student.log_sum_exp + zero - log_sum[:chunks]).exp()
        tokens = TokenWeights(no_labels(ce_slots), None if weights.ce is None else ce_slots, kd)
        out = _gradient_buffer(student.slots, gradient)
        chunk = Chunk(student.slots, teacher.slots, tokens)
        self.kernels.write_gradient(chunk, merged.slots.stats, compared.sums, slots_context(self.context), out)
        gradient[:chunks].index_copy_(1, self.vocabulary.slots, out)
        out = _gradient_buffer(student.columns, gradient)
        tail = _tail(zero, ce[:chunks], log_sum[:chunks], by_rest, rest.masked_fill(rest == torch.inf, 0))
        self.kernels.write_tail_gradient(student.columns, tail, self.context, out)
        gradient[:chunks].index_copy_(1, self.vocabulary.uncommon, out)
        norm = (q.continuation_label - merged.continuation_top) / spec.temperature + q.continuation_loss
        tail = _tail(merged.continuation_top, ce[chunks:], log_sum[chunks:], by_further, norm)
        self.kernels.write_tail_gradient(student.continuation, tail, self.context, gradient[chunks:])
        derivative = self.context.maps.student.derivative
        put_columns(gradient, *own_columns[0], at_label * derivative(merged.label))
        put_columns(gradient[:chunks], *own_columns[1], at_other * derivative(merged.other))

    def _ce_gradient(self, merged: _Merged, weights: GroupWeights) -> tuple[Tensor, Tensor, Tensor]:
        """([n] factor of q at T = 1, [n] ln sum_j exp z_j, [n] gradient by the label's logit)."""
        if weights.ce is None:
            return (torch.zeros_like(merged.label),) * 3
        weight, loss = weights.ce * weights.factor, merged.ce.values
        z_loss = 2.0 * self.context.spec.z_loss * merged.ce.log_sum * weight
        return weight + z_loss, merged.ce.log_sum, weight * torch.expm1(-loss) + z_loss * (-loss).exp()


def _except(ids: Tensor, excluded: Tensor) -> Tensor:
    """`ids`, with -1 where an id equals the excluded one."""
    return torch.where(ids == excluded, -1, ids)


def _take_labels(
    products: Tensor, label: Columns, other: Columns, logit_map: LogitMap, dtype: torch.dtype
) -> Statistics:
    """See `_Products.labels`; the logits are in `dtype`."""
    chunks = len(other[0])
    taken = {"label": take_columns(products, *label), "other": take_columns(products[:chunks], *other)}
    return {name: logit_map.apply_(x.to(dtype)) for name, x in taken.items()}


def _tail(top: Tensor, ce: Tensor, log_sum: Tensor, kd: Tensor, kd_log_norm: Tensor) -> TailCoeffs:
    """Coefficients without labels."""
    used = torch.ones_like(top, dtype=torch.bool)
    return TailCoeffs(used, top, ce, log_sum - top, kd, kd_log_norm, torch.zeros_like(top), no_labels(top))


def _gradient_buffer(products: Tensor, gradient: Tensor) -> Tensor:
    """Output for the gradient by `products`: the products themselves if the dtypes agree."""
    return products if products.dtype == gradient.dtype else torch.empty_like(products, dtype=gradient.dtype)
