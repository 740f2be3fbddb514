"""The divergence over a partition of what may follow: `mkd.xtoken.loss.reference.partition_kl` on vocabulary shards.

With s = logits / T, at the first row of a chunk:

    slots   s_j of a common token, but for those that the chunk begins with on either side
    E       s_y - L, with y the chunk's first token and L = sum over its further rows of -ln q(token)
    REST    the other columns, and beside them s_y + ln(1 - e^-L): the chunk is begun and left

The slots are compared by the kernels of `mkd.losses`, to which E and REST are one more vocabulary shard: the
divergences are those of models with one tokenizer. All other columns only have a share of REST or, in a further row, of
the odds that another token comes; to the same kernels they are the tail of a sparse teacher. The chunk's own tokens are
taken out of the logits first.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from mkd.losses.divergences import DIVERGENCES
from mkd.losses.inputs import KernelContext, LogitMap, LogitMaps, TokenWeights, statistics_dtype
from mkd.losses.kernels.interface import Chunk, Kernels, TailCoeffs
from mkd.losses.statistics import Softmaxes, Statistics, divergence_and_dlogq_sum
from mkd.xtoken.loss.chunk_groups import GroupTerms, GroupWeights
from mkd.xtoken.loss.chunks import Group
from mkd.xtoken.loss.partition_stats import CrossEntropies, Masses
from mkd.xtoken.loss.shards import gather_parts, put_columns, take_columns
from mkd.xtoken.vocabulary.cross_vocabulary import CrossVocabulary

Places = tuple[Tensor, Tensor]
"""([n] column, [n] whether this shard has it)."""


class _Part(NamedTuple):
    """One model's products in a group, without the columns of the chunk's own tokens."""

    slots: Tensor
    """[chunks, slots] of first rows."""
    columns: Tensor
    """[chunks, other columns] of first rows."""
    then: Tensor
    """[n - chunks, columns] of further rows, and of rows without a chunk."""
    tokens: Statistics
    """Logits, -inf where another shard has them: label [n], what the row predicts; other [chunks], what the other
    model's chunk begins with."""


class _Seen(NamedTuple):
    """What all shards together know."""

    q: Masses
    p: Masses
    of_q: Tensor
    """[2, chunks] log-masses of E and REST; REST is -inf where one of the models has nothing in it."""
    of_p: Tensor
    slots: Statistics
    """name -> [tp + 1, chunks] of `softmax_stats` over the slots; the last shard is E and REST."""
    normalizers: Softmaxes
    """Of slots, E and REST."""
    label: Tensor
    """[n] the student's logits; other: [chunks]."""
    other: Tensor
    then_top: Tensor
    """[n - chunks] the student's largest."""
    ce: CrossEntropies | None


class _Compared(NamedTuple):
    value: Tensor
    """[chunks] in nats, without T^2."""
    sums: Statistics | None
    by_others: Tensor
    """[2, chunks] gradient by the log-masses of E and REST."""


