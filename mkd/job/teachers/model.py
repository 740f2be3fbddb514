"""The teacher of a job before it is built: its source fitted to the flags. See mkd.teacher.interface for the chain."""

from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from megatron.training.models import GPTModelConfig

from mkd.checkpoint.source import EnsembleSource, ModelSource, TeacherSource
from mkd.config.check_list import Sink
from mkd.config.kd_config import KDConfig
from mkd.config.megatron.checks.parallel_sizes import has_even_stages
from mkd.config.megatron.checks.teachers import (
    check_teacher_divides,
    check_teacher_graph,
    check_teacher_layout,
    check_teacher_passes,
)
from mkd.config.megatron.fp8_teacher import check_fp8_teacher
from mkd.config.megatron.layouts import has_own_layout, teacher_layout_args
from mkd.config.megatron.teacher_args import teacher_arguments
from mkd.distributed.groups import Groups, ParallelLayout, ParallelSizes
from mkd.errors import MkdConfigError
from mkd.job.cross_tokenizer import CrossTokenizers
from mkd.job.teachers.cached import CachedTeacherSpec, open_cache
from mkd.job.teachers.common import WITHOUT_WAITING_S, top_k_description
from mkd.job.teachers.inference import InferenceSource, InferenceTeacherSpec
from mkd.job.teachers.inference_states import StatesSource, StatesTeacherSpec
from mkd.job.teachers.served import ServedSource, ServedTeacherSpec
from mkd.models.gpt import gpt_config, logit_scale
from mkd.teacher.cache.store import TeacherStore
from mkd.teacher.ensemble import AveragedTeachers, TeacherEnsemble
from mkd.teacher.forward_pass import PassSize
from mkd.teacher.interface import Teacher
from mkd.teacher.online import ForwardOptions, OnlineTeacher
from mkd.teacher.resharded.teacher import ReshardedTeacher


class TeacherSpec(Protocol):
    """A teacher that fits the job; nothing of it is in memory yet."""

    source: TeacherSource

    @property
    def models(self) -> list[Namespace]:
        """Megatron's arguments of each teacher model that runs; empty for a cache."""
        ...

    @property
    def served(self) -> list[Namespace]:
        """See `Workload.served`."""
        ...

    @property
    def sources(self) -> list[TeacherSource]:
        """One source per teacher whose metrics are reported separately."""
        ...

    @property
    def target_description(self) -> str:
        """Teacher tokens that the divergence covers, for the run summary; empty for the whole vocabulary."""
        ...

    def build(self, groups: Groups) -> Teacher:
        """The teacher on this rank. Collective over all ranks."""
        ...


def teacher_source(kd: KDConfig, *, waits: bool = True) -> TeacherSource:
    """Open the folder of --kd-teacher-hf, --kd-teacher-load or --kd-teacher-cache, or find that of --kd-teacher-url.

    Args:
        kd: the flags.
        waits: wait for a service that does not answer yet.

    Raises:
        MkdError: it is missing, incomplete, or of another kind than the flag names.
    """
    if kd.teacher_hf is not None:
        sources = tuple(ModelSource.from_hf(folder, "--kd-teacher-hf") for folder in kd.teacher_hf)
        return sources[0] if len(sources) == 1 else EnsembleSource(sources)
    if kd.teacher_load is not None:
        return ModelSource.from_megatron(kd.teacher_load, "--kd-teacher-load")
    if kd.uses_states_of_server:
        return StatesSource.find(kd, waits=waits)
    if kd.uses_inference_server:
        return InferenceSource.find(kd, waits=waits)
    if kd.teacher_url is not None:
        return ServedSource.of_job(kd, kd.teacher_timeout if waits else WITHOUT_WAITING_S)
    return open_cache(kd.teacher_cache, "--kd-teacher-cache")


