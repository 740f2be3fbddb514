"""Sums of the outputs of layers, their addition to the residual stream, and its norm."""

import pytest
import torch
from torch.nn import functional

from mkd.rollout.engine.block_sum import BlockSums, add_outputs_reference
from tests.support.loss_cases import INTERPRETED


def outputs(ranks: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Outputs of each rank [3, 24], the residual stream and the weight of the norm."""
    generator = torch.Generator().manual_seed(ranks)
    made = [torch.randn(3, 24, generator=generator).to(dtype) for _ in range(ranks)]
    return made, torch.randn(3, 1, 24, generator=generator).to(dtype), torch.rand(24, generator=generator).to(dtype)


@INTERPRETED
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_zero_centered", [False, True])
def test_kernel(ranks: int, dtype: torch.dtype, is_zero_centered: bool) -> None:
    """Bit-equal on all ranks. Triton's interpreter does not round to bf16, it truncates."""
    from mkd.rollout.engine.block_sum_kernel import add_outputs_triton

    made, residual, weight = outputs(ranks, dtype)
    norm = weight, 1e-5, is_zero_centered
    hidden, normed = add_outputs_reference(made, residual, norm)
    found = []
    for rank in range(ranks):
        flags = [torch.full((3, ranks), 1, dtype=torch.int32) for _ in range(ranks)]  # the others have begun the call
        flags[rank][:, rank] = 0
        found.append(add_outputs_triton(made, flags, rank, residual, norm))
    for one in found:
        assert torch.equal(one[0], found[0][0]) and torch.equal(one[1], found[0][1])
        if dtype == torch.float32:
            assert torch.equal(one[0], hidden)
        error = 0.03 if dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(one, (hidden, normed), rtol=error, atol=error)


@INTERPRETED
def test_ranks_wait_for_calls_of_all() -> None:
    """A rank counts its calls with the others, and does not wait where they have begun the same call before."""
    from mkd.rollout.engine.block_sum_kernel import add_outputs_triton

    made, residual, weight = outputs(2, torch.float32)
    flags = [torch.zeros(3, 2, dtype=torch.int32) for _ in range(2)]
    flags[0][:, 1] = 3  # the second rank is two calls ahead
    for call in (1, 2, 3):
        add_outputs_triton(made, flags, 0, residual, (weight, 1e-5, False))
        assert flags[0].tolist() == [[call, 3]] * 3 and flags[1].tolist() == [[call, 0]] * 3


def test_the_definition_is_pytorchs_norm_of_the_sum() -> None:
    (first, second), residual, weight = outputs(2, torch.float32)
    hidden, normed = add_outputs_reference([first, second], residual, (weight, 1e-5, False))
    assert torch.equal(hidden, residual + (first + second)[:, None])
    torch.testing.assert_close(normed, functional.rms_norm(hidden, (24,), weight, 1e-5))


def test_parts_of_the_memory() -> None:
    """They do not overlap, and leave nothing."""
    shape, dtype = (3, 8), torch.bfloat16
    memory = [torch.zeros(BlockSums.bytes_of(shape, dtype, 2), dtype=torch.uint8) for _ in range(2)]
    sums = BlockSums.of(memory, 1, shape, dtype)
    for rank in range(2):
        for part in (sums.partials[0][rank], sums.partials[1][rank], sums.flags[rank]):
            assert not part.view(torch.uint8).any()
            part.view(torch.uint8).fill_(1)
    assert all(one.all() for one in memory)
