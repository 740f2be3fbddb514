"""What a teacher knows, said before it teaches."""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import default_collate

from mkd.console import perplexity
from mkd.data.ahead import NOTHING
from mkd.data.batch import KDBatch
from mkd.errors import MkdCheckpointError
from mkd.evaluation import judged_by, teacher_cross_entropy
from mkd.groups import Groups
from mkd.job import Job
from mkd.teacher.base import Teacher


def introduce_teacher(teacher: Teacher, samples: Any, groups: Groups, job: Job) -> None:
    """Print the teacher's perplexity on a first microbatch, beside that of a model that knows nothing, and its
    fingerprint.

    Args:
        teacher: the teacher.
        samples: a dataset; its first micro-batch is read.
        groups: the student's layout. Collective over all ranks.
        job: for sizes.

    Raises:
        MkdCheckpointError: the teacher computes something that is not finite.
        MkdCacheError: it is a cache that does not have this microbatch, and must.
    """
    whole = _first_batch(samples, job.args.micro_batch_size, job.true_vocab)
    [whole] = teacher.prepare([whole], NOTHING)
    batch = whole.on_rank(groups.cp)
    total = torch.zeros(2, dtype=torch.float64, device="cuda")
    for signal in teacher.signals([batch]):
        judged = judged_by(signal, batch)
        ce = teacher_cross_entropy(
            signal,
            judged,
            true_vocab=job.true_vocab,
            tp_group=groups.tp,
            sequence_parallel=job.args.sequence_parallel,
            options=job.loss_options,
        )
        total += torch.stack([(ce * judged.ce_mask).sum(), judged.ce_mask.sum()])
    dist.all_reduce(total)
    if not total[1]:
        if dist.get_rank() == 0:
            print(f"mkd: teacher {teacher.fingerprint()}: the cache has nothing of the first validation micro-batch")
        return
    ce = (total[0] / total[1]).item()
    if not math.isfinite(ce):
        raise MkdCheckpointError(
            f"the teacher's loss on the first validation micro-batch is {ce}, not finite: {job.teacher.source.origin} "
            "holds numbers that are not, or overflows in this precision (--kd-teacher-dtype)"
        )
    if dist.get_rank() == 0:
        print(
            f"mkd: teacher {teacher.fingerprint()}: CE {ce:.4f}, perplexity {perplexity(ce):.2f} on the first "
            f"validation micro-batch (knowing nothing: CE ln V = {math.log(job.true_vocab):.4f}, "
            f"perplexity {job.true_vocab})",
            flush=True,
        )


def _first_batch(samples: Any, size: int, true_vocab: int) -> KDBatch:
    """The first microbatch, whole. Where it is all prompt, as --kd-mask all allows, CE is that of the prompt."""
    sample = default_collate([samples[i] for i in range(min(size, len(samples)))])
    batch = KDBatch.from_sample(sample, true_vocab)
    return batch if batch.ce_mask.any() else replace(batch, ce_mask=batch.kd_mask)
