"""Where a model comes from, Hugging Face folder or Megatron checkpoint, as one kind of thing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from mkd.checkpoint.hf.check import check_tensors, read_architecture
from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.hf.load import load_hf_weights
from mkd.checkpoint.megatron_folder import MegatronFolder
from mkd.checkpoint.megatron_load import load_megatron_weights
from mkd.checkpoint.tokenizer_files import hash_hex
from mkd.errors import MkdConfigError


class TeacherSource(Protocol):
    """What is known of a teacher from its folder."""

    origin: str
    """The flag and the folder, for messages."""
    path: Path
    architecture: dict[str, Any]
    """Megatron argument name -> value; empty where there is no model."""
    vocab_size: int | None
    """Tokens that it knows; None when that is not known."""
    tokenizer_hash: str | None
    """None when its tokenizer is not known."""

    def fingerprint(self) -> str:
        """128 bits in hexadecimal that change with the teacher's architecture or weights."""
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
    """Rows of the embedding that stand for tokens; None when a Megatron checkpoint does not say."""
    tokenizer_hash: str | None
    """None when the folder has no tokenizer in it."""
    tokenizer_folder: Path | None
    """Where the tokenizer is; None when there is none."""
    fingerprint: Callable[[], str]
    load: Callable[[Sequence[nn.Module], int | None], None]
    """Fills every parameter of this rank's model chunks, in the layout of their own process groups. Takes the number of
    tokens whose embeddings and LM-head rows are kept; None for all."""

    @classmethod
    def from_hf(cls, path: str, flag: str) -> "ModelSource":
        """A Hugging Face folder.

        Raises:
            MkdCheckpointError: it is missing, torn, not of a known family, or its tensors are not what config.json
            says.
        """
        folder = HFFolder(path, flag)
        family, architecture = read_architecture(folder)
        check_tensors(folder, family)
        tokenizer = folder.tokenizer_hash()
        return cls(
            origin=f"{flag} {path}",
            path=Path(path),
            architecture=architecture,
            vocab_size=architecture["vocab_size"],
            tokenizer_hash=tokenizer,
            tokenizer_folder=None if tokenizer is None else Path(path),
            fingerprint=folder.fingerprint,
            load=lambda chunks, vocab: load_hf_weights(chunks, folder, vocab),
        )

    @classmethod
    def from_megatron(cls, path: str, flag: str) -> "ModelSource":
        """A Megatron checkpoint folder in `torch_dist` format.

        Raises:
            MkdCheckpointError: it is missing, torn, or stores no arguments.
        """
        folder = MegatronFolder(path, flag)
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
    """Of several teachers together."""

    sources: tuple[ModelSource, ...]
    architecture: dict[str, Any] = field(default_factory=dict)
    """Nothing that they share is of use: see `TeacherSource`."""
    vocab_size: None = None
    tokenizer_hash: None = None

    @property
    def origin(self) -> str:
        """See `TeacherSource`."""
        return " ".join([self.sources[0].origin, *(str(source.path) for source in self.sources[1:])])

    @property
    def path(self) -> Path:
        """See `TeacherSource`; of the first one."""
        return self.sources[0].path

    def fingerprint(self) -> str:
        """See `TeacherSource`."""
        return common_fingerprint([source.fingerprint() for source in self.sources])


def common_fingerprint(fingerprints: Sequence[str]) -> str:
    """128 bits in hexadecimal of those of all teachers, in their order."""
    return hash_hex("\n".join(fingerprints).encode())


def has_other_tokenizer(student_hash: str | None, teacher: TeacherSource) -> bool:
    """Whether ids are known to mean something else to the teacher."""
    return None not in (student_hash, teacher.tokenizer_hash) and student_hash != teacher.tokenizer_hash


def common_vocabulary(student: str, student_vocab: int, student_hash: str | None, teacher: TeacherSource) -> int:
    """Number of tokens that student and teacher share; their ids mean the same to both.

    Some models of one tokenizer pad their vocabulary to different sizes and call that vocab_size: with equal tokenizers
    the smaller size counts, and rows beyond it stand for nothing.

    Args:
        student: the flag and folder to name.
        student_vocab: tokens that the student knows.
        student_hash: of the student's tokenizer, None when it is not known.
        teacher: the teacher.

    Raises:
        MkdConfigError: the tokenizers differ, or the sizes do while a tokenizer is not known: the teacher's
            probabilities would be about other words.
    """
    hint = "a teacher with another tokenizer than the student's needs --kd-xtoken-loss (docs/cross_tokenizer.md)"
    known = student_hash is not None and teacher.tokenizer_hash is not None
    if has_other_tokenizer(student_hash, teacher):
        raise MkdConfigError(f"{student} and {teacher.origin} have different tokenizers; {hint}")
    if teacher.vocab_size is None or teacher.vocab_size == student_vocab:
        return student_vocab
    if not known:
        raise MkdConfigError(
            f"{student} has a vocabulary of {student_vocab} tokens and {teacher.origin} one of {teacher.vocab_size}; "
            f"{hint}. If they do share it, put the tokenizer's files into both folders"
        )
    return min(student_vocab, teacher.vocab_size)
