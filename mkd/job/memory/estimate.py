"""Memory estimate of each pipeline stage: parts that are always held, and parts of each phase of a step.

The phases are teacher forward, loss, student backward, and the embedding gradient at the end of the backward pass;
before them, where there are such, writing of texts and export of weights. The peak of a stage is `held` plus the
largest phase. Each part is counted in one place:

- WEIGHTS, GRADIENTS, OPTIMIZER, WORKSPACES, MAPS, GRAPH, and TEACHER without --kd-teacher-offload: in `held`; with
  --kd-rollout-offload, OPTIMIZER in every phase but the one in which the student writes;
- ACTIVATIONS: in the student's phases, for the microbatches in flight; with CUDA graphs of the student in `held`;
- STUDENT_GRAPHS: in `held`, inputs and temporary tensors of its layers;
- HIDDEN: the teacher's hidden states, on the last stage, in every phase;
- LOGITS: in the loss;
- KEYS: while the student writes texts, and freed before it learns from them;
- WORKING: temporary tensors of the layer or loss that runs, in every phase.
"""

import copy
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

from mkd.config.kd_config import KDConfig
from mkd.config.megatron.layouts import has_own_layout
from mkd.job.memory.activations import backward_working_bytes, kept_by_layers, layer_bytes, residual_bytes
from mkd.job.memory.logits import logit_bytes, shard_of
from mkd.job.memory.parameters import (
    adapters_of_stage,
    gradient_bytes,
    optimizer_bytes,
    outside_of_layers,
    parameters_of_stage,
)
from mkd.job.memory.rollout import RolloutMemory, exported_bytes
from mkd.job.memory.stage_layers import chunks_of_stage, in_flight, microbatches
from mkd.models.lora import Lora
from mkd.teacher.waiting_states import MOST_ON_DEVICE, ON_DEVICE

GIB = 2**30

WEIGHTS, GRADIENTS, OPTIMIZER = "student weights", "student gradients", "optimizer state"
ACTIVATIONS, TEACHER, HIDDEN = "activations", "teacher weights", "teacher hidden states"
LOGITS, MAPS, WORKING = "loss chunks (logits)", "maps between layers", "working memory"
WORKSPACES = "library workspaces"
KEYS, GRAPH, STUDENT_GRAPHS = "cached keys and values", "teacher CUDA graph", "student CUDA graphs"
WRITING = "writing"
"""The phase in which the student writes texts."""
PARTS = (
    *(WEIGHTS, GRADIENTS, OPTIMIZER, MAPS, ACTIVATIONS, STUDENT_GRAPHS, TEACHER, GRAPH, HIDDEN, LOGITS, KEYS, WORKING),
    WORKSPACES,
)
"""Parts in the order of the table."""

WORKSPACE_BYTES = int(0.1 * GIB)
"""cuBLAS and Transformer Engine, in torch's allocator: 0.08 to 0.12 GiB in the runs of docs/benchmarks.md, whose peaks
the estimate matches within 2% with this value."""
CONTEXT_BYTES = int(0.75 * GIB)
"""Allowance for CUDA's context and kernels, outside of torch's allocator."""
COMMUNICATOR_BYTES = int(0.125 * GIB)
"""Allowance for the buffers of one NCCL communicator."""
FRAGMENTED = 0.03
"""Allowance for fragmentation of torch's allocator, as a share of the peak."""


