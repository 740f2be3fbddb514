"""Samples in the tokens of a student and of a teacher with another tokenizer, for steps that are compared.

Chunks have 1 to 5 tokens in each view, some tokens have no counterpart, and lengths are odd, 1 and the whole row. One
sample has no target, so that a row, and with two data-parallel ranks and small microbatches a rank, has no chunk.
"""

import numpy as np
import torch

from mkd.config.values import XTokenLoss
from mkd.data.packing.aligned_layout import AlignedRowLayout
from mkd.data.packing.aligned_streams import to_tensors
from mkd.data.packing.row_layout import RowLayout
from mkd.data.sources.aligned import AlignedSample, TeacherText
from mkd.xtoken.vocabulary.cross_vocabulary import CrossVocabulary

ROW, TEACHER_ROW, MULTIPLE = 24, 32, 8
VOCAB, TEACHER_VOCAB, TEACHER_PADDED, COMMON = 83, 71, 80, 40
PAIRS_SEED = 3
TEXTS = [
    [(24, 30)],
    [(1, 2), (5, 7), (3, 1)],
    [(15, 16), (7, 12)],
    [(8, 9), (3, 5)],
    [(23, 20)],
    [(2, 3), (7, 9), (6, 2)],
    [(5, 4), (1, 1)],
    [(16, 18), (8, 7)],
]
"""Positions of the samples in each packed row, the student's and the teacher's."""


def sample(places: tuple[int, int], random: np.random.RandomState, supervised: bool) -> AlignedSample:
    """A text of so many tokens, beside the first one, on both sides."""
    count = max(1, min(places) // 2)
    student, teacher = (_composition(n + 1, count, random) for n in places)
    kept = random.rand(count) < 0.85
    number = np.where(kept, np.cumsum(kept) - 1, -1).astype(np.int32)
    ids = [random.randint(0, size, n + 1) for size, n in zip((VOCAB, TEACHER_VOCAB), places, strict=True)]
    targets = (random.rand(places[0] + 1) < 0.9) & supervised
    other = TeacherText(
        ids[1], np.full(places[1] + 1, supervised), np.repeat(number, teacher), np.repeat(number, student)
    )
    return AlignedSample(ids[0], targets, (other,))


def _composition(total: int, parts: int, random: np.random.RandomState) -> np.ndarray:
    """[parts] integers >= 1 that add up to `total`."""
    ends = np.sort(random.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], ends, [total]]))


def rows(packed: bool, masked: bool = False) -> list[dict]:
    """All rows of a step, before they are collated.

    Args:
        packed: several samples a row, else one.
        masked: whether but two samples have no target.
    """
    random = np.random.RandomState(7)
    texts = [
        [sample(places, random, number != 3 and (not masked or number < 2)) for places in row]
        for number, row in enumerate(TEXTS)
    ]
    sides = [RowLayout(length, MULTIPLE, packed, kd_everywhere=False) for length in (ROW, TEACHER_ROW)]
    layout = AlignedRowLayout(sides[0], (sides[1],))
    if not packed:
        texts = [[text] for row in texts for text in row]
    return [to_tensors(layout.row(row)) for row in texts]


def byte_lengths() -> tuple[torch.Tensor, torch.Tensor]:
    """[V] bytes of each of the student's and of the teacher's tokens; some are not text."""
    gen = torch.Generator().manual_seed(4)
    return tuple(torch.randint(0, 5, (size,), generator=gen) for size in (VOCAB, TEACHER_VOCAB))


def common(gen: torch.Generator) -> torch.Tensor:
    """[COMMON, 2] ids of the tokens that both have."""
    return torch.stack([torch.randperm(n, generator=gen)[:COMMON] for n in (VOCAB, TEACHER_VOCAB)], dim=1)


def vocabulary(kind: XTokenLoss, student_width: int, rank: int, size: int) -> CrossVocabulary:
    """The tokens that both vocabularies share, and a projection; the same on all ranks."""
    gen = torch.Generator().manual_seed(PAIRS_SEED)
    pairs = common(gen)
    ids = torch.randint(0, TEACHER_VOCAB, (VOCAB, 3), generator=gen)
    weights = torch.rand(VOCAB, 3, generator=gen)
    ids[:, 1] = (ids[:, 0] + 1) % TEACHER_VOCAB
    ids[:, 2] = (ids[:, 0] + 2) % TEACHER_VOCAB
    ids[pairs[:, 0]] = torch.stack([pairs[:, 1], *[torch.full((COMMON,), -1)] * 2], dim=1)
    weights[ids < 0] = 0
    return CrossVocabulary.of(
        kind,
        ids,
        weights / weights.sum(dim=1, keepdim=True),
        pairs,
        student_vocab=VOCAB,
        teacher_vocab=TEACHER_VOCAB,
        student_width=student_width,
        rank=rank,
        size=size,
    )
