"""One distillation step of small models in any parallel layout, its losses and the gradient of every parameter.

For workers of the pool. Weights are made from the names of the tensors and gradients are gathered by their place in the
whole tensor, both read from megatron's own sharded state dictionaries, so nothing here knows how a layout cuts a model.
"""

import hashlib
import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
from megatron.core import parallel_state as ps
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.utils import get_model_config, unwrap_model
from megatron.training.models import GPTModelBuilder
from torch import Tensor, nn

from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.hf.load import load_hf_weights
from mkd.compat.experts import (
    add_router_biases_in_fp32,
    balance_experts_over_unequal_ranks,
    train_biased_experts_on_whole_ranks,
)
from mkd.config.flags import default_arguments
from mkd.config.kd_config import KDConfig
from mkd.config.megatron.layouts import length_multiple
from mkd.config.values import HiddenLossType, ServedTargets, SignalsMemory, XTokenLoss
from mkd.cpu.flags import set_cpu_values
from mkd.distributed.groups import Groups, ParallelLayout, ParallelSizes
from mkd.job.teachers.cached import CachedTeacherSpec, open_cache
from mkd.job.teachers.inference import InferenceSource, InferenceTeacherSpec
from mkd.job.teachers.inference_states import StatesSource, StatesTeacherSpec
from mkd.job.teachers.served import ServedSource, ServedTeacherSpec
from mkd.losses import LossOptions
from mkd.models.gpt import gpt_config
from mkd.rollout.on_policy import OnPolicy
from mkd.teacher.cache.teacher import CachedTeacher
from mkd.teacher.ensemble import TeacherEnsemble
from mkd.teacher.forward_pass import PassSize
from mkd.teacher.inference.states_teacher import StatesTeacher
from mkd.teacher.inference.teacher import InferenceTeacher
from mkd.teacher.online import ForwardOptions, OnlineTeacher
from mkd.teacher.resharded.teacher import ReshardedTeacher
from mkd.teacher.service.client import ServedTeacher
from mkd.train.cross_tokenizer import CrossTokenizer
from mkd.train.hidden_layers import HiddenLayers
from mkd.train.objective import LossContext
from mkd.train.schedule import TeacherThenStudent
from mkd.train.step import ForwardStep
from tests.support.dist import kd_pairs
from tests.support.dist.kd_samples import ROW, VOCAB, DataName, MaskName, microbatches

PADDED = 96

STUDENT = dict(num_layers=4, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, num_query_groups=2)
TEACHER = dict(
    num_layers=8,
    hidden_size=48,
    ffn_hidden_size=64,
    num_attention_heads=8,
    num_query_groups=4,
    kv_channels=8,
    rotary_base=50000,
    layernorm_epsilon=1e-6,
)
MOE = dict(num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=24, moe_router_load_balancing_type="none")

# With everything by which a router in training changes itself or the metrics.
MOE_TEACHER = dict(
    num_experts=2,
    moe_router_topk=1,
    moe_ffn_hidden_size=40,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_load_balancing_type="seq_aux_loss",
    moe_aux_loss_coeff=0.5,
)


@dataclass(frozen=True)
class Layout:
    """Parallel sizes; what is left of the ranks is data parallel."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    vp: int = 1
    last: int | None = None
    """Layers of the student's last pipeline stage; None if all stages have equally many. Those of the teacher do."""
    ep: int = 1
    etp: int | None = None
    """Expert-tensor-parallel size; None is `tp`."""
    sp: bool = False
    mbs: int = 2
    variable: bool = False
    """Microbatches are trimmed to their longest text, as with --kd-variable-seq-lengths."""
    dist_opt: bool = False
    """True to shard the optimizer's state over the data-parallel ranks."""
    teacher: "Layout | None" = None
    """Layout of the teacher; None if it is the student's."""

    @property
    def segment_cp(self) -> int:
        """The larger context-parallel size of both models, for which packed segments must be long enough."""
        return self.cp if self.teacher is None else max(self.cp, self.teacher.cp)


