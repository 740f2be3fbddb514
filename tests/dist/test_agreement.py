"""Top-1 agreement over vocabulary shards against its definition."""

from collections.abc import Callable

import pytest
import torch

from mkd.losses import reference, top1_agreement
from tests.dist.pool import Pool

ROWS, TRUE_VOCAB = 37, 29
WIDTH = {1: 31, 2: 29, 4: 9}
"""Columns a rank: the real ones end before, at and in the middle of the last shard, which is empty on 2 ranks."""


def models() -> list[torch.Tensor]:
    """Hidden states and LM heads whose logits are small integers, so that most rows have several equal maxima; on some
    rows the models are made to agree."""
    generator = torch.Generator().manual_seed(3)
    student, teacher = (torch.randint(-2, 3, (ROWS, 4), generator=generator).float() for _ in range(2))
    heads = [torch.randint(-1, 2, (TRUE_VOCAB, 4), generator=generator).float() for _ in range(2)]
    heads[1][3] = heads[1][20] = 9.0  # a tie across shards, and the maximum of every teacher with positive states
    heads[0][3] = heads[0][20] = 9.0
    student[::3], teacher[::3] = 1.0, 1.0
    return [student, heads[0], teacher, heads[1]]


def agreement(rank: int, world_size: int, sequence_parallel: bool, chunk_rows: int | None) -> torch.Tensor:
    """On this rank's shards; what pads them would win everywhere."""
    student, head, teacher, teacher_head = models()
    padded = [
        torch.full((WIDTH[world_size] * world_size, 4), 1e4).index_copy(0, torch.arange(TRUE_VOCAB), whole)
        for whole in (head, teacher_head)
    ]
    head, teacher_head = (whole.chunk(world_size)[rank] for whole in padded)
    if sequence_parallel:
        student, teacher = (
            torch.nn.functional.pad(rows, (0, 0, 0, -ROWS % world_size)).chunk(world_size)[rank]
            for rows in (student, teacher)
        )
    return top1_agreement(
        student,
        head,
        teacher,
        teacher_head,
        true_vocab=TRUE_VOCAB,
        tp_group=torch.distributed.group.WORLD,
        sequence_parallel=sequence_parallel,
        chunk_rows=chunk_rows,
    )


@pytest.mark.parametrize("ranks", WIDTH)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("chunk_rows", [None, 5])
def test_equals_the_definition_on_every_rank(
    gloo_pool: Callable[[int], Pool], ranks: int, sequence_parallel: bool, chunk_rows: int | None
) -> None:
    student, head, teacher, teacher_head = models()
    expected = reference.top1_agreement(student @ head.t(), teacher @ teacher_head.t())
    assert 0 < expected.sum() < ROWS
    for seen in gloo_pool(ranks).run(agreement, sequence_parallel, chunk_rows):
        assert torch.equal(seen[:ROWS], expected)


def test_of_equal_logits_the_lowest_id_counts() -> None:
    student = torch.tensor([[0.0, 2.0, 2.0], [0.0, 2.0, 2.0], [1.0, 1.0, 1.0]])
    teacher = torch.tensor([[0.0, 5.0, 0.0], [0.0, 0.0, 5.0], [0.0, 0.0, 0.0]])
    assert reference.top1_agreement(student, teacher).tolist() == [1.0, 0.0, 1.0]
    eye = torch.eye(3)
    assert top1_agreement(student, eye, teacher, eye, true_vocab=3).tolist() == [1.0, 0.0, 1.0]
