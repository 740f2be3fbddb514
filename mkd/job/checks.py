"""The checks that a job passes before any weight is loaded: one list, in order.

A job stops at the first that fails; the doctor collects what all of them find. Each check stores in the `JobDraft` what
later ones read.
"""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from megatron.training.global_vars import get_tokenizer

from mkd.checkpoint.adapters.layers import adapted_linears
from mkd.checkpoint.adapters.peft_folder import PeftFolder, is_peft_folder
from mkd.checkpoint.adapters.stored import StoredAdapters, short_names
from mkd.checkpoint.megatron.folder import MegatronFolder
from mkd.checkpoint.megatron.resume_point import ResumePoint
from mkd.checkpoint.source import EnsembleSource, ModelSource, TeacherSource, fewest_positions
from mkd.config.check_list import Check, Sink
from mkd.config.lora import LoraOptions
from mkd.config.megatron.architecture import adopt_architecture
from mkd.config.megatron.arguments import ARGUMENT_CHECKS, CommandLine
from mkd.config.megatron.checks.adapters import check_latent_adapters, check_lora_arguments, check_query_groups
from mkd.config.megatron.checks.batches import check_virtual_stages
from mkd.config.megatron.checks.checkpoints import check_initialization
from mkd.config.megatron.checks.experts import check_experts
from mkd.config.megatron.checks.losses import check_layer_pairs, check_top_k_in_vocabulary
from mkd.config.megatron.checks.parts import check_transformer_engine
from mkd.config.megatron.checks.rows import check_rows
from mkd.config.megatron.checks.written_texts import check_rollouts, check_sampling, check_tasks
from mkd.config.megatron.data_args import data_prefixes
from mkd.data.sources.stores import is_chat_file
from mkd.errors import MkdConfigError, MkdNodeError
from mkd.job.cross_tokenizer import CrossTokenizers
from mkd.job.data import JobData
from mkd.job.epochs import set_iterations
from mkd.job.resume.compare import check_checkpoint
from mkd.job.resume.position import check_position
from mkd.job.resume.selection import adopt_from_checkpoint, check_pretrained, select_checkpoint
from mkd.job.rollout.on_policy import on_policy_of
from mkd.job.rollout.samples import SampleWriter, TaskEvaluation
from mkd.job.teachers.from_flags import check_teacher_fits, teacher_source, teacher_spec
from mkd.job.teachers.interface import TeacherSpec
from mkd.job.tokenizers import folder_of_tokenizer, hash_of_tokenizer, sort_teachers
from mkd.models.adapted_layers import AdaptedLinear
from mkd.models.layer_maps import KEY_PREFIX, pair_of_key
from mkd.models.lora import Lora
from mkd.rollout.on_policy import OnPolicy
from mkd.utils.atomic_files import regular_target
from mkd.utils.model_folders.hub_folder import model_folder
from mkd.utils.model_folders.pretrained import holds_tokenizer, require_tokenizer_files
from mkd.utils.model_folders.tokenizer_flag import adopt_tokenizer, tokenizer_flag, tokenizer_origin


@dataclass
class JobDraft(CommandLine):
    """A command line and the objects that are made of it, check by check."""

    waits: bool = True
    """True if a teacher service may still be starting; False where no training follows."""
    sink: Sink = nullcontext
    """Context around each part of a check that looks at several files or teachers."""
    source: TeacherSource | None = None
    student: ModelSource | None = None
    """Source of --kd-student-hf; None without the flag."""
    resume_point: ResumePoint | None = None
    true_vocab: int | None = None
    """Tokens that student and teachers share; None while the tokenizer is unknown."""
    tokenizer_hash: str | None = None
    """Hash of the student's tokenizer; None if it is no Hugging Face folder."""
    notes: list[str] = field(default_factory=list)
    """Allowed differences from the checkpoint."""
    foreign: list[ModelSource] = field(default_factory=list)
    """Teachers with a different tokenizer."""
    cross: CrossTokenizers | None = None
    first_adapters: PeftFolder | None = None
    """Adapters that --kd-lora continues; None for new ones."""
    lora: Lora | None = None
    """The student's adapters; None without --kd-lora."""
    on_policy: OnPolicy | None = None
    """Written rows of training steps; None without --kd-on-policy."""
    samples: SampleWriter | None = None
    """None without --kd-sample-prompts."""
    tasks: TaskEvaluation | None = None
    """None without --kd-eval-tasks."""
    data_is_readable: bool = False
    teacher: TeacherSpec | None = None

    @property
    def student_origin(self) -> str:
        """See `tokenizer_origin`."""
        return self.student.origin if self.student else tokenizer_origin(self.args)

    @property
    def data(self) -> JobData:
        known = self.source.sources if isinstance(self.source, EnsembleSource) else [self.source]
        same = [one for one in known if one is not None and not any(one is other for other in self.foreign)]
        return JobData(self.args, self.kd, self.true_vocab, self.cross, fewest_positions(same))


