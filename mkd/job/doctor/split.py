"""Split of a node's GPUs between a teacher service and its student, by the models' sizes and measured rates."""

import copy
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mkd.data.text_size import TextSize
from mkd.job.memory import Workload
from mkd.job.memory.advice import needed
from mkd.job.memory.estimate import CONTEXT_BYTES, FRAGMENTED
from mkd.job.memory.parameters import outside_of_layers, parameters_of_stage
from mkd.report.flops import FlopCounter, lm_head_flops

STUDENT_TIME = 1.15
"""Time of an operation of the student's training, relative to one of a teacher's forward pass in bf16: measured with 8B
and 1B, one H200 each (docs/benchmarks.md). Its matrices are smaller, and optimizer and loss have few operations."""
FP8_TIME = 0.66
"""The same for a forward pass in FP8 (benchmarks/bench_teacher.py, 8B, where the host is not the limit)."""


@dataclass(frozen=True)
class Split:
    """GPUs of a teacher service and of its student."""

    teacher_gpus: int
    student_gpus: int
    teacher_tp: int
    """The smallest tensor-parallel size in which the teacher's weights fit."""
    time: float
    """Time of a step on the busier GPUs, relative to that on all GPUs if they are shared; at least 1."""
    student_fits: bool

    @property
    def flags(self) -> str:
        """Flags of mkd launch for this split."""
        own = f" and --kd-teacher-tensor-model-parallel-size {self.teacher_tp} after --" if self.teacher_tp > 1 else ""
        return f"mkd launch --teacher-gpus {self.teacher_gpus} --student-gpus {self.student_gpus}{own}"


def propose(work: Workload, capacity: float) -> Split | None:
    """The split that balances teacher and student best, or None if there is none.

    Args:
        work: a job with one teacher on the student's ranks.
        capacity: bytes of a GPU.
    """
    gpus = work.student.world_size
    text = TextSize(work.student.seq_length, work.student.seq_length**2, work.student.seq_length)
    flops = FlopCounter(work.student, work.teachers, is_frozen=work.lora is not None)
    # The service sends hidden states: the student's ranks multiply them by the teacher's LM head.
    one = work.teachers[0]
    head = lm_head_flops(one, text.tokens)
    teacher = (flops.of_teachers(text) - head) * (FP8_TIME if one.fp8 else 1.0)
    student = (flops.of_student(text) + head) * STUDENT_TIME
    tp = _smallest_tp(work.teachers[0], gpus, capacity)
    found = []
    for count in range(tp, gpus, tp) if tp else ():
        alone = _student_alone(work, gpus - count)
        if alone is not None:
            time = max(teacher / count, student / (gpus - count)) / ((teacher + student) / gpus)
            found.append(Split(count, gpus - count, tp, time, needed(alone) <= capacity))
    return min(found, key=lambda one: (not one.student_fits, one.time), default=None)


def advice(work: Workload, capacity: float) -> str | None:
    """One sentence on sharing GPUs or splitting them; None without a choice (no teacher model, several, one GPU)."""
    if len(work.teachers) != 1 or work.student.world_size < 2:
        return None
    split, shares = propose(work, capacity), needed(work) <= capacity
    if split is None or not (shares or split.student_fits):
        return None
    if not shares:
        return f"teacher and student do not fit together, but on GPUs of their own: {split.flags}"
    if not split.student_fits:
        return None
    return (
        f"sharing all {work.student.world_size} GPUs is fastest; on GPUs of their own a step takes about "
        f"{split.time:.2f} x as long ({split.flags}), by operations and their rates with 8B and 1B, which pays where "
        "several students share the teacher, or memory allows larger microbatches then (docs/teachers.md)"
    )


def _smallest_tp(teacher: Namespace, gpus: int, capacity: float) -> int | None:
    """The smallest power of two that divides the teacher's heads and lets its weights fit; None if there is none."""
    groups = teacher.num_query_groups if teacher.group_query_attention else teacher.num_attention_heads
    tp = 1
    while tp < gpus and groups % tp == 0:
        if _weights(teacher, tp) * (1 + FRAGMENTED) + CONTEXT_BYTES <= 0.9 * capacity:  # the rest: a forward pass
            return tp
        tp *= 2
    return None


def _weights(teacher: Namespace, tp: int) -> float:
    """Bytes of the teacher's weights on one of `tp` ranks."""
    own = copy.copy(teacher)
    own.tensor_model_parallel_size, own.pipeline_model_parallel_size, own.context_parallel_size = tp, 1, 1
    own.expert_model_parallel_size, own.expert_tensor_parallel_size = 1, tp
    outside = outside_of_layers(own, 0)
    in_layers = parameters_of_stage(own, 0).total - outside
    return in_layers * (1 if own.fp8 else own.params_dtype.itemsize) + outside * own.params_dtype.itemsize


def _student_alone(work: Workload, gpus: int) -> Workload | None:
    """The student on `gpus` GPUs, taught by a service; None if its layout or batch does not divide them."""
    student = copy.copy(work.student)
    ranks = student.tensor_model_parallel_size * student.pipeline_model_parallel_size * student.context_parallel_size
    if gpus % ranks:
        return None
    student.world_size, student.data_parallel_size = gpus, gpus // ranks
    if student.global_batch_size % (student.micro_batch_size * student.data_parallel_size):
        return None
    return replace(work, student=student, teachers=[], served=_heads(work.student, work.teachers))


def _heads(student: Namespace, teachers: Sequence[Namespace]) -> list[Namespace]:
    """See `Workload.served`."""
    found = []
    for teacher in teachers:
        head = copy.copy(student)
        head.hidden_size, head.params_dtype = teacher.hidden_size, teacher.params_dtype
        head.padded_vocab_size, head.seq_length = teacher.padded_vocab_size, teacher.seq_length
        found.append(head)
    return found
