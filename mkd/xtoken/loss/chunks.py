"""Which rows of a microbatch belong to which chunk, and how the work on them is cut.

A chunk may lie on several context-parallel ranks, and its teacher rows on others than its student rows. The rank that
has its first student row owns it: the other rows come there as hidden states, and the student's gradient goes back the
same way. A chunk is then whole wherever it is computed, and no sum over a chunk is ever taken over ranks.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class ChunkRows:
    """The chunks of a microbatch, seen from the rows of one context-parallel rank.

    A row belongs to the chunk of the token that it predicts. Chunks are numbered over the whole microbatch, the same on
    all context-parallel ranks. Rows are in the order of the hidden states' (sequence first). Tensors may be on the
    host, which saves a copy from the device.
    """

    student: Tensor
    """[N_s] int64 chunk of each student row, -1 for none."""
    student_first: Tensor
    """[N_s] bool: the row predicts the first token of its chunk, in the text's order (`chunk_starts` of a batch)."""
    teacher: Tensor
    """[N_t] int64, as the student's."""
    teacher_first: Tensor
    """[N_t] bool."""
    weight: Tensor
    """[C] fp32 KD weight of each chunk; 0: it does not count, and its rows are not looked at."""


class Side(NamedTuple):
    """One model's rows of a group, each [n] but the last two: first the first rows of all chunks, in the order of the
    chunks, then their second rows, and so on."""

    rows: Tensor
    """int64 places among the hidden states that this rank has, brought ones included."""
    labels: Tensor
    """int64 tokens that they predict."""
    chunks: Tensor
    """int64 chunk in the group, from 0 up; anything in a group without chunks."""
    then: tuple[slice, ...]
    """Second rows, third rows ...: in each a chunk has at most one."""
    count: Tensor
    """[chunks] fp32 rows of each chunk."""

    def totals(self, values: Tensor) -> Tensor:
        """[n, ...] of each row -> [chunks, ...] sums over the rows of each chunk, in a fixed order."""
        total = values[: len(self.count)].clone()
        for places in self.then:
            chunks = self.chunks[places]
            total[chunks] = total[chunks] + values[places]
        return total


class Group(NamedTuple):
    """Whole chunks that are computed together; or rows without a chunk, which have cross-entropy alone."""

    numbers: Tensor
    """[chunks] int64 numbers in the microbatch."""
    student: Side
    teacher: Side


@dataclass(frozen=True)
class Plan:
    """The work of one rank."""

    groups: list[Group]
    moved: Tensor
    """[n] int64 rows of this rank whose chunk another one owns."""
    most_moved: int
    """The largest n of all ranks: what each of them sends, padding included. 0: nothing is sent."""

    @classmethod
    def of(
        cls,
        chunks: ChunkRows,
        labels: Tensor,
        ce_weight: Tensor | None,
        teacher_labels: Tensor,
        *,
        vocabularies: tuple[int, int],
        cp_group: ProcessGroup | None,
        budget: int,
        device: torch.device,
    ) -> "Plan":
        """The plan of this rank; the ranks of `cp_group` call it together.

        Communication: one all-gather over `cp_group` of 8 (2 N_s + 2 N_t) bytes, and one copy to the host.

        Args:
            chunks: see there.
            labels, ce_weight: [N_s] of this rank.
            teacher_labels: [N_t].
            vocabularies: true sizes, the student's and the teacher's.
            cp_group: ranks with the other rows of the same microbatch; None: there are none.
            budget: rows of a group, of the larger side; a chunk of more is a group by itself.
            device: of the index tensors.

        Raises:
            ValueError: shapes that do not fit, chunk numbers out of range, or a chunk with a weight that lacks rows or
                has not one first row on each side.
        """
        _check_shapes(chunks, labels, teacher_labels)
        rank = 0 if cp_group is None else cp_group.rank()
        n_s, n_t = len(labels), len(teacher_labels)
        everywhere = _gather(
            [
                _code(chunks.student, chunks.student_first),
                labels,
                _code(chunks.teacher, chunks.teacher_first),
                teacher_labels,
            ],
            cp_group,
            device,
        )
        code_s, label_s, code_t, label_t = everywhere.split([n_s, n_s, n_t, n_t], dim=1)
        counts = chunks.weight.cpu() != 0
        student, teacher = (_Rows.of(name, c, counts) for name, c in (("student", code_s), ("teacher", code_t)))
        for name, side, label, size in zip(
            ("student", "teacher"), (student, teacher), (label_s, label_t), vocabularies, strict=True
        ):
            side.check(name, counts, label.reshape(-1), size)
        owner = torch.full((len(counts),), -1).index_put_(
            (student.chunk[student.first],), student.place[student.first] // max(n_s, 1)
        )
        away = owner[student.chunk] != student.place // max(n_s, 1)
        moved = _cut_by_rank(student.place[away], n_s, len(code_s))
        most = max(len(m) for m in moved)
        # Own rows first, then what the ranks sent, each padded to the same number.
        local = torch.full((code_s.numel(),), -1)
        local[rank * n_s : (rank + 1) * n_s] = torch.arange(n_s)
        for sender, places in enumerate(moved):
            if sender != rank:
                local[places] = n_s + sender * most + torch.arange(len(places))
        own = (counts & (owner == rank)).nonzero().squeeze(1)
        mine_s = student.of_chunks(own, len(counts), local, label_s.reshape(-1))
        mine_t = teacher.of_chunks(own, len(counts), torch.arange(code_t.numel()), label_t.reshape(-1))
        groups = _groups(own, mine_s, mine_t, budget, device)
        if ce_weight is not None:
            alone = (ce_weight != 0).cpu()
            alone[mine_s.place[mine_s.place < n_s]] = False
            groups += _groups_without_chunks(alone.nonzero().squeeze(1), label_s[rank], budget, device)
        return cls(groups, (moved[rank] - rank * n_s).to(device), most)


