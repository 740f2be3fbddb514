"""p_kl and gold by Triton's kernels: the numbers of `p_kl` and `gold`, on GPUs.

`chunk_kernels` computes what a text chunk compares, one fp32 number per column: mean logits (gold) or logarithms of
probabilities (p_kl). The divergences are those of `mkd.losses.kernels`, as for models with one tokenizer.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from mkd.losses.divergences import DIVERGENCES
from mkd.losses.inputs import PLAIN_LOGITS, KernelContext, LogitMaps, TokenWeights
from mkd.losses.kernels.interface import Chunk, Kernels
from mkd.losses.statistics import (
    GradCoeffs,
    ShardScalars,
    Softmaxes,
    Statistics,
    TokenTerms,
    divergence,
)
from mkd.xtoken.loss.chunk_groups import GroupValues, GroupWeights
from mkd.xtoken.loss.chunk_launchers import (
    CEGradient,
    TokenNorms,
    by_probability_,
    chunk_means,
    project,
    rest_gradient_,
    token_sums,
    write_token_gradient,
)
from mkd.xtoken.loss.chunks import ChunkGroup
from mkd.xtoken.loss.gold import SortedDistance, VocabularyMasses, compare_sorted, padded
from mkd.xtoken.loss.outcomes import drop_unmatched
from mkd.xtoken.loss.shards import gather_parts
from mkd.xtoken.loss.slots import Extras, SlotDivergence, SlotStatistics, no_labels, slots_context, used_chunk
from mkd.xtoken.vocabulary.cross_vocabulary import CrossVocabulary


@dataclass(frozen=True)
class _CrossEntropy:
    """Cross-entropy of a group's tokens."""

    terms: TokenTerms
    gradient: CEGradient


@dataclass(frozen=True)
class _FusedLoss:
    """The parts that both losses share."""

    vocabulary: CrossVocabulary
    context: KernelContext
    kernels: Kernels

    @property
    def _plain(self) -> KernelContext:
        """Context of a divergence whose inputs are divided by T and mapped already."""
        spec = replace(self.context.spec, temperature=1.0, z_loss=0.0)
        return replace(self.context, spec=spec, maps=PLAIN_LOGITS)

    def _kd_weight(self, weights: GroupWeights) -> Tensor:
        """[chunks] factor of the divergence's gradient by the logits."""
        spec = self.context.spec
        return weights.kd * weights.factor * (spec.temperature_factor / spec.temperature)

    def _cross_entropy(
        self, stats: Statistics, group: ChunkGroup, weights: GroupWeights, temperature: float
    ) -> _CrossEntropy:
        """From the student's merged statistics, name -> [tp, n], at a temperature."""
        context, labels = self.context, group.student.labels
        softmaxes, tokens = Softmaxes.merge(stats, temperature), TokenWeights(labels, weights.ce, None)
        terms = TokenTerms.of(stats, None, softmaxes, tokens, context.shard.true_vocab, context.spec)
        coeffs = GradCoeffs.of(stats, None, softmaxes, tokens.times(weights.factor), context.spec)
        scalars = ShardScalars.of(stats, softmaxes, context.shard.rank)
        gradient = CEGradient(
            coeffs.ce, scalars.student_max, scalars.ce_log_norm, coeffs.label, labels - context.shard.start
        )
        return _CrossEntropy(terms, gradient)

    def _without_chunks(
        self, products: Tensor, group: ChunkGroup, weights: GroupWeights, gradient: Tensor | None
    ) -> GroupValues:
        """Cross-entropy of tokens without a chunk."""
        context = replace(self.context, with_kd=False)
        tokens = TokenWeights(group.student.labels, weights.ce, None)
        stats = context.shard.exchange(self.kernels.softmax_stats(Chunk(products, None, tokens), context)).wait()
        terms = TokenTerms.of(stats, None, Softmaxes.merge(stats, 1.0), tokens, context.shard.true_vocab, context.spec)
        if gradient is not None:
            weighted = Chunk(products, None, tokens.times(weights.factor))
            self.kernels.write_gradient(weighted, stats, None, context, gradient)
        return GroupValues(weights.kd.new_zeros(0), terms.ce, terms.log_sum)

    def _student_chunk(self, products: Tensor, group: ChunkGroup) -> Chunk:
        """For the student's statistics of all tokens."""
        used = products.new_ones(len(products), dtype=torch.float32)
        return Chunk(products, None, TokenWeights(group.student.labels, used, None))


