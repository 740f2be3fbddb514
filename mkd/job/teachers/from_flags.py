"""The teacher that the flags name: its source is opened, and fitted to the job."""

from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext

from mkd.checkpoint.source import EnsembleSource, ModelSource, TeacherSource
from mkd.config.check_list import Sink
from mkd.config.kd_config import KDConfig
from mkd.config.megatron.checks.teachers import (
    check_teacher_divides,
    check_teacher_layout,
)
from mkd.config.megatron.layouts import teacher_layout_args
from mkd.errors import MkdConfigError
from mkd.job.cross_tokenizer import CrossTokenizers
from mkd.job.teachers.cached import CachedTeacherSpec, open_cache
from mkd.job.teachers.common import WITHOUT_WAITING_S
from mkd.job.teachers.ensemble import EnsembleTeacherSpec
from mkd.job.teachers.inference import InferenceSource, InferenceTeacherSpec
from mkd.job.teachers.inference_states import StatesSource, StatesTeacherSpec
from mkd.job.teachers.interface import TeacherSpec
from mkd.job.teachers.model import ModelTeacherSpec
from mkd.job.teachers.served import ServedSource, ServedTeacherSpec
from mkd.teacher.cache.store import TeacherStore


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
        return EnsembleTeacherSpec.of(
            source, kd, cross, lambda one: teacher_spec(one, args, kd, true_vocab, one.fingerprint(), cross)
        )
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
