"""The convolution, the scan and the gated norm of Mamba 2 in PyTorch's operations, also for packed rows.

The state of a head is S_t = exp(dt_t a) S_(t-1) + dt_t x_t b_t^T, its output y_t = S_t c_t + d x_t. Tokens are
processed in chunks with matrix products; the state is passed from chunk to chunk (Dao, Gu 2024,
https://arxiv.org/abs/2405.21060, section 6).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CHUNK = 128
"""Tokens of a chunk. Larger chunks need more memory for the products between tokens, smaller ones for states."""
BLOCK = 2048
"""Tokens of all rows of a microbatch that are computed at one time, which bounds the memory of temporary tensors."""


def block_length(rows: int, chunk: int) -> int:
    """Tokens of each of `rows` rows that are computed at one time, whole chunks of `chunk` tokens."""
    return max(1, BLOCK // (rows * chunk)) * chunk


def recomputed(function: Callable) -> Callable:
    """The function, recomputed in the backward pass instead of keeping its inner tensors."""
    if not torch.is_grad_enabled():
        return function
    return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)


@dataclass(frozen=True)
class Segments:
    """The samples of a packed row of s tokens."""

    number: Tensor
    """[s] int64 number of the segment of each token, from 0."""
    distance: Tensor
    """[s] int64 tokens between each token and the first one of its segment."""
    before: Tensor | None = None
    """[1] number of the segment of the token before the first one; None at the beginning of a row."""

    @classmethod
    def of(cls, bounds: Tensor, length: int) -> "Segments":
        """The segments with `bounds` [segments + 1] in a row of `length` tokens; tokens after the last are another."""
        positions = torch.arange(length, device=bounds.device)
        number = torch.searchsorted(bounds.long(), positions, right=True) - 1
        return cls(number, positions - bounds.long()[number])

    def part(self, start: int, end: int) -> "Segments":
        """The segments of a part of the row."""
        before = self.number[start - 1 : start] if start else None
        return Segments(self.number[start:end], self.distance[start:end], before)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor, segments: Segments | None = None, earlier_tokens: int = 0
) -> Tensor:
    """SiLU of the convolution of each channel with its last tokens; before a segment there are zeros.

    Args:
        x: [b, n + s, d]
        weight: [d, w], the last column for the token itself.
        bias: [d]
        segments: of the s tokens of a packed row; None for rows of one sample.
        earlier_tokens: n, tokens before the s tokens.

    Returns:
        [b, s, d] in at least fp32.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    x, weight, taps = x.to(wide), weight.to(wide), weight.shape[1]
    if (missing := taps - 1 - earlier_tokens) > 0:
        x = F.pad(x, (0, 0, missing, 0))
    first, length = max(earlier_tokens, taps - 1), x.shape[1]
    output = x[:, first:] * weight[:, -1] + bias.to(wide)
    is_inside = None
    if segments is not None:
        is_inside = segments.distance[:, None] >= torch.arange(taps, device=x.device)
    for back in range(1, taps):
        earlier = x[:, first - back : length - back]
        if is_inside is not None:
            earlier = earlier * is_inside[:, back, None]
        output = output + earlier * weight[:, taps - 1 - back]
    return F.silu(output)


