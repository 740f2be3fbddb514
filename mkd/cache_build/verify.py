"""Whether a cache holds what a teacher says now: some texts of the data are asked about once more."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import default_collate

from mkd.cache_build.job import CacheJob
from mkd.cache_build.targets import Answers
from mkd.cache_build.texts import Rows
from mkd.data.batch import next_microbatches
from mkd.distributed.groups import Groups
from mkd.errors import MkdCacheError
from mkd.teacher.cache.record_format import TokenRows
from mkd.teacher.cache.store import TeacherStore
from mkd.teacher.interface import Teacher

ALLOWED = 0.05
"""Mean distance. Storing 12 bits a logit costs less than 0.005, half precision in another layout about 0.01; another
teacher, or answers that are shifted by one token, more than 0.3."""
_TOKENS_AT_ONCE = 64


@dataclass
class Comparison:
    """What was stored against what was computed."""

    segments: int = 0
    tokens: int = 0
    total: float = 0.0
    """Sum over tokens of the total variation between the two distributions: half the sum of all differences of
    probabilities, the tail as one of them; 0 to 1."""
    largest: float = 0.0

    def add(self, stored: TokenRows, now: TokenRows, vocab: int) -> None:
        """Compare one text."""
        for begin in range(0, len(stored.ids), _TOKENS_AT_ONCE):
            part = slice(begin, begin + _TOKENS_AT_ONCE)
            distance = total_variation(stored, now, part, vocab)
            self.tokens += len(distance)
            self.total += float(distance.sum())
            self.largest = max(self.largest, float(distance.max()))
        self.segments += 1


def total_variation(one: TokenRows, other: TokenRows, part: slice, vocab: int) -> np.ndarray:
    """[n] distance of two answers to the tokens of a part; both are as `RecordFormat.decode` gives them."""
    difference = np.zeros((len(one.ids[part]), vocab + 1))
    rows = np.arange(len(difference))[:, None]
    for answer, sign in ((one, 1.0), (other, -1.0)):
        difference[rows, answer.ids[part]] += sign * np.exp(answer.logits[part].astype(np.float64))
        difference[:, vocab] += sign * np.exp(answer.tail_lse[part, 0].astype(np.float64))
    return np.abs(difference).sum(axis=1) / 2


def ask_again(job: CacheJob, groups: Groups, teacher: Teacher, rows: Rows, segments: int, flag: str) -> Comparison:
    """Ask the teacher about random rows until so many stored texts were met, and compare.

    Collective over all ranks; data-parallel ranks do the same.

    Args:
        job: what the cache was written with.
        groups: the teacher's layout.
        teacher: who is asked.
        rows: of the data.
        segments: how many texts to compare, if there are as many.
        flag: of the cache's folder, for messages.

    Raises:
        MkdCacheError: no text of the data is in the cache; or the answers are others.
    """
    answers = Answers(job.meta, groups, job.teacher.config.sequence_parallel, job.kd.loss_chunk_rows)
    store, seen, found = TeacherStore(job.out, flag), Comparison(), 0
    multiple = job.data.length_multiple
    for index in np.random.RandomState(0).permutation(len(rows)):
        row = rows[int(index)]
        if not any(store.find([key for key, _ in row.texts])):
            continue
        (whole,) = next_microbatches(iter([default_collate([row.sample])]), 1, job.meta.true_vocab, 1, multiple)
        stored = {key: places for key, places in whole.segments() if store.find([key])[0] is not None}
        for signal in teacher.signals([whole.on_rank(groups.cp)]):
            table = answers.of(signal, whole)
            for key, places in stored.items() if table is not None else ():
                (segment,) = store.find([key])
                before = store.read([key], [segment], [np.arange(segment.length)])
                now = job.meta.records.decode(job.meta.records.encode(answers.token_rows(table[places])))
                seen.add(before, now, job.meta.true_vocab)
        found += len(stored)
        if found >= segments:
            break
    if not found:
        raise MkdCacheError(f"{flag} {job.out} has no text of the {len(rows)} rows that these flags read")
    return _from_all(seen, job.out, flag)


def _from_all(seen: Comparison, folder: Path, flag: str) -> Comparison:
    """The comparison of the rank that has it, on all ranks."""
    numbers = torch.tensor([seen.segments, seen.tokens, seen.total, seen.largest], dtype=torch.float64, device="cuda")
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    count, tokens, total, largest = numbers.tolist()
    if not total / tokens <= ALLOWED:
        raise MkdCacheError(
            f"{flag} {folder} holds other answers than this teacher gives: the distance of the distributions is "
            f"{total / tokens:.4f} in the mean over {tokens:.0f} tokens (0 to 1; allowed {ALLOWED}), at most "
            f"{largest:.4f}"
        )
    return Comparison(int(count), int(tokens), total, largest)
