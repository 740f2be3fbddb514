"""Measurements beside the loss: in every evaluation, and in the training steps of --kd-compare-interval."""

import math
from dataclasses import fields

import torch
from torch import Tensor

from mkd.data.batch import KDBatch
from mkd.losses import Comparison, LinearLogits, compare_models, teacher_top_k
from mkd.train.objective import (
    Mean,
    MicrobatchObjective,
    SameTokenizerObjective,
    Student,
    TeacherCE,
    flatten_tokens,
    unflatten_tokens,
)
from mkd.train.step_tokens import StepTokens

BINS = 10
"""Bins of equal width over the teacher's probability of its most probable token."""
CALIBRATION = "calibration"
"""Name of the sums of `calibration_sums` in the report of a microbatch."""
OVERLAP = 16
"""Most probable tokens that are compared on written texts."""
COMPARED = ("agreement", "student_entropy", "teacher_entropy")
"""Names of the means of `comparison_means`, over the tokens of the KD mask."""


def measure(
    microbatch: MicrobatchObjective, student: Student, ce: Tensor | None
) -> tuple[dict[str, Mean], Tensor | None]:
    """The measurements of one microbatch.

    Args:
        microbatch: the objective, whose `Objective.evaluating` and `comparing` decide what is measured.
        student: its hidden states and LM head.
        ce: [b, s] the student's CE.

    Returns:
        Name -> mean, and the calibration sums (see `calibration_sums`; None unless one teacher is evaluated).
    """
    objective, context = microbatch.objective, microbatch.context
    means: dict[str, Mean] = {}
    calibration = None
    if objective.evaluating and ce is not None:
        means |= bits_per_byte("", ce, microbatch.batch, context.byte_lengths)
    for number, teacher in enumerate(microbatch.teachers):
        found: dict[str, Mean] = {}
        if objective.evaluating:
            found |= teacher_means(teacher.cross_entropy(student.sequence_parallel))
        if (objective.evaluating or objective.comparing) and isinstance(teacher, SameTokenizerObjective):
            comparison = compare(teacher, student)
            found |= comparison_means(comparison, teacher.batch.kd_mask, objective.tokens)
            if teacher.batch.written is not None:
                found |= written_means(comparison, teacher, student)
            if objective.evaluating and len(microbatch.teachers) == 1:
                calibration = calibration_sums(comparison, teacher.batch.kd_mask)
        means |= {name + microbatch.suffix(number): mean for name, mean in found.items()}
    return means, calibration


def teacher_means(ce: TeacherCE | None) -> dict[str, Mean]:
    """The teacher's own CE, against which the student's perplexity is read, and its bits per byte."""
    if ce is None:
        return {}
    bits = bits_per_byte("teacher_", ce.values, ce.batch, ce.byte_lengths)
    return {"teacher_ce": Mean.of(ce.values, ce.batch.ce_mask, None), **bits}


def compare(teacher: SameTokenizerObjective, student: Student) -> Comparison:
    """Entropies and agreement of both models on the tokens [s * b] of a microbatch; 0 where none is supervised."""
    context, tokens, other = teacher.context, teacher.batch.supervised, teacher.teacher(student.sequence_parallel)
    student = student.supervised(teacher.batch, context.groups)
    vocab = context.vocab(student.sequence_parallel)
    found = compare_models(student.logits, other, vocab=vocab, chunk_rows=context.options.chunk_rows)
    if tokens is None:
        return found
    values = ((field.name, getattr(found, field.name)) for field in fields(found))
    return Comparison(**{name: None if value is None else tokens.spread(value) for name, value in values})


def comparison_means(found: Comparison, kd_mask: Tensor, tokens: StepTokens) -> dict[str, Mean]:
    """Name -> mean over the tokens of the KD mask [b, s]; tokens outside it have no effect, whatever they hold."""
    means = {}
    for name in COMPARED:
        values = getattr(found, name)
        if values is not None:
            values = torch.where(kd_mask != 0, values.view(kd_mask.shape[::-1]).t(), 0)
            means[name] = Mean.of(values, kd_mask, tokens.kd)
    return means


def written_means(comparison: Comparison, teacher: SameTokenizerObjective, student: Student) -> dict[str, Mean]:
    """Name -> mean over the tokens that the student has written: its entropy, and the share of its `OVERLAP` most
    probable tokens that are among the teacher's."""
    batch = teacher.batch
    inside = batch.written >= 0
    means = {"written_entropy": comparison.student_entropy}
    theirs = teacher.teacher(student.sequence_parallel)
    if isinstance(theirs, LinearLogits):
        means["written_overlap"] = _overlap(teacher, student, theirs)
    return {
        name: Mean.of(torch.where(inside, unflatten_tokens(values, batch), 0), inside.float(), None)
        for name, values in means.items()
    }


def _overlap(teacher: SameTokenizerObjective, student: Student, theirs: LinearLogits) -> Tensor:
    """[s * b]; one GEMM with each LM head, and an all-gather of 4 (4 `OVERLAP` + 4) bytes per token."""
    context, tokens = teacher.context, teacher.batch.supervised
    student = student.supervised(teacher.batch, context.groups)
    how = dict(
        temperatures=(1.0,), vocab=context.vocab(student.sequence_parallel), chunk_rows=context.options.chunk_rows
    )
    count = min(OVERLAP, context.true_vocab)
    ours, others = (teacher_top_k(logits, count, **how)[0].ids for logits in (student.logits, theirs))
    shared = (ours[:, :, None] == others[:, None, :]).any(dim=2).float().mean(dim=1)
    return shared if tokens is None else tokens.spread(shared)


def calibration_sums(found: Comparison, kd_mask: Tensor) -> Tensor | None:
    """[BINS, 4] float64 sums over the tokens of the KD mask, in bins of the teacher's top-1 probability p.

    The columns: number of tokens, p, the student's probability of the same token, and agreement of the most probable
    tokens. None if the teacher's signal does not hold p.
    """
    if found.teacher_top_prob is None:
        return None
    used = flatten_tokens(kd_mask) != 0
    values = torch.stack((used, found.teacher_top_prob, found.student_prob_at_top, found.agreement), dim=1).double()
    values = torch.where(used[:, None], values, 0)
    bins = (values[:, 1] * BINS).long().clamp(0, BINS - 1)
    # A product, because scattered additions have no fixed order on GPUs.
    return torch.nn.functional.one_hot(bins, BINS).double().t() @ values


def bits_per_byte(prefix: str, ce: Tensor, batch: KDBatch, byte_lengths: Tensor | None) -> dict[str, Mean]:
    """Name -> bits of the supervised tokens that are text, per byte of it.

    Unlike perplexity it is comparable between tokenizers.

    Args:
        prefix: of the name.
        ce: [b, s] in nats.
        batch: provides labels and CE mask.
        byte_lengths: [V] bytes of each token, 0 for tokens that are not text; None returns nothing.
    """
    if byte_lengths is None:
        return {}
    lengths = byte_lengths[batch.labels.clamp(0, len(byte_lengths) - 1)] * (batch.ce_mask != 0)
    bits = torch.where(lengths > 0, ce, 0).sum() / math.log(2.0)
    return {f"{prefix}bits_per_byte": Mean(bits, lengths.sum().float(), None)}
