"""Several teachers of a job."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

from mkd.checkpoint.source import EnsembleSource, TeacherSource
from mkd.config.kd_config import KDConfig
from mkd.distributed.groups import Groups, ParallelLayout, ParallelSizes
from mkd.errors import MkdConfigError
from mkd.job.cross_tokenizer import CrossTokenizers
from mkd.job.teachers.model import ModelTeacherSpec
from mkd.job.teachers.served import ServedTeacherSpec
from mkd.teacher.ensemble import AveragedTeachers, TeacherEnsemble


@dataclass(frozen=True)
class EnsembleTeacherSpec:
    """Models that run one after the other beside the student, or services."""

    source: EnsembleSource
    teachers: tuple[ModelTeacherSpec | ServedTeacherSpec, ...]
    kd: KDConfig

    @classmethod
    def of(
        cls,
        source: EnsembleSource,
        kd: KDConfig,
        cross: CrossTokenizers | None,
        fit: Callable[[TeacherSource], ModelTeacherSpec | ServedTeacherSpec],
    ) -> "EnsembleTeacherSpec":
        """The specs of all teachers.

        Args:
            source: their folders or addresses.
            kd: the flags.
            cross: the teachers with other tokenizers among them; None without any.
            fit: makes the spec of one teacher.

        Raises:
            MkdConfigError: see `fit`; or their logits cannot be averaged, or their CE not compared.
        """
        if kd.teachers_mode == "select" and cross is not None:
            cross.require_bytes()
        if kd.teachers_mode == "averaged_logits" and cross is not None:
            raise MkdConfigError(
                "--kd-teachers-mode averaged_logits needs teachers with the student's tokenizer: give sum, "
                f"or leave out {cross.sources[0].path}"
            )
        teachers = tuple(map(fit, source.sources))
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