@dataclass(frozen=True)
class Partition:
    """`TermsOfGroup`.

    Communication: one all-gather of at most 48 bytes a chunk and 16 a further row for the student, 24 and 12 for the
    teacher, and for jsd, the skewed KLs and tvd one of 8 a chunk.
    """

    vocabulary: CrossVocabulary
    setting: KernelContext
    kernels: Kernels

    def __call__(
        self, products: Tensor, teacher: Tensor, group: Group, weights: GroupWeights, gradient: Tensor | None
    ) -> GroupTerms:
        """See `TermsOfGroup`."""
        vocabulary, chunks, maps = self.vocabulary, len(group.numbers), self.setting.maps
        y, t = group.student.labels, group.teacher.labels
        of_label = vocabulary.student_columns_of(y)
        of_other = vocabulary.student_columns_of(_but(vocabulary.pair_of_teacher[t[:chunks]], y[:chunks]))
        of_pair = vocabulary.teacher_columns_of(_but(vocabulary.pair_of_student[y[:chunks]], t[:chunks]))
        tokens = _take(products, of_label, of_other, maps.student)
        slots, columns = (products[:chunks].index_select(1, c) for c in (vocabulary.slots, vocabulary.others))
        student = _Part(slots, columns, products[chunks:], tokens)
        tokens = _take(teacher, vocabulary.teacher_columns_of(t), of_pair, maps.teacher)
        slots, columns = teacher[:chunks].tensor_split([len(vocabulary.slots)], dim=1)
        theirs = _Part(slots, columns, teacher[chunks:], tokens)

        seen = self._first_round(student, theirs, group, with_ce=weights.ce is not None)
        compared = self._compare(student, theirs, seen)
        if gradient is not None:
            self._write_gradient(student, theirs, (of_label, of_other), seen, compared, group, weights, gradient)
        ce = log_sum = None
        if seen.ce is not None:
            used, legal = weights.ce != 0, (y >= 0) & (y < vocabulary.student_vocab)
            ce = torch.where(used, torch.where(legal, seen.ce.values, torch.nan), 0)
            log_sum = torch.where(used, seen.ce.log_sum, 0)
        return GroupTerms(compared.value * self.setting.spec.scale, ce, log_sum)

    def _first_round(self, student: _Part, teacher: _Part, group: Group, with_ce: bool) -> _Seen:
        setting, temperature = self.setting, self.setting.temperature
        of_teacher = replace(setting, maps=LogitMaps(student=setting.maps.teacher))
        chunk = _chunk(student.slots, teacher.slots, with_ce)
        parts = {
            "student": student.tokens,
            "teacher": teacher.tokens,
            "slots": self.kernels.softmax_stats(chunk, setting),
            "columns": self.kernels.softmax_stats(_chunk(student.columns), setting),
            "then": self.kernels.softmax_stats(_chunk(student.then), setting),
            "teacher_columns": self.kernels.softmax_stats(_chunk(teacher.columns), of_teacher),
            "teacher_then": self.kernels.softmax_stats(_chunk(teacher.then), of_teacher),
        }
        unread = {"label_logit"} if with_ce else {"label_logit", "ce_sum_exp"}
        read = {part: {name: x for name, x in stats.items() if name not in unread} for part, stats in parts.items()}
        merged = gather_parts(setting.shard, read)
        slots, columns, then = (merged[part] for part in ("slots", "columns", "then"))
        q = Masses.of(merged["student"], slots["student_max"], columns, then, group.student, temperature)
        columns_and_then = merged["teacher_columns"], merged["teacher_then"]
        p = Masses.of(merged["teacher"], slots["teacher_max"], *columns_and_then, group.teacher, temperature)
        known = (q.rest > -torch.inf) & (p.rest > -torch.inf)
        of_q, of_p = (torch.stack([m.chunk, m.rest.masked_fill(~known, -torch.inf)]) for m in (q, p))
        ce = CrossEntropies.of(merged["student"], (slots, columns, then), q.zero) if with_ce else None
        slots = self._with_others(slots, (q.zero, of_q), (p.zero, of_p), ce)
        label, other = (merged["student"][name].amax(dim=0) for name in ("label", "other"))
        top = torch.maximum(then["student_max"].amax(dim=0), q.then_label)
        return _Seen(q, p, of_q, of_p, slots, Softmaxes.merge(slots, temperature), label, other, top, ce)

    def _with_others(
        self, slots: Statistics, q: tuple[Tensor, Tensor], p: tuple[Tensor, Tensor], ce: CrossEntropies | None
    ) -> Statistics:
        """`_Seen.slots`; q, p: the row's largest logit [chunks], log-masses of E and REST [2, chunks] above it."""
        shard = {"student_max": q[0], "student_sum_exp": q[1].exp().sum(dim=0)}
        shard |= {"teacher_max": p[0], "teacher_sum_exp": p[1].exp().sum(dim=0)}
        if "ce_sum_exp" in slots:
            shard["ce_sum_exp"] = ce.first_others.exp()
        shortcut = DIVERGENCES[self.setting.spec.divergence].single_pass
        if shortcut is not None:
            a, b = (q[1], p[1]) if shortcut.under == "student" else (p[1], q[1])
            shard["log_ratio"] = torch.where(a > -torch.inf, a.exp() * (a - b), 0).sum(dim=0)
        return {name: torch.cat([slots[name], values[None]]) for name, values in shard.items()}

    @property
    def _setting_of_slots(self) -> KernelContext:
        """With the shard of E and REST, and without z-loss: it is in the weights."""
        shard = replace(self.setting.shard, size=self.setting.shard.size + 1)
        return replace(self.setting, spec=replace(self.setting.spec, z_loss=0.0), shard=shard)

    def _compare(self, student: _Part, teacher: _Part, seen: _Seen) -> _Compared:
        spec = self.setting.spec
        entry, sums = DIVERGENCES[spec.divergence], None
        log_q, log_p = (
            of - softmax.log_sum_exp
            for of, softmax in ((seen.of_q, seen.normalizers.student), (seen.of_p, seen.normalizers.teacher))
        )
        if entry.single_pass is None:
            chunk = _chunk(student.slots, teacher.slots)
            local = self.kernels.divergence_stats(chunk, seen.slots, self._setting_of_slots)
            others = {"pointwise": entry.pointwise(log_q, log_p, spec), "dlogq": entry.dlogq(log_q, log_p, spec)}
            merged = self.setting.shard.exchange(local).wait()
            sums = {name: torch.cat([merged[name], others[name].sum(dim=0)[None]]) for name in others}
        value, slope_sum = divergence_and_dlogq_sum(seen.slots, sums, seen.normalizers, spec)
        return _Compared(value, sums, entry.dlogq(log_q, log_p, spec) - log_q.exp() * slope_sum)

    def _write_gradient(
        self,
        student: _Part,
        teacher: _Part,
        places: tuple[Places, Places],
        seen: _Seen,
        compared: _Compared,
        group: Group,
        weights: GroupWeights,
        gradient: Tensor,
    ) -> None:
        chunks, spec, q, zero = len(group.numbers), self.setting.spec, seen.q, seen.q.zero
        kd = weights.kd * weights.factor
        by_chunk, by_rest = compared.by_others * (kd * (spec.scale / spec.temperature))
        # Of a column of log-mass m in REST it is by_rest * exp(m - rest).
        rest = seen.of_q[1].masked_fill(seen.of_q[1] == -torch.inf, torch.inf)
        by_chain = by_rest * (q.chunk - rest).exp() - by_chunk
        by_further = by_chain[group.student.chunks[chunks:]] if chunks else torch.zeros_like(q.then_loss)
        ce, log_sum, at_label = self._of_cross_entropy(seen, weights)
        by_first = by_chunk + by_rest * (q.begun - rest).exp()
        at_label = at_label + torch.cat([by_first, by_further * torch.expm1(-q.then_loss)])
        at_other = by_rest * (q.other - rest).exp() + ce[:chunks] * (seen.other - log_sum[:chunks]).exp()

        of_slots = ce[:chunks]
        if spec.temperature == 1.0:  # the kernels then take CE's softmax for that of slots, E and REST
            of_slots = of_slots * (seen.normalizers.student.log_sum_exp + zero - log_sum[:chunks]).exp()
        rows = TokenWeights(_no_labels(of_slots), None if weights.ce is None else of_slots, kd)
        out = _room(student.slots, gradient)
        chunk = Chunk(student.slots, teacher.slots, rows)
        self.kernels.write_gradient(chunk, seen.slots, compared.sums, self._setting_of_slots, out)
        gradient[:chunks].index_copy_(1, self.vocabulary.slots, out)
        out = _room(student.columns, gradient)
        tail = _tail(zero, ce[:chunks], log_sum[:chunks], by_rest, rest.masked_fill(rest == torch.inf, 0))
        self.kernels.write_tail_gradient(student.columns, tail, self.setting, out)
        gradient[:chunks].index_copy_(1, self.vocabulary.others, out)
        norm = (q.then_label - seen.then_top) / spec.temperature + q.then_loss
        tail = _tail(seen.then_top, ce[chunks:], log_sum[chunks:], by_further, norm)
        self.kernels.write_tail_gradient(student.then, tail, self.setting, gradient[chunks:])
        derivative = self.setting.maps.student.derivative
        put_columns(gradient, *places[0], at_label * derivative(seen.label))
        put_columns(gradient[:chunks], *places[1], at_other * derivative(seen.other))

    def _of_cross_entropy(self, seen: _Seen, weights: GroupWeights) -> tuple[Tensor, Tensor, Tensor]:
        """([n] factor of q at T = 1, [n] ln sum_j exp z_j, [n] gradient by the label's logit)."""
        if weights.ce is None:
            return (torch.zeros_like(seen.label),) * 3
        weight, loss = weights.ce * weights.factor, seen.ce.values
        more = 2.0 * self.setting.spec.z_loss * seen.ce.log_sum * weight
        return weight + more, seen.ce.log_sum, weight * torch.expm1(-loss) + more * (-loss).exp()


