"""Which teacher tokens stand for a student token: the projection from one vocabulary to the other, and its file."""

import json
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from mkd.errors import MkdCacheError, MkdConfigError
from mkd.utils.atomic_files import write_bytes

VERSION = 1
"""Raised when the same tokenizers and options give something else, or the file holds it differently."""
_METADATA = "mkd_projection"
_REBUILD = "build it anew with tools/build_projection.py"


@dataclass(frozen=True)
class ProjectionOptions:
    """How a projection is made.

    Raises:
        MkdConfigError: a value that makes no projection.
    """

    k: int = 4
    """Most teacher tokens for one student token. Of a longer text the first ones are kept."""
    decay: float = 0.1
    """Weight of a teacher token relative to the one before it, in the teacher's tokenization of a student token that it
    does not have. 0 keeps the first one only, which is what the teacher would predict next."""
    pairs: tuple[tuple[str, str], ...] = ()
    """Special tokens (student's, teacher's) that mean the same, beside those of the same role or spelling."""

    def __post_init__(self) -> None:
        if self.k < 1:
            raise MkdConfigError(f"--top-k is {self.k}; a projection needs at least 1 teacher token a row")
        if not 0 <= self.decay <= 1:
            raise MkdConfigError(f"--decay is {self.decay}; it must be between 0 and 1")


@dataclass(frozen=True)
class Projection:
    """A sparse matrix from student tokens to teacher tokens; its rows are probability distributions, or empty."""

    ids: Tensor
    """[V_s, k] int32 teacher tokens of each student token, the most weight first; -1 in unused places, which are last.
    No teacher token is twice in a row."""
    weights: Tensor
    """[V_s, k] fp32; 0 exactly where ids is -1. Rows sum to 1; those of tokens without any counterpart are empty."""
    common: Tensor
    """[n, 2] int64 (student token, teacher token) with the same bytes or the same role, sorted by the student's; no
    token is twice on its side. In `ids` and `weights`, these rows are the one token with weight 1."""
    teacher_size: int
    """Teacher ids are below it."""
    cut: int
    """Rows whose text the teacher writes with more than k tokens."""
    student_hash: str
    """`SpanTokenizer.hash` of the student."""
    teacher_hash: str
    options: ProjectionOptions
    version: int = VERSION

    def padded_to(self, rows: int) -> "Projection":
        """With empty rows at the end, for a model whose output layer is wider than its vocabulary.

        Raises:
            MkdConfigError: the model has fewer rows than its tokenizer has tokens.
        """
        more = rows - len(self.ids)
        if more < 0:
            raise MkdConfigError(
                f"the student has {rows} output rows, fewer than the {len(self.ids)} tokens of its tokenizer: the "
                "model and its tokenizer do not belong together"
            )
        ids = torch.nn.functional.pad(self.ids, (0, 0, 0, more), value=-1)
        return replace(self, ids=ids, weights=torch.nn.functional.pad(self.weights, (0, 0, 0, more)))

    def summary(self) -> dict[str, int]:
        """How many student tokens have which kind of row."""
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
        """Write a safetensors file, which appears when it is whole. The same projection gives the same bytes.

        Raises:
            MkdCacheError: it cannot be written.
        """
        tensors = {name: getattr(self, name).contiguous() for name in ("ids", "weights", "common")}
        facts = {key: value for key, value in asdict(self).items() if key not in tensors}
        metadata = json.dumps({**facts, "checksum": _checksum(tensors)}, sort_keys=True)
        try:
            # One entry, since safetensors writes several in any order.
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
            path: of the file.
            student_hash, teacher_hash: `SpanTokenizer.hash` of the tokenizers in use.
            flag: where the file was named, for messages.
            remedy: what to do about a file that cannot be used, for messages.

        Raises:
            MkdCacheError: it is missing, truncated, damaged, of a newer version, or of other tokenizers.
        """
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise MkdCacheError(f"{flag} {path} cannot be read: {error.strerror}") from error
        tensors, facts = _parse(content, f"{flag} {path}", remedy)
        for whose, wanted in (("student", student_hash), ("teacher", teacher_hash)):
            seen = facts[f"{whose}_hash"]
            if seen != wanted:
                raise MkdCacheError(
                    f"{flag} {path} is for another tokenizer of the {whose} ({seen}, in use is {wanted}): {remedy}"
                )
        options = facts.pop("options")
        pairs = tuple(tuple(pair) for pair in options.pop("pairs"))
        return cls(**tensors, **facts, options=ProjectionOptions(**options, pairs=pairs))


def _checksum(tensors: dict[str, Tensor]) -> str:
    digest = blake2b(digest_size=16)
    for name in sorted(tensors):
        digest.update(f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype}".encode())
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()


def _parse(content: bytes, where: str, remedy: str) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Tensors and facts of a file's bytes."""
    try:
        tensors = load_tensors(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        facts = json.loads(header["__metadata__"][_METADATA])
        version, checksum = facts["version"], facts.pop("checksum")
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise MkdCacheError(f"{where} is truncated or no projection ({error}): {remedy}") from error
    if version != VERSION:
        raise MkdCacheError(f"{where} has version {version}, and this mkd reads version {VERSION}: {remedy}")
    if _checksum(tensors) != checksum:
        raise MkdCacheError(f"{where} is damaged: {remedy}")
    return tensors, facts
