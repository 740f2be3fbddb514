"""A job that fills a teacher cache, from the command line of a training run whose student is ignored."""

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from mkd.checkpoint.source import EnsembleSource, ModelSource, fewest_positions
from mkd.config import flags
from mkd.config.kd_config import KDConfig
from mkd.config.megatron import arguments, data_args
from mkd.config.megatron.checks.rows import check_position_resets
from mkd.config.run_state import RunState
from mkd.config.values import require_temperature
from mkd.data.sources.stores import is_chat_file
from mkd.errors import MkdConfigError
from mkd.job.data import JobData, refuse_data_cache
from mkd.job.plan.warnings import uncompared_tokenizers
from mkd.job.teachers.from_flags import teacher_source
from mkd.job.teachers.model import ModelTeacherSpec
from mkd.job.tokenizers import folder_of_tokenizer, hash_of_tokenizer, sort_teachers
from mkd.job.without_student import describe_teacher, refuse_flags_of_teachers
from mkd.teacher.cache.meta import CacheMeta
from mkd.teacher.cache.record_format import MAX_COUNT, MAX_VOCAB
from mkd.teacher.cache.writer import check_folder
from mkd.utils.logging import logger, set_level
from mkd.utils.model_folders.tokenizer_flag import tokenizer_origin

_KD_FIELDS = (
    *("teacher_hf", "teacher_load", "teacher_dtype", "teacher_offload", "student_hf", "loss_chunk_rows"),
    *("teacher_micro_batch_size", "teacher_cuda_graph", "teacher_signals"),
    *("data_format", "bad_records"),
    *("packing", "packing_multiple", "long_samples", "variable_seq_lengths", "mask", "dry_run", "verbose"),
    *("log_level", "same_tokenizer"),
)
"""Fields of KDConfig about the teacher and its data. The teacher's others are refused; the student's are ignored."""
_INSTEAD = dict.fromkeys(
    ("teacher_cache", "teacher_url"), "it is no teacher to run: give --kd-teacher-hf or --kd-teacher-load"
)
"""Fields of a teacher that are refused -> what to do."""


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """The tool's own flags: what is stored, and where."""

    out: Path
    top_k: int | None = None
    samples: int | None = None
    lossless: bool = False
    temperatures: tuple[float, ...] = ()
    """Empty: 1 and the value of --kd-temperature."""

    def __post_init__(self) -> None:
        if (self.top_k is None) == (self.samples is None):
            seen = "neither" if self.top_k is None else f"--top-k {self.top_k} and --sample {self.samples}"
            raise MkdConfigError(
                f"one of --top-k K (the most probable tokens) and --sample N (sampled targets) is needed: {seen}"
            )
        if self.top_k is not None and self.top_k < 1:
            raise MkdConfigError(f"--top-k is {self.top_k}; it must be at least 1")
        if self.samples is not None and not 1 <= self.samples <= MAX_COUNT:
            raise MkdConfigError(f"--sample is {self.samples}; it must be 1 to {MAX_COUNT}")
        if self.samples is not None and self.lossless:
            raise MkdConfigError("--lossless does not work with --sample: counts are stored without loss")
        for value in self.temperatures:
            require_temperature("--temperature", value)
        if self.samples is not None and len(self.temperatures) > 1:
            raise MkdConfigError(f"--temperature has {len(self.temperatures)} values; --sample uses one")

    @classmethod
    def of(cls, folder: Path, meta: CacheMeta) -> "CacheOptions":
        """The options that a cache was written with."""
        top_k, samples = (None, meta.samples) if meta.samples else (meta.top_k, None)
        temperatures = meta.temperatures[-1:] if meta.samples else meta.temperatures
        lossless = meta.values == "fp32"
        return cls(out=folder, top_k=top_k, samples=samples, lossless=lossless, temperatures=temperatures)

    def meta(self, teacher: ModelTeacherSpec, tokenizer: str | None, temperature: float, positions: str) -> CacheMeta:
        """Metadata of the cache.

        Args:
            teacher: the teacher.
            tokenizer: hash of its tokenizer; None if not known.
            temperature: value of --kd-temperature.
            positions: see `CacheMeta`.

        Raises:
            MkdConfigError: more ids than the vocabulary has, or too large a vocabulary.
        """
        vocab = teacher.true_vocab
        flag, ids = ("--top-k", self.top_k) if self.samples is None else ("--sample", min(self.samples, vocab))
        if ids > vocab:
            raise MkdConfigError(f"{flag} is {ids}, but the vocabulary has {vocab} tokens")
        if vocab > MAX_VOCAB:
            raise MkdConfigError(f"a teacher cache holds vocabularies of up to {MAX_VOCAB} tokens, not {vocab}")
        own = self.temperatures or (temperature,)
        return CacheMeta(
            teacher=teacher.stored_fingerprint,
            tokenizer=tokenizer,
            true_vocab=vocab,
            top_k=ids,
            values="counts" if self.samples else "fp32" if self.lossless else "log12",
            temperatures=tuple(dict.fromkeys((1.0, *map(float, own)))),
            samples=self.samples or 0,
            teacher_dtype=teacher.dtype,
            positions=positions,
        )


