"""Width pruning: selects the channels and heads that a student keeps, and their indices in each tensor."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mkd.checkpoint.hf.layouts import Dims
from mkd.errors import MkdConfigError

_PACKED: Mapping[str, tuple[str, ...]] = {
    "query_key_value": ("query", "key", "key"),
    "gate_and_up": ("ffn", "ffn"),
}


def axis_parts(axis: str) -> tuple[str, ...]:
    """Names of `Dims` that are concatenated along one axis of a tensor."""
    return _PACKED.get(axis, (axis,))


@dataclass(frozen=True)
class Importance:
    """Importance scores of channels and heads, float64 on the CPU; the highest scores are kept."""

    hidden: Tensor
    """[hidden]: channels of the residual stream, shared by all layers."""
    ffn: Tensor
    """[layers, ffn]"""
    heads: Tensor
    """[layers, heads]: query heads."""

    @classmethod
    def zeros(cls, dims: Dims, layers: int) -> "Importance":
        """Zero scores, to accumulate into."""
        sizes = ((dims.hidden,), (layers, dims.ffn), (layers, dims.heads))
        return cls(*(torch.zeros(size, dtype=torch.float64) for size in sizes))

    @property
    def is_finite(self) -> bool:
        return all(bool(scores.isfinite().all()) for scores in (self.hidden, self.ffn, self.heads))


def student_dims(
    teacher: Dims,
    hidden: int | None = None,
    ffn: int | None = None,
    heads: int | None = None,
    groups: int | None = None,
) -> Dims:
    """The sizes of a student; a size of None stays as in the teacher.

    If `groups` is None, a teacher with one query group per head gives a student of this kind; any other keeps its
    number of groups.

    Raises:
        MkdConfigError: naming the flag, when no size is given, a size is below 1 or above the teacher's, or heads and
            groups are not compatible.
    """
    requested = {
        "--hidden-size": (hidden, teacher.hidden),
        "--ffn-hidden-size": (ffn, teacher.ffn),
        "--num-attention-heads": (heads, teacher.heads),
        "--num-query-groups": (groups, teacher.groups),
    }
    if all(size is None for size, _ in requested.values()):
        raise MkdConfigError(f"no size is given; give at least one of {', '.join(requested)}")
    for flag, (size, largest) in requested.items():
        if size is not None and not 1 <= size <= largest:
            raise MkdConfigError(f"{flag} is {size}; it must be from 1 to the teacher's {largest}")
    if heads is None and groups is not None:
        raise MkdConfigError(f"--num-query-groups is {groups}; --num-attention-heads is needed with it")
    heads = heads or teacher.heads
    groups = groups or (heads if teacher.groups == teacher.heads else teacher.groups)
    if heads % groups:
        raise MkdConfigError(
            f"--num-attention-heads is {heads}, which {groups} query groups do not divide; "
            "choose a multiple, or another --num-query-groups"
        )
    if heads // groups > teacher.heads // teacher.groups:
        raise MkdConfigError(
            f"--num-attention-heads {heads} in {groups} query groups are {heads // groups} heads per group; the "
            f"teacher has {teacher.heads // teacher.groups}, and a head uses the keys and values of its own group only"
        )
    return replace(teacher, hidden=hidden or teacher.hidden, ffn=ffn or teacher.ffn, heads=heads, groups=groups)


@dataclass(frozen=True)
class WidthChoice:
    """Indices of the teacher's channels, heads and groups that the student keeps, ascending."""

    teacher: Dims
    student: Dims
    hidden: Tensor
    """[student's hidden]"""
    ffn: Tensor
    """[teacher's layers, student's ffn]"""
    heads: Tensor
    """[teacher's layers, student's heads]"""
    groups: Tensor
    """[teacher's layers, student's groups]"""

    @classmethod
    def best(cls, scores: Importance, teacher: Dims, student: Dims) -> "WidthChoice":
        """The channels and heads with the highest scores; of equal scores the first."""
        heads, groups = _best_heads(scores.heads, teacher, student)
        hidden, ffn = _largest(scores.hidden, student.hidden), _largest(scores.ffn, student.ffn)
        return cls(teacher, student, hidden, ffn, heads, groups)

    def kept(self, axis: str, layer: int | None) -> Tensor | None:
        """Kept indices along an axis of a tensor; None if the whole axis is kept.

        Args:
            axis: a name of `Dims`.
            layer: layer of the teacher; None outside of the layers.
        """
        if getattr(self.teacher, axis) == getattr(self.student, axis):
            return None
        pieces, start = [], 0
        for part in axis_parts(axis):
            pieces.append(start + self._kept_in_part(part, layer))
            start += getattr(self.teacher, part)
        return torch.cat(pieces)

    def _kept_in_part(self, part: str, layer: int | None) -> Tensor:
        if part == "hidden":
            return self.hidden
        if part == "ffn":
            return self.ffn[layer]
        blocks = {"query": self.heads, "key": self.groups}[part][layer]
        return (blocks[:, None] * self.teacher.head_dim + torch.arange(self.teacher.head_dim)).flatten()


def _largest(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest scores along the last axis, ascending."""
    return scores.sort(descending=True, stable=True).indices[..., :count].sort().values


def _best_heads(scores: Tensor, teacher: Dims, student: Dims) -> tuple[Tensor, Tensor]:
    """The best heads of each group, and the groups whose best heads have the highest sum of scores.

    Every kept group keeps the same number of heads, because heads are assigned to groups by position.
    """
    per_group, kept = teacher.heads // teacher.groups, student.heads // student.groups
    grouped = scores.unflatten(1, (teacher.groups, per_group))
    inside = _largest(grouped, kept)
    groups = _largest(grouped.gather(2, inside).sum(2), student.groups)
    index = groups[..., None].expand(-1, -1, kept)
    return (index * per_group + inside.gather(1, index)).flatten(1), groups
