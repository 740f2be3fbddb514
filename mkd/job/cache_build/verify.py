"""Recomputes the targets of a few texts and compares them with the cache."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import default_collate

from mkd.data.microbatches import next_microbatches
from mkd.distributed.groups import Groups
from mkd.errors import MkdCacheError
from mkd.job.cache_build.job import CacheJob
from mkd.job.cache_build.targets import TargetBuilder
from mkd.job.cache_build.texts import RowDataset
from mkd.teacher.cache.record_format import TokenTargets
from mkd.teacher.cache.store import TeacherStore
from mkd.teacher.interface import Teacher

ALLOWED = 0.05
"""Largest mean distance. 12 bits per logit cost less than 0.005, half precision in another layout about 0.01; another
teacher, or targets that are shifted by one token, more than 0.3."""
_TOKENS_AT_ONCE = 64
_COMMAND = "verify"
"""The command of `mkd cache`, which names the cache in messages."""


@dataclass
class CacheComparison:
    """Distance of cached targets from recomputed ones."""

    segments: int = 0
    tokens: int = 0
    total: float = 0.0
    """Sum over tokens of the total variation of the two distributions: half the sum of all absolute differences of
    probabilities, with the tail as one category; 0 to 1 per token."""
    largest: float = 0.0

    def add(self, cached: TokenTargets, recomputed: TokenTargets, vocab: int) -> None:
        """Compare one text."""
        for begin in range(0, len(cached.ids), _TOKENS_AT_ONCE):
            part = slice(begin, begin + _TOKENS_AT_ONCE)
            distance = total_variation(cached, recomputed, part, vocab)
            self.tokens += len(distance)
            self.total += float(distance.sum())
            self.largest = max(self.largest, float(distance.max()))
        self.segments += 1


def total_variation(one: TokenTargets, other: TokenTargets, part: slice, vocab: int) -> np.ndarray:
    """[n] distance of two targets for the tokens of a slice; both are as `RecordFormat.decode` returns them."""
    difference = np.zeros((len(one.ids[part]), vocab + 1))
    tokens = np.arange(len(difference))[:, None]
    for targets, sign in ((one, 1.0), (other, -1.0)):
        difference[tokens, targets.ids[part]] += sign * np.exp(targets.logits[part].astype(np.float64))
        difference[:, vocab] += sign * np.exp(targets.tail_lse[part, 0].astype(np.float64))
    return np.abs(difference).sum(axis=1) / 2


def recompute_and_compare(
    job: CacheJob, groups: Groups, teacher: Teacher, rows: RowDataset, segments: int
) -> CacheComparison:
    """Run the teacher on random rows until enough cached texts are compared.

    Collective over all ranks; data-parallel ranks do the same work.

    Args:
        job: the job that the cache was written with.
        groups: the teacher's layout.
        teacher: the teacher.
        rows: rows of the data.
        segments: number of texts to compare, if the data has as many.

    Raises:
        MkdCacheError: no text of the data is in the cache, or the targets differ.
    """
    builder = TargetBuilder(job.meta, groups, job.teacher.config.sequence_parallel, job.kd.loss_chunk_rows)
    store, comparison, found = TeacherStore(job.out, _COMMAND), CacheComparison(), 0
    multiple = job.data.length_multiple
    for index in np.random.RandomState(0).permutation(len(rows)):
        row = rows[int(index)]
        if not any(store.find([key for key, _ in row.texts])):
            continue
        (whole,) = next_microbatches(iter([default_collate([row.sample])]), 1, job.meta.true_vocab, 1, multiple)
        in_cache = {key: positions for key, positions in whole.segments() if store.find([key])[0] is not None}
        for signal in teacher.signals([whole.on_rank(groups.cp)]):
            table = builder.table(signal, whole)
            for key, positions in in_cache.items() if table is not None else ():
                (segment,) = store.find([key])
                cached = store.read([key], [segment], [np.arange(segment.length)])
                records = job.meta.records.encode(builder.token_targets(table[positions]))
                comparison.add(cached, job.meta.records.decode(records), job.meta.true_vocab)
        found += len(in_cache)
        if found >= segments:
            break
    if not found:
        raise MkdCacheError(f"{_COMMAND} {job.out} has no text of the {len(rows)} rows that these flags read")
    return _on_all_ranks(comparison, job.out)


def _on_all_ranks(comparison: CacheComparison, folder: Path) -> CacheComparison:
    """The comparison of the one rank that collects targets, on all ranks."""
    numbers = (comparison.segments, comparison.tokens, comparison.total, comparison.largest)
    numbers = torch.tensor(numbers, dtype=torch.float64, device="cuda")
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    segments, tokens, total, largest = numbers.tolist()
    if not total / tokens <= ALLOWED:
        raise MkdCacheError(
            f"{_COMMAND} {folder} holds targets that differ from those of this teacher: the distance of the "
            f"distributions is {total / tokens:.4f} on average over {tokens:.0f} tokens (0 to 1; allowed {ALLOWED}), "
            f"at most {largest:.4f}"
        )
    return CacheComparison(int(segments), int(tokens), total, largest)
