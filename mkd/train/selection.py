"""Selection of one of several teachers for each text of a microbatch: the one with the lowest cross-entropy on it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.data.batch import KDBatch
from mkd.train.objective import Mean, MicrobatchObjective, TeacherCE

_TEXTS_PER_PRODUCT = 64
"""Texts whose sums are one matrix product, with as many columns."""


@dataclass(frozen=True)
class Selection:
    """The choice for the texts of a microbatch; the same on all its tensor- and context-parallel ranks."""

    chosen: Tensor
    """[texts] int64 number of the teacher with the lowest cross-entropy; of equal ones the first."""
    supervised: Tensor
    """[texts] bool, True where the text has a supervised token."""

    @classmethod
    @torch.no_grad()
    def of(cls, microbatch: MicrobatchObjective, sequence_parallel: bool) -> "Selection":
        """Compare the teachers' cross-entropy on the supervised tokens of each text.

        Cross-entropies are per token, or per byte of text where a teacher of the job has another tokenizer. A written
        text with a teacher of its own (`KDBatch.teacher`) has that one. Communication, whatever is chosen: an
        all-reduce of 8 (2 teachers + 2) bytes per text over the context-parallel ranks, and one of 8 bytes per text
        over the tensor-parallel ones.

        Args:
            microbatch: its batch numbers its texts (`KDBatch.with_texts`).
            sequence_parallel: True if the teachers' hidden states are cut along the sequence.
        """
        batch, groups, teachers = microbatch.batch, microbatch.context.groups, microbatch.teachers
        texts, per_byte = len(batch.segment_hashes), bool(microbatch.context.cross)
        sums = torch.cat(
            [
                *(_nats_and_units(teacher.cross_entropy(sequence_parallel), texts, per_byte) for teacher in teachers),
                _supervised_and_named(batch, texts),
            ]
        )
        dist.all_reduce(sums, group=groups.cp)
        *rates, supervised, named = sums
        nats, units = torch.stack(rates).view(len(teachers), 2, texts).unbind(1)
        chosen = torch.where(units > 0, nats / units, torch.inf).argmin(dim=0)
        chosen = torch.where(named > 0, named / supervised - 1, chosen).long()
        # Ranks whose sums differ in the last bit must not differ in the selected teacher.
        dist.all_reduce(chosen, op=dist.ReduceOp.MAX, group=groups.tp)
        return cls(chosen, supervised > 0)

    def taught_by(self, number: int) -> Tensor:
        """[texts] fp32, 1 for the texts of one teacher."""
        return (self.chosen == number).float()

    def apply(self, microbatch: MicrobatchObjective) -> tuple[MicrobatchObjective, dict[str, Mean]]:
        """Restrict each teacher to its texts.

        Returns:
            The restricted objective, and per teacher the share of the supervised texts that it was selected for.
        """
        tokens = microbatch.objective.tokens
        # Each text counts once, on the first of the context-parallel ranks, all of which hold the choice.
        counted = self.supervised.float() * float(microbatch.context.groups.cp.rank() == 0)
        taught = [self.taught_by(number) for number in range(len(microbatch.teachers))]
        teachers = tuple(t.restricted_to(texts) for t, texts in zip(microbatch.teachers, taught, strict=True))
        of_step = tokens.ce if microbatch.batch.written is None else tokens.divisor
        shares = {f"selected_{n + 1}": Mean.of(texts, counted, of_step) for n, texts in enumerate(taught)}
        return replace(microbatch, teachers=teachers), shares


def _nats_and_units(ce: TeacherCE, texts: int, per_byte: bool) -> Tensor:
    """[2, texts] float64 of this rank's supervised tokens: the teacher's CE in nats, and their number or bytes."""
    batch, units = ce.batch, ce.batch.ce_mask != 0
    if per_byte:
        if ce.byte_lengths is None:
            raise ValueError("texts in several tokenizers are compared per byte, and the bytes of a token are unknown")
        units = units * ce.byte_lengths[batch.labels.clamp(0, len(ce.byte_lengths) - 1)]
    return sums_of_texts([torch.where(units > 0, ce.values, 0), units], batch.text, texts)


def _supervised_and_named(batch: KDBatch, texts: int) -> Tensor:
    """[2, texts] float64 over this rank's part: the weights of each text's supervised tokens, and the same times one
    more than the number of the text's own teacher, 0 for texts without one."""
    mask = batch.scored_mask
    number = torch.zeros_like(mask) if batch.teacher is None else (batch.teacher + 1).float()
    return sums_of_texts([mask, mask * number], batch.text, texts)


def sums_of_texts(values: Sequence[Tensor], text: Tensor, texts: int) -> Tensor:
    """[k, texts] float64: sums of k values [b, s] over the tokens of each text (`KDBatch.text`), in a fixed order."""
    flat, number = torch.stack([value.double().flatten() for value in values]), text.flatten()[:, None]
    blocks = torch.arange(texts, device=text.device).split(_TEXTS_PER_PRODUCT)
    return torch.cat([flat @ (number == block).double() for block in blocks], dim=1)
