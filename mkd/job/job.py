"""A job from its command line to the objects that `megatron.training.pretrain` is given."""

from argparse import Namespace
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from megatron.training.models import GPTModelConfig
from torch import Tensor

from mkd import cpu
from mkd.checkpoint.megatron.resume_point import ResumePoint
from mkd.checkpoint.source import ModelSource, TeacherSource, fewest_positions
from mkd.config.check_list import run_checks
from mkd.config.flags import flags_given, parse_command_line
from mkd.config.kd_config import KDConfig
from mkd.config.run_state import RunState
from mkd.data.byte_lengths import byte_lengths
from mkd.distributed.groups import Groups
from mkd.job.checks import CHECKS, JobDraft
from mkd.job.cross_tokenizer import CrossTokenizers
from mkd.job.data import JobData, number_of_iterations
from mkd.job.rollout.samples import SampleWriter, TaskEvaluation
from mkd.job.teachers.interface import TeacherSpec
from mkd.job.teachers.model import is_model_of
from mkd.losses import LossOptions
from mkd.models.gpt import gpt_config
from mkd.models.lora import Lora
from mkd.models.shared_weights import BorrowingBuilder, share_weights
from mkd.report.flops import FlopCounter, peak_tflops
from mkd.report.metrics import MetricsLog
from mkd.report.trackers import start_trackers
from mkd.rollout.on_policy import OnPolicy
from mkd.teacher.interface import Teacher
from mkd.teacher.online import OnlineTeacher
from mkd.train.hidden_layers import HiddenLayers
from mkd.train.nan_check import FiniteCheck
from mkd.train.objective import LossContext
from mkd.train.step import ForwardStep
from mkd.utils.logging import logger, set_level
from mkd.utils.model_folders.pretrained import load_tokenizer
from mkd.utils.model_folders.tokenizer_flag import tokenizer_flag


