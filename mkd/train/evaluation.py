"""What is measured beside the losses: in evaluations always, in training steps where --kd-compare-interval asks."""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mkd.config.kd_config import LossSpec
from mkd.data.batch import KDBatch
from mkd.losses import (
    Comparison,
    LogitMap,
    LogitMaps,
    LogitSource,
    LossOptions,
    SparseTeacher,
    compare_models,
    fused_linear_loss,
)
from mkd.teacher.interface import TeacherSignal, TopKSignal

BINS = 10
"""Of the teacher's probability of its most probable token, of equal width."""
CALIBRATION = "calibration"
"""Name of the sums of `calibration_sums` in the report of a microbatch."""
COMPARED = ("agreement", "student_entropy", "teacher_entropy")
"""Names of the terms of `comparison_terms`; means over the tokens of the KD mask."""
_TEXTS_AT_ONCE = 64
"""Whose sums are one product, of a matrix with as many columns."""


class Mean(NamedTuple):
    """A reported mean: scalars of this rank's part, and what the whole step's is divided by."""

    total: Tensor
    count: Tensor
    everywhere: Tensor | None
    """The count over all microbatches and ranks of the step; None where only this one is known."""

    @classmethod
    def of(cls, values: Tensor, mask: Tensor, everywhere: Tensor | None) -> "Mean":
        """Over the tokens of a mask; both [b, s]."""
        return cls((values * mask).sum(), mask.sum(), everywhere)


def rows_of(tokens: Tensor) -> Tensor:
    """[b, s] -> [s * b], the order in which megatron's [s, b, H] activations flatten."""
    return tokens.t().reshape(-1)


def sparse_rows(signal: TopKSignal) -> SparseTeacher:
    """[b, s, K] -> [s * b, K]"""
    ids, logits, lse, tail_lse, counts = (
        None if x is None else x.transpose(0, 1).flatten(0, 1)
        for x in (signal.ids, signal.logits, signal.lse, signal.tail_lse, signal.counts)
    )
    return SparseTeacher(ids, logits, lse, tail_lse, signal.temperature, counts)


def mask_unknown_labels(signal: TeacherSignal, batch: KDBatch) -> KDBatch:
    """The batch with a CE mask of 0 where the teacher does not tell the label's probability: stored answers are about
    tokens of the KD mask."""
    if isinstance(signal, TopKSignal):
        return replace(batch, ce_mask=batch.ce_mask * (batch.kd_mask != 0))
    return batch


def teacher_cross_entropy(
    signal: TeacherSignal,
    batch: KDBatch,
    *,
    true_vocab: int,
    tp_group: ProcessGroup,
    sequence_parallel: bool,
    options: LossOptions,
) -> Tensor:
    """[b, s] the teacher's own CE on the supervised tokens: what the student's perplexity is to be read against.

    The batch comes from `mask_unknown_labels`; the other arguments are those of `fused_linear_loss`.
    """
    if isinstance(signal, TopKSignal):
        return torch.where(batch.ce_mask != 0, -signal.label_log_prob, 0.0)
    output = fused_linear_loss(
        signal.hidden.flatten(0, 1),
        signal.head,
        None,
        None,
        rows_of(batch.labels),
        rows_of(batch.ce_mask),
        None,
        spec=LossSpec(),
        maps=LogitMaps(student=LogitMap(scale=signal.logit_scale)),
        true_vocab=true_vocab,
        tp_group=tp_group,
        sequence_parallel=sequence_parallel,
        **asdict(options),
    )
    return output.ce.view(batch.tokens.shape[::-1]).t()


def compare(
    student: LogitSource,
    signal: TeacherSignal,
    *,
    true_vocab: int,
    tp_group: ProcessGroup,
    sequence_parallel: bool,
    chunk_rows: int | None,
) -> Comparison:
    """Student and teacher on the rows [s * b] of a microbatch; the arguments are those of `compare_models`."""
    if isinstance(signal, TopKSignal):
        teacher: LogitSource | SparseTeacher = sparse_rows(signal)
    else:
        teacher = LogitSource(signal.hidden.flatten(0, 1), signal.head, LogitMap(scale=signal.logit_scale))
    return compare_models(
        student,
        teacher,
        true_vocab=true_vocab,
        tp_group=tp_group,
        sequence_parallel=sequence_parallel,
        chunk_rows=chunk_rows,
    )


def comparison_terms(found: Comparison, kd_mask: Tensor) -> dict[str, Tensor]:
    """Name -> [b, s] what is reported of a comparison; 0 where the mask [b, s] is, whatever the models say there."""
    terms = {name: getattr(found, name) for name in COMPARED}
    shape = kd_mask.shape[::-1]
    return {
        name: torch.where(kd_mask != 0, values.view(shape).t(), 0)
        for name, values in terms.items()
        if values is not None
    }


def calibration_sums(found: Comparison, kd_mask: Tensor) -> Tensor | None:
    """[BINS, 4] float64 sums over the tokens of the KD mask, in bins of the teacher's top-1 probability p.

    Number of tokens, p, the student's probability of the same token, and how often the most probable token of both is
    the same. None if the teacher does not tell p.
    """
    if found.teacher_top is None:
        return None
    used = rows_of(kd_mask) != 0
    values = torch.stack((used, found.teacher_top, found.student_on_top, found.agreement), dim=1).double()
    values = torch.where(used[:, None], values, 0)
    bins = (values[:, 1] * BINS).long().clamp(0, BINS - 1)
    # A product, because adding to places is done in no fixed order on GPUs.
    return torch.nn.functional.one_hot(bins, BINS).double().t() @ values


def sums_of_texts(values: Sequence[Tensor], text: Tensor, texts: int) -> Tensor:
    """[k, texts] float64: sums of each of k values [b, s] over the tokens of each text (`KDBatch.text`), in an order
    that is always the same."""
    rows, place = torch.stack([value.double().flatten() for value in values]), text.flatten()[:, None]
    blocks = torch.arange(texts, device=text.device).split(_TEXTS_AT_ONCE)
    return torch.cat([rows @ (place == block).double() for block in blocks], dim=1)


def bits_per_byte(prefix: str, ce: Tensor, batch: KDBatch, byte_lengths: Tensor | None) -> dict[str, Mean]:
    """Name -> bits of the supervised tokens that are text, over their bytes.

    Unlike perplexity it can be compared between tokenizers.

    Args:
        prefix: of the name.
        ce: [b, s] in nats.
        batch: its labels and CE mask.
        byte_lengths: [V] bytes of each token, 0 of what is no text; None: nothing is returned.
    """
    if byte_lengths is None:
        return {}
    lengths = byte_lengths[batch.labels.clamp(0, len(byte_lengths) - 1)] * (batch.ce_mask != 0)
    bits = torch.where(lengths > 0, ce, 0).sum() / math.log(2.0)
    return {f"{prefix}bits_per_byte": Mean(bits, lengths.sum().float(), None)}
