"""The proposed split of GPUs between a teacher service and its student."""

from copy import copy

import pytest

from mkd.config.kd_config import KDConfig
from mkd.job.doctor.split import advice, propose
from mkd.job.memory import Workload
from tests.support.memory_jobs import llama_arguments

GIB = 2**30
SHAPE = {"padded_vocab_size": 128256, "seq_length": 4096, "micro_batch_size": 1, "global_batch_size": 24}
SMALL, LARGE, HUGE = (16, 2048, 8192, 32, 8), (32, 4096, 14336, 32, 8), (80, 8192, 28672, 64, 8)
"""Shapes of Llama with 1B, 8B and 70B parameters."""


def work(teacher: tuple[int, ...], gpus: int, **changes: int) -> Workload:
    student = llama_arguments(*SMALL, True, **SHAPE)
    vars(student).update(world_size=gpus, data_parallel_size=gpus, use_distributed_optimizer=True, **changes)
    return Workload(student, [llama_arguments(*teacher, False, **SHAPE)], KDConfig(teacher_hf=["T"], ratio=0.5), True)


def test_balanced_split() -> None:
    """As measured on H200s for 16 rows of 4096 tokens: 1.769 s of the teacher's GPU, 1.252 s of the student's with the
    teacher's LM head; if all GPUs are shared and scale perfectly, each computes its part of the sum."""
    for teacher, student in (1, 1), (3, 3), (5, 3):
        split = propose(work(LARGE, teacher + student), 80 * GIB)
        assert (split.teacher_gpus, split.student_gpus, split.teacher_tp) == (teacher, student, 1)
        shared = (1.769 + 1.252) / (teacher + student)
        assert split.time == pytest.approx(max(1.769 / teacher, 1.252 / student) / shared, rel=5e-3)
        assert split.student_fits
    found = advice(work(LARGE, 6), 80 * GIB)
    assert "sharing all 6 GPUs is fastest" in found and "mkd launch --teacher-gpus 3 --student-gpus 3" in found


def test_teacher_in_fp8() -> None:
    """It needs two thirds of the time, and fewer GPUs."""
    job = work(LARGE, 5, global_batch_size=60)
    assert propose(job, 80 * GIB).teacher_gpus == 3
    job.teachers[0].fp8 = "e4m3"
    assert propose(job, 80 * GIB).teacher_gpus == 2


def test_teacher_that_does_not_fit_beside_the_student() -> None:
    found = advice(work(HUGE, 8), 80 * GIB)
    assert "do not fit together" in found
    assert "mkd launch --teacher-gpus 6 --student-gpus 2 and --kd-teacher-tensor-model-parallel-size 2" in found


def test_no_choice() -> None:
    assert advice(work(LARGE, 1), 80 * GIB) is None
    alone = work(LARGE, 4)
    assert advice(Workload(alone.student, [], alone.kd, True), 80 * GIB) is None
    assert advice(work(HUGE, 2), 40 * GIB) is None


@pytest.mark.parametrize("tp", [2, 4])
def test_layout_of_the_student(tp: int) -> None:
    one = work(LARGE, 8, tensor_model_parallel_size=tp)
    assert propose(one, 80 * GIB).student_gpus % tp == 0
    assert one.student.world_size == 8 and copy(one.student) is not one.student