@dataclass(frozen=True)
class Workload:
    """The inputs of the estimate."""

    student: Namespace
    """Megatron's arguments of the job, validated."""
    teachers: Sequence[Namespace]
    """Megatron's arguments of the teachers; empty if no teacher model runs."""
    kd: KDConfig
    on_gpu: bool
    """True if the run will use GPUs."""
    lora: Lora | None = None
    """Adapters of a frozen student; None if all its weights are trained."""
    shares_teacher: bool = False
    """True if the frozen weights are the teacher's, in one copy."""
    served: Sequence[Namespace] = ()
    """Megatron's arguments of the student with the sizes of each teacher that a service computes. The student's last
    stage has its LM head and hidden states."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes on each rank of one pipeline stage."""

    stage: int
    held: dict[str, float]
    """Part -> bytes that are allocated from the first step to the last."""
    phases: dict[str, dict[str, float]]
    """Phase of a step -> part -> bytes in addition to `held`."""

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def peak_parts(self) -> dict[str, float]:
        """Part -> bytes at the peak; the sum is torch's peak of allocated memory."""
        return self.held | self.phases[self.peak_phase]

    @property
    def peak(self) -> float:
        return sum(self.peak_parts.values())

    def most(self, part: str) -> float:
        """Peak of one part, possibly in another phase than the total peak."""
        return max(part_of.get(part, 0.0) for part_of in (self.held, *self.phases.values()))


def estimate(work: Workload) -> list[StageMemory]:
    """Estimates of all pipeline stages, in order."""
    return [_stage(work, stage) for stage in range(work.student.pipeline_model_parallel_size)]


def offloaded_bytes(work: Workload) -> float:
    """Host memory of a rank for the optimizer's state while the student writes, on the pipeline stage with most of it;
    0 without --kd-rollout-offload."""
    return max(stage.most(OPTIMIZER) for stage in estimate(work)) if work.kd.rollout_offload else 0.0


def fullest(stages: Sequence[StageMemory]) -> StageMemory:
    """The stage with the highest peak, which decides if a run fits."""
    return max(stages, key=lambda stage: stage.peak)


def outside_of_torch(args: Namespace, peak: float, teachers: Sequence[Namespace] = ()) -> float:
    """Bytes on a GPU that torch does not count: an allowance, not a measurement.

    Args:
        args: Megatron's arguments of the job.
        peak: peak of the bytes that torch counts.
        teachers: Megatron's arguments of the teachers that run.
    """
    groups = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    groups = (*groups, "expert_model_parallel_size")
    communicators = sum(getattr(args, name) > 1 for name in (*groups, "data_parallel_size")) + (args.world_size > 1)
    for teacher in teachers:
        if has_own_layout(teacher, args):
            communicators += 1 + sum(getattr(teacher, name) > 1 for name in groups)  # 1: teacher to student
    return CONTEXT_BYTES + COMMUNICATOR_BYTES * communicators + FRAGMENTED * peak


def _stage(work: Workload, stage: int) -> StageMemory:
    # The loss reads teachers in the student's layout.
    teachers = [_with_student_values(teacher, work.student, LAYOUT) for teacher in (*work.teachers, *work.served)]
    held, phases = _held(work, stage, teachers), _phases(work, stage, teachers) | _rollout(work, stage)
    if work.kd.rollout_offload:
        state = held.pop(OPTIMIZER)
        for name, parts in phases.items():
            if name != WRITING:
                parts[OPTIMIZER] = state
    if work.student.cuda_graph_impl != "none" and work.on_gpu:
        backward = phases["student backward"]
        held[ACTIVATIONS] = backward[ACTIVATIONS]
        held[STUDENT_GRAPHS] = _graph_inputs(work.student, stage) + backward.pop(WORKING)
        for parts in phases.values():
            parts.pop(ACTIVATIONS, None)
    return StageMemory(stage, {name: value for name, value in held.items() if value}, phases)


def _is_last(student: Namespace, stage: int) -> bool:
    return stage == student.pipeline_model_parallel_size - 1