def teacher_spec(
    source: TeacherSource,
    args: Namespace,
    kd: KDConfig,
    true_vocab: int,
    fingerprint: str | None,
    cross: CrossTokenizers | None = None,
) -> TeacherSpec:
    """Fit a teacher to the job.

    Args:
        source: the teacher's folder.
        args: Megatron's arguments of the student, complete.
        kd: the distillation flags.
        true_vocab: tokens that student and teacher share.
        fingerprint: fingerprint of the teacher's folder; None if the teacher never runs.
        cross: the teachers with other tokenizers, if there are any; this one may be among them.

    Raises:
        MkdError: the teacher does not fit the job.
    """
    if isinstance(source, TeacherStore):
        return CachedTeacherSpec.of(source, args, kd, true_vocab)
    if isinstance(source, StatesSource):
        return StatesTeacherSpec.of(source, args, kd, true_vocab)
    if isinstance(source, InferenceSource):
        return InferenceTeacherSpec.of(source, args, kd, true_vocab)
    if isinstance(source, ServedSource):
        return ServedTeacherSpec.of(source, args, kd, true_vocab, cross)
    if isinstance(source, EnsembleSource):
        return EnsembleTeacherSpec.of(source, args, kd, true_vocab, cross)
    return ModelTeacherSpec.of(source, args, kd, true_vocab, fingerprint, cross)


def check_teacher_fits(source: TeacherSource, args: Namespace, kd: KDConfig, sink: Sink = nullcontext) -> None:
    """Refuse a layout of the teachers that does not fit the ranks, the rows or a teacher; nothing for a cache or a
    service.

    Args:
        source: the teacher, or several.
        args: Megatron's arguments of the student, in its layout.
        kd: the distillation flags.
        sink: context around the checks of each teacher.

    Raises:
        MkdConfigError: names the flag, its value and what it does not fit.
    """
    sources = source.sources if isinstance(source, EnsembleSource) else (source,)
    if isinstance(sources[0], TeacherStore | ServedSource | InferenceSource | StatesSource):
        return
    _check_experts(source, sources, kd)
    for one in sources:
        experts = one.architecture.get("num_experts")
        with sink():
            check_teacher_layout(args, kd, experts)
        with sink():
            check_teacher_divides(one.architecture, teacher_layout_args(args, kd.teacher_sizes, experts), args)


def _check_experts(source: TeacherSource, sources: Sequence[TeacherSource], kd: KDConfig) -> None:
    """Refuse --kd-teacher-expert-* sizes if no teacher has experts."""
    for name, size in kd.teacher_sizes.items():
        if name.startswith("expert") and all(one.architecture.get("num_experts") is None for one in sources):
            raise MkdConfigError(
                f"--kd-teacher-{name.replace('_', '-')} is {size}, but {source.origin} has no experts: leave it out"
            )