@dataclass(frozen=True)
class Job:
    """A launched command, checked; no weight is loaded and no process group exists yet."""

    args: Namespace
    """Megatron's arguments, complete and global."""
    kd: KDConfig
    state: RunState
    teacher: TeacherSpec
    student_source: ModelSource | None
    student_config: GPTModelConfig
    true_vocab: int
    """Tokens that exist; ids from here up are padding of the vocabulary."""
    loss_options: LossOptions
    resume_point: ResumePoint | None
    """The checkpoint to continue from."""
    notes: list[str]
    """Allowed differences from that checkpoint, as lines to print."""
    cross: CrossTokenizers | None = None
    """Alignment and projections of teachers with other tokenizers; None without such a teacher."""
    lora: Lora | None = None
    """Adapters of a frozen student; None if all its weights are trained."""
    on_policy: OnPolicy | None = None
    """Rows whose answers the student writes; None without --kd-on-policy."""
    samples: SampleWriter | None = None
    """None without --kd-sample-prompts."""
    tasks: TaskEvaluation | None = None
    """None without --kd-eval-tasks."""

    @classmethod
    def from_command_line(cls) -> "Job":
        """Parse the command line and make all checks.

        Raises:
            MkdError: the first of `mkd.job.checks.CHECKS` that fails.
        """
        draft = JobDraft(*parse_command_line())
        set_level(draft.kd.log_level)
        run_checks(CHECKS, draft)
        return cls.of(draft)

    @classmethod
    def of(cls, draft: JobDraft) -> "Job":
        """The job of a draft whose teacher has been fitted."""
        args, kd = draft.args, draft.kd
        if draft.lora is not None:
            args.moe_router_bias_update_rate = 0.0  # balancing would change the frozen routers
        config = gpt_config(args)
        config.transformer.variable_seq_lengths = kd.variable_seq_lengths  # megatron has no flag for it
        job = cls(
            args=args,
            kd=kd,
            state=draft.state,
            teacher=draft.teacher,
            student_source=draft.student,
            student_config=config,
            true_vocab=draft.true_vocab,
            loss_options=LossOptions.of(kd, cpu.target_device(), args.params_dtype, args.tensor_model_parallel_size),
            resume_point=draft.resume_point,
            notes=draft.notes,
            cross=draft.cross,
            lora=draft.lora,
            on_policy=draft.on_policy,
            samples=draft.samples,
            tasks=draft.tasks,
        )
        if draft.student is not None and (draft.lora is not None or not draft.state.resumes):
            config.perform_initialization = False  # the folder fills every parameter, or is refused
            if not job.shares_teacher:
                config.pre_wrap_hooks.append(job._load_student)
        if draft.lora is not None:
            config.pre_wrap_hooks.append(draft.lora.attach)
        return job

    @cached_property
    def shares_teacher(self) -> bool:
        """True if the frozen weights under the student's adapters are the teacher's: one copy serves both."""
        return self.lora is not None and is_model_of(self.teacher, self.student_source, self.args, self.kd)

    def _load_student(self, chunks: list[Any]) -> list[Any]:
        self.student_source.load(chunks, None)
        return chunks

    def build_teacher(self, groups: Groups) -> Teacher | None:
        """The teacher on this rank; None if R is 0 for the whole run. A student of the same weights will share them."""
        if self.kd.is_plain_pretraining:
            return None
        teacher = self.teacher.build(groups)
        if self.shares_teacher:
            self.student_config.builder = BorrowingBuilder.PATH
            hooks = self.student_config.pre_wrap_hooks
            hooks.insert(hooks.index(self.lora.attach), partial(_share, teacher))
        return teacher

    def pair_layers(self, groups: Groups, teacher: Teacher | None) -> HiddenLayers | None:
        """Layer pairs of --kd-hidden-loss, attached to the student when it is built; None without the flag."""
        if not self.kd.layer_pairs:
            return None
        layers = HiddenLayers(
            self.kd.layer_pairs,
            self.kd.hidden_loss_type,
            self.kd.hidden_loss_weight,
            groups,
            teacher.record_layers({pair.teacher for pair in self.kd.layer_pairs}),
            seed=self.args.seed,
        )
        self.student_config.pre_wrap_hooks.append(layers.attach)
        return layers

    @property
    def data(self) -> JobData:
        foreign = () if self.cross is None else self.cross.sources
        same = [one for one in self.teacher.sources if not any(one is other for other in foreign)]
        return JobData(self.args, self.kd, self.true_vocab, self.cross, fewest_positions(same))

    def forward_step(self, groups: Groups) -> ForwardStep:
        """The forward step of this rank."""
        context = LossContext(
            groups,
            self.true_vocab,
            options=self.loss_options,
            top_k=self.kd.top_k,
            top_k_tail=self.kd.top_k_tail,
            byte_lengths=self.byte_lengths(),
            cross=() if self.cross is None else self.cross.settings(groups),
        )
        return ForwardStep(context, FiniteCheck() if self.args.check_for_nan_in_loss_and_grad else None)

    def vocabulary_of(self, teacher: TeacherSource) -> int:
        """Vocabulary size of a teacher."""
        own = None if self.cross is None else self.cross.own_tokens(teacher)
        return self.true_vocab if own is None else own[0]

    def byte_lengths(self) -> Tensor | None:
        """[ids] bytes of each of the tokenizer's tokens, for bits per byte; None if unknown."""
        lengths = None
        if self.args.tokenizer_type == "HuggingFaceTokenizer" and Path(self.args.tokenizer_model).is_dir():
            lengths = byte_lengths(load_tokenizer(self.args.tokenizer_model, tokenizer_flag(self.args)))
        if lengths is None:
            logger.info(f"no bits per byte: the bytes of a token are unknown for {self.args.tokenizer_type}")
        return None if lengths is None else lengths.to("cuda")

    def metrics(self) -> MetricsLog:
        """The log of the metrics. Starts the trackers on the rank that writes them.

        Raises:
            MkdConfigError: a tracker refuses.
        """
        file = self.kd.metrics_file
        if file is None and self.args.save is not None:
            file = str(Path(self.args.save) / "metrics.jsonl")
        writes = self.args.rank == self.args.world_size - 1
        self.state.without_texts().write_to(self.args)  # trackers record the arguments
        card = torch.cuda.get_device_name()
        return MetricsLog(
            train_iters=number_of_iterations(self.args),
            log_interval=self.args.log_interval,
            log_interval_is_given="log_interval" in flags_given(),
            file=None if file is None else Path(file),
            writes=writes,
            flops=FlopCounter(self.args, self.teacher.models, is_frozen=self.lora is not None),
            ranks=self.args.world_size,
            on_gpus=not cpu.is_active(),
            peak_tflops=None if self.args.params_dtype == torch.float32 else peak_tflops(card),
            trackers=start_trackers(self.args, self.kd) if writes else (),
            vocabulary=self.true_vocab,
            tracker_interval=self.args.tensorboard_log_interval,
        )


def _share(teacher: OnlineTeacher, chunks: list[Any]) -> list[Any]:
    share_weights(chunks, teacher.model)
    return chunks