def _but(ids: Tensor, excluded: Tensor) -> Tensor:
    """`ids`, and -1 where one is the excluded one."""
    return torch.where(ids == excluded, -1, ids)


def _take(products: Tensor, label: Places, other: Places, logit_map: LogitMap) -> Statistics:
    """See `_Part.tokens`."""
    dtype, chunks = statistics_dtype(products), len(other[0])
    taken = {"label": take_columns(products, *label), "other": take_columns(products[:chunks], *other)}
    return {name: logit_map.apply_(x.to(dtype)) for name, x in taken.items()}


def _no_labels(rows: Tensor) -> Tensor:
    """[rows] int64, no token: labels are taken out before."""
    return torch.full(rows.shape, -1, dtype=torch.int64, device=rows.device)


def _chunk(products: Tensor, teacher: Tensor | None = None, with_ce: bool = True) -> Chunk:
    """All rows in use. Without a teacher it is a model's own statistics that are wanted."""
    used = products.new_ones(len(products), dtype=statistics_dtype(products))
    own = used if with_ce or teacher is None else None
    return Chunk(products, teacher, TokenWeights(_no_labels(used), own, None if teacher is None else used))


def _tail(top: Tensor, ce: Tensor, log_sum: Tensor, kd: Tensor, kd_log_norm: Tensor) -> TailCoeffs:
    """Factors without labels."""
    used = torch.ones_like(top, dtype=torch.bool)
    return TailCoeffs(used, top, ce, log_sum - top, kd, kd_log_norm, torch.zeros_like(top), _no_labels(top))


def _room(products: Tensor, gradient: Tensor) -> Tensor:
    """Where their gradient is written: over them, if it has the same dtype."""
    return products if products.dtype == gradient.dtype else torch.empty_like(products, dtype=gradient.dtype)