def _held(work: Workload, stage: int, teachers: Sequence[Namespace]) -> dict[str, float]:
    """Part -> bytes from the first step to the last; `teachers` as the loss reads them."""
    student, kd = work.student, work.kd
    trained = count = parameters_of_stage(student, stage)
    if work.lora is not None:
        trained = adapters_of_stage(work.lora, student, stage)
        count = count + trained
    held = {
        WEIGHTS: student.params_dtype.itemsize * count.total,
        GRADIENTS: gradient_bytes(student) * trained.total,
        OPTIMIZER: optimizer_bytes(student, trained),
        WORKSPACES: WORKSPACE_BYTES if work.on_gpu else 0,
    }
    if not kd.teacher_offload:
        held[TEACHER] = _weights_of_teachers(work, stage, teachers)
    if kd.teacher_cuda_graph and work.on_gpu:
        held[GRAPH] = sum(_graph_bytes(teacher, work, stage) for teacher in work.teachers)
    if _is_last(student, stage) and kd.layer_pairs and any(t.hidden_size != student.hidden_size for t in teachers):
        per_parameter = student.params_dtype.itemsize + gradient_bytes(student) + 12  # 12: Adam's state
        held[MAPS] = len(kd.layer_pairs) * student.hidden_size * teachers[0].hidden_size * per_parameter
    return held


def _weights_of_teachers(work: Workload, stage: int, teachers: Sequence[Namespace]) -> float:
    """Bytes of the weights of teachers that run here, and of the LM heads of those that a service computes."""
    weights = 0.0
    if not work.shares_teacher:
        weights = sum(_teacher_weights(teacher, work.student, stage) for teacher in work.teachers)
    served = teachers[len(work.teachers) :] if _is_last(work.student, stage) else ()
    return weights + sum(map(_lm_head_bytes, served))


def _phases(work: Workload, stage: int, teachers: Sequence[Namespace]) -> dict[str, dict[str, float]]:
    """Phase of a step -> part -> bytes; `teachers` as the loss reads them."""
    student, kd, is_last = work.student, work.kd, _is_last(work.student, stage)
    hidden = _hidden_bytes(work, teachers) if is_last else 0.0
    chunks = chunks_of_stage(student, stage)
    kept = [kept_by_layers(student, chunk, work.on_gpu) for chunk in chunks]
    alive = {ACTIVATIONS: in_flight(student, stage) * sum(kept) / len(kept), HIDDEN: hidden}
    if kd.teacher_offload:
        alive[TEACHER] = sum(map(_lm_head_bytes, teachers)) if is_last else 0
    if is_last:
        alive[ACTIVATIONS] += 2 * residual_bytes(student)  # input of the last norm, gradient of its output
    phases = {
        "student backward": {**alive, WORKING: backward_working_bytes(student, chunks[-1], work.on_gpu)},
    }
    if work.lora is None:
        phases["embedding gradient"] = {HIDDEN: hidden, WORKING: _embedding_gradient(student, stage)}
    if is_last:
        working = residual_bytes(student) + _gathered(student, teachers)  # residual: output of the last norm
        phases["loss"] = {**alive, LOGITS: logit_bytes(student, teachers, kd, work.on_gpu), WORKING: working}
    if work.teachers:
        working = max(_teacher_working_bytes(teacher, work, stage) for teacher in work.teachers)
        phases["teacher forward"] = {HIDDEN: hidden, WORKING: working}
        if kd.teacher_offload:
            phases["teacher forward"][TEACHER] = _weights_of_teachers(work, stage, teachers)
    return phases


def _rollout(work: Workload, stage: int) -> dict[str, dict[str, float]]:
    """The phases in which the student writes texts, or weights for servers that do, if there are such."""
    phases: dict[str, dict[str, float]] = {}
    if work.kd.rollout_url is not None:
        phases["export"] = {WORKING: exported_bytes(work.student)}
    memory = RolloutMemory.of(work.student, work.kd, stage, work.on_gpu)
    if memory is None:
        return phases
    share = memory.prompt_tokens / (work.student.seq_length * work.student.micro_batch_size)
    working = max(share * _forward_bytes(work.student, stage, work.on_gpu), memory.logits)
    return phases | {WRITING: {KEYS: memory.cache, WORKING: working}}


LAYOUT = ("tensor_model_parallel_size", "context_parallel_size", "sequence_parallel")
"""Arguments that determine how hidden states and LM heads are sharded in the loss."""


