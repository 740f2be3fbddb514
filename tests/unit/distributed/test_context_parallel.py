"""mkd/distributed/context_parallel.py: the dual-chunk order, against megatron's own."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.models.common.embeddings.rope_utils import _get_thd_freqs_on_this_cp_rank
from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank as on_this_rank

from mkd.distributed.context_parallel import dual_chunk_positions
from mkd.errors import MkdDataError


class Rank:
    """The methods of a process group that megatron calls."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = lambda: rank, lambda: size


@pytest.mark.parametrize("size", [2, 3, 4])
def test_whole_row_is_split_as_in_megatron(size: int) -> None:
    row = torch.arange(12 * size)
    for rank in range(size):
        assert torch.equal(dual_chunk_positions([0, 12 * size], rank, size), on_this_rank(row, 0, Rank(rank, size)))


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, 4), lengths=st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_segment_positions_match_megatrons_rotary_embeddings(size: int, lengths: list[int]) -> None:
    bounds = [0, *accumulate(2 * size * length for length in lengths)]
    places = [dual_chunk_positions(bounds, rank, size) for rank in range(size)]
    assert torch.equal(torch.cat(places).sort().values, torch.arange(bounds[-1])), "each token is on one rank"
    for rank, held in enumerate(places):
        expected = [
            start + _get_thd_freqs_on_this_cp_rank(rank, size, torch.empty(2 * length), torch.arange(64))
            for start, length in zip(bounds, lengths, strict=False)
        ]
        assert torch.equal(held, torch.cat(expected))


def test_order_on_two_ranks() -> None:
    assert dual_chunk_positions([0, 8, 12], 0, 2).tolist() == [0, 1, 6, 7, 8, 11]
    assert dual_chunk_positions([0, 8, 12], 1, 2).tolist() == [2, 3, 4, 5, 9, 10]


@pytest.mark.parametrize("bounds", [[0, 6], [0, 4, 10, 16]])
def test_indivisible_segment(bounds: list[int]) -> None:
    assert dual_chunk_positions(bounds, 0, 1).tolist() == list(range(bounds[-1]))
    with pytest.raises(MkdDataError, match=r"6 tokens .* --context-parallel-size 2"):
        dual_chunk_positions(bounds, 1, 2)
