"""How much memory a run needs on each pipeline stage, from its arguments alone."""

import copy
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

from mkd.config.kd_config import KDConfig
from mkd.config.teacher_layout import has_own_layout
from mkd.memory.activations import at_work_backward, kept_by_layers, layer_bytes, tokens_of
from mkd.memory.logits import logit_bytes, shard_of
from mkd.memory.parameters import gradient_bytes, optimizer_bytes, outside_of_layers, parameters_of_stage
from mkd.memory.stages import chunks_of_stage, in_flight, microbatches

GIB = 2**30

WEIGHTS, GRADIENTS, OPTIMIZER = "student weights", "student gradients", "optimizer state"
ACTIVATIONS, TEACHER, HIDDEN = "activations", "teacher weights", "teacher hidden states"
LOGITS, MAPS, AT_WORK = "loss chunks (logits)", "maps between layers", "layers at work"
WORKSPACES = "library workspaces"
PARTS = (WEIGHTS, GRADIENTS, OPTIMIZER, MAPS, ACTIVATIONS, TEACHER, HIDDEN, LOGITS, AT_WORK, WORKSPACES)
"""In the order of the table."""

WORKSPACE_BYTES = int(0.1 * GIB)
"""Of cuBLAS and Transformer Engine, from torch's allocator: 0.08 to 0.12 GiB in the runs of docs/benchmarks.md, whose
peaks this estimate meets within 2% with it."""
CONTEXT_BYTES = int(0.75 * GIB)
"""Allowance for CUDA's context and kernels, outside of torch's allocator."""
COMMUNICATOR_BYTES = int(0.125 * GIB)
"""Allowance for the buffers of one NCCL communicator."""
FRAGMENTED = 0.03
"""Allowance for what torch's allocator cannot use, as a share of the peak."""


@dataclass(frozen=True)
class Workload:
    """All that the memory of a run depends on."""

    student: Namespace
    """Megatron's arguments of the job, after their checks."""
    teachers: Sequence[Namespace]
    """Those of the teachers; none where no teacher is run."""
    kd: KDConfig
    on_gpu: bool
    """Whether it is to run on GPUs."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes on each rank of one pipeline stage."""

    stage: int
    held: dict[str, float]
    """From the first step to the last."""
    phases: dict[str, dict[str, float]]
    """Phase of a step -> what is there beside `held`."""

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def peak_parts(self) -> dict[str, float]:
        """What there is at the fullest moment; the sum is torch's peak of allocated memory."""
        return self.held | self.phases[self.peak_phase]

    @property
    def peak(self) -> float:
        return sum(self.peak_parts.values())

    def most(self, part: str) -> float:
        """Of one part, at its own fullest moment."""
        return max(part_of.get(part, 0.0) for part_of in (self.held, *self.phases.values()))


def estimate(work: Workload) -> list[StageMemory]:
    """Of every pipeline stage, in order."""
    return [_stage(work, stage) for stage in range(work.student.pipeline_model_parallel_size)]


def fullest(stages: Sequence[StageMemory]) -> StageMemory:
    """The stage that decides whether a run fits."""
    return max(stages, key=lambda stage: stage.peak)


def outside_of_torch(args: Namespace, peak: float, teachers: Sequence[Namespace] = ()) -> float:
    """Bytes of a card that torch does not count: an allowance, not a measurement.

    Args:
        args: Megatron's, of the job.
        peak: bytes that torch does count.
        teachers: Megatron's arguments of those that run.
    """
    groups = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    groups = (*groups, "expert_model_parallel_size")
    communicators = sum(getattr(args, name) > 1 for name in (*groups, "data_parallel_size")) + (args.world_size > 1)
    for teacher in teachers:
        if has_own_layout(teacher, args):
            communicators += 1 + sum(getattr(teacher, name) > 1 for name in groups)  # and that to the student
    return CONTEXT_BYTES + COMMUNICATOR_BYTES * communicators + FRAGMENTED * peak


def _stage(work: Workload, stage: int) -> StageMemory:
    student, kd = work.student, work.kd
    count = parameters_of_stage(student, stage)
    held = {
        WEIGHTS: student.params_dtype.itemsize * count.total,
        GRADIENTS: gradient_bytes(student) * count.total,
        OPTIMIZER: optimizer_bytes(student, count),
        WORKSPACES: WORKSPACE_BYTES if work.on_gpu else 0,
    }
    # As the loss sees them: cut as the student is.
    teachers = [_beside(teacher, student, LAYOUT) for teacher in work.teachers]
    is_last = stage == student.pipeline_model_parallel_size - 1
    heads = sum(map(_head_bytes, teachers)) if is_last else 0
    weights = sum(_teacher_weights(teacher, student, stage) for teacher in work.teachers)
    if not kd.teacher_offload:
        held[TEACHER], weights, heads = weights, 0, 0
    hidden = _hidden_bytes(work, teachers) if is_last else 0.0
    if is_last and kd.layer_pairs and any(t.hidden_size != student.hidden_size for t in teachers):
        each = student.params_dtype.itemsize + gradient_bytes(student) + 12
        held[MAPS] = len(kd.layer_pairs) * student.hidden_size * teachers[0].hidden_size * each
    chunks = chunks_of_stage(student, stage)
    kept = [kept_by_layers(student, chunk, work.on_gpu) for chunk in chunks]
    alive = {ACTIVATIONS: in_flight(student, stage) * sum(kept) / len(kept), HIDDEN: hidden}
    if kd.teacher_offload:
        alive[TEACHER] = heads
    if is_last:
        alive[ACTIVATIONS] += 2 * _residual(student)  # the last norm's input, and the gradient of its output
    phases = {
        "student backward": {**alive, AT_WORK: at_work_backward(student, chunks[-1], work.on_gpu)},
        "embedding gradient": {HIDDEN: hidden, AT_WORK: _embedding_gradient(student, stage)},
    }
    if is_last:
        at_work = _residual(student) + _gathered(student, teachers)  # the norm's output
        phases["loss"] = {**alive, LOGITS: logit_bytes(student, teachers, kd, work.on_gpu), AT_WORK: at_work}
    if teachers:
        works = max(_teacher_works(teacher, student, stage, work.on_gpu) for teacher in work.teachers)
        phases["teacher forward"] = {HIDDEN: hidden, AT_WORK: works}
        if kd.teacher_offload:
            phases["teacher forward"][TEACHER] = weights
    return StageMemory(stage, {name: value for name, value in held.items() if value}, phases)