@dataclass(frozen=True)
class FusedPKL(_FusedLoss):
    """`p_kl` as a `GroupLoss`.

    Communication: as `p_kl`, and for CE 12 to 16 bytes per token.
    """

    def __call__(
        self, products: Tensor, teacher: Tensor, group: ChunkGroup, weights: GroupWeights, gradient: Tensor | None
    ) -> GroupValues:
        if not len(group.numbers):
            return self._without_chunks(products, group, weights, gradient)
        context, vocabulary, shard = self.context, self.vocabulary, self.context.shard
        temperature, maps = context.temperature, context.maps
        parts = {
            "student": self.kernels.softmax_stats(self._student_chunk(products, group), context),
            "teacher": self.kernels.softmax_stats(
                used_chunk(teacher), replace(context, maps=LogitMaps(student=maps.teacher))
            ),
        }
        unused = {"label_logit", "ce_sum_exp"}
        parts["teacher"] = {name: x for name, x in parts["teacher"].items() if name not in unused}
        merged = gather_parts(shard, parts)
        norms, teacher_norms = (self._norms(merged[model]) for model in parts)

        means = chunk_means(products, group.student, maps.student, temperature, norms=norms)
        log_p = chunk_means(
            teacher, group.teacher, maps.teacher, temperature, norms=teacher_norms, reached=vocabulary.reached
        )
        log_q = self._project(means)
        plain = self._plain
        chunk = used_chunk(log_q, log_p, with_ce=False)
        stats = shard.exchange(self.kernels.softmax_stats(chunk, plain)).wait()
        sums = None
        if DIVERGENCES[context.spec.divergence].single_pass is None:
            sums = shard.exchange(self.kernels.divergence_stats(chunk, stats, plain)).wait()
        value = divergence(stats, sums, Softmaxes.merge(stats, 1.0), plain.spec)
        ce = None if weights.ce is None else self._cross_entropy(merged["student"], group, weights, temperature)
        if gradient is not None:
            tokens = TokenWeights(chunk.tokens.labels, None, self._kd_weight(weights))
            self.kernels.write_gradient(chunk._replace(tokens=tokens), stats, sums, plain, log_p)
            by_projected = self._gather(by_probability_(log_p, log_q))
            by_mean = project(by_projected, vocabulary.projection.rows, means, divisor=group.student.count)
            local = token_sums(products, by_mean, group.student, norms, maps.student, temperature)
            write_token_gradient(
                products,
                by_mean,
                group.student,
                gradient,
                maps.student,
                temperature,
                norms=norms,
                sums=shard.exchange({"sum": local}).wait()["sum"].sum(dim=0),
                ce=None if ce is None else ce.gradient,
            )
        value = value * context.spec.temperature_factor
        return GroupValues(value, *((None, None) if ce is None else (ce.terms.ce, ce.terms.log_sum)))

    def _norms(self, stats: Statistics) -> TokenNorms:
        softmaxes = Softmaxes.merge(stats, self.context.temperature)
        scalars = ShardScalars.of(stats, softmaxes, self.context.shard.rank)
        return TokenNorms(scalars.student_max.contiguous(), scalars.student_log_norm.contiguous())

    def _project(self, means: Tensor) -> Tensor:
        """[chunks, teacher columns of this rank] ln of the projected probabilities, -inf where none is reached."""
        vocabulary, shard = self.vocabulary, self.context.shard
        out = means.new_empty((len(means), vocabulary.teacher_vocab))
        if shard.size == 1:
            return project(means, vocabulary.projection_t.rows, out, reached=vocabulary.reached)
        parts = project(means, vocabulary.projection_t.rows, out).split(self._widths, dim=1)
        by_rank = out.new_zeros((shard.size, len(means), max(self._widths)))
        for rank, part in enumerate(parts):
            by_rank[rank, :, : part.shape[1]] = part
        sums = torch.empty_like(by_rank[0])
        torch.distributed.reduce_scatter_tensor(sums, by_rank.flatten(0, 1), group=shard.group)
        sums = sums[:, : self._widths[shard.rank]].clamp_min(torch.finfo(sums.dtype).tiny)
        return sums.log_().masked_fill_(~vocabulary.reached, -torch.inf)

    def _gather(self, own: Tensor) -> Tensor:
        """[chunks, columns of this rank] -> [chunks, teacher columns of all ranks]"""
        shard = self.context.shard
        if shard.size == 1:
            return own
        own = padded(own, max(self._widths))
        everywhere = own.new_empty((shard.size, *own.shape))
        torch.distributed.all_gather_into_tensor(everywhere.flatten(0, 1), own, group=shard.group)
        return torch.cat([part[:, :width] for part, width in zip(everywhere, self._widths, strict=True)], dim=1)

    @property
    def _widths(self) -> list[int]:
        """Teacher columns of each rank."""
        return [b - a for a, b in pairwise(self.vocabulary.teacher_starts)]