def chunked_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    segments: Segments | None = None,
    state: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Outputs S_t c_t of the states of each head, without the term of d; a segment starts with a state of zeros.

    Args:
        x: [b, s, heads, p]
        dt: [b, s, heads], positive.
        a: [heads], negative.
        b: [b, s, groups, n]; consecutive heads share a group.
        c: as `b`.
        segments: of a packed row; None for rows of one sample.
        state: [b, heads, p, n] before the first token; None for zeros.
        chunk: see `CHUNK`.

    Returns:
        [b, s, heads, p], and the state after the last token.
    """
    length, groups, heads = x.shape[1], b.shape[2], x.shape[2]
    chunk = min(chunk, length)
    # Tokens of padding have dt = 0: they change no state. Chunks come first, so that a loop passes over them.
    # Differences of sums over a chunk cancel digits: the sums keep twice as many, in two numbers.
    exact = _chunks((dt.double() * a)[..., None], chunk)[..., 0].cumsum(-1)
    decay = exact.to(x.dtype)
    rest = (exact - decay).to(x.dtype).detach()
    x = _chunks(x * dt[..., None], chunk).contiguous()
    b, c = _chunks(b, chunk), _chunks(c, chunk)
    number = None
    if segments is not None:
        padding = segments.number[-1:].expand(-length % chunk)
        number = torch.cat([segments.number, padding]).view(-1, 1, 1, chunk)
    by_group = (groups, heads // groups)

    later = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).triu(1)
    if number is not None:
        later = later | (number[..., :, None] != number[..., None, :])
    between = (decay[..., :, None] - decay[..., None, :]) + (rest[..., :, None] - rest[..., None, :])
    between = between.masked_fill(later, float("-inf")).exp()
    scores = (c @ b.transpose(-1, -2))[:, :, :, None] * between.unflatten(2, by_group)
    output = scores.flatten(2, 3) @ x

    # [chunks, b, heads, chunk]: the share of the state before a chunk in each token, and of each token in the one after
    before, after = decay.exp(), ((decay[..., -1:] - decay) + (rest[..., -1:] - rest)).exp()
    owners = None
    if number is not None:
        last = number[..., -1:]
        first = torch.full_like(last[:1], -1) if segments.before is None else segments.before.view(1, 1, 1, 1)
        owners = torch.cat([first, last])
        before, after = before * (number == owners[:-1]), after * (number == last)
    keys = b[:, :, :, None] * after.unflatten(2, by_group)[..., None]
    added = x.transpose(-1, -2) @ keys.flatten(2, 3)
    shares = _shares(exact[..., -1], None if owners is None else owners.flatten()).to(x.dtype)
    state = torch.zeros_like(added[0]) if state is None else state
    states = torch.einsum("jkbh,kbhpn->jbhpn", shares, torch.cat([state[None], added]))
    queries = c[:, :, :, None] * before.unflatten(2, by_group)[..., None]
    output = output + queries.flatten(2, 3) @ states[:-1].transpose(-1, -2)
    # [chunks, b, heads, chunk, p] -> [b, s, heads, p]
    return output.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :length], states[-1]


def _shares(decays: Tensor, owners: Tensor | None) -> Tensor:
    """[chunks + 1, chunks + 1, b, heads] shares in the states before each chunk, and after the last one, of the state
    before the first chunk and of the additions by each chunk.

    Args:
        decays: [chunks, b, heads] logarithms.
        owners: [chunks + 1] segments of the states.
    """
    sums = F.pad(decays.cumsum(0), (0, 0, 0, 0, 1, 0))
    count = len(sums)
    unrelated = torch.ones(count, count, dtype=torch.bool, device=sums.device).triu(1)
    if owners is not None:
        unrelated = unrelated | (owners[:, None] != owners[None, :])
    return (sums[:, None] - sums[None, :]).masked_fill(unrelated[..., None, None], float("-inf")).exp()


def _chunks(values: Tensor, chunk: int) -> Tensor:
    """[b, s, heads, d] -> [chunks, b, heads, chunk, d], the last chunk padded with zeros."""
    if rest := -values.shape[1] % chunk:
        values = F.pad(values, (0, 0, 0, 0, 0, rest))
    return values.unflatten(1, (-1, chunk)).permute(1, 0, 3, 2, 4)


def gated_group_norm(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """RMSNorm of x SiLU(gate) over each of `groups` groups of channels.

    Args:
        x: [..., d]
        gate: [..., d], in the dtype of `x`.
        weight: [d]
        groups: number of groups.
        eps: added to the mean of squares.
    """
    gated = (x * F.silu(gate)).unflatten(-1, (groups, -1))
    normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + eps)
    return normed.flatten(-2) * weight.to(x.dtype)