def _with_student_values(teacher: Namespace, student: Namespace, names: Sequence[str] = ()) -> Namespace:
    """A teacher's arguments with the student's batch size, world size and the arguments `names`."""
    teacher = copy.copy(teacher)
    for name in ("micro_batch_size", "world_size", *names):
        setattr(teacher, name, getattr(student, name))
    ranks = teacher.tensor_model_parallel_size * teacher.pipeline_model_parallel_size * teacher.context_parallel_size
    teacher.data_parallel_size = max(1, teacher.world_size // ranks)
    return teacher


def _teacher_stages(teacher: Namespace, student: Namespace, stage: int) -> range:
    """The teacher's pipeline stages on the ranks of one of the student's; a stage is a contiguous range of ranks."""
    own, students = teacher.pipeline_model_parallel_size, student.pipeline_model_parallel_size
    return range(stage * own // students, -(-(stage + 1) * own // students))


def _lm_head_bytes(teacher: Namespace) -> float:
    """Bytes of a rank's rows of a teacher's LM head."""
    return teacher.params_dtype.itemsize * shard_of(teacher) * teacher.hidden_size


def _teacher_weights(teacher: Namespace, student: Namespace, stage: int) -> float:
    """Bytes of a teacher's weights on the fullest rank of one of the student's stages."""
    own = _with_student_values(teacher, student)
    sizes = []
    for number in _teacher_stages(own, student, stage):
        outside = outside_of_layers(own, number)
        in_layers = parameters_of_stage(own, number).total - outside
        size = in_layers * (1 if own.fp8 else own.params_dtype.itemsize) + outside * own.params_dtype.itemsize
        is_last = number == own.pipeline_model_parallel_size - 1
        if has_own_layout(own, student) and is_last and (number > 0 or own.untie_embeddings_and_output_weights):
            size -= _lm_head_bytes(own)  # it is held on the student's last stage
        sizes.append(size)
    moved = has_own_layout(own, student) and stage == student.pipeline_model_parallel_size - 1
    return max(sizes) + (_lm_head_bytes(_with_student_values(teacher, student, LAYOUT)) if moved else 0.0)


def _joined(teacher: Namespace, work: Workload) -> Namespace:
    """A teacher's arguments with the rows of one of its forward passes as the size of a microbatch."""
    student, own = work.student, _with_student_values(teacher, work.student)
    of_replica = -(-microbatches(student) * student.data_parallel_size // own.data_parallel_size)
    own.micro_batch_size *= min(joined_microbatches(student, work.kd), of_replica)
    return own


def _graph_bytes(teacher: Namespace, work: Workload, stage: int) -> float:
    """The private memory of a teacher's CUDA graph: temporary tensors and output of one forward pass."""
    joined = _joined(teacher, work)
    stages = _teacher_stages(joined, work.student, stage)
    return max(_forward_bytes(joined, number, work.on_gpu) for number in stages) + residual_bytes(joined)


def _graph_inputs(student: Namespace, stage: int) -> float:
    """Inputs of the student's layers that their CUDA graphs hold beside the activations: hidden states, and a causal
    mask of a byte per pair of positions (megatron-core 0.19, `TransformerLayer.get_layer_static_inputs`)."""
    mask = student.micro_batch_size * student.seq_length**2 / student.context_parallel_size
    chunks = chunks_of_stage(student, stage)
    layers = sum(len(chunk) for chunk in chunks) / len(chunks)
    return in_flight(student, stage) * layers * (mask + residual_bytes(student))


def _teacher_working_bytes(teacher: Namespace, work: Workload, stage: int) -> float:
    """Working memory of a teacher's forward pass on the fullest rank of one of the student's stages.

    A teacher in a layout of its own also holds its hidden states before they are sent: of one pass, or of all
    microbatches if it has pipeline stages.
    """
    student, on_gpu = work.student, work.on_gpu
    own, joined = _with_student_values(teacher, student), _joined(teacher, work)
    of_replica = -(-microbatches(student) * student.data_parallel_size // own.data_parallel_size)
    together = joined.micro_batch_size // own.micro_batch_size
    layers = max(_forward_bytes(joined, number, on_gpu) for number in _teacher_stages(own, student, stage))
    if together > 1:
        layers += residual_bytes(joined)  # the output of the pass, while it is divided into microbatches
    if not has_own_layout(own, student):
        return layers
    kept = together
    if own.pipeline_model_parallel_size > 1:
        kept = min(of_replica, ON_DEVICE) if waits_on_host(work.kd, of_replica, on_gpu) else of_replica
    return layers + kept * residual_bytes(own) + residual_bytes(_with_student_values(teacher, student, LAYOUT))


def _hidden_bytes(work: Workload, teachers: Sequence[Namespace]) -> float:
    """The teachers' hidden states: of one forward pass, or of all microbatches of a step if the teacher runs before the
    student (mkd/train/schedule.py), unless they wait in host memory. Those of paired layers stay on the device."""
    student, kd, count = work.student, work.kd, microbatches(work.student)
    runs_before_student = student.pipeline_model_parallel_size > 1 or kd.teacher_offload
    runs_before_student = runs_before_student or any(has_own_layout(teacher, student) for teacher in work.teachers)
    states = of_layers = count if runs_before_student else min(joined_microbatches(student, kd), count)
    sizes, running, more = list(map(residual_bytes, teachers)), len(work.teachers), 0.0
    if runs_before_student and waits_on_host(kd, count, work.on_gpu):
        states = min(count, ON_DEVICE + _between_virtual_stages(student))
        if running > 1 and states < count:
            more = max(sizes[:running])  # one teacher's next states arrive while the others' last ones are used
    served = min(count, 1 + _between_virtual_stages(student))
    if count > 1:  # the rank that receives answers copies the next ones to the device beside the computation
        more += sum(map(_answer_bytes, teachers[running:]))
    return more + (states + len(kd.layer_pairs) * of_layers) * sum(sizes[:running]) + served * sum(sizes[running:])


def _answer_bytes(teacher: Namespace) -> float:
    """Hidden states of whole rows of a microbatch."""
    shards = teacher.tensor_model_parallel_size if teacher.sequence_parallel else 1
    return residual_bytes(teacher) * shards * teacher.context_parallel_size


def waits_on_host(kd: KDConfig, microbatches: int, on_gpu: bool) -> bool:
    """True if hidden states of `microbatches` microbatches wait for the student in host memory."""
    if kd.teacher_signals == "auto":
        return on_gpu and microbatches > MOST_ON_DEVICE
    return kd.teacher_signals == "host"


def _between_virtual_stages(student: Namespace) -> int:
    """Microbatches between the first and the last virtual stage of a rank, whose inputs exist; 0 without them."""
    if student.virtual_pipeline_model_parallel_size is None:
        return 0
    return student.microbatch_group_size_per_vp_stage or student.pipeline_model_parallel_size


def joined_microbatches(student: Namespace, kd: KDConfig) -> int:
    """Microbatches that one forward pass of a teacher has at most."""
    return max(1, (kd.teacher_micro_batch_size or 1) // student.micro_batch_size)


def _gathered(student: Namespace, teachers: Sequence[Namespace]) -> float:
    """Hidden states that the loss gathers under sequence parallelism, and their gradients."""
    size = student.tensor_model_parallel_size
    if not student.sequence_parallel or size == 1:
        return 0.0
    return size * (2 * residual_bytes(student) + sum(map(residual_bytes, teachers)))


def _forward_bytes(teacher: Namespace, stage: int, on_gpu: bool) -> float:
    """Peak of a forward pass through one pipeline stage without gradients."""
    layers = [layer for chunk in chunks_of_stage(teacher, stage) for layer in chunk]
    return max((layer_bytes(teacher, layer, on_gpu).forward for layer in layers), default=0.0)


def _embedding_gradient(args: Namespace, stage: int) -> float:
    """The first stage's embedding gradient before it is added to the gradient buffer; no activations are left then."""
    return shard_of(args) * args.hidden_size * args.params_dtype.itemsize if stage == 0 else 0.0