def _open_teacher(draft: JobDraft) -> None:
    draft.source = teacher_source(draft.kd, waits=draft.waits and not draft.kd.dry_run)


def _select_checkpoint(draft: JobDraft) -> None:
    draft.resume_point = select_checkpoint(draft.args, draft.state)


def _open_student(draft: JobDraft) -> None:
    path, flag = draft.kd.student_hf, "--kd-student-hf"
    if path is None:
        return
    if draft.kd.lora is not None and is_peft_folder(path):
        draft.first_adapters = PeftFolder(path, flag)
        draft.student = ModelSource.of_folder(draft.first_adapters.base, f"{flag} {path}")
    else:
        draft.student = ModelSource.from_hf(path, flag)


def _adopt_architecture(draft: JobDraft) -> None:
    args = draft.args
    if draft.student is not None:
        adopt_architecture(args, draft.student.architecture, draft.student.origin)
        args.tokenizer_type = args.tokenizer_type or "HuggingFaceTokenizer"
        if args.tokenizer_model is None and holds_tokenizer(draft.student.path):
            adopt_tokenizer(args, _tokenizer_folder(draft.student, draft.kd.student_hf), draft.student.origin)
    elif args.use_checkpoint_args:
        adopt_from_checkpoint(args, draft.state)


def _check_tokenizer_files(draft: JobDraft) -> None:
    """Refuse a folder without tokenizer files, which transformers would refuse at length."""
    args, student = draft.args, draft.student
    if args.tokenizer_type != "HuggingFaceTokenizer":
        return
    if args.tokenizer_model is None and student is not None:
        remedy = (
            ": copy the tokenizer's files into it, or give --tokenizer-model DIR, or, for token ids alone, "
            "--tokenizer-type NullTokenizer"
        )
        require_tokenizer_files(student.path, student.origin, remedy)
    elif (
        args.tokenizer_model is not None
        and (folder := model_folder(args.tokenizer_model, tokenizer_flag(args))).is_dir()
    ):
        require_tokenizer_files(folder, tokenizer_origin(args))


def _find_adapters(draft: JobDraft) -> None:
    options, student = draft.kd.lora_options, draft.student
    if options is None or student is None:
        return
    check_lora_arguments(draft.args, options)
    linears = adapted_linears(student.family, student.architecture, options)
    if any(linear.groups is not None for linear in linears):
        check_query_groups(draft.args, options)
    check_latent_adapters(draft.args, options, short_names(layer for linear in linears for layer in linear.layers))
    first = draft.first_adapters
    if first is not None:
        _check_first_adapters(first, linears, options)
    draft.lora = Lora(options, linears, draft.args.seed, None if first is None else first.factors)
    draft.state.base_fingerprint = student.fingerprint()


def _check_first_adapters(first: PeftFolder, linears: Sequence[AdaptedLinear], options: LoraOptions) -> None:
    """Refuse to continue the adapters of a PEFT folder with others."""
    layers = {layer for linear in linears for layer in linear.layers}
    if options.rank == first.rank and options.scale == first.scale and layers == set(first.layers):
        return
    alpha = first.scale * first.rank
    raise MkdConfigError(
        f"--kd-student-hf {first.path} has adapters of rank {first.rank}, alpha {alpha:.12g} on "
        f"{' '.join(short_names(first.layers))}: give --kd-lora {first.rank}:{alpha:.12g} --kd-lora-modules "
        f"{' '.join(short_names(first.layers))}, or leave --kd-lora out to train the merged weights"
    )


def _tokenizer_folder(student: ModelSource, given: str) -> str:
    """The student's folder as given, or its snapshot if it is one of the hub's cache."""
    return given if student.path == Path(given) else str(student.path)


def _find_vocabulary(draft: JobDraft) -> None:
    draft.true_vocab = draft.args.vocab_size or (get_tokenizer().vocab_size if draft.is_complete else None)
    draft.tokenizer_hash = None if draft.student is None else draft.student.tokenizer_hash
    if draft.tokenizer_hash is None and draft.is_complete:
        draft.tokenizer_hash = hash_of_tokenizer(draft.args)


