"""What two vocabularies share, laid out over the student's vocabulary shards.

A token that both have is a slot: a column of the student's shard and, on the same rank, a column of the teacher's. The
teacher's head is cut so that its first columns are the slots of the student's shard, in their order; the teacher's
other tokens follow, spread so that all ranks have about the same number of columns.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from mkd.config.values import XTokenLoss
from mkd.errors import MkdConfigError

RELAXED_WEIGHT = 0.6
"""`gold_relaxed` pairs a student token with a teacher token that has at least this part of its projection."""


@dataclass(frozen=True)
class CrossVocabulary:
    """One rank's part of both vocabularies. Tensors are on the device of the losses."""

    kind: XTokenLoss
    """The loss that it is made for."""
    student_vocab: int
    """True size, without padding."""
    teacher_vocab: int
    student_width: int
    """Rows of the student's LM head on each rank, padding included."""
    rank: int
    size: int
    teacher_columns: Tensor
    """[columns] int64 teacher ids of this rank, in the order of the rows that its part of the teacher's head has."""
    teacher_starts: tuple[int, ...]
    """Where each rank's columns start among all, in rank order, and the end of the last."""
    most_others: tuple[int, int]
    """The greatest number of columns that are in no slot on a rank: of the student's, of the teacher's."""
    slots: Tensor
    """[slots] int64 columns of the student's shard; slot k is column k of the teacher's part."""
    others: Tensor
    """[others] int64 columns of the student's shard that are in no slot; no padding."""
    pair_of_student: Tensor
    """[V_s] int64 teacher id of the same token, -1 without one."""
    pair_of_teacher: Tensor
    """[V_t] int64 student id of the same token, -1 without one."""
    teacher_place: Tensor
    """[V_t] int64 place of a teacher id among the columns of all ranks, in rank order."""
    reached: Tensor
    """[columns] bool: whether the projection reaches this rank's teacher column."""
    projection: Tensor | None
    """Sparse CSR [student columns, teacher columns of all ranks] fp32, and its transpose; for p_kl only."""
    projection_t: Tensor | None

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
        """The layout of one rank.

        Args:
            kind: the loss that it is for.
            ids: [V, k] int64, for each student token the teacher tokens that it is written in, -1 in empty places. V
                may be any size: rows from `student_vocab` up, and ids from `teacher_vocab` up, are left out.
            weights: [V, k] their shares, >= 0; 0 counts as an empty place.
            pairs: [n, 2] ids (student, teacher) of the tokens that both have, each id at most once.
            student_vocab, teacher_vocab: true sizes.
            student_width: rows of the student's LM head on each rank.
            rank, size: of the tensor-parallel group.
            device: of the losses.

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
        place = torch.empty(teacher_vocab, dtype=torch.int64)
        place[torch.cat(columns)] = torch.arange(teacher_vocab)
        start = rank * student_width
        real = max(0, min(student_width, student_vocab - start))
        slots = pairs[:, 0][(pairs[:, 0] >= start) & (pairs[:, 0] < start + real)] - start
        is_slot = torch.zeros(real, dtype=torch.bool).index_fill_(0, slots, True)
        reached = torch.zeros(teacher_vocab, dtype=torch.bool).index_fill_(0, ids[ids >= 0], True)
        projection = None
        if kind == "p_kl":
            projection = _projection(ids, weights, place, slice(start, start + real), teacher_vocab)
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
            most_others=_most_others(pairs, columns, student_vocab, student_width),
            slots=slots.to(device),
            others=(~is_slot).nonzero().squeeze(1).to(device),
            pair_of_student=_table(student_vocab, pairs).to(device),
            pair_of_teacher=_table(teacher_vocab, pairs.flip(1)).to(device),
            teacher_place=place.to(device),
            reached=reached[columns[rank]].to(device),
            projection=None if projection is None else _csr(projection).to(device),
            projection_t=None if projection is None else _csr(projection.t()).to(device),
        )

    @property
    def student_start(self) -> int:
        """Global id of this rank's first student column."""
        return self.rank * self.student_width

    @property
    def student_columns(self) -> int:
        """Real student columns of this rank; they come first."""
        return len(self.slots) + len(self.others)

    @property
    def teacher_start(self) -> int:
        """Place of this rank's first teacher column among those of all ranks."""
        return self.teacher_starts[self.rank]

    def student_columns_of(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(column in this rank's shard, whether it has one) of student tokens [n]; the column says nothing without."""
        columns = ids - self.student_start
        return columns, (ids >= 0) & (columns >= 0) & (columns < self.student_columns)

    def teacher_columns_of(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The same of teacher tokens."""
        columns = self.teacher_place[ids.clamp_min(0)] - self.teacher_start
        return columns, (ids >= 0) & (columns >= 0) & (columns < len(self.teacher_columns))


def relaxed_pairs(ids: Tensor, weights: Tensor) -> Tensor:
    """[n, 2] pairs of each student token and the teacher token that has at least `RELAXED_WEIGHT` of its projection.

    Of several student tokens with the same teacher token the one with the greatest weight is taken, of equal ones the
    lowest id.
    """
    top, slot = torch.where(ids >= 0, weights, 0).max(dim=1)
    student = (top >= RELAXED_WEIGHT * (1.0 - 1e-6)).nonzero().squeeze(1)
    # fp32 shares of 0.6 may be rounded below it
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
    for side, name in enumerate(("student", "teacher")):
        ids, counts = pairs[:, side].unique(return_counts=True)
        if (counts > 1).any():
            raise MkdConfigError(f"--kd-projection: {name} token {ids[counts > 1][0].item()} is in several pairs")


def _teacher_columns(pairs: Tensor, teacher_vocab: int, student_width: int, size: int) -> list[Tensor]:
    """Teacher ids of each rank: those of its slots, then its part of the others."""
    slots = [pairs[pairs[:, 0] // student_width == rank, 1] for rank in range(size)]
    is_free = torch.ones(teacher_vocab, dtype=torch.bool).index_fill_(0, pairs[:, 1], False)
    free = is_free.nonzero().squeeze(1)
    level = _water_level([len(s) for s in slots], teacher_vocab)
    room = [max(0, level - len(s)) for s in slots]
    # The level may hold some columns too many; the last ranks go without them.
    ends = torch.tensor([0, *room]).cumsum(0).clamp_max(len(free)).tolist()
    return [torch.cat([s, free[a:b]]) for s, (a, b) in zip(slots, pairwise(ends), strict=True)]


def _water_level(taken: list[int], total: int) -> int:
    """The least width at which ranks that have `taken` columns each can hold `total` together."""
    low, high = 0, total
    while low < high:
        middle = (low + high) // 2
        if sum(max(t, middle) for t in taken) >= total:
            high = middle
        else:
            low = middle + 1
    return low


def _most_others(pairs: Tensor, columns: list[Tensor], student_vocab: int, student_width: int) -> tuple[int, int]:
    """See `CrossVocabulary.most_others`."""
    size = len(columns)
    slots = (pairs[:, 0] // student_width).bincount(minlength=size).tolist()
    real = [max(0, min(student_width, student_vocab - rank * student_width)) for rank in range(size)]
    teacher = max(len(c) - n for c, n in zip(columns, slots, strict=True))
    return max(r - n for r, n in zip(real, slots, strict=True)), teacher


def _table(size: int, pairs: Tensor) -> Tensor:
    """[size] int64: from the first ids of pairs to the second, -1 for others."""
    table = torch.full((size,), -1, dtype=torch.int64)
    table[pairs[:, 0]] = pairs[:, 1]
    return table


def _projection(ids: Tensor, weights: Tensor, place: Tensor, rows: slice, teacher_vocab: int) -> Tensor:
    """COO [student columns of a shard, teacher columns of all ranks]; rows add up to 1, or 0 without ids."""
    ids, weights = ids[rows], torch.where(ids[rows] >= 0, weights[rows].double(), 0)
    total = weights.sum(dim=1, keepdim=True)
    shares = torch.where(total > 0, weights / total, 0).float()
    row, slot = (ids >= 0).nonzero(as_tuple=True)
    places = torch.stack([row, place[ids[row, slot]]])
    return torch.sparse_coo_tensor(places, shares[row, slot], (rows.stop - rows.start, teacher_vocab)).coalesce()


def _csr(matrix: Tensor) -> Tensor:
    return matrix.coalesce().to_sparse_csr()
