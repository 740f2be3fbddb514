"""The comparison of two models over vocabulary shards against its definitions."""

from collections.abc import Callable
from dataclasses import astuple

import pytest
import torch
from torch import Tensor

from mkd.losses import Comparison, LinearLogits, LogitMap, SparseTeacher, VocabLayout, compare_models, reference
from tests.support.dist.pool import Pool
from tests.support.tolerance import FP32, FP64, assert_close_norm

ROWS, TRUE_VOCAB = 37, 29
WIDTH = {1: 31, 2: 29, 4: 9}
"""Columns per rank: the real ones end before, at and in the middle of the last shard, which is empty on 2 ranks."""
MAPS = LogitMap(scale=0.5), LogitMap(softcap=20.0)


def models(dtype: torch.dtype) -> list[Tensor]:
    """Hidden states and LM heads whose logits are small integers, so that most rows have several equal maxima; on some
    rows the models are made to agree."""
    generator = torch.Generator().manual_seed(3)
    student, teacher = (torch.randint(-2, 3, (ROWS, 4), generator=generator).to(dtype) for _ in range(2))
    heads = [torch.randint(-1, 2, (TRUE_VOCAB, 4), generator=generator).to(dtype) for _ in range(2)]
    heads[1][3] = heads[1][20] = 9.0  # a tie across shards, and the maximum of every teacher with positive states
    heads[0][3] = heads[0][20] = 9.0
    student[::3], teacher[::3] = 1.0, 1.0
    return [student, heads[0], teacher, heads[1]]


def logits() -> tuple[Tensor, Tensor]:
    student, head, teacher, teacher_head = models(torch.float64)
    return MAPS[0].apply_(student @ head.t()), MAPS[1].apply_(teacher @ teacher_head.t())


def expected() -> Comparison:
    student, teacher = logits()
    return Comparison(
        reference.entropy(student),
        reference.entropy(teacher),
        reference.top1_agreement(student, teacher),
        *reference.top_probabilities(student, teacher),
    )


def sparse(temperature: float, dtype: torch.dtype) -> SparseTeacher:
    """The teacher's five most probable tokens in no order, one empty slot before them."""
    teacher = logits()[1]
    top = teacher.sort(dim=1, descending=True, stable=True).indices[:, [3, 0, 4, 1, 2]].int()
    named = torch.nn.functional.pad(teacher.gather(1, top.long()), (1, 0), value=1e6)
    lse = torch.logsumexp(teacher / temperature, dim=1)
    ids = torch.nn.functional.pad(top, (1, 0), value=-1)
    return SparseTeacher(ids, named.to(dtype), lse.to(dtype), temperature=temperature)


def compared(
    rank: int,
    world_size: int,
    sequence_parallel: bool,
    chunk_rows: int | None,
    dtype: torch.dtype,
    teacher: SparseTeacher | None,
) -> tuple[Tensor | None, ...]:
    """Comparison on this rank's shards; their padding would be the maximum everywhere."""
    student, head, theirs, teacher_head = models(dtype)
    padded = [
        torch.full((WIDTH[world_size] * world_size, 4), 1e4, dtype=dtype).index_copy(0, torch.arange(TRUE_VOCAB), whole)
        for whole in (head, teacher_head)
    ]
    head, teacher_head = (whole.chunk(world_size)[rank] for whole in padded)
    if sequence_parallel:
        student, theirs = (
            torch.nn.functional.pad(rows, (0, 0, 0, -ROWS % world_size)).chunk(world_size)[rank]
            for rows in (student, theirs)
        )
        teacher = teacher and SparseTeacher(
            *(
                torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1) + (0, -ROWS % world_size))
                for x in astuple(teacher)[:3]
            )
        )
    found = compare_models(
        LinearLogits(student, head, MAPS[0]),
        teacher or LinearLogits(theirs, teacher_head, MAPS[1]),
        vocab=VocabLayout(TRUE_VOCAB, torch.distributed.group.WORLD, sequence_parallel),
        chunk_rows=chunk_rows,
    )
    return tuple(None if values is None else values[:ROWS] for values in astuple(found))