@dataclass(frozen=True)
class Models:
    """Models, data and loss of a step."""

    moe: bool = False
    tied: bool = True
    teacher_is_student: bool = False
    ratio: float = 0.3
    temperature: float = 2.0
    offload: bool = False
    hidden_loss: str | None = None
    """Pairs of layers, as in --kd-hidden-loss."""
    hidden_loss_type: HiddenLossType = "mse"
    same_width: bool = False
    """True if the teacher is as wide as the student."""
    recompute: bool = False
    """True to recompute the student's activations in the backward pass."""
    loss_scale: float = 1.0
    top_k: int | None = None
    xtoken: XTokenLoss | None = None
    """Loss from a teacher with another tokenizer; the data must be pairs."""
    mixed: bool = False
    """True to add a teacher with the student's tokenizer."""
    select: bool = False
    """True if each text has one teacher: one of the two of `mixed`, or of two with the student's tokenizer."""
    both: bool = False
    """True if every text has two teachers, both with the student's tokenizer."""
    cache: str | None = None
    """Teacher cache that replaces the online teacher."""
    cache_missing: Literal["error", "ce_only"] = "error"
    served: tuple[str, ...] = ()
    """Addresses of services that replace the online teacher."""
    ahead: int = 2
    """Steps that requests to services run ahead."""
    targets: ServedTargets = "hidden_states"
    """Answers of services."""
    answer_s: float = 60.0
    """Seconds without an answer of a service that are an error."""
    states: str = ""
    """Folder to which the servers in `served` write hidden states; empty for top-k targets."""
    folder: str = ""
    """Hugging Face folder with the weights of the teacher; empty for those of `salt`."""
    salt: str = "teacher"
    """Seed of the weights of a teacher with the student's tokenizer."""
    teacher_moe: bool = False
    teacher_experts: int = MOE_TEACHER["num_experts"]
    teacher_layers: int = TEACHER["num_layers"]
    teacher_rows: int | None = None
    """Rows of a forward pass of the teacher, as in --kd-teacher-micro-batch-size."""
    signals: SignalsMemory = "auto"
    """Memory in which hidden states wait, as in --kd-teacher-signals."""
    aux_loss: float = 0.0
    """Coefficient of the student's load-balancing losses."""
    balancing: tuple[str, ...] = ("seq_aux_loss",)
    """The load-balancing losses that the coefficient belongs to."""
    biases: bool = False
    """The student's linear layers have biases, experts too."""
    router_z_loss: float | None = None
    """Coefficient of the z-loss of the student's routers."""
    masks: MaskName = "same"
    data: DataName = "text"
    """Name of the samples; see `tests.support.dist.kd_samples`."""

    @property
    def teacher(self) -> dict[str, Any]:
        """Sizes of the teacher."""
        if self.teacher_is_student:
            return self.student
        teacher = TEACHER | {"num_layers": self.teacher_layers}
        if self.teacher_moe:
            return teacher | MOE_TEACHER | {"num_experts": self.teacher_experts}
        return teacher | {"hidden_size": STUDENT["hidden_size"]} if self.same_width else teacher

    @property
    def student(self) -> dict[str, Any]:
        """Sizes of the student, and what it recomputes."""
        recomputed = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
        balanced: dict[str, Any] = dict(
            moe_router_load_balancing_type=list(self.balancing),
            moe_aux_loss_coeff=[self.aux_loss] * len(self.balancing),
        )
        if len(self.balancing) == 1:
            balanced = {name: value[0] for name, value in balanced.items()}
        sizes = STUDENT | (MOE if self.moe else {}) | (balanced if self.aux_loss else {})
        if self.biases:
            sizes |= dict(add_bias_linear=True, bias_swiglu_fusion=False)
        if self.router_z_loss is not None:
            sizes |= dict(moe_z_loss_coeff=self.router_z_loss)
        return sizes | (recomputed if self.recompute else {})

    @property
    def kd(self) -> KDConfig:
        return KDConfig(
            teacher_hf=None if self.cache or self.served else ["T"],
            teacher_cache=self.cache,
            **(
                dict(
                    teacher_url=list(self.served),
                    teacher_ahead=self.ahead,
                    teacher_timeout=self.answer_s,
                    teacher_targets=self.targets,
                    teacher_samples=20 if self.targets == "sampled" else None,
                    teacher_states_dir=self.states or None,
                    teacher_head_hf=self.folder if self.states else None,
                )
                if self.served
                else {}
            ),
            cache_missing=self.cache_missing,
            top_k=self.top_k,
            ratio=self.ratio,
            temperature=self.temperature,
            teacher_offload=self.offload,
            teacher_micro_batch_size=self.teacher_rows,
            hidden_loss=self.hidden_loss,
            hidden_loss_type=self.hidden_loss_type,
            hidden_loss_weight=2.5 if self.hidden_loss else 1.0,
        )