def _check_tokenizer(draft: JobDraft) -> None:
    """Refuse a --tokenizer-model that is not the student's own."""
    given, student = hash_of_tokenizer(draft.args), draft.student
    if student is not None and given and student.tokenizer_hash and given != student.tokenizer_hash:
        raise MkdConfigError(
            f"--tokenizer-model {draft.args.tokenizer_model} is a different tokenizer from that of {student.origin}: "
            "leave it out"
        )


def _check_layer_pairs(draft: JobDraft) -> None:
    layers = draft.source.architecture.get("num_layers", 0)
    check_layer_pairs(draft.kd.layer_pairs, draft.args, layers)


def _check_checkpoint(draft: JobDraft) -> None:
    draft.notes = check_checkpoint(draft.args, draft.kd, draft.state, draft.resume_point, draft.source)


def _check_stored_maps(draft: JobDraft) -> None:
    """Refuse to resume with other maps between layers than the checkpoint holds."""
    args, kd = draft.args, draft.kd
    if not draft.state.resumes or args.finetune or args.ckpt_format != "torch_dist":
        return
    stored = MegatronFolder(draft.state.resume_from, "--load").metadata.state_dict_metadata
    held = sorted(pair_of_key(key) for key in stored if key.startswith(KEY_PREFIX))
    is_mapped = draft.source.architecture.get("hidden_size") != args.hidden_size
    needed = sorted(kd.layer_pairs) if is_mapped else []
    if held != needed:
        texts = [",".join(map(str, pairs)) or "none" for pairs in (held, needed)]
        raise MkdConfigError(
            f"--load {args.load} has trained maps for the pairs of layers {texts[0]}, this command line needs maps for "
            f"{texts[1]}: give the same --kd-hidden-loss, or start from its weights with --pretrained-checkpoint"
        )


def _check_stored_adapters(draft: JobDraft) -> None:
    """Refuse to resume with other adapters than the checkpoint holds."""
    if draft.lora is None or not draft.state.resumes:
        return
    held = StoredAdapters(MegatronFolder(draft.state.resume_from, "--load"))
    if not held.are_of(draft.lora.linears, draft.lora.options):
        here = f"{draft.lora.options} on {' '.join(draft.lora.modules)}"
        raise MkdConfigError(
            f"--load {draft.args.load} has adapters of {held.options} on {' '.join(held.modules)}, this command line "
            f"has {here}: give the same --kd-lora and --kd-lora-modules, or another --load"
        )


def _sort_teachers(draft: JobDraft) -> None:
    if draft.true_vocab is not None:
        draft.foreign, draft.true_vocab = sort_teachers(
            draft.kd,
            draft.student_origin,
            draft.true_vocab,
            draft.tokenizer_hash,
            draft.source,
            folder_of_tokenizer(draft.args, draft.student),
        )


def _check_top_k(draft: JobDraft) -> None:
    if draft.true_vocab is not None:
        check_top_k_in_vocabulary(draft.kd, draft.true_vocab)


def _check_rows(draft: JobDraft) -> None:
    has_chats = any(map(is_chat_file, data_prefixes(draft.args)))
    check_rows(draft.args, draft.kd, has_chats)


def _check_data_files(draft: JobDraft) -> None:
    draft.data_is_readable = draft.data.check_files(draft.tokenizer_hash, draft.sink)


def _check_splits(draft: JobDraft) -> None:
    if draft.data_is_readable:
        draft.data.check_splits()


def _set_iterations(draft: JobDraft) -> None:
    """Count the rows of documents, which takes no tokenizing and no other rank; other rows are counted later."""
    if draft.data_is_readable and not draft.data.has_own_rows:
        set_iterations(draft.args, draft.kd, draft.data, draft.resume_point)


def _check_position(draft: JobDraft) -> None:
    if draft.data_is_readable:
        folders = [(str(one.tokenizer_folder), one.origin) for one in draft.foreign if one.tokenizer_folder is not None]
        draft.notes += check_position(draft.args, draft.kd, draft.state, draft.resume_point, folders)


def check_writable(flag: str, folder: str | None) -> None:
    """Refuse a folder that cannot be created or written to, before the job trains for hours."""
    if folder is None:
        return
    path = Path(folder).absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise MkdNodeError(f"{flag}: folder {folder} cannot be written: {existing} is not a folder, or is read-only")


def _check_metrics_file(draft: JobDraft) -> None:
    if draft.kd.metrics_file is not None:
        target = regular_target(Path(draft.kd.metrics_file), "--kd-metrics-file")
        check_writable("--kd-metrics-file", str(target.parent))


def _check_samples(draft: JobDraft) -> None:
    check_sampling(draft.args, draft.kd)
    draft.samples = SampleWriter.of(draft.args, draft.kd, draft.true_vocab)


