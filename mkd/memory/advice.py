"""What to change where a run does not fit its cards, and how much each change saves."""

import copy
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from mkd.config.kd_config import KDConfig
from mkd.config.megatron_checks import check_divisions, length_multiple
from mkd.config.teacher_layout import (
    SIZES,
    check_teacher_divides,
    check_teacher_layout,
    has_own_layout,
    teacher_layout_args,
)
from mkd.errors import MkdConfigError
from mkd.memory.estimate import LOGITS, Workload, estimate, fullest, outside_of_torch

WORTHWHILE = 0.01
"""Share of the need that a change must save to be named."""
FEW_ROWS = 256
"""Of a chunk of the loss, where memory is short."""


@dataclass(frozen=True)
class Advice:
    """A change of flags."""

    flags: str
    needed: float
    """Bytes of a card with it."""
    saves: float
    """Bytes less than without it."""


def needed(work: Workload) -> float:
    """Bytes of a card on the fullest rank, the allowances included."""
    peak = fullest(estimate(work)).peak
    return peak + outside_of_torch(work.student, peak, work.teachers)


def advise(work: Workload, capacity: float) -> tuple[list[Advice], Advice | None]:
    """Changes that save memory.

    Args:
        work: the run.
        capacity: bytes of a card.

    Returns:
        Each change by itself, what it costs least first; and some of them that together make the run fit, chosen in
        that order and without those that are not needed then. None if all of them are not enough.
    """
    before = needed(work)
    alone = [(number, _told([number], work)) for number in range(len(CHANGES))]
    useful = [(number, told) for number, told in alone if told and told.saves > WORTHWHILE * before]
    chosen: list[int] = []
    for number in range(len(CHANGES)):
        last, told = _told(chosen, work), _told([*chosen, number], work)
        if told is None or last.needed - told.needed <= WORTHWHILE * before:
            continue
        chosen.append(number)
        if told.needed <= capacity:
            return [told for _, told in useful], _told(_without_idle(chosen, work, capacity), work)
    return [told for _, told in useful], None


def _without_idle(chosen: list[int], work: Workload, capacity: float) -> list[int]:
    """Leave out, the costliest first, what the run fits without."""
    for number in reversed(chosen):
        rest = [other for other in chosen if other != number]
        told = _told(rest, work)
        if told is not None and told.needed <= capacity:
            chosen = rest
    return chosen


def _told(numbers: list[int], work: Workload) -> Advice | None:
    """The changes of these numbers, one after the other; None where one of them is not possible."""
    before, flags = needed(work), []
    for number in numbers:
        text, change = CHANGES[number]
        changed = change(work)
        if changed is None:
            return None
        work = changed
        flags.append(text(work) if callable(text) else text)
    after = needed(work)
    return Advice(" ".join(flags), after, before - after)


def _with(work: Workload, **values: object) -> Workload:
    """The same with other arguments of the job."""
    student = copy.copy(work.student)
    vars(student).update(values)
    return replace(work, student=student)


def _relaid(work: Workload, **sizes: object) -> Workload | None:
    """The same on as many ranks in another layout, but for teachers in one of their own; None where it does not
    divide."""
    models = [copy.copy(args) for args in (work.student, *work.teachers)]
    relaid = [args for args in models if not has_own_layout(args, work.student)]
    for args in relaid:
        vars(args).update(sizes)
    student = models[0]
    tp, pp = student.tensor_model_parallel_size, student.pipeline_model_parallel_size
    ranks = tp * pp * student.context_parallel_size
    if student.world_size % ranks:
        return None
    student.data_parallel_size = student.world_size // ranks
    if student.global_batch_size % (student.micro_batch_size * student.data_parallel_size):
        return None
    try:
        for args in relaid:
            check_divisions("a model", vars(args), tp, pp)
    except MkdConfigError:
        return None
    if student.seq_length % length_multiple(student) or student.padded_vocab_size % tp:
        return None
    return replace(work, student=student, teachers=models[1:])


def _half_precision(work: Workload) -> Workload | None:
    if work.student.params_dtype != torch.float32 or not work.on_gpu:
        return None
    models = [copy.copy(args) for args in (work.student, *work.teachers)]
    for args in models:
        args.params_dtype = torch.bfloat16
    models[0].accumulate_allreduce_grads_in_fp32 = True
    return replace(work, student=models[0], teachers=models[1:])


def _cut_optimizer(work: Workload) -> Workload | None:
    return None if work.student.use_distributed_optimizer else _with(work, use_distributed_optimizer=True)