@pytest.mark.parametrize("ranks", WIDTH)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("chunk_rows", "dtype"), [(None, torch.float64), (5, torch.float32)])
def test_equal_to_the_definitions_on_every_rank(
    gloo_pool: Callable[[int], Pool], ranks: int, sequence_parallel: bool, chunk_rows: int | None, dtype: torch.dtype
) -> None:
    wanted = expected()
    assert 0 < wanted.agreement.sum() < ROWS
    for seen in gloo_pool(ranks).run(compared, sequence_parallel, chunk_rows, dtype, None):
        found = Comparison(*seen)
        assert torch.equal(found.agreement, wanted.agreement.to(dtype))
        for name in ("student_entropy", "teacher_entropy", "teacher_top_prob", "student_prob_at_top"):
            tolerance = FP32 if dtype == torch.float32 else FP64
            assert_close_norm(getattr(found, name), getattr(wanted, name), tolerance, name)


@pytest.mark.parametrize(("ranks", "sequence_parallel"), [(1, False), (2, True), (4, False)])
def test_sparse_teacher(gloo_pool: Callable[[int], Pool], ranks: int, sequence_parallel: bool) -> None:
    wanted = expected()
    for seen in gloo_pool(ranks).run(compared, sequence_parallel, 5, torch.float64, sparse(1.0, torch.float64)):
        found = Comparison(*seen)
        assert found.teacher_entropy is None
        assert torch.equal(found.agreement, wanted.agreement)
        for name in ("student_entropy", "teacher_top_prob", "student_prob_at_top"):
            assert_close_norm(getattr(found, name), getattr(wanted, name), FP64, name)


def test_unknown_results_of_a_sparse_teacher_are_none() -> None:
    student, head, *_ = models(torch.float64)
    model, wanted = LinearLogits(student, head, MAPS[0]), expected()
    warm = sparse(2.0, torch.float64)
    found = compare_models(model, warm, vocab=VocabLayout(TRUE_VOCAB))
    assert torch.equal(found.agreement, wanted.agreement)
    assert found.teacher_top_prob is None and found.student_prob_at_top is None
    drawn = SparseTeacher(warm.ids, warm.logits, warm.lse, counts=torch.ones_like(warm.ids))
    found = compare_models(model, drawn, vocab=VocabLayout(TRUE_VOCAB))
    assert found.agreement is None and found.teacher_top_prob is None
    assert_close_norm(found.student_entropy, wanted.student_entropy, FP64, "student_entropy")
    tail = torch.logsumexp(torch.tensor([0.0, -1.0], dtype=torch.float64), dim=0).expand(1)
    known = SparseTeacher(torch.tensor([[4]]), torch.tensor([[1.0]], dtype=torch.float64), None, tail)
    model = LinearLogits(student[:1], head, MAPS[0])
    top = compare_models(model, known, vocab=VocabLayout(TRUE_VOCAB)).teacher_top_prob
    assert_close_norm(top, torch.softmax(torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64), 0)[:1], FP64, "top")


def test_lowest_id_of_equal_logits_counts() -> None:
    student = torch.tensor([[0.0, 2.0, 2.0], [0.0, 2.0, 2.0], [1.0, 1.0, 1.0]])
    teacher = torch.tensor([[0.0, 5.0, 0.0], [0.0, 0.0, 5.0], [0.0, 0.0, 0.0]])
    assert reference.top1_agreement(student, teacher).tolist() == [1.0, 0.0, 1.0]
    eye = torch.eye(3)
    found = compare_models(LinearLogits(student, eye), LinearLogits(teacher, eye), vocab=VocabLayout(3))
    assert found.agreement.tolist() == [1.0, 0.0, 1.0]


def test_impossible_logit_has_no_effect() -> None:
    hidden = torch.tensor([[1.0], [2.0]])
    weight = torch.tensor([[1.0], [-torch.inf], [0.5]])
    source = LinearLogits(hidden, weight)
    found = compare_models(source, source, vocab=VocabLayout(3))
    assert_close_norm(found.student_entropy, reference.entropy(hidden @ weight.t()), FP32, "entropy")
    assert torch.equal(found.agreement, torch.ones(2))
