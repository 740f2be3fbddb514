"""The projection kernel: rows of all lengths against a dense matrix."""

import pytest
import torch

from mkd.xtoken.vocabulary.sparse_rows import SparseRows
from tests.support.loss_cases import INTERPRETED
from tests.support.tolerance import FP32, assert_close_norm


def matrix(lengths: list[int], columns: int) -> torch.Tensor:
    """Dense, with so many positive entries in each row."""
    gen = torch.Generator().manual_seed(5)
    dense = torch.zeros(len(lengths), columns)
    for row, length in enumerate(lengths):
        dense[row, torch.randperm(columns, generator=gen)[:length]] = torch.rand(length, generator=gen) + 0.1
    return dense


LENGTHS = [0, 1, 3, 9, 40, 257, 8, 1, 300, 0, 2]


def test_every_row_is_in_one_class() -> None:
    rows = SparseRows.of(matrix(LENGTHS, 320).to_sparse_csr())
    assert len(rows) == len(LENGTHS) and [c.tile for c in rows.classes] == [(1024, 1), (32, 32), (1, 1024)]
    assert sorted(torch.cat([c.rows for c in rows.classes]).tolist()) == list(range(len(LENGTHS)))
    for one in rows.classes:
        assert one.lengths.tolist() == [LENGTHS[row] for row in one.rows.tolist()]
        assert (one.lengths.diff() >= 0).all()


@INTERPRETED
@pytest.mark.parametrize("as_log", [False, True])
def test_against_a_dense_matrix(as_log: bool) -> None:
    from mkd.xtoken.loss.chunk_launchers import project

    dense, gen = matrix(LENGTHS, 320), torch.Generator().manual_seed(6)
    source, count = torch.rand(3, 320, generator=gen), torch.tensor([1.0, 2.0, 4.0])
    out = torch.full((3, len(LENGTHS)), torch.nan)
    reached = torch.tensor(LENGTHS) > 0
    seen = project(
        source, SparseRows.of(dense.to_sparse_csr()), out, divisor=count, reached=reached if as_log else None
    )
    wanted = source.double() @ dense.double().t() / count[:, None]
    if as_log:
        assert (seen[:, ~reached] == -torch.inf).all()
        seen, wanted = seen[:, reached], wanted[:, reached].log()
    assert_close_norm(seen, wanted, FP32, "product")
