"""A job from its command line to the objects that `megatron.training.pretrain` is given."""

import os
from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.training.models import GPTModelConfig
from torch import Tensor

from mkd import cpu
from mkd.checkpoint.megatron_folder import MegatronFolder
from mkd.checkpoint.resume import ResumePoint
from mkd.checkpoint.source import ModelSource, TeacherSource
from mkd.config import flags, megatron_args
from mkd.config.kd_config import KDConfig
from mkd.config.megatron_checks import check_layer_pairs, check_top_k, check_transformer_engine
from mkd.config.run_state import RunState
from mkd.data.byte_lengths import byte_lengths
from mkd.data.sources.text import load_tokenizer
from mkd.distributed.groups import Groups
from mkd.errors import MkdConfigError
from mkd.job.cross_tokenizer import CrossTokenizers, sort_teachers
from mkd.job.data import JobData, hash_of_tokenizer
from mkd.job.resume import adopt_from_checkpoint, check_checkpoint, check_first_weights, select_checkpoint
from mkd.job.teacher import TeacherSpec, teacher_source, teacher_spec
from mkd.losses import LossOptions
from mkd.models.gpt import gpt_config
from mkd.models.layer_maps import KEY_PREFIX, pair_of_key
from mkd.report.flops import FlopCounter, peak_tflops
from mkd.report.metrics import MetricsLog
from mkd.report.trackers import start_trackers
from mkd.teacher.interface import Teacher
from mkd.train.hidden_layers import HiddenLayers
from mkd.train.nan_check import FiniteCheck
from mkd.train.objective import LossContext
from mkd.train.step import ForwardStep
from mkd.utils.logging import logger, set_level


@dataclass(frozen=True)
class Job:
    """Everything that was asked for, checked; no weight is loaded and no process group exists yet."""

    args: Namespace
    """Megatron's arguments, also global by now."""
    kd: KDConfig
    state: RunState
    teacher: TeacherSpec
    student_source: ModelSource | None
    student_config: GPTModelConfig
    true_vocab: int
    """Tokens that exist; ids from here up pad the vocabulary."""
    loss_options: LossOptions
    resume_point: ResumePoint | None
    """The checkpoint to continue from."""
    notes: list[str]
    """What is otherwise than in that checkpoint."""
    cross: CrossTokenizers | None = None
    """Of teachers with other tokenizers."""

    @classmethod
    def from_command_line(cls, tolerate: Callable[[], AbstractContextManager] = nullcontext) -> "Job":
        """Parse and check.

        Args:
            tolerate: a context around each check without which the rest still makes sense. One that catches MkdError
                and goes on hears of several at once.

        Raises:
            MkdError: anything that would stop the job later.
        """
        args, kd = flags.parse_command_line()
        set_level(kd.log_level)
        state = RunState()
        source = teacher_source(kd)
        student = None
        resume_point = select_checkpoint(args, state)
        if kd.student_hf is not None:
            student = ModelSource.from_hf(kd.student_hf, "--kd-student-hf")
            megatron_args.adopt_architecture(args, student.architecture, student.origin)
            args.tokenizer_type = args.tokenizer_type or "HuggingFaceTokenizer"
            args.tokenizer_model = args.tokenizer_model or kd.student_hf
        elif args.use_checkpoint_args:
            adopt_from_checkpoint(args, state)
        megatron_args.finish(args, kd, state)
        true_vocab = megatron_args.true_vocabulary(args)
        origin = student.origin if student else f"--tokenizer-model {args.tokenizer_model}"
        student_hash = student.tokenizer_hash if student else hash_of_tokenizer(args)
        with tolerate():
            check_transformer_engine(args)
        with tolerate():
            _check_tokenizer(args, student)
        with tolerate():
            check_layer_pairs(kd.layer_pairs, args, source.architecture.get("num_layers", 0))
        check_first_weights(args, state)
        notes: list[str] = []
        with tolerate():
            notes = check_checkpoint(args, kd, state, resume_point, source)
        _check_stored_maps(args, kd, state, mapped=source.architecture.get("hidden_size") != args.hidden_size)
        foreign: list[ModelSource] = []
        with tolerate():
            foreign, true_vocab = sort_teachers(kd, origin, true_vocab, student_hash, source)
        check_top_k(kd, true_vocab)
        with tolerate():
            JobData(args, kd, true_vocab).check(student_hash)
        with tolerate():
            check_writable("--save", args.save)
        if kd.metrics_file is not None:
            with tolerate():
                check_writable("--kd-metrics-file", str(Path(kd.metrics_file).parent))
        cross = CrossTokenizers.of(foreign, args, kd, true_vocab) if foreign else None
        teacher = teacher_spec(source, args, kd, true_vocab, state.teacher_fingerprint, cross)
        options = LossOptions.of(kd, cpu.target_device(), args.params_dtype, args.tensor_model_parallel_size)
        config = gpt_config(args)
        config.transformer.variable_seq_lengths = kd.variable_seq_lengths  # megatron has no flag for it
        job = cls(args, kd, state, teacher, student, config, true_vocab, options, resume_point, notes, cross)
        if student is not None and not state.resumes:
            job.student_config.pre_wrap_hooks.append(job._load_student)
            job.student_config.perform_initialization = False  # the folder fills every parameter, or is refused
        return job

    def _load_student(self, chunks: list[Any]) -> list[Any]:
        self.student_source.load(chunks, None)
        return chunks

    def build_teacher(self, groups: Groups) -> Teacher | None:
        """The teacher on this rank; None when the run never looks at it."""
        return None if self.kd.is_plain_pretraining else self.teacher.build(groups)

    def pair_layers(self, groups: Groups, teacher: Teacher | None) -> HiddenLayers | None:
        """What --kd-hidden-loss asks for, to be placed in the student when it is built; None without the flag."""
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
        return JobData(self.args, self.kd, self.true_vocab, self.cross)

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
        """Tokens that a teacher chooses from."""
        own = None if self.cross is None else self.cross.own_tokens(teacher)
        return self.true_vocab if own is None else own[0]

    def byte_lengths(self) -> Tensor | None:
        """[ids] bytes of each of the tokenizer's tokens, for bits per byte; None where they are not known."""
        lengths = None
        if self.args.tokenizer_type == "HuggingFaceTokenizer" and Path(self.args.tokenizer_model).is_dir():
            lengths = byte_lengths(load_tokenizer(self.args.tokenizer_model))
        if lengths is None:
            logger.info(f"no bits per byte: {self.args.tokenizer_type} does not tell the bytes of a token")
        return None if lengths is None else lengths.to("cuda")

    def metrics(self) -> MetricsLog:
        """What the metrics are written to. On the rank that writes them, trackers begin.

        Raises:
            MkdConfigError: a tracker refuses.
        """
        file = self.kd.metrics_file
        if file is None and self.args.save is not None:
            file = str(Path(self.args.save) / "metrics.jsonl")
        writes = self.args.rank == self.args.world_size - 1
        self.state.write_to(self.args)  # trackers record the arguments
        card = torch.cuda.get_device_name()
        return MetricsLog(
            train_iters=self.args.train_iters,
            log_interval=self.args.log_interval,
            file=None if file is None else Path(file),
            writes=writes,
            flops=FlopCounter(self.args, self.teacher.models),
            ranks=self.args.world_size,
            on_gpus=not cpu.is_active(),
            peak_tflops=None if self.args.params_dtype == torch.float32 else peak_tflops(card),
            trackers=start_trackers(self.args, self.kd) if writes else (),
            vocabulary=self.true_vocab,
            tracker_interval=self.args.tensorboard_log_interval,
        )