@cache
def _default_arguments() -> Namespace:
    """Building megatron's parser takes longer than a step of these models."""
    return default_arguments()


def model_arguments(
    sizes: dict[str, Any], layout: Layout, tied: bool, vocab: int = VOCAB, padded: int = PADDED
) -> Namespace:
    """Megatron arguments of a Llama-like model in fp32 without dropout."""
    args = copy(_default_arguments())
    values = dict(
        group_query_attention=True,
        swiglu=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        position_embedding_type="rope",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        max_position_embeddings=64,
        seq_length=ROW,
        vocab_size=vocab,
        padded_vocab_size=padded,
        untie_embeddings_and_output_weights=not tied,
        params_dtype=torch.float32,
        calculate_per_token_loss=True,
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.sp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        virtual_pipeline_model_parallel_size=layout.vp if layout.vp > 1 else None,
        decoder_last_pipeline_num_layers=layout.last,
        overlap_p2p_comm=layout.vp > 1,
        variable_seq_lengths=layout.variable,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp or layout.tp,
        moe_token_dispatcher_type="alltoall",
    )
    values |= sizes
    for name, value in values.items():
        setattr(args, name, value)
    set_cpu_values(args)
    return args


def sharded_tensors(model: nn.Module) -> Iterator[ShardedTensor]:
    """The model's tensors as checkpoints see them; `data` shares memory with the parameters."""
    state = model.sharded_state_dict()
    apply_factories(state)
    yield from (value for value in nested_values(state) if isinstance(value, ShardedTensor) and value.data is not None)


def _place(shard: ShardedTensor) -> tuple[slice, ...]:
    """The slice of the whole tensor that a shard holds."""
    shape = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
    return tuple(slice(offset, offset + size) for offset, size in zip(shard.global_offset, shape, strict=True))


@torch.no_grad()
def fill(chunks: list[nn.Module], salt: str) -> None:
    """Give every parameter the values that belong to its name, its place and `salt`."""
    for chunk in chunks:
        for shard in sharded_tensors(unwrap_model(chunk)):
            if not shard.data.is_floating_point():
                continue
            seed = int.from_bytes(hashlib.sha256((salt + shard.key).encode()).digest()[:4], "big")
            whole = torch.randn(shard.global_shape, generator=torch.Generator().manual_seed(seed))
            whole = 1.0 + 0.1 * whole if "norm" in shard.key else 0.15 * whole
            if "word_embeddings" in shard.key or "output_layer" in shard.key:
                whole[VOCAB:] = 0.0
            shard.data.copy_(whole[_place(shard)].view(shard.data.shape))


Part = tuple[str, tuple[int, ...], tuple[slice, ...], Tensor]
"""(name, whole shape, place in it, values) of a tensor that a rank has a part of."""


def parameter_parts(chunks: list[nn.Module]) -> list[Part]:
    """A copy of every parameter on this rank."""
    return [
        (shard.key, tuple(shard.global_shape), _place(shard), shard.data.detach().clone())
        for chunk in chunks
        for shard in sharded_tensors(unwrap_model(chunk))
        if shard.data.is_floating_point()
    ]


def gradients(chunks: list[nn.Module]) -> list[Part]:
    """The gradient of every parameter on this rank."""
    values = [(p, p.data) for chunk in chunks for p in unwrap_model(chunk).parameters()]
    for parameter, _ in values:
        parameter.data = parameter.main_grad
    found = parameter_parts(chunks)
    for parameter, value in values:
        parameter.data = value
    return found


def kd_step(
    rank: int, world_size: int, layout: Layout, models: Models, on_policy: OnPolicy | None = None
) -> dict[str, Any]:
    """One forward and backward pass over the whole global batch.

    Returns:
        reports (on the last stage of tensor rank 0: name -> [sum, count] over this rank's microbatches) and gradients.
    """
    with parallel_state(layout):
        return _kd_step(layout, models, on_policy)


@contextmanager
def parallel_state(layout: Layout) -> Iterator[None]:
    """Megatron's groups and random states of a layout."""
    ps.initialize_model_parallel(
        layout.tp,
        layout.pp,
        virtual_pipeline_model_parallel_size=layout.vp if layout.vp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp or layout.tp,
    )
    model_parallel_cuda_manual_seed(1)
    balance_experts_over_unequal_ranks()
    train_biased_experts_on_whole_ranks()
    add_router_biases_in_fp32()
    try:
        yield
    finally:
        ps.destroy_model_parallel()


