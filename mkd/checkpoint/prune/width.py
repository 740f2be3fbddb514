"""Which channels and heads a narrower student keeps of its teacher, and where they lie in each tensor."""

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
    """The axes of `Dims` that lie one after the other on one axis of a tensor."""
    return _PACKED.get(axis, (axis,))


@dataclass(frozen=True)
class Importance:
    """Scores by which to keep channels and heads, float64 on the CPU: the larger, the more important."""

    hidden: Tensor
    """[hidden] of the residual stream, which all layers share."""
    ffn: Tensor
    """[layers, ffn]"""
    heads: Tensor
    """[layers, heads] of the query heads."""

    @classmethod
    def zeros(cls, dims: Dims, layers: int) -> "Importance":
        """Nothing counted yet."""
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
    """The sizes of a student; what is None stays the teacher's.

    Without `groups` a teacher with one query group a head gives such a student, another keeps its number of groups.

    Raises:
        MkdConfigError: nothing is to change, or a size is below 1, above the teacher's, or heads and groups do not go
            together; names the flag.
    """
    asked = {
        "--hidden-size": (hidden, teacher.hidden),
        "--ffn-hidden-size": (ffn, teacher.ffn),
        "--num-attention-heads": (heads, teacher.heads),
        "--num-query-groups": (groups, teacher.groups),
    }
    if all(size is None for size, _ in asked.values()):
        raise MkdConfigError(f"no size is given; give at least one of {', '.join(asked)}")
    for flag, (size, largest) in asked.items():
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
            f"--num-attention-heads {heads} in {groups} query groups are {heads // groups} heads a group; the teacher "
            f"has {teacher.heads // teacher.groups}, and a head can only use the keys and values of its own group"
        )
    return replace(teacher, hidden=hidden or teacher.hidden, ffn=ffn or teacher.ffn, heads=heads, groups=groups)


@dataclass(frozen=True)
class WidthChoice:
    """What the student keeps: indices into the teacher's channels, heads and groups, ascending."""

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
        """The channels and heads with the largest scores; of equal ones the first."""
        heads, groups = _best_heads(scores.heads, teacher, student)
        hidden, ffn = _largest(scores.hidden, student.hidden), _largest(scores.ffn, student.ffn)
        return cls(teacher, student, hidden, ffn, heads, groups)

    def kept(self, axis: str, layer: int | None) -> Tensor | None:
        """Indices into an axis of a tensor of the teacher's `layer`; None where all of the axis is kept.

        Args:
            axis: a name of `Dims`.
            layer: the teacher's, None outside of the layers.
        """
        if getattr(self.teacher, axis) == getattr(self.student, axis):
            return None
        pieces, start = [], 0
        for part in axis_parts(axis):
            pieces.append(start + self._kept_of_part(part, layer))
            start += getattr(self.teacher, part)
        return torch.cat(pieces)

    def _kept_of_part(self, part: str, layer: int | None) -> Tensor:
        if part == "hidden":
            return self.hidden
        if part == "ffn":
            return self.ffn[layer]
        blocks = {"query": self.heads, "key": self.groups}[part][layer]
        return (blocks[:, None] * self.teacher.head_dim + torch.arange(self.teacher.head_dim)).flatten()


def _largest(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest along the last axis, ascending."""
    return scores.sort(descending=True, stable=True).indices[..., :count].sort().values


def _best_heads(scores: Tensor, teacher: Dims, student: Dims) -> tuple[Tensor, Tensor]:
    """In each group the best heads, and of the groups those whose best heads have the largest sum.

    Every kept group keeps equally many heads, so that the student's heads find their keys and values by position.
    """
    per_group, kept = teacher.heads // teacher.groups, student.heads // student.groups
    grouped = scores.unflatten(1, (teacher.groups, per_group))
    inside = _largest(grouped, kept)
    groups = _largest(grouped.gather(2, inside).sum(2), student.groups)
    where = groups[..., None].expand(-1, -1, kept)
    return (where * per_group + inside.gather(1, where)).flatten(1), groups