class _Rows(NamedTuple):
    """Rows of chunks that count, on the host, each [n]."""

    place: Tensor
    """Rank * rows of a rank + row; or, in `of_chunks`, what the caller calls that place."""
    chunk: Tensor
    first: Tensor
    label: Tensor | None = None

    @classmethod
    def of(cls, name: str, code: Tensor, counts: Tensor) -> "_Rows":
        """From `_code` [ranks, rows]."""
        code = code.reshape(-1)
        chunk = code >> 1
        if len(chunk) and chunk.max() >= len(counts):
            raise ValueError(f"a {name} row is in chunk {chunk.max().item()}; there are weights of {len(counts)}")
        place = ((chunk >= 0) & counts[chunk] if len(counts) else chunk > 0).nonzero().squeeze(1)
        return cls(place, chunk[place], (code[place] & 1).bool())

    def check(self, name: str, counts: Tensor, labels: Tensor, vocabulary: int) -> None:
        """Raise ValueError unless each chunk that counts has one first row, and all its labels are tokens."""
        firsts = self.chunk[self.first].bincount(minlength=len(counts))
        wrong = (counts & (firsts != 1)).nonzero()
        if len(wrong):
            chunk = wrong[0].item()
            rows = (self.chunk == chunk).sum().item()
            raise ValueError(
                f"chunk {chunk} has a weight, {rows} {name} rows and {firsts[chunk].item()} first ones; needed is 1"
            )
        labels = labels[self.place]
        illegal = ((labels < 0) | (labels >= vocabulary)).nonzero()
        if len(illegal):
            row = illegal[0].item()
            raise ValueError(
                f"chunk {self.chunk[row].item()} has {name} label {labels[row].item()}; the vocabulary has {vocabulary}"
            )

    def of_chunks(self, own: Tensor, chunks: int, local: Tensor, labels: Tensor) -> "_Rows":
        """Those of some chunks, renumbered from 0, by chunk and with first rows first."""
        number = torch.full((chunks,), -1).index_put_((own,), torch.arange(len(own)))
        chunk = number[self.chunk]
        keep = (chunk >= 0).nonzero().squeeze(1)
        keep = keep[(chunk[keep] * 2 + (~self.first[keep]).long()).argsort(stable=True)]
        place = self.place[keep]
        return _Rows(local[place], chunk[keep], self.first[keep], labels[place])