@dataclass(frozen=True)
class ModelTeacherSpec:
    """A model that runs beside the student."""

    source: ModelSource
    args: Namespace
    """Megatron's arguments of the teacher."""
    config: GPTModelConfig
    kd: KDConfig
    true_vocab: int
    stored_fingerprint: str | None
    """Fingerprint of its folder; None if the model never runs."""
    cross: CrossTokenizers | None
    """None if the teacher has the student's tokenizer."""
    job_args: Namespace
    """Megatron's arguments of the student."""

    @classmethod
    def of(
        cls,
        source: ModelSource,
        args: Namespace,
        kd: KDConfig,
        true_vocab: int,
        fingerprint: str | None,
        cross: CrossTokenizers | None = None,
    ) -> "ModelTeacherSpec":
        """See `teacher_spec`."""
        own_tokens = None if cross is None else cross.own_tokens(source)
        if own_tokens is None:
            cross = None
        check_teacher_layout(args, kd, source.architecture.get("num_experts"))
        own = teacher_arguments(
            source.architecture, args, kd.teacher_dtype, own_tokens, kd.teacher_sizes, is_packed=kd.packing != "none"
        )
        if kd.teacher_dtype == "fp8":
            check_fp8_teacher(own, args.micro_batch_size, kd)
        check_teacher_passes(own, args, kd)
        check_teacher_graph(own, kd)
        config = gpt_config(own)
        config.transformer.variable_seq_lengths = kd.variable_seq_lengths  # megatron has no flag for it
        return cls(source, own, config, kd, true_vocab, fingerprint, cross, args)

    def __str__(self) -> str:
        return f"{shape_of(self.config)}, {self.dtype}, {self.source.path}"

    @property
    def logit_softcap(self) -> float | None:
        """Softcap of its logits; None without one."""
        return logit_scale(self.config.transformer).softcap

    @property
    def dtype(self) -> str:
        """Name of the dtype of its layers."""
        return "float8" if self.config.transformer.fp8 else str(self.config.params_dtype).removeprefix("torch.")

    @property
    def sources(self) -> list[TeacherSource]:
        """See `TeacherSpec`."""
        return [self.source]

    @property
    def models(self) -> list[Namespace]:
        """See `TeacherSpec`."""
        return [self.args]

    @property
    def served(self) -> list[Namespace]:
        """See `TeacherSpec`."""
        return []

    @property
    def target_description(self) -> str:
        """See `TeacherSpec`."""
        return top_k_description(self.kd)

    def build(self, groups: Groups, layouts: dict[ParallelSizes, ParallelLayout] | None = None) -> OnlineTeacher:
        """See `TeacherSpec`.

        Args:
            groups: the student's layout.
            layouts: layouts of the other teachers of an ensemble; this one reuses or adds its own.
        """
        view = None if self.cross is None else self.cross.view_of(self.source)
        kept = self.true_vocab if view is None else self.source.vocab_size
        columns = None if view is None else self.cross.vocabulary(view, groups).teacher_columns
        common = dict(
            load_weights=lambda chunks: self.source.load(chunks, kept),
            fingerprint=self.stored_fingerprint,
            offload=self.kd.teacher_offload,
            view=view,
            options=self._forward_options,
        )
        if not has_own_layout(self.args, self.job_args):
            return OnlineTeacher.build(self.config, groups, head_columns=columns, **common)
        if columns is None:
            columns = torch.arange(self.job_args.padded_vocab_size).chunk(groups.tp.size())[groups.tp.rank()]
        return ReshardedTeacher.build_in(
            self._layout({} if layouts is None else layouts),
            self.config,
            groups,
            head_columns=columns,
            student_sequence_parallel=self.job_args.sequence_parallel,
            **common,
        )

    @property
    def _forward_options(self) -> ForwardOptions:
        rows = self.kd.teacher_micro_batch_size
        size = None if rows is None else PassSize(rows, self.args.seq_length)
        return ForwardOptions(size, captures=self.kd.teacher_cuda_graph, memory=self.kd.teacher_signals)

    def _layout(self, known: dict[ParallelSizes, ParallelLayout]) -> ParallelLayout:
        """The teacher's layout, created (collective over all ranks) unless `known` has it."""
        t, levels = self.config.transformer, self.args.hierarchical_context_parallel_sizes
        sizes = ParallelSizes(
            t.tensor_model_parallel_size,
            t.pipeline_model_parallel_size,
            t.context_parallel_size,
            t.expert_model_parallel_size,
            t.expert_tensor_parallel_size,
        )
        if sizes not in known:
            known[sizes] = ParallelLayout.create(
                sizes,
                cp_levels=levels if sizes.cp > 1 else None,
                timeout_minutes=self.args.distributed_timeout_minutes,
            )
        return known[sizes]


