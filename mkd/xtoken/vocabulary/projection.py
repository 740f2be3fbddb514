"""The projection, a sparse matrix from the student's to a teacher's vocabulary, and its file."""

import json
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from mkd.errors import MkdCacheError, MkdConfigError
from mkd.utils.atomic_files import write_bytes
from mkd.utils.json_files import parse_json, read_regular

VERSION = 1
"""Increased when the same tokenizers and options give another projection, or the file format changes."""
_METADATA = "mkd_projection"
_MOST_BYTES = 1 << 30
"""Largest projection that is read."""
_REBUILD = "build it again with mkd build-projection"


@dataclass(frozen=True)
class ProjectionOptions:
    """Options of building a projection.

    Raises:
        MkdConfigError: a value out of range.
    """

    k: int = 4
    """Maximum of teacher tokens per student token; of more, the first ones are kept."""
    decay: float = 0.1
    """Weight of a teacher token relative to the one before it, in the teacher's tokenization of a student token that is
    not in its vocabulary. 0 keeps the first one only, which is the teacher's next token."""
    pairs: tuple[tuple[str, str], ...] = ()
    """Equivalent special tokens (student's, teacher's), beside those of the same role or name."""

    def __post_init__(self) -> None:
        if self.k < 1:
            raise MkdConfigError(f"--top-k is {self.k}; a projection needs at least 1 teacher token per student token")
        if not 0 <= self.decay <= 1:
            raise MkdConfigError(f"--decay is {self.decay}; it must be between 0 and 1")


@dataclass(frozen=True)
class Projection:
    """A sparse matrix from student to teacher tokens: per student token a probability distribution, or nothing."""

    ids: Tensor
    """[V_s, k] int32 teacher tokens of each student token, by descending weight and without repetition; unused columns,
    which are last, hold -1."""
    weights: Tensor
    """[V_s, k] fp32, 0 exactly where ids is -1. Weights of a student token sum to 1, or are all 0."""
    common: Tensor
    """[n, 2] int64 (student token, teacher token) with the same bytes or the same role, sorted by the student's; each
    token is in one pair at most. In `ids` and `weights` these student tokens have the one teacher token, weight 1."""
    teacher_size: int
    """Size of the teacher's vocabulary."""
    cut: int
    """Student tokens that the teacher encodes to more than k tokens."""
    student_hash: str
    """`SpanTokenizer.hash` of the student."""
    teacher_hash: str
    options: ProjectionOptions
    version: int = VERSION

    def summary(self) -> dict[str, int]:
        """Number of student tokens by kind of counterpart."""
        size = (self.ids >= 0).sum(dim=1)
        return {
            "student tokens": len(self.ids),
            "teacher tokens": self.teacher_size,
            "exact": len(self.common),
            "one token": int((size == 1).sum()) - len(self.common),
            "several tokens": int((size > 1).sum()),
            "cut": self.cut,
            "empty": int((size == 0).sum()),
        }

    def save(self, path: str | Path) -> None:
        """Write a safetensors file atomically. The same projection gives the same bytes.

        Raises:
            MkdCacheError: it cannot be written.
        """
        tensors = {name: getattr(self, name).contiguous() for name in ("ids", "weights", "common")}
        facts = {key: value for key, value in asdict(self).items() if key not in tensors}
        checksums = {"checksum": _checksum(tensors), "facts_checksum": _facts_checksum(facts)}
        metadata = json.dumps({**facts, **checksums}, sort_keys=True)
        try:
            # A single entry, since safetensors writes several in any order.
            write_bytes(Path(path), save_tensors(tensors, {_METADATA: metadata}))
        except OSError as error:
            raise MkdCacheError(f"the projection cannot be written to {path}: {error}") from error

    @classmethod
    def load(
        cls,
        path: str | Path,
        student_hash: str,
        teacher_hash: str,
        flag: str = "--kd-projection",
        remedy: str = _REBUILD,
    ) -> "Projection":
        """Read a file that `save` wrote.

        Args:
            path: the file.
            student_hash, teacher_hash: `SpanTokenizer.hash` of the tokenizers in use.
            flag: flag that named the file, for messages.
            remedy: end of the messages about an unusable file.

        Raises:
            MkdCacheError: the file is missing, truncated, damaged, of another version, or for other tokenizers.
        """
        try:
            content = read_regular(Path(path), _MOST_BYTES)
        except OSError as error:
            raise MkdCacheError(f"{flag} {path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise MkdCacheError(f"{flag} {path}: {error}") from error
        tensors, facts = _parse(content, f"{flag} {path}", remedy)
        for model, expected in (("student", student_hash), ("teacher", teacher_hash)):
            seen = facts[f"{model}_hash"]
            if seen != expected:
                raise MkdCacheError(
                    f"{flag} {path} is for another tokenizer of the {model} ({seen}, in use is {expected}): {remedy}"
                )
        try:
            options = facts.pop("options")
            pairs = tuple(tuple(pair) for pair in options.pop("pairs"))
            return cls(**tensors, **facts, options=ProjectionOptions(**options, pairs=pairs))
        except (KeyError, TypeError, AttributeError) as error:
            raise MkdCacheError(f"{flag} {path} is damaged ({error!r}): {remedy}") from error


def _checksum(tensors: dict[str, Tensor]) -> str:
    digest = blake2b(digest_size=16)
    for name in sorted(tensors):
        digest.update(f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype}".encode())
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()


def _facts_checksum(facts: dict[str, object]) -> str:
    return blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


def _parse(content: bytes, where: str, remedy: str) -> tuple[dict[str, Tensor], dict[str, object]]:
    """(tensors, metadata) of a file's bytes."""
    try:
        tensors = load_tensors(content)
        header = parse_json(content[8 : 8 + int.from_bytes(content[:8], "little")])
        facts = parse_json(header["__metadata__"][_METADATA])
        version, checksum = facts["version"], facts.pop("checksum")
        of_facts = facts.pop("facts_checksum", None)  # older files have none
        _ = facts["student_hash"], facts["teacher_hash"]
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise MkdCacheError(f"{where} is truncated or not a projection ({error}): {remedy}") from error
    if version != VERSION:
        raise MkdCacheError(f"{where} has version {version}, and this mkd reads version {VERSION}: {remedy}")
    if _checksum(tensors) != checksum or of_facts not in (None, _facts_checksum(facts)):
        raise MkdCacheError(f"{where} is damaged: {remedy}")
    return tensors, facts
