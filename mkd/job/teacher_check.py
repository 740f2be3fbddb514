"""What a teacher knows, said before it teaches."""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import default_collate

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
    """Print each teacher's perplexity on a first microbatch, beside that of a model that knows nothing, and the
    fingerprint.

    Args:
        teacher: the teacher.
        samples: a dataset; its first microbatch is read.
        groups: the student's layout. Collective over all ranks.
        job: for sizes.
        step: holds the loss context.

    Raises:
        MkdCheckpointError: a teacher computes something that is not finite, or is far worse than one that knows
            nothing (`WORSE_NATS`) without --kd-allow-bad-teacher.
        MkdCacheError: it is a cache that does not have this microbatch, and must.
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
        _introduce(teacher.fingerprint(), source, *numbers, known=job.vocabulary_of(source))
        _refuse_bad(source, *numbers[:2], known=job.vocabulary_of(source), allowed=job.kd.allow_bad_teacher)


WORSE_NATS = 2.0
"""Above ln V a teacher is wrong rather than ignorant. Random weights of the usual sizes are less than one above it."""

_NOTHING = (0.0, 0.0)


def _introduce(
    fingerprint: str, source: TeacherSource, nats: float, tokens: float, bits: float, size: float, *, known: int
) -> None:
    """One teacher.

    Args:
        fingerprint: of all teachers.
        source: of this one.
        nats, tokens: sum of its CE, over so many tokens.
        bits, size: the same in bits of text with so many bytes, 0 where that is not known.
        known: tokens of its vocabulary.
    """
    if not tokens:
        logger.info(f"teacher {fingerprint}: the cache has nothing of the first validation microbatch")
        return
    ce = nats / tokens
    if not math.isfinite(ce):
        raise MkdCheckpointError(
            f"the teacher's loss on the first validation microbatch is {ce}, not finite: {source.origin} "
            "holds numbers that are not, or overflows in this precision (--kd-teacher-dtype)"
        )
    per_byte = f", {bits / size:.4f} bits per byte" if size else ""
    logger.info(
        f"teacher {fingerprint}: CE {ce:.4f}, perplexity {perplexity(ce):.2f}{per_byte} on the first "
        f"validation microbatch (knowing nothing: CE ln V = {math.log(known):.4f}, perplexity {known})"
    )


def _refuse_bad(source: TeacherSource, nats: float, tokens: float, *, known: int, allowed: bool) -> None:
    """Refuse a teacher from which a student would learn nonsense: see `_introduce` for the arguments."""
    if tokens and not allowed and nats / tokens > math.log(known) + WORSE_NATS:
        raise MkdCheckpointError(
            f"{source.origin} has a cross-entropy of {nats / tokens:.4f} on the first validation microbatch; not to "
            f"know anything is ln V = {math.log(known):.4f}: its weights, its config.json or the data are not "
            "what they should be. --kd-allow-bad-teacher trains all the same"
        )


def _first_batch(samples: Any, size: int, true_vocab: int) -> KDBatch:
    """The first microbatch, whole. Where it is all prompt, as --kd-mask all allows, CE is that of the prompt."""
    sample = default_collate([samples[i] for i in range(min(size, len(samples)))])
    batch = KDBatch.from_sample(sample, true_vocab)
    return batch if batch.ce_mask.any() else replace(batch, ce_mask=batch.kd_mask)