def _check_tasks(draft: JobDraft) -> None:
    check_tasks(draft.args, draft.kd)
    draft.tasks = TaskEvaluation.of(draft.args, draft.kd, draft.true_vocab)


def _check_prompts(draft: JobDraft) -> None:
    check_rollouts(draft.args, draft.kd)
    check_writable("--kd-rollout-weights", draft.kd.rollout_weights)
    waits = draft.waits and not draft.kd.dry_run
    longest = draft.data.longest_sample
    how = dict(waits=waits, cross=draft.cross, source=draft.source)
    draft.on_policy = on_policy_of(draft.args, draft.kd, draft.true_vocab, longest, draft.state, **how)
    if draft.on_policy is not None and draft.cross is not None:
        draft.cross.warn_of_ends(draft.on_policy.decoding.end_tokens)


def _align_tokenizers(draft: JobDraft) -> None:
    if draft.foreign:
        draft.cross = CrossTokenizers.of(draft.foreign, draft.args, draft.kd, draft.true_vocab)


def _fit_teacher(draft: JobDraft) -> None:
    draft.teacher = teacher_spec(
        draft.source, draft.args, draft.kd, draft.true_vocab, draft.state.teacher_fingerprint, draft.cross
    )


CHECKS: tuple[Check[JobDraft], ...] = (
    Check("teacher source", _open_teacher),
    Check("checkpoint", _select_checkpoint),
    Check("student", _open_student),
    Check("architecture", _adopt_architecture, needs=("student",)),
    Check("tokenizer files", _check_tokenizer_files, needs=("architecture",)),
    *ARGUMENT_CHECKS,
    Check(
        "experts",
        lambda draft: check_experts(draft.args),
        needs=("architecture", "parallel sizes", "--seq-length", "--micro-batch-size"),
    ),
    Check(
        "virtual stages",
        lambda draft: check_virtual_stages(draft.args),
        needs=("megatron's checks",),
    ),
    Check("vocabulary", _find_vocabulary, needs=("student",)),
    Check("transformer engine", lambda draft: check_transformer_engine(draft.args)),
    Check("student's tokenizer", _check_tokenizer, needs=("tokenizer",)),
    Check("--kd-lora", _find_adapters, needs=("student", "architecture", "parallel sizes")),
    Check("layer pairs", _check_layer_pairs, needs=("teacher source", "--num-layers")),
    Check(
        "initialization",
        lambda draft: check_initialization(draft.args, draft.kd, draft.state),
        needs=("--load",),
    ),
    Check("initial weights", lambda draft: check_pretrained(draft.args, draft.state), needs=("--load",)),
    Check("stored job", _check_checkpoint, needs=("teacher source", "tokenizer")),
    Check("stored maps", _check_stored_maps, needs=("teacher source", "tokenizer")),
    Check("stored adapters", _check_stored_adapters, needs=("stored job", "--kd-lora")),
    Check("teachers' tokenizers", _sort_teachers, needs=("teacher source", "vocabulary")),
    Check("--kd-top-k", _check_top_k, needs=("vocabulary",)),
    Check("data path", lambda draft: data_prefixes(draft.args)),
    Check("rows", _check_rows, needs=("data path", "tokenizer")),
    Check("data files", _check_data_files, needs=("data path",)),
    Check("position in the data", _check_position, needs=("stored job", "data files", "teachers' tokenizers")),
    Check("splits", _check_splits, needs=("data files", "tokenizer")),
    Check("--save", lambda draft: check_writable("--save", draft.args.save)),
    Check("--kd-metrics-file", _check_metrics_file),
    Check("--kd-sample-prompts", _check_samples, needs=("tokenizer", "--seq-length")),
    Check("--kd-eval-tasks", _check_tasks, needs=("tokenizer", "--seq-length")),
    Check("other tokenizers", _align_tokenizers, needs=("teachers' tokenizers", "data path", "tokenizer")),
    Check("--kd-on-policy", _check_prompts, needs=("tokenizer", "--seq-length")),
    Check("epochs", _set_iterations, needs=("stored job", "--train-iters", "data files", "splits", "other tokenizers")),
    Check(
        "teacher's layout",
        lambda draft: check_teacher_fits(draft.source, draft.args, draft.kd, draft.sink),
        needs=("teacher source", "parallel sizes", "--seq-length"),
    ),
    Check("teacher", _fit_teacher, needs=("teacher source", "vocabulary", "other tokenizers", "tokenizer")),
)
"""Checks in the order of a job. The doctor uses `needs`, because it continues after a failed check; a job stops."""