@dataclass(frozen=True)
class FusedGold(_FusedLoss):
    """`gold` as a `GroupLoss`.

    Communication: as `gold` without the all-gather of 8 bytes for its gradient, and for CE 12 bytes per token.
    """

    uncommon_top_k: int
    columns: Tensor
    """[columns] int64 columns of the student's shard, slots first: the order of the teacher's."""

    def __call__(
        self, products: Tensor, teacher: Tensor, group: ChunkGroup, weights: GroupWeights, gradient: Tensor | None
    ) -> GroupValues:
        if not len(group.numbers):
            return self._without_chunks(products, group, weights, gradient)
        context, shard, spec = self.context, self.context.shard, self.context.spec
        maps, count = context.maps, len(self.vocabulary.slots)
        s = chunk_means(products, group.student, maps.student, spec.temperature, columns=self.columns)
        t = chunk_means(teacher, group.teacher, maps.teacher, spec.temperature)
        s_slots, s_rest = s.tensor_split([count], dim=1)
        t_slots, t_rest = t.tensor_split([count], dim=1)
        plain, kernels = self._plain, self.kernels
        parts = {
            "slots": kernels.softmax_stats(used_chunk(s_slots, t_slots, with_ce=False), plain),
            "rest": kernels.softmax_stats(used_chunk(s_rest), plain),
            "teacher_rest": kernels.softmax_stats(used_chunk(t_rest), plain),
        }
        for part in ("rest", "teacher_rest"):
            del parts[part]["label_logit"]
        if weights.ce is not None:
            parts["ce"] = kernels.softmax_stats(self._student_chunk(products, group), replace(context, with_kd=False))
        merged = gather_parts(shard, parts)
        slots, rest, teacher_rest = (merged[part] for part in ("slots", "rest", "teacher_rest"))
        q, p = (
            VocabularyMasses.merge(
                slots[f"{model}_max"], slots[f"{model}_sum_exp"], others["student_max"], others["student_sum_exp"]
            )
            for model, others in (("student", rest), ("teacher", teacher_rest))
        )
        extras = (Extras(m.zero, x[None]) for m, x in zip((q, p), drop_unmatched(q.rest, p.rest), strict=True))
        outcomes = SlotStatistics.of(slots, *extras, plain)
        common = SlotDivergence.of(s_slots, t_slots, outcomes, plain, kernels)
        distance = compare_sorted(
            self._largest(s_rest, q, self.vocabulary.max_uncommon[0]),
            self._largest(t_rest, p, self.vocabulary.max_uncommon[1])[0],
            s_rest.shape[1],
            shard,
            self.uncommon_top_k,
        )
        ce = None if weights.ce is None else self._cross_entropy(merged["ce"], group, weights, 1.0)
        if gradient is not None:
            self._write_gradient((s_slots, t_slots), s_rest, q, outcomes, common, distance, weights)
            write_token_gradient(
                products,
                s,
                group.student,
                gradient,
                maps.student,
                spec.temperature,
                columns=self.columns,
                ce=None if ce is None else ce.gradient,
            )
        value = (common.value + distance.value) * spec.temperature_factor
        return GroupValues(value, *((None, None) if ce is None else (ce.terms.ce, ce.terms.log_sum)))

    def _largest(self, logits: Tensor, masses: VocabularyMasses, most: int) -> tuple[Tensor, Tensor]:
        """See `gold.largest`; probabilities rise with the logits, and only the largest are computed."""
        width = min(self.uncommon_top_k, most)
        top, where = logits.topk(min(width, logits.shape[1]), dim=1, sorted=False)
        return padded(top.sub_((masses.zero + masses.everything)[:, None]).exp_(), width), where

    def _write_gradient(
        self,
        slots: tuple[Tensor, Tensor],
        rest: Tensor,
        masses: VocabularyMasses,
        outcomes: SlotStatistics,
        common: SlotDivergence,
        distance: SortedDistance,
        weights: GroupWeights,
    ) -> None:
        """Write the gradient by the student's mean logits / T over them.

        Args:
            slots: mean logits of both models [chunks, slots].
            rest: the student's of the other columns.
            masses: the student's.
            outcomes, common, distance: the parts of the loss.
            weights: of the group.
        """
        kd = self._kd_weight(weights)
        # The distance also has a gradient by slots, -sum * probability: the kernels compute it as a cross-entropy's.
        log_norm = outcomes.softmaxes.student.log_sum_exp
        of_slots = -distance.sum * kd * (log_norm - masses.everything).exp()
        chunk = Chunk(*slots, TokenWeights(no_labels(kd), of_slots, kd))
        self.kernels.write_gradient(chunk, outcomes.stats, common.sums, slots_context(self._plain), slots[0])
        log_rest = outcomes.student.masses[0]
        rest_gradient_(
            rest,
            distance.sign,
            distance.sum,
            masses.zero + masses.everything,
            masses.zero + log_rest.masked_fill(log_rest == -torch.inf, torch.inf),
            common.by_extras[0],
            kd,
        )
