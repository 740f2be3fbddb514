"""Tensors of one row in k views: the student's row, and a row and chunk numbers per teacher with another tokenizer."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mkd.data.batch import TEACHER_VIEWS
from mkd.data.packing.row_layout import RowLayout
from mkd.data.sources.aligned import AlignedSample, TeacherText


@dataclass(frozen=True)
class AlignedRowLayout:
    """Layout of pieces in the rows of all views."""

    student: RowLayout
    teachers: tuple[RowLayout, ...]
    """One for each teacher with another tokenizer."""

    @property
    def row_lengths(self) -> list[int]:
        """Positions of a row in each view."""
        return [self.student.row_length, *(teacher.row_length for teacher in self.teachers)]

    @property
    def piece_lengths(self) -> list[int]:
        """Most positions of a piece in each view."""
        return [self.student.piece_length, *(teacher.piece_length for teacher in self.teachers)]

    @property
    def limit(self) -> str:
        """The lengths of the longest pieces, for messages."""
        return " or ".join(dict.fromkeys(layout.limit for layout in (self.student, *self.teachers)))

    def row(self, pieces: Sequence[AlignedSample]) -> dict[str, object]:
        """The student's row as `RowLayout.row` returns it, and under TEACHER_VIEWS a tuple with one row per teacher.

        A teacher's row also has chunk [t] and student_chunk [s] int64: for each position of its own row and of the
        student's the chunk of its label, counted from 0 along the row, -1 for none; and chunks (int64), their number.
        """
        row: dict[str, object] = self.student.row([(piece.ids, piece.targets) for piece in pieces])
        views = []
        for number, layout in enumerate(self.teachers):
            texts = [piece.views[number] for piece in pieces]
            view = layout.row([(text.ids, text.targets) for text in texts])
            chunks = [
                counted_chunks(piece.targets, text, layout.kd_everywhere)
                for piece, text in zip(pieces, texts, strict=True)
            ]
            view["student_chunk"] = _in_row(self.student, [chunk for chunk, _ in chunks])
            view["chunk"] = _in_row(layout, [chunk for _, chunk in chunks])
            view["chunks"] = np.int64(view["chunk"].max(initial=-1) + 1)
            views.append(view)
        return {**row, TEACHER_VIEWS: tuple(views)}


def counted_chunks(targets: np.ndarray, text: TeacherText, everywhere: bool) -> tuple[np.ndarray, np.ndarray]:
    """Chunks of a piece on which the divergence is taken, for each position of both views that of its label.

    A chunk counts if all of its tokens are predicted inside the piece, in both views, and, unless `everywhere`, are all
    targets.

    Args:
        targets: [positions + 1] bool, the student's.
        text: the teacher's tokens and the chunks of both views.
        everywhere: count prompts too.

    Returns:
        [positions] int64 of the student and of the teacher, counted from 0; -1 for none.
    """
    views = ((text.student_chunk, targets), (text.chunk, text.targets))
    low = min(int(chunk[chunk >= 0].min(initial=np.iinfo(np.int32).max)) for chunk, _ in views)
    views = tuple((np.where(chunk >= 0, chunk - low, -1).astype(np.int64), targets) for chunk, targets in views)
    count = 1 + max(int(chunk.max(initial=-1)) for chunk, _ in views)
    kept = np.ones(count + 1, dtype=bool)
    kept[-1] = False  # read by index -1
    for chunk, is_target in views:
        labels = chunk[1:]
        kept[:-1] &= np.bincount(labels[labels >= 0], minlength=count) > 0
        kept[chunk[0]] = False  # no position predicts its first token
        if not everywhere:
            kept[labels[~is_target[1:]]] = False
    number = np.where(kept, np.cumsum(kept) - 1, -1)
    return number[views[0][0][1:]], number[views[1][0][1:]]


def _in_row(layout: RowLayout, chunks: Sequence[np.ndarray]) -> np.ndarray:
    """[row length] int64: chunk numbers of pieces at their positions in a row, counted on from piece to piece."""
    row = np.full(layout.row_length, -1, dtype=np.int64)
    before = 0
    for start, chunk in zip(layout.starts([len(chunk) for chunk in chunks]), chunks, strict=False):
        row[start : start + len(chunk)] = np.where(chunk >= 0, chunk + before, -1)
        before += int(chunk.max(initial=-1)) + 1
    return row