@dataclass(frozen=True)
class CacheJob:
    """A checked job; no weight is loaded and no process group exists yet."""

    args: Namespace
    """Megatron's arguments, which are also its global ones."""
    kd: KDConfig
    teacher: ModelTeacherSpec
    meta: CacheMeta
    out: Path
    reads_one_epoch: bool
    """True if every sample is read once, because no number of iterations is given."""

    @property
    def data(self) -> JobData:
        limit = fewest_positions(self.teacher.sources)
        return JobData(self.args, self.kd, self.meta.true_vocab, teacher_limit=limit)

    def check_folder(self) -> None:
        """Check the cache's folder, without changing it. Raises MkdCacheError if the cache cannot be written there."""
        refuse_data_cache(self.out, self.args, "--out")
        check_folder(self.out, self.meta, "--out")

    @classmethod
    def from_command_line(cls, options: CacheOptions) -> "CacheJob":
        """Parse `sys.argv`, which holds the flags of pretrain_kd.py, and check everything but the cache's folder.

        Args:
            options: the tool's own flags.

        Raises:
            MkdError: a flag or file is wrong.
        """
        args, given = flags.parse_flags()
        refuse_flags_of_teachers(given, _KD_FIELDS, _INSTEAD)
        kd = KDConfig(**{name: given[name] for name in _KD_FIELDS}, ratio=1.0)
        set_level(kd.log_level)
        source = teacher_source(kd)
        if isinstance(source, EnsembleSource):
            raise MkdConfigError(f"{source.origin} are several teachers, and a cache has the targets of one: give one")
        student = None if kd.student_hf is None else ModelSource.from_hf(kd.student_hf, "--kd-student-hf")
        own_tokenizer, one_epoch = args.tokenizer_model, _reads_one_epoch(args, kd)
        if one_epoch:
            args.train_iters = 1
        elif given.get("epochs") is not None and not (args.train_iters or args.train_samples):
            raise MkdConfigError(
                f"--kd-epochs is {given['epochs']:g}, but the rows of concatenated documents differ from epoch to "
                "epoch: give --train-iters with the number that the training job prints"
            )
        describe_teacher(args, source, student)
        check_position_resets(args, source.architecture.get("position_embedding_type"), "the teacher")
        arguments.finish(args, kd, RunState())
        tokenizer = (student.tokenizer_hash if student else None) or hash_of_tokenizer(args)
        origin = student.origin if student else tokenizer_origin(args)
        vocab = source.vocab_size
        if student is not None or own_tokenizer is not None or vocab is None:
            size, folder = arguments.true_vocabulary(args), folder_of_tokenizer(args, student)
            _, vocab = sort_teachers(kd, origin, size, tokenizer, source, folder)
        for text in uncompared_tokenizers(args, student, [source]):
            logger.warning(text)
        JobData(args, kd, vocab).check(tokenizer)
        teacher = ModelTeacherSpec.of(source, args, kd, vocab, source.fingerprint())
        positions = "document" if args.reset_position_ids else "segment"
        meta = options.meta(teacher, tokenizer or source.tokenizer_hash, given["temperature"], positions)
        return cls(args, kd, teacher, meta, options.out, one_epoch)


def _reads_one_epoch(args: Namespace, kd: KDConfig) -> bool:
    """True if no number of iterations is given, nor needed: epochs of whole samples differ in their order only."""
    given = args.train_iters or args.train_samples
    return not given and (kd.packing != "none" or all(map(is_chat_file, data_args.data_prefixes(args))))
