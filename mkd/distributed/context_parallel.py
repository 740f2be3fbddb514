"""The dual-chunk order: tokens of a row that a context-parallel rank holds."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from mkd.errors import MkdDataError


def dual_chunk_positions(bounds: Sequence[int], rank: int, size: int) -> Tensor:
    """Positions in the whole row of the tokens that one rank holds, in its order.

    Each segment is cut into 2 * size equal chunks, and rank r has chunks r and 2 * size - 1 - r of it: with causal
    attention every rank then has the same work. Megatron's rotary embeddings and Transformer Engine's attention use the
    same order.

    Args:
        bounds: 0 and the end of each segment in the row, in tokens; empty segments are allowed.
        rank: rank in the context-parallel group.
        size: ranks in it.

    Returns:
        [bounds[-1] / size] int64, on the host.

    Raises:
        MkdDataError: the length of a segment is not divisible by 2 * size, with more than one rank.
    """
    if size == 1:
        return torch.arange(bounds[-1])
    parts = []
    for start, end in pairwise(bounds):
        chunk, rest = divmod(end - start, 2 * size)
        if rest:
            raise MkdDataError(
                f"a segment of {end - start} tokens cannot be cut into 2 * --context-parallel-size {size} chunks: "
                "segments must be padded to a multiple of them"
            )
        for number in (rank, 2 * size - 1 - rank):
            parts.append(torch.arange(start + number * chunk, start + (number + 1) * chunk))
    return torch.cat(parts)
