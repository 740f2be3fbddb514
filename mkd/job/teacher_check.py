"""Checks of the teacher before the first step, or before a service answers: its perplexity on the first validation
microbatch, and its weights."""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import default_collate

from mkd.checkpoint.casts import count_not_finite, listed
from mkd.checkpoint.ranks import gather_objects
from mkd.checkpoint.source import TeacherSource
from mkd.data.batch import KDBatch
from mkd.data.lookahead import Lookahead
from mkd.distributed.groups import Groups
from mkd.errors import MkdCheckpointError
from mkd.job.job import Job
from mkd.report.console import perplexity
from mkd.teacher.interface import EnsembleSignal, Teacher
from mkd.train.evaluation import teacher_means
from mkd.train.objective import teacher_objective
from mkd.train.step import ForwardStep
from mkd.utils.logging import logger


def check_teacher_quality(teacher: Teacher, samples: Any, groups: Groups, job: Job, step: ForwardStep) -> None:
    """Print each teacher's perplexity on the first microbatch, beside that of a uniform distribution, and the
    fingerprint. Collective over all ranks.

    Args:
        teacher: the teacher.
        samples: a dataset; its first microbatch is read.
        groups: the student's layout.
        job: the job.
        step: holds the loss context.

    Raises:
        MkdCheckpointError: the loss of a teacher is not finite, or is far above uniform (`MAX_EXCESS_NATS`) without
            --kd-allow-bad-teacher or --mock-data.
        MkdCacheError: a cache does not have this microbatch, without --kd-cache-missing ce_only.
    """
    whole = _first_batch(samples, job.args.micro_batch_size, job.true_vocab)
    [whole] = teacher.prepare([whole], Lookahead.empty())
    batch = whole.on_rank(groups.cp)
    sources = job.teacher.sources
    total = torch.zeros(len(sources), 4, dtype=torch.float64, device="cuda")
    for signal in teacher.signals([batch]):
        for number, one in enumerate(EnsembleSignal.of(signal).signals):
            ce = teacher_objective(step.context, batch, one).cross_entropy(job.args.sequence_parallel)
            means = teacher_means(ce)
            found = [*means["teacher_ce"][:2], *means.get("teacher_bits_per_byte", _NOTHING)[:2]]
            total[number] = torch.stack([torch.as_tensor(x, device="cuda") for x in found])
    dist.all_reduce(total)
    for source, numbers in zip(sources, total.tolist(), strict=True):
        name = teacher.fingerprint() + (f", {source.origin}" if len(sources) > 1 else "")
        _print_loss(name, source, *numbers, vocab=job.vocabulary_of(source))
        allowed = job.kd.allow_bad_teacher or job.args.mock_data  # made-up tokens, which no teacher predicts
        _refuse_bad(source, *numbers[:2], vocab=job.vocabulary_of(source), allowed=allowed)


def check_weights(model: nn.Module, source: TeacherSource) -> None:
    """Refuse a teacher with weights that are not finite, for a job that has no data to try it on. Collective over all
    ranks.

    Args:
        model: the weights on this rank.
        source: the teacher, for the message.

    Raises:
        MkdCheckpointError: on all ranks; names the weights of the first rank that has some.
    """
    counts = count_not_finite(model.named_parameters())
    for rank, found in enumerate(gather_objects(counts)):
        if found:
            raise MkdCheckpointError(
                f"{source.origin} holds weights that are not finite, or that overflow in this precision "
                f"(--kd-teacher-dtype): {listed(found)} on rank {rank}"
            )


MAX_EXCESS_NATS = 2.0
"""This far above ln V, the weights or the data are broken, not merely untrained: random weights of the usual sizes are
less than 1 nat above it."""

_NOTHING = (0.0, 0.0)


def _print_loss(
    name: str, source: TeacherSource, nats: float, tokens: float, bits: float, size: float, *, vocab: int
) -> None:
    """Print the line of one teacher.

    Args:
        name: fingerprint of all teachers together, with several followed by the flag and folder of this one.
        source: this teacher.
        nats, tokens: sum of its cross-entropy, and number of tokens.
        bits, size: the same in bits, and number of bytes of text; 0 if not known.
        vocab: size of its vocabulary.
    """
    if not tokens:
        logger.info(f"teacher {name}: the cache has no text of the first validation microbatch")
        return
    ce = nats / tokens
    if not math.isfinite(ce):
        raise MkdCheckpointError(
            f"the teacher's loss on the first validation microbatch is {ce}, not finite: {source.origin} "
            "holds weights that are not finite, or overflows in this precision (--kd-teacher-dtype)"
        )
    per_byte = f", {bits / size:.4f} bits per byte" if size else ""
    logger.info(
        f"teacher {name}: CE {ce:.4f}, perplexity {perplexity(ce):.2f}{per_byte} on the first "
        f"validation microbatch (uniform baseline: CE ln V = {math.log(vocab):.4f}, perplexity {vocab})"
    )


def _refuse_bad(source: TeacherSource, nats: float, tokens: float, *, vocab: int, allowed: bool) -> None:
    """Refuse a broken teacher unless `allowed`; for the other arguments see `_print_loss`."""
    if tokens and not allowed and nats / tokens > math.log(vocab) + MAX_EXCESS_NATS:
        raise MkdCheckpointError(
            f"{source.origin} has a cross-entropy of {nats / tokens:.4f} on the first validation microbatch; a "
            f"uniform distribution has ln V = {math.log(vocab):.4f}: its weights, config.json or the data are wrong; "
            "give --kd-allow-bad-teacher to train anyway"
        )


def _first_batch(samples: Any, size: int, true_vocab: int) -> KDBatch:
    """The first microbatch, whole. If it is all prompt, which --kd-mask all allows, its CE mask becomes the KD mask."""
    sample = default_collate([samples[i] for i in range(min(size, len(samples)))])
    batch = KDBatch.from_sample(sample, true_vocab)
    return batch if batch.ce_mask.any() else replace(batch, ce_mask=batch.kd_mask)