def _check_shapes(chunks: ChunkRows, labels: Tensor, teacher_labels: Tensor) -> None:
    for name, tensor, like in (
        ("student", chunks.student, labels),
        ("student_first", chunks.student_first, labels),
        ("teacher", chunks.teacher, teacher_labels),
        ("teacher_first", chunks.teacher_first, teacher_labels),
    ):
        if tensor.shape != like.shape or tensor.dim() != 1:
            raise ValueError(f"chunks.{name} has shape {tuple(tensor.shape)}; there are labels {tuple(like.shape)}")


def _code(chunk: Tensor, first: Tensor) -> Tensor:
    """Both in one number: 2 * chunk + first, below 0 without a chunk."""
    return chunk * 2 + first.to(chunk.dtype)


def _gather(parts: list[Tensor], group: ProcessGroup | None, device: torch.device) -> Tensor:
    """[ranks, sum of lengths] on the host."""
    if group is None or group.size() == 1:
        return torch.cat([p.cpu() for p in parts])[None]
    packed = torch.cat([p.to(device) for p in parts])
    gathered = packed.new_empty((group.size() * len(packed),))
    torch.distributed.all_gather_into_tensor(gathered, packed, group=group)
    return gathered.view(group.size(), -1).cpu()


def _cut_by_rank(places: Tensor, rows: int, ranks: int) -> list[Tensor]:
    """Ascending places of all ranks -> those of each."""
    bounds = torch.arange(1, ranks) * rows
    return list(places.tensor_split(torch.searchsorted(places, bounds).tolist()))


def _groups(own: Tensor, student: _Rows, teacher: _Rows, budget: int, device: torch.device) -> list[Group]:
    """Whole chunks, in order, with about equal numbers of rows."""
    sizes = [side.chunk.bincount(minlength=len(own)) for side in (student, teacher)]
    load = torch.maximum(*sizes).cumsum(0)
    bounds = _bounds(load, budget)
    sides = []
    for side, size in zip((student, teacher), sizes, strict=True):
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), size.cumsum(0)])
        turn = torch.arange(len(side.chunk)) - ends[side.chunk]
        group = torch.searchsorted(torch.tensor(bounds[1:], dtype=torch.int64), side.chunk, right=True)
        most = int(size.max()) if len(size) else 0
        order = (group * (most + 1) + turn).argsort(stable=True)
        first = torch.tensor(bounds, dtype=torch.int64)[group]
        tensors = [x.to(device, non_blocking=True) for x in (side.place[order], side.label[order])]
        tensors.append((side.chunk - first)[order].to(device, non_blocking=True))
        counts = size.float().to(device, non_blocking=True)
        sides.append((tensors, counts, ends.tolist(), turn[order], size))
    own = own.to(device, non_blocking=True)
    return [Group(own[a:b], *(_side(parts, a, b) for parts in sides)) for a, b in pairwise(bounds)]


def _side(parts: tuple, start: int, end: int) -> Side:
    """One side of the group of chunks start .. end."""
    tensors, counts, ends, turns, _ = parts
    rows = slice(ends[start], ends[end])
    lengths = turns[rows].bincount().cumsum(0).tolist()
    then = tuple(slice(a, b) for a, b in pairwise(lengths))
    return Side(*(t[rows] for t in tensors), then, counts[start:end])


def _bounds(load: Tensor, budget: int) -> list[int]:
    """Ends of groups of chunks, from the rows of the chunks up to each; 0 first."""
    if not len(load):
        return [0]
    total = int(load[-1])
    fair = -(-total // -(-total // budget))
    bounds = [0]
    while bounds[-1] < len(load):
        done = int(load[bounds[-1] - 1]) if bounds[-1] else 0
        end = int(torch.searchsorted(load, done + fair, right=True))
        bounds.append(max(end, bounds[-1] + 1))
    return bounds


def _groups_without_chunks(rows: Tensor, labels: Tensor, budget: int, device: torch.device) -> list[Group]:
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    count = torch.empty(0, device=device)
    empty = Side(nothing, nothing, nothing, (), count)
    groups = []
    for part in rows.split(budget) if len(rows) else ():
        here = part.to(device)
        groups.append(Group(nothing, Side(here, labels[part].to(device), torch.zeros_like(here), (), count), empty))
    return groups
