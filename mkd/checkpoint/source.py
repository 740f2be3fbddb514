"""Model sources: one interface for Hugging Face folders, Megatron checkpoints and ensembles of them.

A source holds everything that is known about a model before its weights are read: architecture, vocabulary, tokenizer,
fingerprint, and the function that loads the weights.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from mkd.checkpoint.adapters.peft_folder import open_hf_folder
from mkd.checkpoint.hf.check import check_tensors, read_architecture, report_left_out
from mkd.checkpoint.hf.families import Family
from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.hf.load import load_hf_weights
from mkd.checkpoint.megatron.folder import MegatronFolder
from mkd.checkpoint.megatron.load import load_megatron_weights
from mkd.checkpoint.tokenizer_difference import TokenizerDifference, tokenizer_difference
from mkd.checkpoint.tokenizer_hash import hash_hex
from mkd.errors import MkdConfigError


class TeacherSource(Protocol):
    """Properties of a teacher that are known from its folder."""

    origin: str
    """The flag and the folder, for messages."""
    path: Path
    architecture: dict[str, Any]
    """Megatron argument name -> value; empty without a model (cached targets)."""
    vocab_size: int | None
    """Vocabulary size without padding; None if unknown."""
    tokenizer_hash: str | None
    """None if the tokenizer is unknown."""

    def fingerprint(self) -> str:
        """128-bit hex hash that changes with the teacher's architecture or weights."""
        ...


@dataclass(frozen=True)
class ModelSource:
    """Architecture and weights of a model on disk, checked, with no weight read yet."""

    origin: str
    """The flag and the folder, for messages."""
    path: Path
    architecture: dict[str, Any]
    """Megatron argument name -> value."""
    vocab_size: int | None
    """Embedding rows without padding; None if a Megatron checkpoint does not record it."""
    tokenizer_hash: str | None
    """None when the folder has no tokenizer."""
    tokenizer_folder: Path | None
    """Folder with the tokenizer files; None without a tokenizer."""
    fingerprint: Callable[[], str]
    load: Callable[[Sequence[nn.Module], int | None], None]
    """(model chunks, vocabulary) -> None: fills every parameter of this rank's model chunks, in the layout of their own
    process groups. Embedding and LM-head rows of tokens from `vocabulary` up are not read; None reads all."""
    family: Family | None = None
    """The family of a Hugging Face folder; None for a Megatron checkpoint."""

    @classmethod
    def from_hf(cls, path: str, flag: str) -> "ModelSource":
        """A Hugging Face folder, or a PEFT folder merged with the model under it.

        Raises:
            MkdCheckpointError: the folder is missing or incomplete, its family is unknown, or its tensors contradict
                config.json.
        """
        return cls.of_folder(open_hf_folder(path, flag), f"{flag} {path}")

    @classmethod
    def of_folder(cls, folder: HFFolder, origin: str) -> "ModelSource":
        """See `from_hf`; `origin` is the flag and the folder, for messages."""
        family, architecture = read_architecture(folder)
        check_tensors(folder, family)
        report_left_out(folder, family)
        tokenizer = folder.tokenizer_hash()
        return cls(
            origin=origin,
            path=folder.path,
            architecture=architecture,
            vocab_size=architecture["vocab_size"],
            tokenizer_hash=tokenizer,
            tokenizer_folder=None if tokenizer is None else folder.path,
            fingerprint=folder.fingerprint,
            load=lambda chunks, vocab: load_hf_weights(chunks, folder, vocab),
            family=family,
        )

    @classmethod
    def from_megatron(cls, path: str, flag: str) -> "ModelSource":
        """A Megatron checkpoint folder in `torch_dist` format.

        Raises:
            MkdCheckpointError: the folder is missing or incomplete, or stores no arguments.
        """
        folder = MegatronFolder(path, flag)
        folder.check_whole()
        folder.check_shards()
        tokenizer = folder.tokenizer_hash()
        return cls(
            origin=f"{flag} {path}",
            path=Path(path),
            architecture=dict(vars(folder.args)),
            vocab_size=folder.args.vocab_size,
            tokenizer_hash=tokenizer,
            tokenizer_folder=None if tokenizer is None else folder.assets_dir,
            fingerprint=folder.fingerprint,
            load=lambda chunks, vocab: load_megatron_weights(chunks, folder),
        )


