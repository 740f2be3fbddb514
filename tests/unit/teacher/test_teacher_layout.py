"""Plans for a teacher in a layout of its own: exchange groups, assignments of microbatches, transfers."""

import itertools
from argparse import Namespace
from collections import Counter

import pytest
import torch

from mkd.config.kd_config import KDConfig
from mkd.config.megatron.layouts import has_own_layout, row_multiple, teacher_layout_args
from mkd.teacher.resharded.plan import (
    ExchangeGroup,
    RankCoords,
    RowSharding,
    TeacherForward,
    TransferPlan,
    exchange_groups,
    last_stage,
)
from tests.support.memory_jobs import llama_arguments

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"


def coords(ranks: int, tp: int = 1, cp: int = 1, pp: int = 1) -> list[RankCoords]:
    """Coordinates of all ranks in Megatron's order tp-cp-dp-pp."""
    dp = ranks // (tp * cp * pp)
    positions = itertools.product(range(pp), range(dp), range(cp), range(tp))
    return [RankCoords(t, c, d, p == pp - 1) for p, d, c, t in positions]


def only_group(student: list[RankCoords], teacher: list[RankCoords]) -> ExchangeGroup:
    (only,) = exchange_groups(student, teacher)
    return only


@pytest.mark.parametrize(
    ("student", "teacher", "expected"),
    [
        ({}, {"tp": 8}, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ({}, {"tp": 2}, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ({"tp": 2}, {"tp": 4}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ({"tp": 4}, {"cp": 2}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ({}, {"pp": 2}, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ({"pp": 2}, {"tp": 2}, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ({"pp": 4}, {"tp": 2, "pp": 2}, [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ],
)
def test_exchange_groups_hold_whole_replicas(student, teacher, expected):
    found = exchange_groups(coords(8, **student), coords(8, **teacher))
    assert [list(one.ranks) for one in found] == expected


def test_exchange_groups_of_coprime_sizes():
    (one,) = exchange_groups(coords(6, tp=2), coords(6, tp=3))
    assert one.ranks == tuple(range(6))


@pytest.mark.parametrize(
    ("student", "teacher", "microbatches"),
    [
        (dict(tp=1), dict(tp=8), 3),
        (dict(tp=8), dict(tp=1), 3),
        (dict(tp=8), dict(tp=1), 19),
        (dict(tp=4), dict(tp=8), 5),
        (dict(pp=4), dict(cp=2, tp=4), 7),
    ],
)
def test_each_microbatch_is_assigned_once_and_evenly(student, teacher, microbatches):
    one = only_group(coords(8, **student), coords(8, **teacher))
    assignments = one.assign(microbatches)
    forwards = Counter(forward for assignment in assignments.values() for forward in assignment.forwards)
    students = {coords.dp for coords in one.students.values()}
    assert forwards == Counter(TeacherForward(s, m) for s in students for m in range(microbatches))
    counts = [assignment.needed for assignment in assignments.values()]
    assert max(counts) - min(counts) <= 1 and max(counts) == one.passes(microbatches)


def test_equal_numbers_of_passes():
    """5 microbatches over 8 replicas with 2 passes each: the added passes run, and their outputs are not needed."""
    one = only_group(coords(8, tp=8), coords(8))
    assignments = one.assign(5, passes=2)
    assert all(len(assignment.forwards) == 2 for assignment in assignments.values())
    needed = [assignment.needed_at(index) for assignment in assignments.values() for index in range(2)]
    assert sorted(forward for forward in needed if forward is not None) == [TeacherForward(0, n) for n in range(5)]
    assert assignments[0].needed_at(7) is None


def test_neighboring_replicas_work_together():
    """Four student replicas of two ranks, two teacher replicas of four."""
    (left, right) = exchange_groups(coords(8, tp=2), coords(8, tp=4))
    assert left.assign(1) == {0: ((TeacherForward(0, 0), TeacherForward(1, 0)), 2)}
    assert right.assign(1) == {1: ((TeacherForward(2, 0), TeacherForward(3, 0)), 2)}
    assert left.batch_sender(student=0, receiver=1) == 1, "a rank uses its own batches"
    assert {left.batch_sender(0, receiver) for receiver in (2, 3)} == {0, 1}, "ranks share the sending"


BOUNDS = (0, 8, 24, 48)


@pytest.mark.parametrize(
    ("student", "teacher", "shardings"),
    [
        ({}, {"tp": 4}, (RowSharding(1, 1, False), RowSharding(4, 1, True))),
        ({"tp": 2}, {"tp": 2, "cp": 2}, (RowSharding(2, 1, True), RowSharding(2, 2, True))),
        ({"cp": 2}, {"tp": 4}, (RowSharding(1, 2, False), RowSharding(4, 1, True))),
        ({"cp": 4}, {"cp": 2, "tp": 2}, (RowSharding(1, 4, False), RowSharding(2, 2, False))),
        ({"tp": 2, "pp": 2}, {"cp": 4}, (RowSharding(2, 1, True), RowSharding(1, 4, False))),
    ],
)
def test_received_positions_are_those_needed(student, teacher, shardings):
    """From the first replica of the teacher to the first of the student, in packed rows."""
    one = only_group(coords(4, **student), coords(4, **teacher))
    needed = {r: shardings[0].positions(BOUNDS, coords) for r, coords in last_stage(one.students, 0).items()}
    held = {r: shardings[1].positions(BOUNDS, coords) for r, coords in last_stage(one.teachers, 0).items()}
    plan = TransferPlan(held, needed)
    for receiver, positions in needed.items():
        received = torch.full_like(positions, -1)
        for sender in held:
            received[plan.received(sender, receiver)] = held[sender][plan.sent(sender, receiver)]
        assert torch.equal(received, positions)
    for rank in set(one.ranks) - set(needed):
        assert all(len(plan.sent(sender, rank)) == len(plan.received(sender, rank)) == 0 for sender in one.ranks)


def test_holders_share_the_sending_and_keep_their_own_items():
    """Without sequence parallelism every tensor-parallel rank of the teacher holds all positions."""
    one = only_group(coords(4), coords(4, tp=4))
    everything = {rank: torch.arange(10) for rank in one.ranks}
    plan = TransferPlan(everything, {rank: torch.arange(10) for rank in (1, 2)})
    assert len(plan.sent(1, 1)) == len(plan.sent(2, 2)) == 10
    plan = TransferPlan({rank: torch.arange(10) for rank in (0, 1)}, {rank: torch.arange(10) for rank in (2, 3)})
    assert {(s, r) for s in (0, 1) for r in (2, 3) if len(plan.sent(s, r))} == {(0, 2), (1, 3)}
    with pytest.raises(ValueError, match=r"no rank has \[10\]"):
        TransferPlan(everything, {0: torch.tensor([3, 10])}).received(0, 0)


def student_args(**changes: int | bool) -> Namespace:
    return llama_arguments(8, 1024, 2816, 16, 4, True, seq_length=512, micro_batch_size=2, **changes)


def kd(**sizes: int) -> KDConfig:
    return KDConfig(teacher_hf=["T"], ratio=0.5, **{f"teacher_{name}": size for name, size in sizes.items()})


def test_teacher_layout_defaults_to_the_students():
    args = student_args(**{TP: 2, CP: 2})
    same = teacher_layout_args(args, kd(**{TP: 2}).teacher_sizes, None)
    assert not has_own_layout(same, args) and same.sequence_parallel == args.sequence_parallel
    own = teacher_layout_args(args, kd(**{TP: 4, PP: 2}).teacher_sizes, None)
    assert has_own_layout(own, args)
    assert (getattr(own, TP), getattr(own, PP), getattr(own, CP), own.sequence_parallel) == (4, 2, 2, True)
    one = teacher_layout_args(student_args(**{TP: 2}, sequence_parallel=True), kd(**{TP: 1}).teacher_sizes, None)
    assert not one.sequence_parallel


def test_expert_tensor_parallel_size_defaults_to_the_teachers_tensor_parallel_size():
    args = student_args(expert_tensor_parallel_size=1)
    given = {TP: 4, "expert_model_parallel_size": 2}
    assert teacher_layout_args(args, kd(**given).teacher_sizes, 8).expert_tensor_parallel_size == 4
    given["expert_tensor_parallel_size"] = 1
    assert teacher_layout_args(args, kd(**given).teacher_sizes, 8).expert_tensor_parallel_size == 1
    experts = teacher_layout_args(args, {"expert_model_parallel_size": 2}, 8)
    assert has_own_layout(experts, args)
    assert not has_own_layout(teacher_layout_args(args, {"expert_model_parallel_size": 2}, None), args)


def test_row_multiple_suits_both_layouts():
    args = student_args(**{TP: 2}, sequence_parallel=True)
    assert row_multiple(args, kd()) == 2
    assert row_multiple(args, kd(**{CP: 3})) == 6
    assert row_multiple(args, kd(**{TP: 8})) == 8
