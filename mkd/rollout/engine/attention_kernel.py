"""The Triton kernel of `store_reference` and `attend_reference` (`mkd.rollout.engine.cache_attention`)."""

import os
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from mkd.rollout.engine.cache_attention import ScoreOptions

_POSITIONS, _WARPS, _STAGES = 32, 2, 3
"""Positions that a program reads at a time, its warps, and the reads that are in flight."""
_SHARED_BYTES = 64 << 10
"""Reads in flight need this much shared memory at most; wider heads are read one block at a time."""
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter has no loops over a range with loaded bounds."""


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
