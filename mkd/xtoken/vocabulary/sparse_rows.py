"""A sparse matrix for the projection kernel: its rows in classes of similar length."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

TILES = ((8, 1024, 1), (256, 32, 32), (None, 1, 1024))
"""Classes of rows: (largest number of entries, rows per program, entries read at once). A program takes as long as its
longest row, and a common piece of text can be a part of thousands of tokens."""


@dataclass(frozen=True)
class RowClass:
    """Rows of similar length, by ascending length."""

    rows: Tensor
    """[n] int32"""
    starts: Tensor
    """[n] int32 index of each row's first entry."""
    lengths: Tensor
    """[n] int32"""
    tile: tuple[int, int]
    """(rows per program, entries read at once)."""

    def to(self, device: torch.device | str) -> "RowClass":
        return replace(self, **{name: getattr(self, name).to(device) for name in ("rows", "starts", "lengths")})


@dataclass(frozen=True)
class SparseRows:
    """A sparse matrix [rows, columns], row by row."""

    ids: Tensor
    """[entries] int32 columns."""
    shares: Tensor
    """[entries] fp32"""
    classes: tuple[RowClass, ...]
    """Each row of the matrix is in one of them."""
    columns: int

    @classmethod
    def of(cls, matrix: Tensor) -> "SparseRows":
        """From a CSR matrix on the host."""
        starts = matrix.crow_indices()
        lengths = starts.diff()
        classes, least = [], 0
        for most, *tile in TILES:
            rows = ((lengths >= least) & (lengths <= (most or len(matrix.values())))).nonzero().squeeze(1)
            rows = rows[lengths[rows].argsort(stable=True)]
            if len(rows):
                parts = (x.to(torch.int32) for x in (rows, starts[rows], lengths[rows]))
                classes.append(RowClass(*parts, tuple(tile)))
            least = (most or 0) + 1
        return cls(matrix.col_indices().to(torch.int32), matrix.values(), tuple(classes), matrix.shape[1])

    def to(self, device: torch.device | str) -> "SparseRows":
        classes = tuple(rows.to(device) for rows in self.classes)
        return replace(self, ids=self.ids.to(device), shares=self.shares.to(device), classes=classes)

    def __len__(self) -> int:
        """Rows of the matrix."""
        return sum(len(rows.rows) for rows in self.classes)
