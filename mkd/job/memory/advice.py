"""Advice for a run that does not fit into GPU memory: changes of flags, and the memory that each change saves.

Each entry of `CHANGES` transforms a `Workload`; the estimate of the result gives the saving.
"""

import copy
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from mkd.config.kd_config import KDConfig
from mkd.config.megatron.arg_names import ArgRole, names_with
from mkd.config.megatron.checks.parallel_sizes import check_divisions, has_even_stages
from mkd.config.megatron.checks.teachers import check_teacher_divides, check_teacher_layout
from mkd.config.megatron.layouts import has_own_layout, length_multiple, teacher_layout_args
from mkd.errors import MkdConfigError
from mkd.job.memory.estimate import LOGITS, Workload, estimate, fullest, outside_of_torch

WORTHWHILE = 0.01
"""Share of the required memory that a change must save to be reported."""
SMALL_CHUNK = 256
"""Tokens of a loss chunk when memory is short."""


@dataclass(frozen=True)
class Advice:
    """A change of flags and its effect."""

    flags: str
    needed: float
    """Required bytes per GPU with the change."""
    saves: float
    """Bytes that the change saves."""


def needed(work: Workload) -> float:
    """Required bytes per GPU on the fullest rank, including allowances."""
    peak = fullest(estimate(work)).peak
    return peak + outside_of_torch(work.student, peak, work.teachers)


def advise(work: Workload, capacity: float) -> tuple[list[Advice], Advice | None]:
    """Changes that save memory.

    Args:
        work: the run.
        capacity: bytes per GPU.

    Returns:
        (each useful change by itself, in the order of `CHANGES`; a combination with which the run fits). The
        combination is built greedily in the same order, and changes that turn out to be unnecessary are removed; it is
        None if the run does not fit with all changes.
    """
    before = needed(work)
    single = [_evaluate([number], work) for number in range(len(CHANGES))]
    useful = [advice for advice in single if advice and advice.saves > WORTHWHILE * before]
    chosen: list[int] = []
    for number in range(len(CHANGES)):
        last, advice = _evaluate(chosen, work), _evaluate([*chosen, number], work)
        if advice is None or last.needed - advice.needed <= WORTHWHILE * before:
            continue
        chosen.append(number)
        if advice.needed <= capacity:
            return useful, _evaluate(_drop_unnecessary(chosen, work, capacity), work)
    return useful, None


def _drop_unnecessary(chosen: list[int], work: Workload, capacity: float) -> list[int]:
    """Remove changes without which the run still fits, the most expensive first."""
    for number in reversed(chosen):
        rest = [other for other in chosen if other != number]
        advice = _evaluate(rest, work)
        if advice is not None and advice.needed <= capacity:
            chosen = rest
    return chosen


def _evaluate(numbers: list[int], work: Workload) -> Advice | None:
    """The effect of several changes in sequence; None if one of them is not possible."""
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
    """The workload with other arguments of the job."""
    student = copy.copy(work.student)
    vars(student).update(values)
    return replace(work, student=student)


def _with_layout(work: Workload, **sizes: object) -> Workload | None:
    """The workload on the same number of ranks in another parallel layout; None if the model cannot be divided so.

    Teachers in a layout of their own keep it.
    """
    models = [copy.copy(args) for args in (work.student, *work.teachers)]
    changed = [args for args in models if not has_own_layout(args, work.student)]
    for args in changed:
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
        for args in changed:
            check_divisions("a model", vars(args), tp, pp)
    except MkdConfigError:
        return None
    if student.seq_length % length_multiple(student) or student.padded_vocab_size % tp:
        return None
    return replace(work, student=student, teachers=models[1:])


def _use_bf16(work: Workload) -> Workload | None:
    if work.student.params_dtype != torch.float32 or not work.on_gpu:
        return None
    models = [copy.copy(args) for args in (work.student, *work.teachers)]
    for args in models:
        args.params_dtype = torch.bfloat16
    models[0].accumulate_allreduce_grads_in_fp32 = True
    return replace(work, student=models[0], teachers=models[1:])


def _distribute_optimizer(work: Workload) -> Workload | None:
    return None if work.student.use_distributed_optimizer else _with(work, use_distributed_optimizer=True)


def _enable_sequence_parallel(work: Workload) -> Workload | None:
    is_possible = work.student.tensor_model_parallel_size > 1 and not work.student.sequence_parallel
    return _with_layout(work, sequence_parallel=True) if is_possible else None


