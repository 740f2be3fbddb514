"""The Triton kernel that samples a token of each text; random numbers are those of `sampler.gumbel_noise`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS, _WARPS = 1024, 2
"""Logits per program, and its warps."""


def sampled_triton(logits: Tensor, keys: Tensor, first: int, temperature: float) -> tuple[Tensor, Tensor]:
    """The largest logit / temperature + Gumbel noise of each text, in one pass over the logits.

    Args:
        logits: [b, V/tp] in any floating-point dtype; those of ids that do not exist are -inf.
        keys: [b] int64, see `mkd.rollout.engine.sampler.position_key`.
        first: id of the first logit.
        temperature: above 0.

    Returns:
        ([b] float64 the largest sum, [b] int64 its column).
    """
    texts, count = logits.shape
    blocks = triton.cdiv(count, _TOKENS)
    values = torch.empty(texts, blocks, dtype=torch.float64, device=logits.device)
    columns = torch.empty(texts, blocks, dtype=torch.int64, device=logits.device)
    divisor = torch.full((1,), temperature, dtype=torch.float64, device=logits.device)
    _sample_kernel[(texts, blocks)](
        logits, keys, divisor, values, columns, logits.stride(0), count, first, BLOCK=_TOKENS, num_warps=_WARPS
    )
    best, block = values.max(dim=1)
    # Columns behind the last are the largest only where logits are NaN.
    return best, columns.gather(1, block[:, None]).squeeze(1).clamp_(max=count - 1)


@triton.jit
def _mix(x):
    """The finalizer of SplitMix64 on uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _sample_kernel(
    logit_ptr, key_ptr, divisor_ptr, value_ptr, column_ptr, row_stride, count, first, BLOCK: tl.constexpr
):
    """The largest sum of one text over `BLOCK` logits, and its column; the first one if there are several.

    Logarithms in fp64 are slow: an upper bound of each sum in fp32 leaves one or two columns for which they matter.
    """
    text, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    start = block * BLOCK
    column = tl.arange(0, BLOCK)
    logit_ptr += text * row_stride + start
    logits = tl.load(logit_ptr + column, mask=start + column < count, other=float("-inf")).to(tl.float32)
    key = _mix(tl.load(key_ptr + text).to(tl.uint64))
    divisor = tl.load(divisor_ptr)
    ratio = logits / divisor.to(tl.float32)
    bits = _mix(key + (start + column + first + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    bound = ratio + _largest_gumbel((bits >> 32).to(tl.uint32)) + (tl.abs(ratio) * 1e-6 + 1e-3)
    bound = tl.where(logits == float("-inf"), float("-inf"), bound)  # not NaN
    best, best_column = tl.full((), float("-inf"), tl.float64), tl.full((), 0, tl.int32)
    largest = tl.max(bound, axis=0)
    while (largest.to(tl.float64) >= best) & (largest > float("-inf")):
        candidate = tl.argmax(bound, axis=0)
        chosen = _mix(key + (start + candidate + first + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
        uniform = ((chosen >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52
        exact = tl.load(logit_ptr + candidate).to(tl.float64) / divisor - tl.log(-tl.log(uniform))
        is_better = (exact > best) | ((exact == best) & (candidate < best_column))
        best, best_column = tl.where(is_better, exact, best), tl.where(is_better, candidate, best_column)
        bound = tl.where(column == candidate, float("-inf"), bound)
        largest = tl.max(bound, axis=0)
    tl.store(value_ptr + text * blocks + block, best)
    tl.store(column_ptr + text * blocks + block, (start + best_column).to(tl.int64))


@triton.jit
def _largest_gumbel(high):
    """A bound of -log(-log(u)) for all u with these upper 32 bits, up to the rounding of fp32; inf if u may be 1."""
    rest = (0xFFFFFFFF - high).to(tl.float32) * 2.3283064365386963e-10  # 2^-32; at most 1 - u
    series = rest * (1.0 + rest * (0.5 + rest * (0.3333333 + rest * 0.25)))  # of -log(1 - rest), all terms positive
    exponential = tl.where(rest < 0.0625, series, -tl.log(1.0 - rest + 1.2e-7))
    return -tl.log(exponential)