def _kd_step(layout: Layout, models: Models, on_policy: OnPolicy | None) -> dict[str, Any]:
    groups = Groups.from_megatron()
    kd, teacher = models.kd, build_teacher(layout, models, groups)
    hidden_layers = None
    if kd.layer_pairs:
        recorder = teacher.record_layers({pair.teacher for pair in kd.layer_pairs})
        settings = (kd.layer_pairs, kd.hidden_loss_type, kd.hidden_loss_weight)
        hidden_layers = HiddenLayers(*settings, groups, recorder, seed=1)
    chunks = build_student(layout, models, groups, [hidden_layers.attach] if hidden_layers else [])
    multiple = None
    if layout.variable:
        layouts = [layout] if layout.teacher is None else [layout, layout.teacher]
        multiple = math.lcm(*(length_multiple(model_arguments(models.student, one, models.tied)) for one in layouts))
    schedule = TeacherThenStudent(kd, groups, teacher, VOCAB, lambda: 0, hidden_layers, multiple, on_policy=on_policy)
    run = schedule.around(get_forward_backward_func(pp_size=layout.pp, vp_size=layout.vp if layout.vp > 1 else None))
    batches = microbatches(models.data, layout.segment_cp, layout.mbs, groups.dp.rank(), groups.dp.size(), models.masks)
    iterator = iter(batches)
    context = LossContext(
        groups,
        VOCAB,
        LossOptions(chunk_rows=5),
        top_k=models.top_k,
        byte_lengths=kd_pairs.byte_lengths()[0] if models.select and models.xtoken else None,
        cross=cross_settings(models, groups),
    )
    reports = run(
        forward_step_func=ForwardStep(context),
        data_iterator=[iterator] + [None] * (layout.vp - 1) if layout.vp > 1 else iterator,
        model=chunks,
        num_microbatches=len(batches),
        seq_length=ROW,
        micro_batch_size=layout.mbs,
        forward_only=False,
    )
    sums: dict[str, Tensor] = {}
    if groups.is_last_stage and groups.tp.rank() == 0:
        sums = {name: sum(report[name].double() for report in reports) for name in reports[0]}
    return {"reports": sums, "gradients": gradients(chunks)}


def build_teacher(
    layout: Layout, models: Models, groups: Groups
) -> OnlineTeacher | CachedTeacher | ServedTeacher | InferenceTeacher | StatesTeacher | TeacherEnsemble:
    """The teacher on this rank."""
    if models.served and models.served[0].startswith("http"):
        kd, args = models.kd, model_arguments(models.student, layout, models.tied)
        if models.states:
            return StatesTeacherSpec.of(StatesSource.find(kd, waits=True), args, kd, VOCAB).build(groups)
        source = InferenceSource.find(kd, waits=True)
        args.data_cache_path = "data"  # kept answers go elsewhere
        return InferenceTeacherSpec.of(source, args, kd, VOCAB).build(groups)
    if models.cache is not None:
        source = open_cache(models.cache, "--kd-teacher-cache")
        return CachedTeacherSpec(source, models.kd, row_length=ROW).build(groups)
    if models.served:
        return _served_teacher(layout, models, groups)
    if models.xtoken is None:
        if models.both:
            each = [build_teacher(layout, replace(models, both=False, salt=salt), groups) for salt in "AB"]
            return TeacherEnsemble(tuple(each), (0.4, 0.6))
        if models.select:
            each = [build_teacher(layout, replace(models, select=False, salt=salt), groups) for salt in "AB"]
            return TeacherEnsemble(tuple(each), (1.0, 1.0), selecting=True)
        tied = models.teacher_is_student and models.tied
        return build_model_teacher(
            layout, models, groups, tied=tied, salt="student" if models.teacher_is_student else models.salt
        )
    vocabulary = cross_settings(models, groups)[0].vocabulary
    other = build_model_teacher(
        layout,
        models,
        groups,
        tied=models.tied,
        vocab=(kd_pairs.TEACHER_VOCAB, kd_pairs.TEACHER_PADDED),
        view=0,
        head_columns=vocabulary.teacher_columns,
    )
    if not models.mixed:
        return other
    same = build_teacher(layout, replace(models, xtoken=None, select=False), groups)
    if models.select:
        return TeacherEnsemble((same, other), (1.0, 1.0), selecting=True)
    return TeacherEnsemble((same, other), (0.4, 1.5))