def _check_tokenizer(args: Namespace, student: ModelSource | None) -> None:
    """Refuse a --tokenizer-model that is not the student's own."""
    given = hash_of_tokenizer(args)
    if student is not None and given and student.tokenizer_hash and given != student.tokenizer_hash:
        raise MkdConfigError(
            f"--tokenizer-model {args.tokenizer_model} is another tokenizer than that of {student.origin}: leave it out"
        )


def _check_stored_maps(args: Namespace, kd: KDConfig, state: RunState, mapped: bool) -> None:
    """Refuse to resume with other maps between layers than the checkpoint has.

    Args:
        args: Megatron's.
        kd: names the pairs of layers.
        state: names the checkpoint.
        mapped: whether each pair has a map.
    """
    if not state.resumes or args.finetune or args.ckpt_format != "torch_dist":
        return
    stored = MegatronFolder(state.resume_from, "--load").metadata.state_dict_metadata
    had = sorted(pair_of_key(key) for key in stored if key.startswith(KEY_PREFIX))
    wanted = sorted(kd.layer_pairs) if mapped else []
    if had != wanted:
        texts = [",".join(map(str, pairs)) or "none" for pairs in (had, wanted)]
        raise MkdConfigError(
            f"--load {args.load} has trained maps for the pairs of layers {texts[0]}, this command line needs maps for "
            f"{texts[1]}: give the same --kd-hidden-loss, or begin anew from its weights with --pretrained-checkpoint"
        )


def check_writable(flag: str, folder: str | None) -> None:
    """Refuse a folder that cannot be made or written to, before hours of training end there."""
    if folder is None:
        return
    path = Path(folder).absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise MkdConfigError(f"{flag}: folder {folder} cannot be written: {existing} is no folder, or is read-only")