def _cut_sequence(work: Workload) -> Workload | None:
    is_possible = work.student.tensor_model_parallel_size > 1 and not work.student.sequence_parallel
    return _relaid(work, sequence_parallel=True) if is_possible else None


def _fewer_rows(work: Workload) -> Workload | None:
    rows = work.kd.loss_chunk_rows
    if (rows is not None and rows <= FEW_ROWS) or not any(stage.most(LOGITS) for stage in estimate(work)):
        return None
    return replace(work, kd=replace(work.kd, loss_chunk_rows=FEW_ROWS))


def _recompute(granularity: str, modules: str | None) -> Callable[[Workload], Workload | None]:
    def change(work: Workload) -> Workload | None:
        student = work.student
        if student.recompute_granularity == "full" or student.recompute_granularity == granularity == "selective":
            return None
        method = {"recompute_method": "uniform", "recompute_num_layers": 1} if granularity == "full" else {}
        return _with(
            work, recompute_granularity=granularity, recompute_modules=modules.split() if modules else None, **method
        )

    return change


def _smaller_microbatch(work: Workload) -> Workload | None:
    size = work.student.micro_batch_size
    return _with(work, micro_batch_size=size // 2) if size % 2 == 0 else None


def _cut_teacher(work: Workload) -> Workload | None:
    """A layout of the teacher's own, with as many tensor-parallel ranks as divide it and a node may have."""
    student = work.student
    if not work.teachers or any(has_own_layout(teacher, student) for teacher in work.teachers):
        return None
    for size in (8, 4, 2):
        if size <= student.tensor_model_parallel_size:
            continue
        try:
            kd = replace(work.kd, teacher_tensor_model_parallel_size=size)
            return replace(work, kd=kd, teachers=[_in_its_layout(teacher, student, kd) for teacher in work.teachers])
        except MkdConfigError:
            continue
    return None


def _in_its_layout(teacher: Namespace, student: Namespace, kd: KDConfig) -> Namespace:
    """Raises MkdConfigError where the sizes in `kd` do not divide."""
    own = teacher_layout_args(student, kd.teacher_sizes, teacher.num_experts)
    check_teacher_layout(student, kd, teacher.num_experts)
    check_teacher_divides(vars(teacher), own, student)
    teacher = copy.copy(teacher)
    vars(teacher).update((name, getattr(own, name)) for name in SIZES)
    return teacher


def _offload(work: Workload) -> Workload | None:
    if not work.teachers or work.kd.teacher_offload:
        return None
    return replace(work, kd=replace(work.kd, teacher_offload=True))


def _double(name: str) -> Callable[[Workload], Workload | None]:
    def change(work: Workload) -> Workload | None:
        student = work.student
        uneven = ("pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers")
        uneven += ("decoder_last_pipeline_num_layers", "virtual_pipeline_model_parallel_size")
        if name == "pipeline_model_parallel_size" and any(getattr(student, other) is not None for other in uneven):
            return None
        return _relaid(work, **{name: 2 * getattr(student, name)})

    return change


def _size_flag(name: str) -> Callable[[Workload], str]:
    return lambda work: f"--{name.replace('_', '-')} {getattr(work.student, name)}"


def _teacher_flag(work: Workload) -> str:
    return f"--kd-teacher-tensor-model-parallel-size {work.kd.teacher_tensor_model_parallel_size}"


Flags = str | Callable[[Workload], str]
CHANGES: list[tuple[Flags, Callable[[Workload], Workload | None]]] = [
    ("--bf16", _half_precision),
    ("--use-distributed-optimizer", _cut_optimizer),
    ("--sequence-parallel", _cut_sequence),
    (f"--kd-loss-chunk-rows {FEW_ROWS}", _fewer_rows),
    ("--recompute-activations", _recompute("selective", "core_attn")),
    ("--recompute-granularity selective --recompute-modules mlp", _recompute("selective", "mlp")),
    (_size_flag("micro_batch_size"), _smaller_microbatch),
    ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", _recompute("full", None)),
    (_teacher_flag, _cut_teacher),
    ("--kd-teacher-offload", _offload),
    (_size_flag("context_parallel_size"), _double("context_parallel_size")),
    (_size_flag("tensor_model_parallel_size"), _double("tensor_model_parallel_size")),
    (_size_flag("pipeline_model_parallel_size"), _double("pipeline_model_parallel_size")),
]
"""Flags and what they do to a run, None where that is not possible; what costs no time first, more parallelism last."""