@dataclass(frozen=True)
class EnsembleTeacherSpec:
    """Models that run one after the other beside the student, or services."""

    source: EnsembleSource
    teachers: tuple[ModelTeacherSpec | ServedTeacherSpec, ...]
    kd: KDConfig

    @classmethod
    def of(
        cls, source: EnsembleSource, args: Namespace, kd: KDConfig, true_vocab: int, cross: CrossTokenizers | None
    ) -> "EnsembleTeacherSpec":
        """See `teacher_spec`.

        Raises:
            MkdConfigError: see `ModelTeacherSpec.of`; or their logits cannot be averaged, or their CE not compared.
        """
        if kd.teachers_mode == "select" and cross is not None:
            cross.require_bytes()
        if kd.teachers_mode == "averaged_logits" and cross is not None:
            raise MkdConfigError(
                "--kd-teachers-mode averaged_logits needs teachers with the student's tokenizer: give sum, "
                f"or leave out {cross.sources[0].path}"
            )
        teachers = tuple(teacher_spec(one, args, kd, true_vocab, one.fingerprint(), cross) for one in source.sources)
        for one in teachers:
            softcap = one.logit_softcap
            if kd.teachers_mode == "averaged_logits" and softcap is not None:
                raise MkdConfigError(
                    f"--kd-teachers-mode averaged_logits needs teachers without a softcap of the logits, "
                    f"{one.source.path} has {softcap:g}: give sum or select"
                )
        return cls(source, teachers, kd)

    def __str__(self) -> str:
        if self.kd.teachers_mode == "select":
            return "for each text the best of " + "; ".join(map(str, self.teachers))
        listed = zip(self.kd.weights_of_teachers(len(self.teachers)), self.teachers, strict=True)
        return f"{self.kd.teachers_mode} of " + "; ".join(f"{weight:g} x {teacher}" for weight, teacher in listed)

    @property
    def sources(self) -> list[TeacherSource]:
        """See `TeacherSpec`; teachers with averaged logits are reported as one."""
        return [self.source] if self.kd.teachers_mode == "averaged_logits" else list(self.source.sources)

    @property
    def models(self) -> list[Namespace]:
        """See `TeacherSpec`."""
        return [model for teacher in self.teachers for model in teacher.models]

    @property
    def served(self) -> list[Namespace]:
        """See `TeacherSpec`."""
        return [model for teacher in self.teachers for model in teacher.served]

    @property
    def target_description(self) -> str:
        """See `TeacherSpec`."""
        return self.teachers[0].target_description

    def build(self, groups: Groups) -> TeacherEnsemble | AveragedTeachers:
        """See `TeacherSpec`."""
        layouts: dict[ParallelSizes, ParallelLayout] = {}
        teachers = tuple(teacher.build(groups, layouts) for teacher in self.teachers)
        mode = self.kd.teachers_mode
        ensemble = TeacherEnsemble(teachers, self.kd.weights_of_teachers(len(teachers)), selecting=mode == "select")
        return AveragedTeachers(ensemble) if mode == "averaged_logits" else ensemble


def is_model_of(spec: TeacherSpec, student: ModelSource | None, args: Namespace, kd: KDConfig) -> bool:
    """True if a teacher is the student's folder in the student's layout and dtype, held in memory all the time.

    Args:
        spec: the teacher.
        student: the student's folder; None without one.
        args: Megatron's arguments of the student.
        kd: the flags.
    """
    if not isinstance(spec, ModelTeacherSpec) or student is None or kd.is_plain_pretraining:
        return False
    if kd.teacher_offload or spec.cross is not None or has_own_layout(spec.args, args):
        return False
    if args.virtual_pipeline_model_parallel_size is not None or not has_even_stages(vars(args)):
        return False
    if spec.config.transformer.fp8:
        return False
    same_dtype = spec.config.params_dtype == args.params_dtype
    return same_dtype and spec.true_vocab == student.vocab_size and spec.stored_fingerprint == student.fingerprint()


def shape_of(config: GPTModelConfig) -> str:
    """Layers, width and heads of a model, for the run summary."""
    t = config.transformer
    experts = f", {t.num_moe_experts} experts" if t.num_moe_experts else ""
    return f"{t.num_layers} layers x {t.hidden_size}, {t.num_attention_heads} heads{experts}"
