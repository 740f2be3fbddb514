"""The gated delta rule, its convolution and its norm in PyTorch's operations, also for packed rows.

megatron-core 0.19's `GatedDeltaNet` computes with three functions of flash-linear-attention, which need a GPU. The
functions here have the same arguments, for CPU and for GPUs where those of the package are missing or not right.

Yang, Kautz, Hatamizadeh 2024, https://arxiv.org/abs/2412.06464; transformers, models/qwen3_next.
"""

import re
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.ssm.gated_delta_net import common, gdn
from torch import Tensor
from torch.nn import functional as F

from mkd import cpu
from mkd.models.state_space import Segments, block_length, causal_conv, recomputed

CHUNK = 64
"""Tokens that are processed with matrix products; the state is passed from chunk to chunk."""
_WRONG_TRITON = (3, 4, 0), (3, 7, 1)
"""First and last version of Triton, the last excluded, with which flash-linear-attention refuses to compute gradients
of gated delta nets on Hopper GPUs, because they would be wrong."""


def l2norm(values: Tensor, eps: float = 1e-6, **unused: Any) -> Tensor:
    """[..., d] divided by sqrt(sum of squares + eps)."""
    wide = _wide(values)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(values.dtype)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str,
    cu_seqlens: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Convolution of each channel with its last tokens, in which a segment has zeros before its first token.

    The backward pass recomputes it in fp32, a block of tokens at a time.

    Args:
        x: [b, s, d]
        weight: [d, w], the last column for the token itself.
        bias: [d], or None.
        activation: silu.
        cu_seqlens: [segments + 1] bounds of the segments of a packed row.
        unused: states, which are None.

    Returns:
        [b, s, d], and no state.
    """
    assert activation in ("silu", "swish"), activation
    bias = weight.new_zeros(1) if bias is None else bias
    segments = None if cu_seqlens is None else Segments.of(cu_seqlens, x.shape[1])
    convolve, outputs = recomputed(_convolve), []
    for start, end in _blocks(x):
        first = max(0, start - weight.shape[1] + 1)
        part = None if segments is None else segments.part(start, end)
        outputs.append(convolve(x[:, first:end], weight, bias, part, start - first))
    return _joined(outputs), None


def _convolve(x: Tensor, weight: Tensor, bias: Tensor, segments: Segments | None, earlier_tokens: int) -> Tensor:
    return causal_conv(x, weight, bias, segments, earlier_tokens).to(x.dtype)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Outputs S_t^T q_t / sqrt(d) of the states S_t = exp(g_t) (I - beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T.

    The backward pass recomputes the outputs in fp32, a block of tokens at a time.

    Args:
        q: [b, s, h, d], normalized.
        k: as `q`.
        v: [b, s, h, w]
        g: [b, s, h] logarithms of the decays.
        beta: [b, s, h]
        cu_seqlens: [segments + 1] bounds of the segments of a packed row, each of which starts with a state of zeros.
        unused: states and options, which have their defaults.

    Returns:
        [b, s, h, w] in the dtype of `q`, and no state.
    """
    segments = None if cu_seqlens is None else Segments.of(cu_seqlens, q.shape[1])
    rule, outputs, state = recomputed(_delta_rule), [], None
    for start, end in _blocks(q):
        part = None if segments is None else segments.part(start, end)
        output, state = rule(*(tensor[:, start:end] for tensor in (q, k, v, g, beta)), part, state)
        outputs.append(output)
    return _joined(outputs), None


def _blocks(values: Tensor) -> list[tuple[int, int]]:
    """Start and end of each block of values [b, s, ...]."""
    rows, length = values.shape[:2]
    block = block_length(rows, CHUNK)
    return [(start, min(start + block, length)) for start in range(0, length, block)]


