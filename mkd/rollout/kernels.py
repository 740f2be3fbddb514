"""Triton kernels of writing: attention to cached keys and values, and the sampled token of each text.

The definitions are `mkd.rollout.cache_attention.attend_reference` and `mkd.rollout.sampler.gumbel_noise`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mkd.rollout.cache_attention import ScoreOptions

_POSITIONS = 64
"""Positions that a program of the attention kernel reads at a time."""
_TOKENS = 1024
"""Logits per program of the sampling kernel."""


def attend_triton(query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, options: ScoreOptions) -> Tensor:
    """`attend_reference` in one kernel, which reads keys and values from the start of the window to the position."""
    texts, heads, width = query.shape
    groups, value_width = keys.shape[1], values.shape[3]
    query = query.contiguous()
    output = query.new_empty(texts, heads, value_width)
    _attend_kernel[(texts, groups)](
        query,
        keys,
        values,
        positions,
        options.sinks,
        output,
        options.scale,
        options.softcap or 0.0,
        -1 if options.window is None else options.window,
        *keys.stride()[:3],
        *values.stride()[:3],
        heads // groups,
        width,
        value_width,
        has_sinks=options.sinks is not None,
        has_softcap=options.softcap is not None,
        BLOCK_H=max(16, triton.next_power_of_2(heads // groups)),
        BLOCK_D=max(16, triton.next_power_of_2(width)),
        BLOCK_V=max(16, triton.next_power_of_2(value_width)),
        BLOCK_N=_POSITIONS,
    )
    return output


@triton.jit
def _attend_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    position_ptr,
    sink_ptr,
    output_ptr,
    scale,
    softcap,
    window,
    key_text,
    key_group,
    key_token,
    value_text,
    value_group,
    value_token,
    heads,
    width,
    value_width,
    has_sinks: tl.constexpr,
    has_softcap: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One text and one group of heads that share keys: the online softmax over blocks of `BLOCK_N` positions."""
    text, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    groups = tl.num_programs(1)
    head, channel, value_channel = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    is_head, is_channel, is_value = head < heads, channel < width, value_channel < value_width
    row = (text * groups + group) * heads + head
    query = tl.load(
        query_ptr + row[:, None] * width + channel[None, :], mask=is_head[:, None] & is_channel[None, :], other=0.0
    )
    position = tl.load(position_ptr + text).to(tl.int32)
    first = 0
    if window >= 0:
        first = tl.maximum(position - window, 0)
    largest = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    if has_sinks:  # exp(sink - largest) is 1 here
        largest = tl.load(sink_ptr + group * heads + head, mask=is_head, other=0.0).to(tl.float32)
        total = tl.full((BLOCK_H,), 1.0, tl.float32)
    mean = tl.zeros((BLOCK_H, BLOCK_V), tl.float32)
    key_ptr += text * key_text + group * key_group
    value_ptr += text * value_text + group * value_group
    start = first // BLOCK_N * BLOCK_N
    while start <= position:  # Triton's interpreter has no loops over a range with loaded bounds
        token = start + tl.arange(0, BLOCK_N)
        seen = (token >= first) & (token <= position)
        keys = tl.load(
            key_ptr + token[None, :] * key_token + channel[:, None], mask=seen[None, :] & is_channel[:, None], other=0.0
        )
        scores = tl.dot(query, keys, input_precision="ieee") * scale
        if has_softcap:
            ratio = scores / softcap
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * ratio) + 1.0))
        scores = tl.where(seen[None, :], scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, axis=1))
        shrink, weights = tl.exp(largest - larger), tl.exp(scores - larger[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        values = tl.load(
            value_ptr + token[:, None] * value_token + value_channel[None, :],
            mask=seen[:, None] & is_value[None, :],
            other=0.0,
        )
        product = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        mean = mean * shrink[:, None] + product
        largest = larger
        start += BLOCK_N
    tl.store(
        output_ptr + row[:, None] * value_width + value_channel[None, :],
        (mean / total[:, None]).to(output_ptr.dtype.element_ty),
        mask=is_head[:, None] & is_value[None, :],
    )


def sampled_triton(logits: Tensor, keys: Tensor, first: int, temperature: float) -> tuple[Tensor, Tensor]:
    """The largest logit / temperature + Gumbel noise of each text, in one pass over the logits.

    Args:
        logits: [b, V/tp] fp32; those of ids that do not exist are -inf.
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
        logits, keys, divisor, values, columns, logits.stride(0), count, first, BLOCK=_TOKENS
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
    """The largest sum of one text over `BLOCK` logits, and its column; the first one if there are several."""
    text, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logit_ptr + text * row_stride + column, mask=column < count, other=float("-inf"))
    key = tl.load(key_ptr + text).to(tl.uint64)
    ids = (column + first + 1).to(tl.uint64)
    bits = _mix(_mix(key) + ids * 0x9E3779B97F4A7C15)
    uniform = ((bits >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52
    sums = logits.to(tl.float64) / tl.load(divisor_ptr) - tl.log(-tl.log(uniform))
    best = tl.argmax(sums, axis=0)
    tl.store(value_ptr + text * blocks + block, tl.max(sums, axis=0))
    tl.store(column_ptr + text * blocks + block, (block * BLOCK + best).to(tl.int64))