LAYOUT = ("tensor_model_parallel_size", "context_parallel_size", "sequence_parallel")
"""By which the loss finds hidden states and LM heads cut."""


def _beside(teacher: Namespace, student: Namespace, names: Sequence[str] = ()) -> Namespace:
    """A teacher's arguments with what they leave to the student's, the batch, and with others of these names."""
    teacher = copy.copy(teacher)
    for name in ("micro_batch_size", "world_size", *names):
        setattr(teacher, name, getattr(student, name))
    ranks = teacher.tensor_model_parallel_size * teacher.pipeline_model_parallel_size * teacher.context_parallel_size
    teacher.data_parallel_size = max(1, teacher.world_size // ranks)
    return teacher


def _stages_there(teacher: Namespace, student: Namespace, stage: int) -> range:
    """The teacher's pipeline stages on the ranks of one of the student's: stages are runs of ranks."""
    own, students = teacher.pipeline_model_parallel_size, student.pipeline_model_parallel_size
    return range(stage * own // students, -(-(stage + 1) * own // students))


def _head_bytes(teacher: Namespace) -> float:
    """Of a rank's rows of a teacher's LM head."""
    return teacher.params_dtype.itemsize * shard_of(teacher) * teacher.hidden_size


def _teacher_weights(teacher: Namespace, student: Namespace, stage: int) -> float:
    """Most bytes of a teacher's weights on a rank of one of the student's stages."""
    own = _beside(teacher, student)
    sizes = []
    for number in _stages_there(own, student, stage):
        outside = outside_of_layers(own, number)
        in_layers = parameters_of_stage(own, number).total - outside
        size = in_layers * (1 if own.fp8 else own.params_dtype.itemsize) + outside * own.params_dtype.itemsize
        is_last = number == own.pipeline_model_parallel_size - 1
        if has_own_layout(own, student) and is_last and (number > 0 or own.untie_embeddings_and_output_weights):
            size -= _head_bytes(own)  # the student's last stage has it
        sizes.append(size)
    moved = has_own_layout(own, student) and stage == student.pipeline_model_parallel_size - 1
    return max(sizes) + (_head_bytes(_beside(teacher, student, LAYOUT)) if moved else 0.0)


def _teacher_works(teacher: Namespace, student: Namespace, stage: int, on_gpu: bool) -> float:
    """Most bytes of a teacher's layer at work on a rank of one of the student's stages; it keeps nothing. In a layout
    of its own also its hidden states before they travel, of all its microbatches where it has pipeline stages."""
    own = _beside(teacher, student)
    works = max(_forward_bytes(own, number, on_gpu) for number in _stages_there(own, student, stage))
    if not has_own_layout(own, student):
        return works
    piped = own.pipeline_model_parallel_size > 1
    kept = -(-microbatches(student) * student.data_parallel_size // own.data_parallel_size) if piped else 1
    return works + kept * _residual(own) + _residual(_beside(teacher, student, LAYOUT))


def _residual(args: Namespace) -> float:
    """A microbatch's final hidden states on a rank."""
    cut = args.tensor_model_parallel_size if args.sequence_parallel else 1
    return tokens_of(args) * args.hidden_size * args.params_dtype.itemsize / cut


def _hidden_bytes(work: Workload, teachers: Sequence[Namespace]) -> float:
    """The teachers' hidden states: of one microbatch, or of a whole step where the teacher looks at all of them first
    (mkd/train/schedule.py)."""
    runs_before_student = work.student.pipeline_model_parallel_size > 1 or work.kd.teacher_offload
    runs_before_student = runs_before_student or any(has_own_layout(teacher, work.student) for teacher in work.teachers)
    count = microbatches(work.student) if runs_before_student else 1
    return count * (1 + len(work.kd.layer_pairs)) * sum(_residual(teacher) for teacher in teachers)


def _gathered(student: Namespace, teachers: Sequence[Namespace]) -> float:
    """Hidden states of all tokens, which the loss gathers under sequence parallelism, and the gradient of them."""
    size = student.tensor_model_parallel_size
    if not student.sequence_parallel or size == 1:
        return 0.0
    return size * (2 * _residual(student) + sum(map(_residual, teachers)))


def _forward_bytes(teacher: Namespace, stage: int, on_gpu: bool) -> float:
    """Most bytes of a teacher's layer at work; it keeps nothing."""
    layers = [layer for chunk in chunks_of_stage(teacher, stage) for layer in chunk]
    return max((layer_bytes(teacher, layer, on_gpu).forward for layer in layers), default=0.0)


def _embedding_gradient(args: Namespace, stage: int) -> float:
    """Of the first stage's embedding, before it is added to the gradient buffer; the activations are gone by then."""
    return shard_of(args) * args.hidden_size * args.params_dtype.itemsize if stage == 0 else 0.0