def _joined(outputs: list[Tensor]) -> Tensor:
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, segments: Segments | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Outputs of a block of tokens, and the state after it.

    Args:
        q: [b, s, h, d], as k, v, g and beta in `chunk_gated_delta_rule`.
        k: see there.
        v: see there.
        g: see there.
        beta: see there.
        segments: of the s tokens of a packed row; None for rows of one sample.
        state: [b h, d, w] before the block; None for zeros.
    """
    (rows, length, heads), dtype, chunk = q.shape[:3], q.dtype, min(CHUNK, q.shape[1])
    q, k, v, beta = (_chunks(_wide(tensor), chunk) for tensor in (q * q.shape[-1] ** -0.5, k, v, beta[..., None]))
    wide = q.dtype
    # Sums of decays, their differences and the sums of their gradients cancel digits: they are computed in float64.
    sums = torch.ones(chunk, chunk, dtype=torch.float64, device=q.device).tril()
    decay = (sums @ _chunks(g.double()[..., None], chunk))[..., 0]
    unrelated = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    before, after, last = decay, decay[..., -1:] - decay, decay[..., -1]
    if segments is not None:
        number = torch.cat([segments.number, segments.number[-1:].expand(-length % chunk)]).view(-1, 1, chunk)
        unrelated = unrelated | (number[..., :, None] != number[..., None, :])
        first = number.new_full((1,), -1) if segments.before is None else segments.before
        ends = number[:, 0, -1]
        owner = torch.cat([first, ends[:-1]])[:, None, None]
        before = before.masked_fill(number != owner, float("-inf"))
        after = after.masked_fill(number != ends[:, None, None], float("-inf"))
        last = last.masked_fill(ends[:, None] != owner[..., 0], float("-inf"))
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(unrelated, float("-inf"))
    between, before, after, last = (exponent.exp().to(wide) for exponent in (between, before, after, last))

    # The changes of the state by the chunk's tokens depend on one another: a triangular system.
    scaled = k * beta
    system = (scaled @ k.transpose(-1, -2)) * between
    sides = torch.cat([v * beta, scaled * before[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    values, keys = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    state = values.new_zeros(rows * heads, k.shape[-1], v.shape[-1]) if state is None else state
    values, states = _Scan.apply(values, keys, k * after[..., None], last, state)
    output = (q * before[..., None]) @ states[:-1] + ((q @ k.transpose(-1, -2)) * between) @ values
    # [chunks, b h, chunk, w] -> [b, s, h, w]
    output = output.unflatten(1, (rows, heads)).permute(1, 0, 3, 2, 4).flatten(1, 2)
    return output[:, :length].to(dtype), states[-1]


class _Scan(torch.autograd.Function):
    """Passes the state from chunk to chunk: values V_i = U_i - W_i S_i, states S_(i+1) = last_i S_i + K_i^T V_i.

    The backward pass is written out: it has a third of the operations of autograd's.
    """

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, keys: Tensor, written: Tensor, last: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """V and the states before each chunk and after the last one.

        Args:
            ctx: of autograd.
            values: U [chunks, n, chunk, w]
            keys: W [chunks, n, chunk, d]
            written: K [chunks, n, chunk, d]
            last: [chunks, n] share of the state that is left after a chunk.
            state: [n, d, w] before the first chunk.
        """
        changed = torch.empty_like(values)
        states = values.new_empty(len(values) + 1, *state.shape)
        states[0] = state
        for i, share in enumerate(last[..., None, None].unbind()):
            torch.baddbmm(values[i], keys[i], states[i], alpha=-1, out=changed[i])
            torch.baddbmm(states[i] * share, written[i].transpose(-1, -2), changed[i], out=states[i + 1])
        ctx.save_for_backward(changed, keys, written, last, states)
        return changed, states

    @staticmethod
    def backward(ctx: Any, of_changed: Tensor, of_states: Tensor) -> tuple[Tensor, ...]:
        """Gradients of the arguments of `forward`."""
        changed, keys, written, last, states = ctx.saved_tensors
        of_values, totals = torch.empty_like(of_changed), torch.empty_like(of_states)
        totals[-1] = of_states[-1]
        shares = last[..., None, None]
        for i in reversed(range(len(changed))):
            torch.baddbmm(of_changed[i], written[i], totals[i + 1], out=of_values[i])
            kept = torch.addcmul(of_states[i], shares[i], totals[i + 1])
            torch.baddbmm(kept, keys[i].transpose(-1, -2), of_values[i], alpha=-1, out=totals[i])
        of_keys = -(of_values @ states[:-1].transpose(-1, -2))
        of_written = changed @ totals[1:].transpose(-1, -2)
        return of_values, of_keys, of_written, (states[:-1] * totals[1:]).sum((-1, -2)), totals[0]


def _chunks(values: Tensor, chunk: int) -> Tensor:
    """[b, s, h, d] -> [chunks, b h, chunk, d], the last chunk padded with zeros, which change no state."""
    padded = F.pad(values, (0, 0, 0, 0, 0, -values.shape[1] % chunk))
    return padded.unflatten(1, (-1, chunk)).permute(1, 0, 3, 2, 4).flatten(1, 2)


def _wide(values: Tensor) -> Tensor:
    """In at least fp32."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def missing_kernel(is_trained: bool, is_deterministic: bool) -> str | None:
    """The reason why a delta rule is computed by PyTorch's operations instead of a kernel; None if there is a kernel.

    Args:
        is_trained: the model's gradients are computed.
        is_deterministic: --deterministic-mode.
    """
    if cpu.is_target():
        return "the job runs on CPU"
    if is_deterministic:
        return "--deterministic-mode"
    if common.chunk_gated_delta_rule is None:
        return "flash-linear-attention cannot be imported (pip install flash-linear-attention)"
    capability = cpu.compute_capability()
    if not is_trained or find_spec("tilelang") is not None or capability is None or capability[0] != 9:
        return None
    import triton  # flash-linear-attention has imported it; nightly builds are distributed under another name

    installed = triton.__version__
    found = tuple(int(part) for part in re.findall("[0-9]+", installed)[:3])
    if _WRONG_TRITON[0] <= found < _WRONG_TRITON[1]:
        return (
            f"flash-linear-attention computes no gradients with Triton {installed} on Hopper GPUs, because they would "
            "be wrong (with tilelang, or Triton 3.7.1 or later, it does)"
        )
    return None


def install_if_needed() -> None:
    """Use these functions in megatron's gated delta net on CPU and without flash-linear-attention."""
    if cpu.is_target() or not common.HAVE_FLA:
        common.HAVE_FLA, common.l2norm = True, l2norm
        gdn.causal_conv1d, gdn.chunk_gated_delta_rule = causal_conv1d, chunk_gated_delta_rule
