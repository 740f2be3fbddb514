"""Triton kernels of writing: attention to cached keys and values, and the sampled token of each text.

The definitions are `store_reference` and `attend_reference` of `mkd.rollout.cache_attention`, and
`mkd.rollout.sampler.gumbel_noise`.
"""

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mkd.rollout.cache_attention import ScoreOptions

_POSITIONS, _WARPS, _STAGES = 32, 2, 3
"""Positions that a program of the attention kernel reads at a time, its warps, and the reads that are in flight."""
_SHARED_BYTES = 64 << 10
"""Reads in flight need this much shared memory at most; wider heads are read one block at a time."""
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter has no loops over a range with loaded bounds."""
_TOKENS, _TOKEN_WARPS = 1024, 2
"""Logits per program of the sampling kernel, and its warps."""


def attend_triton(
    query: Tensor,
    new: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    options: ScoreOptions,
) -> Tensor:
    """`store_reference` and `attend_reference` in one kernel, which reads no keys and values but those of the window.

    Args:
        query: see `attend_reference`.
        new: see `store_reference`.
        keys: see `attend_reference`, changed in place.
        values: see `attend_reference`, changed in place.
        positions: see `attend_reference`.
        options: see `ScoreOptions`.
    """
    texts, heads, width = query.shape
    groups, value_width = keys.shape[1], values.shape[3]
    query, new_key, new_value = (one if one.stride(-1) == 1 else one.contiguous() for one in (query, *new))
    output = query.new_empty(texts, heads, value_width)
    block_d, block_v = (max(16, triton.next_power_of_2(one)) for one in (width, value_width))
    in_flight = _STAGES * _POSITIONS * (block_d + block_v) * keys.itemsize
    _attend_kernel[(texts, groups)](
        query,
        new_key,
        new_value,
        keys,
        values,
        positions,
        options.sinks,
        output,
        options.scale,
        options.softcap or 0.0,
        -1 if options.window is None else options.window,
        *query.stride()[:2],
        *new_key.stride()[:2],
        *new_value.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        heads // groups,
        width,
        value_width,
        has_sinks=options.sinks is not None,
        has_softcap=options.softcap is not None,
        BLOCK_H=max(16, triton.next_power_of_2(heads // groups)),
        BLOCK_D=block_d,
        BLOCK_V=block_v,
        BLOCK_N=_POSITIONS,
        is_pipelined=in_flight <= _SHARED_BYTES and not _INTERPRETED,
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    return output


class _NewToken(NamedTuple):
    """The token that one text has in this forward pass."""

    query: tl.tensor
    """[BLOCK_H, BLOCK_D] of the heads that share keys."""
    key: tl.tensor
    """[BLOCK_D]"""
    value: tl.tensor
    """[BLOCK_V]"""
    position: tl.tensor


class _CachedTokens(NamedTuple):
    """Keys and values of one text and one group of heads in the cache."""

    key_ptr: tl.tensor
    key_stride: tl.tensor
    """Elements between the keys of neighboring positions."""
    value_ptr: tl.tensor
    value_stride: tl.tensor
    first: tl.tensor
    """First position of the window."""


class _Softmax(NamedTuple):
    """The online softmax over some positions, for each head."""

    largest: tl.tensor
    """[BLOCK_H] largest score."""
    total: tl.tensor
    """[BLOCK_H] sum of exp(score - largest)."""
    mean: tl.tensor
    """[BLOCK_H, BLOCK_V] sum of exp(score - largest) times the value."""


@triton.jit
def _attend_kernel(
    query_ptr,  # [texts, groups * heads, width]
    new_key_ptr,  # [texts, groups, width]
    new_value_ptr,  # [texts, groups, value_width]
    key_ptr,  # [texts, groups, length, width]; the new key is stored
    value_ptr,  # [texts, groups, length, value_width]; the new value is stored
    position_ptr,  # [texts] int64 positions of the new tokens
    sink_ptr,  # [groups * heads]; None without sinks
    output_ptr,  # [texts, groups * heads, value_width] without gaps, output
    scale,
    softcap,  # not read without one
    window,  # the farthest position that is read, counted back from the new one; -1 for all
    query_text,  # elements between texts, as the others of this name
    query_head,  # elements between heads
    new_key_text,
    new_key_group,  # elements between groups of heads, as the others of this name
    new_value_text,
    new_value_group,
    key_text,
    key_group,
    key_token,  # elements between positions, as the next of this name
    value_text,
    value_group,
    value_token,
    heads,  # of a group
    width,
    value_width,
    has_sinks: tl.constexpr,
    has_softcap: tl.constexpr,
    BLOCK_H: tl.constexpr,  # heads, rounded up
    BLOCK_D: tl.constexpr,  # width, rounded up
    BLOCK_V: tl.constexpr,  # value_width, rounded up
    BLOCK_N: tl.constexpr,  # positions that are read at a time
    is_pipelined: tl.constexpr,  # reads of several blocks are in flight
):
    """One text and one group of heads that share keys. Grid: [texts, groups].

    The new key and value are stored, and taken from registers: a program does not read what it has stored.
    """
    text, group = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)  # offsets may exceed 32 bits
    groups = tl.num_programs(1)
    head, channel, value_channel = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    is_head, is_channel, is_value = head < heads, channel < width, value_channel < value_width
    row = (text * groups + group) * heads + head
    query_row = text * query_text + (group * heads + head) * query_head
    query = tl.load(
        query_ptr + query_row[:, None] + channel[None, :], mask=is_head[:, None] & is_channel[None, :], other=0.0
    )
    position = tl.load(position_ptr + text).to(tl.int32)
    new_key = tl.load(new_key_ptr + text * new_key_text + group * new_key_group + channel, mask=is_channel, other=0.0)
    new_value = tl.load(
        new_value_ptr + text * new_value_text + group * new_value_group + value_channel, mask=is_value, other=0.0
    )
    first = 0
    if window >= 0:
        first = tl.maximum(position - window, 0)
    largest = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    if has_sinks:  # exp(sink - largest) is 1 here
        largest = tl.load(sink_ptr + group * heads + head, mask=is_head, other=0.0).to(tl.float32)
        total = tl.full((BLOCK_H,), 1.0, tl.float32)
    softmax = _Softmax(largest, total, tl.zeros((BLOCK_H, BLOCK_V), tl.float32))
    key_ptr += text * key_text + group * key_group
    value_ptr += text * value_text + group * value_group
    tl.store(key_ptr + position * key_token + channel, new_key, mask=is_channel)
    tl.store(value_ptr + position * value_token + value_channel, new_value, mask=is_value)
    new = _NewToken(query, new_key, new_value, position)
    cached = _CachedTokens(key_ptr, key_token, value_ptr, value_token, first)
    start = first // BLOCK_N * BLOCK_N
    if is_pipelined:
        for begin in tl.range(start, position + 1, BLOCK_N):
            token = begin + tl.arange(0, BLOCK_N)
            softmax = _attend_block(new, cached, token, softmax, scale, softcap, is_channel, is_value, has_softcap)
    else:
        while start <= position:
            token = start + tl.arange(0, BLOCK_N)
            softmax = _attend_block(new, cached, token, softmax, scale, softcap, is_channel, is_value, has_softcap)
            start += BLOCK_N
    tl.store(
        output_ptr + row[:, None] * value_width + value_channel[None, :],
        (softmax.mean / softmax.total[:, None]).to(output_ptr.dtype.element_ty),
        mask=is_head[:, None] & is_value[None, :],
    )


@triton.jit
def _attend_block(
    new,  # _NewToken
    cached,  # _CachedTokens
    token,  # [BLOCK_N] positions
    softmax,  # _Softmax over earlier positions
    scale,
    softcap,
    is_channel,  # [BLOCK_D]
    is_value,  # [BLOCK_V]
    has_softcap: tl.constexpr,
):
    """The online softmax after some more positions."""
    channel, value_channel = tl.arange(0, is_channel.shape[0]), tl.arange(0, is_value.shape[0])
    earlier, is_new = (token >= cached.first) & (token < new.position), token == new.position
    seen = earlier | is_new
    keys = tl.load(
        cached.key_ptr + token[None, :] * cached.key_stride + channel[:, None],
        mask=earlier[None, :] & is_channel[:, None],
        other=0.0,
    )
    keys = tl.where(is_new[None, :], new.key[:, None], keys)
    scores = tl.dot(new.query, keys, input_precision="ieee") * scale
    if has_softcap:
        ratio = scores / softcap
        scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * ratio) + 1.0))
    scores = tl.where(seen[None, :], scores, float("-inf"))
    largest = tl.maximum(softmax.largest, tl.max(scores, axis=1))
    shrink, weights = tl.exp(softmax.largest - largest), tl.exp(scores - largest[:, None])
    total = softmax.total * shrink + tl.sum(weights, axis=1)
    values = tl.load(
        cached.value_ptr + token[:, None] * cached.value_stride + value_channel[None, :],
        mask=earlier[:, None] & is_value[None, :],
        other=0.0,
    )
    values = tl.where(is_new[:, None], new.value[None, :], values)
    product = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return _Softmax(largest, total, softmax.mean * shrink[:, None] + product)


def sampled_triton(logits: Tensor, keys: Tensor, first: int, temperature: float) -> tuple[Tensor, Tensor]:
    """The largest logit / temperature + Gumbel noise of each text, in one pass over the logits.

    Args:
        logits: [b, V/tp] in any floating-point dtype; those of ids that do not exist are -inf.
        keys: [b] int64, see `mkd.rollout.sampler.position_key`.
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
        logits, keys, divisor, values, columns, logits.stride(0), count, first, BLOCK=_TOKENS, num_warps=_TOKEN_WARPS
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
