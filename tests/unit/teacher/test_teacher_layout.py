"""Plans for a teacher in a layout of its own: islands, who looks at what, and what goes where."""

import itertools
from argparse import Namespace
from collections import Counter

import pytest
import torch

from mkd.config.kd_config import KDConfig
from mkd.config.teacher_args import has_own_layout, row_multiple, teacher_layout_args
from mkd.teacher.resharded.plan import Cut, ExchangeGroup, Job, RankCoords, Route, islands, last_stage
from tests.support.memory_jobs import llama_arguments

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"


def seats(ranks: int, tp: int = 1, cp: int = 1, pp: int = 1) -> list[RankCoords]:
    """Of all ranks in megatron's order tp-cp-dp-pp."""
    dp = ranks // (tp * cp * pp)
    places = itertools.product(range(pp), range(dp), range(cp), range(tp))
    return [RankCoords(t, c, d, p == pp - 1) for p, d, c, t in places]


def island(student: list[RankCoords], teacher: list[RankCoords]) -> ExchangeGroup:
    (only,) = islands(student, teacher)
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
def test_islands_are_closed_under_both_layouts(student, teacher, expected):
    found = islands(seats(8, **student), seats(8, **teacher))
    assert [list(one.ranks) for one in found] == expected


def test_islands_where_no_size_divides_the_other():
    (one,) = islands(seats(6, tp=2), seats(6, tp=3))
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
def test_every_microbatch_is_looked_at_once_and_work_is_even(student, teacher, microbatches):
    one = island(seats(8, **student), seats(8, **teacher))
    shares = one.deal(microbatches)
    jobs = Counter(job for share in shares.values() for job in share.jobs)
    students = {seat.dp for seat in one.students.values()}
    assert jobs == Counter(Job(s, m) for s in students for m in range(microbatches))
    counts = [share.wanted for share in shares.values()]
    assert max(counts) - min(counts) <= 1 and max(counts) == one.passes(microbatches)


def test_equal_numbers_of_passes():
    """5 microbatches over 8 replicas in 2 passes each: what is added is run and wanted by nobody."""
    one = island(seats(8, tp=8), seats(8))
    shares = one.deal(5, passes=2)
    assert all(len(share.jobs) == 2 for share in shares.values())
    wanted = [share.wanted_at(step) for share in shares.values() for step in range(2)]
    assert sorted(job for job in wanted if job is not None) == [Job(0, number) for number in range(5)]
    assert shares[0].wanted_at(7) is None


def test_neighbors_work_for_each_other():
    """Four students of two ranks, two teachers of four."""
    (left, right) = islands(seats(8, tp=2), seats(8, tp=4))
    assert left.deal(1) == {0: ((Job(0, 0), Job(1, 0)), 2)}
    assert right.deal(1) == {1: ((Job(2, 0), Job(3, 0)), 2)}
    assert left.sender(student=0, receiver=1) == 1, "a rank has its own batches"
    assert {left.sender(0, receiver) for receiver in (2, 3)} == {0, 1}, "the others are shared"


BOUNDS = (0, 8, 24, 48)


@pytest.mark.parametrize(
    ("student", "teacher", "cuts"),
    [
        ({}, {"tp": 4}, (Cut(1, 1, False), Cut(4, 1, True))),
        ({"tp": 2}, {"tp": 2, "cp": 2}, (Cut(2, 1, True), Cut(2, 2, True))),
        ({"cp": 2}, {"tp": 4}, (Cut(1, 2, False), Cut(4, 1, True))),
        ({"cp": 4}, {"cp": 2, "tp": 2}, (Cut(1, 4, False), Cut(2, 2, False))),
        ({"tp": 2, "pp": 2}, {"cp": 4}, (Cut(2, 1, True), Cut(1, 4, False))),
    ],
)
def test_what_arrives_is_what_is_wanted(student, teacher, cuts):
    """From the first replica of the teacher to the first of the student, in packed rows."""
    one = island(seats(4, **student), seats(4, **teacher))
    wanted = {r: cuts[0].places(BOUNDS, seat) for r, seat in last_stage(one.students, 0).items()}
    held = {r: cuts[1].places(BOUNDS, seat) for r, seat in last_stage(one.teachers, 0).items()}
    route = Route(held, wanted)
    for receiver, places in wanted.items():
        arrived = torch.full_like(places, -1)
        for sender in held:
            arrived[route.received(sender, receiver)] = held[sender][route.sent(sender, receiver)]
        assert torch.equal(arrived, places)
    for rank in set(one.ranks) - set(wanted):
        assert all(len(route.sent(sender, rank)) == len(route.received(sender, rank)) == 0 for sender in one.ranks)


def test_copies_share_the_sending_and_own_things_do_not_travel():
    """Without sequence parallelism every tensor-parallel rank of the teacher has everything."""
    one = island(seats(4), seats(4, tp=4))
    everything = {rank: torch.arange(10) for rank in one.ranks}
    route = Route(everything, {rank: torch.arange(10) for rank in (1, 2)})
    assert len(route.sent(1, 1)) == len(route.sent(2, 2)) == 10
    route = Route({rank: torch.arange(10) for rank in (0, 1)}, {rank: torch.arange(10) for rank in (2, 3)})
    assert {(s, r) for s in (0, 1) for r in (2, 3) if len(route.sent(s, r))} == {(0, 2), (1, 3)}
    with pytest.raises(ValueError, match=r"no rank has \[10\]"):
        Route(everything, {0: torch.tensor([3, 10])})


def job(**changes: int | bool) -> Namespace:
    return llama_arguments(8, 1024, 2816, 16, 4, True, seq_length=512, micro_batch_size=2, **changes)


def kd(**sizes: int) -> KDConfig:
    return KDConfig(teacher_hf=["T"], ratio=0.5, **{f"teacher_{name}": size for name, size in sizes.items()})


def test_the_layout_is_the_students_unless_a_flag_says_otherwise():
    args = job(**{TP: 2, CP: 2})
    same = teacher_layout_args(args, kd(**{TP: 2}).teacher_sizes, None)
    assert not has_own_layout(same, args) and same.sequence_parallel == args.sequence_parallel
    own = teacher_layout_args(args, kd(**{TP: 4, PP: 2}).teacher_sizes, None)
    assert has_own_layout(own, args)
    assert (getattr(own, TP), getattr(own, PP), getattr(own, CP), own.sequence_parallel) == (4, 2, 2, True)
    one = teacher_layout_args(job(**{TP: 2}, sequence_parallel=True), kd(**{TP: 1}).teacher_sizes, None)
    assert not one.sequence_parallel


def test_experts_follow_the_tensor_parallel_size_of_the_teacher():
    args = job(expert_tensor_parallel_size=1)
    given = {TP: 4, "expert_model_parallel_size": 2}
    assert teacher_layout_args(args, kd(**given).teacher_sizes, 8).expert_tensor_parallel_size == 4
    given["expert_tensor_parallel_size"] = 1
    assert teacher_layout_args(args, kd(**given).teacher_sizes, 8).expert_tensor_parallel_size == 1
    experts = teacher_layout_args(args, {"expert_model_parallel_size": 2}, 8)
    assert has_own_layout(experts, args)
    assert not has_own_layout(teacher_layout_args(args, {"expert_model_parallel_size": 2}, None), args)


def test_rows_can_be_cut_by_both():
    args = job(**{TP: 2}, sequence_parallel=True)
    assert row_multiple(args, kd()) == 2
    assert row_multiple(args, kd(**{CP: 3})) == 6
    assert row_multiple(args, kd(**{TP: 8})) == 8
