"""A model that runs beside the student, as the teacher of a job."""

from argparse import Namespace
from dataclasses import dataclass

import torch
from megatron.training.models import GPTModelConfig

from mkd.checkpoint.source import ModelSource, TeacherSource
from mkd.config.kd_config import KDConfig
from mkd.config.megatron.checks.parallel_sizes import has_even_stages
from mkd.config.megatron.checks.teachers import check_captured_passes, check_joined_passes, check_teacher_layout
from mkd.config.megatron.fp8_teacher import check_fp8_teacher
from mkd.config.megatron.layouts import has_own_layout
from mkd.config.megatron.teacher_args import teacher_arguments
from mkd.distributed.groups import Groups, ParallelLayout, ParallelSizes
from mkd.job.cross_tokenizer import CrossTokenizers
from mkd.job.teachers.common import top_k_description
from mkd.job.teachers.interface import TeacherSpec
from mkd.models.gpt import gpt_config, logit_scale
from mkd.teacher.forward_pass import PassSize
from mkd.teacher.online import ForwardOptions, OnlineTeacher
from mkd.teacher.resharded.teacher import ReshardedTeacher


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
        """See `from_flags.teacher_spec`."""
        own_tokens = None if cross is None else cross.own_tokens(source)
        if own_tokens is None:
            cross = None
        check_teacher_layout(args, kd, source.architecture.get("num_experts"))
        own = teacher_arguments(
            source.architecture, args, kd.teacher_dtype, own_tokens, kd.teacher_sizes, is_packed=kd.packing != "none"
        )
        if kd.teacher_dtype == "fp8":
            check_fp8_teacher(own, args.micro_batch_size, kd)
        check_joined_passes(own, args, kd)
        check_captured_passes(own, kd)
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
