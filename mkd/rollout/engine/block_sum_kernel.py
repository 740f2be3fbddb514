"""The Triton kernel of `mkd.rollout.engine.block_sum.add_outputs_reference`."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_WARPS = 8
"""Warps of a program, which computes one row."""


def add_outputs_triton(
    partials: Sequence[Tensor],
    flags: Sequence[Tensor],
    rank: int,
    residual: Tensor,
    norm: tuple[Tensor, float, bool],
) -> tuple[Tensor, Tensor]:
    """The sum of the outputs of all ranks, added to the residual stream, and its norm. Collective over the ranks.

    The rows of a rank are read when its own call has begun: its earlier kernels have written them. A rank may write
    into `partials` again once it has ended a later call over other memory, which no rank begins before it has ended
    this one.

    Args:
        partials: see `add_outputs_reference`; memory that each rank reads.
        flags: [R, ranks] int32 memory of each rank, 0 before the first call; unused with one rank.
        rank: this rank.
        residual: see `add_outputs_reference`.
        norm: see `add_outputs_reference`.
    """
    weight, eps, is_zero_centered = norm
    width = residual.shape[-1]
    residual = residual.contiguous()
    hidden, normed = torch.empty_like(residual), torch.empty_like(residual)
    _add_outputs_kernel[(residual.numel() // width,)](
        tuple(partials),
        tuple(flags),
        residual,
        weight,
        hidden,
        normed,
        width,
        eps,
        RANK=rank,
        RANKS=len(partials),
        is_zero_centered=is_zero_centered,
        BLOCK=triton.next_power_of_2(width),
        num_warps=_WARPS,
    )
    return hidden, normed


@triton.jit
def _add_outputs_kernel(
    partial_ptrs,
    flag_ptrs,
    residual_ptr,
    weight_ptr,
    hidden_ptr,
    normed_ptr,
    width,
    eps,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    is_zero_centered: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row. All ranks add the values in the same order, in fp32, and round where PyTorch does."""
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    is_value = column < width
    value = row * width + column
    own = tl.load(partial_ptrs[RANK] + value, mask=is_value, other=0.0)
    residual = tl.load(residual_ptr + value, mask=is_value, other=0.0)
    weight = tl.load(weight_ptr + column, mask=is_value, other=0.0).to(tl.float32)
    if RANKS > 1:
        _wait_for_ranks(flag_ptrs, row, RANK, RANKS)
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            total += own.to(tl.float32)
        else:  # not from the L1 cache
            total += tl.load(partial_ptrs[rank] + value, mask=is_value, other=0.0, cache_modifier=".cg").to(tl.float32)
    hidden = (total.to(residual.dtype).to(tl.float32) + residual.to(tl.float32)).to(residual.dtype)
    tl.store(hidden_ptr + value, hidden, mask=is_value)
    hidden = hidden.to(tl.float32)
    if is_zero_centered:
        weight += 1.0
    scale = tl.rsqrt(tl.sum(hidden * hidden, axis=0) / width + eps)
    tl.store(normed_ptr + value, (hidden * scale * weight).to(residual.dtype), mask=is_value)


@triton.jit
def _wait_for_ranks(flag_ptrs, row, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Wait until the program of this row has begun the same call on all ranks.

    Each rank counts its calls in its own column of the flags of all ranks. No flag is ever reset. The signal is a
    release: this rank's earlier kernels, which have written what the others read and read what they write next, happen
    before what the others do after they have acquired it.
    """
    own_ptr = flag_ptrs[RANK] + row * RANKS
    call = tl.atomic_add(own_ptr + RANK, 1, sem="relaxed", scope="gpu") + 1
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            tl.atomic_xchg(flag_ptrs[rank] + row * RANKS + RANK, call, sem="release", scope="sys")
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            while tl.atomic_add(own_ptr + rank, 0, sem="acquire", scope="sys") - call < 0:
                pass