def _served_teacher(layout: Layout, models: Models, groups: Groups) -> ServedTeacher | TeacherEnsemble:
    """The teachers behind `Models.served`; the last one has another tokenizer if there is one."""
    sizes = dict(padded_vocab_size=PADDED, micro_batch_size=layout.mbs, seq_length=ROW)
    kd, args = models.kd, Namespace(sequence_parallel=layout.sp, **sizes)
    sources = ServedSource.find_each(kd.teacher_url, 60.0)
    specs = [ServedTeacherSpec.of(source, args, kd, VOCAB) for source in sources]
    if models.xtoken is not None:
        cross = SimpleNamespace(
            view_of=lambda _: 0,
            vocabulary=lambda *_: cross_settings(models, groups)[0].vocabulary,
            own_tokens=lambda _: (kd_pairs.TEACHER_VOCAB, ROW),
        )
        specs[-1] = replace(specs[-1], cross=cross)
    teachers = tuple(spec.build(groups) for spec in specs)
    if len(teachers) == 1:
        return teachers[0]
    weights = (1.0, 1.0) if models.select else (0.4, 0.6) if models.both else (0.4, 1.5)
    return TeacherEnsemble(teachers, weights, selecting=models.select)


def build_model_teacher(
    layout: Layout,
    models: Models,
    groups: Groups,
    *,
    tied: bool,
    salt: str = "teacher",
    vocab: tuple[int, int] = (VOCAB, PADDED),
    head_columns: Tensor | None = None,
    **options: Any,
) -> OnlineTeacher:
    """One that runs, in the student's layout or in its own.

    Args:
        layout, models, groups: of the run.
        tied: whether its LM head is its embedding.
        salt: of its weights.
        vocab: its tokens, and rows of its embedding.
        head_columns, options: of an `OnlineTeacher`.
    """
    sizes = models.teacher
    own = layout if layout.teacher is None else replace(layout.teacher, variable=layout.variable)
    own = replace(own, vp=1, last=None, ep=own.ep if "num_experts" in sizes else 1)
    config = gpt_config(model_arguments(sizes, own, tied, *vocab))
    load = partial(fill, salt=salt)
    if models.folder:
        load = partial(load_hf_weights, folder=HFFolder(models.folder, "folder"))
    options |= dict(load_weights=load, fingerprint="", offload=models.offload)
    size = None if models.teacher_rows is None else PassSize(models.teacher_rows, ROW)
    options["options"] = ForwardOptions(size, memory=models.signals)
    if layout.teacher is None:
        return OnlineTeacher.build(config, groups, head_columns=head_columns, **options)
    if head_columns is None:
        head_columns = torch.arange(PADDED).chunk(layout.tp)[groups.tp.rank()]
    return ReshardedTeacher.build_in(
        ParallelLayout.create(ParallelSizes(own.tp, own.pp, own.cp, own.ep, own.etp or own.tp)),
        config,
        groups,
        head_columns=head_columns,
        student_sequence_parallel=layout.sp,
        **options,
    )


def cross_settings(models: Models, groups: Groups) -> tuple[CrossTokenizer, ...]:
    """The options of the teacher with another tokenizer; empty without one."""
    if models.xtoken is None:
        return ()
    size = groups.tp.size()
    vocabulary = kd_pairs.vocabulary(models.xtoken, PADDED // size, groups.tp.rank(), size)
    return (CrossTokenizer(vocabulary, kd_pairs.byte_lengths()[1] if models.select else None),)


def build_student(layout: Layout, models: Models, groups: Groups, hooks: Sequence[Callable] = ()) -> list[nn.Module]:
    """The student's chunks on this rank, in megatron's data-parallel wrapper, ready for a backward pass."""
    config = gpt_config(model_arguments(models.student, layout, models.tied))
    config.pre_wrap_hooks += hooks
    chunks = GPTModelBuilder(config).build_distributed_models(
        pg_collection=groups.collection,
        ddp_config=DistributedDataParallelConfig(use_distributed_optimizer=layout.dist_opt),
        data_parallel_random_init=False,
    )
    fill(chunks, "student")
    for chunk in chunks:
        chunk.zero_grad_buffer()
        get_model_config(chunk).finalize_model_grads_func = finalize_model_grads
        if models.loss_scale != 1.0:
            get_model_config(chunk).grad_scale_func = lambda loss: models.loss_scale * loss
    return chunks
