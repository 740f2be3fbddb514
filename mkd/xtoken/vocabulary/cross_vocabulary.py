"""Two vocabularies in the layout of the student's vocabulary shards.

A common token is a *slot*: a column of the student's shard and, on the same rank, a column of the teacher's. The
teacher's LM head is split so that its first columns are the slots of the student's shard, in their order; the teacher's
other tokens follow, spread so that all ranks have about the same number of columns.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from mkd.config.values import XTokenLoss
from mkd.errors import MkdConfigError
from mkd.xtoken.vocabulary.sparse_rows import SparseRows

RELAXED_WEIGHT = 0.6
"""`gold_relaxed` pairs a student token with a teacher token that has at least this share of its projection."""


class SparseMatrix(NamedTuple):
    """A matrix [rows, columns] fp32 in the two forms that losses multiply by."""

    csr: Tensor
    """For PyTorch."""
    rows: SparseRows
    """For the kernel."""

    @classmethod
    def of(cls, matrix: Tensor, device: torch.device | str) -> "SparseMatrix":
        """From a sparse COO matrix on the host."""
        csr = matrix.coalesce().to_sparse_csr()
        return cls(csr.to(device), SparseRows.of(csr).to(device))


@dataclass(frozen=True)
class CrossVocabulary:
    """One rank's shards of both vocabularies. Tensors are on the device of the loss."""

    kind: XTokenLoss
    """The loss that it is built for."""
    student_vocab: int
    """True size, without padding."""
    teacher_vocab: int
    student_width: int
    """Rows of the student's LM head on each rank, padding included."""
    rank: int
    size: int
    teacher_columns: Tensor
    """[columns] int64 teacher ids of this rank, in the order of the rows of its shard of the teacher's LM head."""
    teacher_starts: tuple[int, ...]
    """Start of each rank's columns among all, in rank order, and the end of the last."""
    max_uncommon: tuple[int, int]
    """Maximum over ranks of the number of columns in no slot: the student's, the teacher's."""
    slots: Tensor
    """[slots] int64 columns of the student's shard; slot k is column k of the teacher's shard."""
    uncommon: Tensor
    """[n] int64 columns of the student's shard that are in no slot; no padding."""
    pair_of_student: Tensor
    """[V_s] int64 teacher id of the common token, -1 for uncommon ones."""
    pair_of_teacher: Tensor
    """[V_t] int64 student id of the common token, -1 for uncommon ones."""
    teacher_position: Tensor
    """[V_t] int64 position of each teacher id among the columns of all ranks, in rank order."""
    reached: Tensor
    """[columns] bool, True for teacher columns of this rank that the projection reaches."""
    projection: SparseMatrix | None
    """[student columns, teacher columns of all ranks]; for p_kl only."""
    projection_t: SparseMatrix | None
    """Its transpose."""

    @classmethod
    def of(
        cls,
        kind: XTokenLoss,
        ids: Tensor,
        weights: Tensor,
        pairs: Tensor,
        *,
        student_vocab: int,
        teacher_vocab: int,
        student_width: int,
        rank: int = 0,
        size: int = 1,
        device: torch.device | str = "cpu",
    ) -> "CrossVocabulary":
        """Build the shards of one rank.

        Args:
            kind: the loss that it is for.
            ids: [V, k] int64 teacher tokens of each student token (`Projection.ids`), -1 in unused columns. V may be
                any size: student ids from `student_vocab` up, and teacher ids from `teacher_vocab` up, are ignored.
            weights: [V, k] their shares, >= 0; 0 counts as unused.
            pairs: [n, 2] ids (student, teacher) of the common tokens, each id at most once.
            student_vocab, teacher_vocab: true sizes.
            student_width: rows of the student's LM head on each rank.
            rank, size: in the tensor-parallel group.
            device: device of the loss.

        Raises:
            MkdConfigError: no token in common, an id in two pairs, or shapes that do not fit.
        """
        if ids.shape != weights.shape or ids.dim() != 2 or pairs.dim() != 2 or pairs.shape[1] != 2:
            raise MkdConfigError(
                f"--kd-projection: ids {tuple(ids.shape)}, weights {tuple(weights.shape)} and pairs "
                f"{tuple(pairs.shape)} must be [V, k], [V, k] and [n, 2]"
            )
        ids, weights = ids.cpu().long()[:student_vocab], weights.cpu()[:student_vocab]
        ids = torch.where((weights > 0) & (ids < teacher_vocab), ids, -1)
        pairs = relaxed_pairs(ids, weights) if kind == "gold_relaxed" else pairs.cpu().long()
        pairs = pairs[((pairs >= 0) & (pairs < torch.tensor([student_vocab, teacher_vocab]))).all(dim=1)]
        _check_pairs(kind, pairs)
        pairs = pairs[pairs[:, 0].argsort()]
        columns = _teacher_columns(pairs, teacher_vocab, student_width, size)
        position = torch.empty(teacher_vocab, dtype=torch.int64)
        position[torch.cat(columns)] = torch.arange(teacher_vocab)
        start = rank * student_width
        real = max(0, min(student_width, student_vocab - start))
        slots = pairs[:, 0][(pairs[:, 0] >= start) & (pairs[:, 0] < start + real)] - start
        is_slot = torch.zeros(real, dtype=torch.bool).index_fill_(0, slots, True)
        reached = torch.zeros(teacher_vocab, dtype=torch.bool).index_fill_(0, ids[ids >= 0], True)
        projection = projection_t = None
        if kind == "p_kl":
            shares = _projection(ids, weights, position, slice(start, start + real), teacher_vocab)
            projection, projection_t = (SparseMatrix.of(matrix, device) for matrix in (shares, shares.t()))
        ends = torch.tensor([0, *(len(c) for c in columns)]).cumsum(0).tolist()
        return cls(
            kind,
            student_vocab,
            teacher_vocab,
            student_width,
            rank,
            size,
            teacher_columns=columns[rank].to(device),
            teacher_starts=tuple(ends),
            max_uncommon=_max_uncommon(pairs, columns, student_vocab, student_width),
            slots=slots.to(device),
            uncommon=(~is_slot).nonzero().squeeze(1).to(device),
            pair_of_student=_table(student_vocab, pairs).to(device),
            pair_of_teacher=_table(teacher_vocab, pairs.flip(1)).to(device),
            teacher_position=position.to(device),
            reached=reached[columns[rank]].to(device),
            projection=projection,
            projection_t=projection_t,
        )

    @property
    def student_start(self) -> int:
        """Global id of this rank's first student column."""
        return self.rank * self.student_width

    @property
    def student_columns(self) -> int:
        """Real student columns of this rank; they come first."""
        return len(self.slots) + len(self.uncommon)

    @property
    def teacher_start(self) -> int:
        """Position of this rank's first teacher column among those of all ranks."""
        return self.teacher_starts[self.rank]

    def student_columns_of(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """([n] column in this rank's shard, [n] bool: the shard has it) of student ids [n]; else undefined."""
        columns = ids - self.student_start
        return columns, (ids >= 0) & (columns >= 0) & (columns < self.student_columns)

    def teacher_columns_of(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """([n] column in this rank's shard, [n] bool: the shard has it) of teacher ids [n]; else undefined."""
        columns = self.teacher_position[ids.clamp_min(0)] - self.teacher_start
        return columns, (ids >= 0) & (columns >= 0) & (columns < len(self.teacher_columns))


def relaxed_pairs(ids: Tensor, weights: Tensor) -> Tensor:
    """[n, 2] pairs of a student token and the teacher token that has at least `RELAXED_WEIGHT` of its projection.

    Of several student tokens with the same teacher token the one with the greatest weight is paired, then the one with
    the lowest id.
    """
    top, slot = torch.where(ids >= 0, weights, 0).max(dim=1)
    student = (top >= RELAXED_WEIGHT * (1.0 - 1e-6)).nonzero().squeeze(1)
    # The tolerance is for fp32 shares of 0.6 that are rounded below it.
    student = student[top[student].argsort(descending=True, stable=True)]
    teacher = ids[student, slot[student]]
    order = teacher.argsort(stable=True)
    student, teacher = student[order], teacher[order]
    first = torch.ones_like(teacher, dtype=torch.bool)
    first[1:] = teacher[1:] != teacher[:-1]
    return torch.stack([student[first], teacher[first]], dim=1)


def _check_pairs(kind: str, pairs: Tensor) -> None:
    if len(pairs) == 0 and kind != "p_kl":
        raise MkdConfigError(
            f"--kd-projection: student and teacher have no token in common, and --kd-xtoken-loss {kind} compares "
            "common tokens: was the file made for these two tokenizers? p_kl needs none"
        )
    for column, name in enumerate(("student", "teacher")):
        ids, counts = pairs[:, column].unique(return_counts=True)
        if (counts > 1).any():
            raise MkdConfigError(f"--kd-projection: {name} token {ids[counts > 1][0].item()} is in several pairs")


def _teacher_columns(pairs: Tensor, teacher_vocab: int, student_width: int, size: int) -> list[Tensor]:
    """Teacher ids of each rank: those of its slots, then its share of the uncommon ones."""
    slots = [pairs[pairs[:, 0] // student_width == rank, 1] for rank in range(size)]
    is_free = torch.ones(teacher_vocab, dtype=torch.bool).index_fill_(0, pairs[:, 1], False)
    free = is_free.nonzero().squeeze(1)
    level = _water_level([len(s) for s in slots], teacher_vocab)
    room = [max(0, level - len(s)) for s in slots]
    # The level may hold too many columns; the last ranks then have fewer.
    ends = torch.tensor([0, *room]).cumsum(0).clamp_max(len(free)).tolist()
    return [torch.cat([s, free[a:b]]) for s, (a, b) in zip(slots, pairwise(ends), strict=True)]


def _water_level(taken: list[int], total: int) -> int:
    """Smallest width at which ranks with `taken` columns each can hold `total` columns together."""
    low, high = 0, total
    while low < high:
        middle = (low + high) // 2
        if sum(max(t, middle) for t in taken) >= total:
            high = middle
        else:
            low = middle + 1
    return low


def _max_uncommon(pairs: Tensor, columns: list[Tensor], student_vocab: int, student_width: int) -> tuple[int, int]:
    """See `CrossVocabulary.max_uncommon`."""
    size = len(columns)
    slots = (pairs[:, 0] // student_width).bincount(minlength=size).tolist()
    real = [max(0, min(student_width, student_vocab - rank * student_width)) for rank in range(size)]
    teacher = max(len(c) - n for c, n in zip(columns, slots, strict=True))
    return max(r - n for r, n in zip(real, slots, strict=True)), teacher


def _table(size: int, pairs: Tensor) -> Tensor:
    """[size] int64 map from the first to the second id of each pair, -1 for ids in no pair."""
    table = torch.full((size,), -1, dtype=torch.int64)
    table[pairs[:, 0]] = pairs[:, 1]
    return table


def _projection(ids: Tensor, weights: Tensor, position: Tensor, own: slice, teacher_vocab: int) -> Tensor:
    """COO [student columns of a shard, teacher columns of all ranks]; shares of a student token sum to 1, or to 0."""
    ids, weights = ids[own], torch.where(ids[own] >= 0, weights[own].double(), 0)
    total = weights.sum(dim=1, keepdim=True)
    shares = torch.where(total > 0, weights / total, 0).float()
    token, column = (ids >= 0).nonzero(as_tuple=True)
    indices = torch.stack([token, position[ids[token, column]]])
    return torch.sparse_coo_tensor(indices, shares[token, column], (own.stop - own.start, teacher_vocab)).coalesce()