def _smaller_chunks(work: Workload) -> Workload | None:
    rows = work.kd.loss_chunk_rows
    if (rows is not None and rows <= SMALL_CHUNK) or not any(stage.most(LOGITS) for stage in estimate(work)):
        return None
    return replace(work, kd=replace(work.kd, loss_chunk_rows=SMALL_CHUNK))


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


def _shard_teacher(work: Workload) -> Workload | None:
    """A separate teacher layout with the largest tensor-parallel size that divides the teacher and fits a node."""
    student = work.student
    if not work.teachers or any(has_own_layout(teacher, student) for teacher in work.teachers):
        return None
    for size in (8, 4, 2):
        if size <= student.tensor_model_parallel_size:
            continue
        try:
            kd = replace(work.kd, teacher_tensor_model_parallel_size=size)
            return replace(work, kd=kd, teachers=[_with_own_layout(teacher, student, kd) for teacher in work.teachers])
        except MkdConfigError:
            continue
    return None


def _with_own_layout(teacher: Namespace, student: Namespace, kd: KDConfig) -> Namespace:
    """The teacher's arguments with the sizes in `kd`. Raises `MkdConfigError` if the teacher cannot be divided so."""
    own = teacher_layout_args(student, kd.teacher_sizes, teacher.num_experts)
    check_teacher_layout(student, kd, teacher.num_experts)
    check_teacher_divides(vars(teacher), own, student)
    teacher = copy.copy(teacher)
    vars(teacher).update((name, getattr(own, name)) for name in names_with(ArgRole.LAYOUT))
    return teacher


def _offload_teacher(work: Workload) -> Workload | None:
    if not work.teachers or work.kd.teacher_offload:
        return None
    return replace(work, kd=replace(work.kd, teacher_offload=True))


def _offload_optimizer(work: Workload) -> Workload | None:
    student, kd = work.student, work.kd
    if not kd.is_on_policy or kd.rollout_offload or student.optimizer_cpu_offload or student.optimizer_cuda_graph:
        return None
    return replace(work, kd=replace(kd, rollout_offload=True))


def _signals_on_host(work: Workload) -> Workload | None:
    if not work.teachers or work.kd.teacher_signals == "host":
        return None
    return replace(work, kd=replace(work.kd, teacher_signals="host"))


def _double(name: str) -> Callable[[Workload], Workload | None]:
    def change(work: Workload) -> Workload | None:
        student = work.student
        is_divided = student.virtual_pipeline_model_parallel_size is not None or not has_even_stages(vars(student))
        if name == "pipeline_model_parallel_size" and is_divided:
            return None
        return _with_layout(work, **{name: 2 * getattr(student, name)})

    return change


def _size_flag(name: str) -> Callable[[Workload], str]:
    return lambda work: f"--{name.replace('_', '-')} {getattr(work.student, name)}"


def _teacher_flag(work: Workload) -> str:
    return f"--kd-teacher-tensor-model-parallel-size {work.kd.teacher_tensor_model_parallel_size}"


Flags = str | Callable[[Workload], str]
CHANGES: list[tuple[Flags, Callable[[Workload], Workload | None]]] = [
    ("--bf16", _use_bf16),
    ("--use-distributed-optimizer", _distribute_optimizer),
    ("--sequence-parallel", _enable_sequence_parallel),
    (f"--kd-loss-chunk-rows {SMALL_CHUNK}", _smaller_chunks),
    ("--recompute-activations", _recompute("selective", "core_attn")),
    ("--recompute-granularity selective --recompute-modules mlp", _recompute("selective", "mlp")),
    (_size_flag("micro_batch_size"), _smaller_microbatch),
    ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", _recompute("full", None)),
    (_teacher_flag, _shard_teacher),
    ("--kd-rollout-offload", _offload_optimizer),
    ("--kd-teacher-signals host", _signals_on_host),
    ("--kd-teacher-offload", _offload_teacher),
    (_size_flag("context_parallel_size"), _double("context_parallel_size")),
    (_size_flag("tensor_model_parallel_size"), _double("tensor_model_parallel_size")),
    (_size_flag("pipeline_model_parallel_size"), _double("pipeline_model_parallel_size")),
]
"""(flags, change of a workload; None if it is not possible), from changes that cost no time to more parallelism."""