@dataclass(frozen=True)
class EnsembleSource:
    """Several teachers that form an ensemble."""

    sources: "tuple[TeacherSource, ...]"
    """Folders of models, or services."""
    architecture: dict[str, Any] = field(default_factory=dict)
    """Empty: the teachers may have different architectures."""
    vocab_size: None = None
    tokenizer_hash: None = None

    @property
    def origin(self) -> str:
        """See `TeacherSource`."""
        return " ".join([self.sources[0].origin, *(str(source.path) for source in self.sources[1:])])

    @property
    def path(self) -> Path:
        """See `TeacherSource`; the folder of the first teacher."""
        return self.sources[0].path

    def fingerprint(self) -> str:
        """See `TeacherSource`."""
        return common_fingerprint([source.fingerprint() for source in self.sources])


@dataclass(frozen=True)
class PositionLimit:
    """Positions of a model that reads the rows."""

    positions: int
    model: str
    """The model, for messages."""


def fewest_positions(teachers: Iterable[TeacherSource]) -> PositionLimit | None:
    """The positions of the teacher with the fewest; None if none has a limit."""
    each = [one.sources if isinstance(one, EnsembleSource) else (one,) for one in teachers]
    known = [(source.architecture.get("max_position_embeddings"), source) for sources in each for source in sources]
    found = [PositionLimit(positions, f"the teacher {source.origin}") for positions, source in known if positions]
    return min(found, key=lambda limit: limit.positions, default=None)


def common_fingerprint(fingerprints: Sequence[str]) -> str:
    """128-bit hex hash of the fingerprints of all teachers, in their order."""
    return hash_hex("\n".join(fingerprints).encode())


def has_other_tokenizer(student_hash: str | None, teacher: TeacherSource) -> bool:
    """True if both tokenizers are known and differ."""
    return None not in (student_hash, teacher.tokenizer_hash) and student_hash != teacher.tokenizer_hash


def compare_tokenizers(folder: Path | None, teacher: TeacherSource) -> TokenizerDifference | None:
    """Compare the student's tokenizer, in `folder`, with a teacher's; None if a tokenizer.json is not at hand."""
    other = getattr(teacher, "tokenizer_folder", None)
    if folder is None or other is None:
        return None
    return tokenizer_difference(folder, other, ("the student's tokenizer", teacher.origin))


def common_vocabulary(
    student: str,
    student_vocab: int,
    student_hash: str | None,
    teacher: TeacherSource,
    *,
    folder: Path | None = None,
    renamed_control_tokens: bool = False,
) -> int:
    """Number of tokens that student and teacher share, with equal ids.

    Models with the same tokenizer may pad their vocabulary to different sizes and report the padded one as vocab_size.
    With equal tokenizers the smaller size is used; rows beyond it are not tokens.

    Args:
        student: the flag and folder to name.
        student_vocab: vocabulary size of the student.
        student_hash: hash of the student's tokenizer; None if unknown.
        teacher: the teacher.
        folder: the folder of the student's tokenizer; None if unknown.
        renamed_control_tokens: accept tokenizers that differ in names of control tokens only (--kd-same-tokenizer).

    Raises:
        MkdConfigError: the tokenizers differ, or the sizes differ and a tokenizer is unknown: equal ids could then be
            different tokens.
    """
    hint = "a teacher with a different tokenizer needs --kd-xtoken-loss (docs/cross_tokenizer.md)"
    if has_other_tokenizer(student_hash, teacher):
        difference = compare_tokenizers(folder, teacher)
        if not (renamed_control_tokens and difference is not None and difference.is_in_names_only):
            raise MkdConfigError(_refusal(student, teacher, difference, hint, renamed_control_tokens))
    if teacher.vocab_size is None or teacher.vocab_size == student_vocab:
        return student_vocab
    if student_hash is None or teacher.tokenizer_hash is None:
        raise MkdConfigError(
            f"{student} has a vocabulary of {student_vocab} tokens and {teacher.origin} one of {teacher.vocab_size}; "
            f"{hint}. If they do share it, put the tokenizer's files into both folders"
        )
    return min(student_vocab, teacher.vocab_size)


def _refusal(
    student: str, teacher: TeacherSource, difference: TokenizerDifference | None, hint: str, is_given: bool
) -> str:
    """The message about different tokenizers: what differs, and the remedies."""
    text = f"{student} and {teacher.origin} have different tokenizers"
    if difference is None:
        unknown = "; --kd-same-tokenizer compares the tokenizer.json of two folders, which are not both here"
        return f"{text}{unknown if is_given else ''}; {hint}"
    if difference.is_in_names_only:
        return (
            f"{text}: {difference}. Ordinary text has the same ids in both: give --kd-same-tokenizer to train on these "
            f"ids, or --kd-xtoken-loss to align texts (docs/cross_tokenizer.md)"
        )
    refused = "; --kd-same-tokenizer accepts only other names of control tokens" if is_given else ""
    return f"{text}: {difference}{refused}; {hint}"
