"""Device functions that the Triton kernels share: logits, divergences and their derivatives, merging of shards.

Notation, here and in triton_kernels.py: z and u are the logits of student and teacher; s and t are log2 of their
probabilities q and p at temperature T, or powers of two relative to some maximum until the normalizer is known.
`to_log2` is log2(e) / T, so that e^(z / T) = 2^(z * to_log2): GPUs have an instruction for powers of two.
"""

import os
from typing import NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""True if kernels run in Triton's interpreter, which has no assembly."""
LEAST = tl.constexpr(-1e30)
"""Maximum of logits none of which is finite: finite itself, so that differences of maxima are."""


class LossConstants(NamedTuple):
    """Compile-time constants of a loss; a kernel is compiled once for each combination."""

    has_ce: bool
    """Cross-entropy is computed."""
    has_kd: bool
    """A divergence from the teacher is computed."""
    tempered: bool
    """T is not 1: cross-entropy, which is at T = 1, needs a sum of exponentials of its own."""
    divergence: str
    """A key of `DIVERGENCES`."""
    log_ratio_under: str
    """Model whose probabilities weight the log ratio summed in the softmax pass: "teacher", "student" or "none"."""
    student_scale: float
    """`LogitMap.scale`; 1.0 costs nothing."""
    student_softcap: float
    """`LogitMap.softcap`; 0.0 means no cap."""
    teacher_scale: float
    teacher_softcap: float


class TokenSoftmax(NamedTuple):
    """One model's softmax of one token: log2 of the probability of a logit z is (z - max) * to_log2 - log2_sum_exp."""

    max: tl.tensor
    """fp32: maximum of the shard's logits."""
    log2_sum_exp: tl.tensor
    """fp32: log2 of the sum of e^((z - max) / T) over the whole vocabulary."""


@triton.jit
def compute_logits(products, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """LM-head products of any dtype -> logits in fp32, as `LogitMap` does; -inf, also of masked columns, stays -inf."""
    z = products.to(tl.float32)
    if SCALE != 1.0:
        z = z * SCALE
    if SOFTCAP > 0:
        # tanh(x) = 1 - 2 / (e^2x + 1), which neither overflows nor is NaN at infinity
        capped = SOFTCAP * (1.0 - 2.0 / (tl.exp2(z * (2.0 / SOFTCAP * LOG2_E)) + 1.0))
        z = tl.where(z == float("-inf"), z, capped)
    return z


@triton.jit
def weighted(weight, logarithm):
    """weight * logarithm, and 0 where the weight is 0: there the logarithm may be infinite or NaN."""
    return tl.where(weight == 0, 0.0, weight * logarithm)


@triton.jit
def fast_log2(x):
    """log2 within 2^-22, and exactly 0 at 1; `tl.log2` is exact to the last bit but takes 20 instructions, not 1."""
    if INTERPRETED:
        log2 = tl.log2(x)
    else:
        log2 = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return log2


@triton.jit
def ratios_to_mixture(s, t, share_of_p):
    """log2 of p / m and of q / m, where m = share_of_p p + (1 - share_of_p) q.

    Relative to the larger of p and q, so that nothing overflows and the logarithms of equal probabilities are 0.
    """
    d = t - s
    smaller = tl.exp2(-tl.abs(d))
    log_m = fast_log2(
        tl.where(d >= 0, share_of_p + (1.0 - share_of_p) * smaller, share_of_p * smaller + (1.0 - share_of_p))
    )
    return tl.minimum(d, 0.0) - log_m, -tl.maximum(d, 0.0) - log_m


@triton.jit
def pointwise_term(s, t, q, p, share, LOSS: tl.constexpr):
    """`TokenDivergence.pointwise` in nats, from s = log2 q and t = log2 p; `share` is beta or skew."""
    if LOSS.divergence == "jsd":
        p_to_m, q_to_m = ratios_to_mixture(s, t, share)
        pointwise = (share * weighted(p, p_to_m) + (1.0 - share) * weighted(q, q_to_m)) * LN_2
    elif LOSS.divergence == "skew_forward_kl":
        p_to_m, _ = ratios_to_mixture(s, t, share)
        pointwise = weighted(p, p_to_m) * LN_2
    elif LOSS.divergence == "skew_reverse_kl":
        _, q_to_m = ratios_to_mixture(s, t, 1.0 - share)
        pointwise = weighted(q, q_to_m) * LN_2
    else:
        tl.static_assert(LOSS.divergence == "tvd", "no pointwise for this divergence")
        pointwise = 0.5 * tl.abs(p - q)
    return pointwise


@triton.jit
def dlogq_term(s, t, q, p, share, LOSS: tl.constexpr):
    """`TokenDivergence.dlogq`: derivative of each pointwise term by ln q, from s = log2 q and t = log2 p.

    Both models are rounded alike: where their logits agree, q == p and the sign in tvd is 0.
    """
    if LOSS.divergence == "forward_kl":
        dlogq = -p
    elif LOSS.divergence == "reverse_kl":
        dlogq = weighted(q, (s - t) * LN_2)
    elif LOSS.divergence == "jsd":
        _, q_to_m = ratios_to_mixture(s, t, share)
        dlogq = (1.0 - share) * weighted(q, q_to_m * LN_2)
    elif LOSS.divergence == "skew_forward_kl":
        p_to_m, _ = ratios_to_mixture(s, t, share)
        dlogq = (share - 1.0) * weighted(q, tl.exp2(p_to_m))
    elif LOSS.divergence == "skew_reverse_kl":
        _, q_to_m = ratios_to_mixture(s, t, 1.0 - share)
        dlogq = weighted(q, q_to_m * LN_2 - share * tl.exp2(q_to_m))
    else:
        tl.static_assert(LOSS.divergence == "tvd", "no dlogq for this divergence")
        sign = (q > p).to(tl.float32) - (q < p).to(tl.float32)
        dlogq = 0.5 * q * sign
    return dlogq


@triton.jit
def merge_softmax(max_ptr, sum_exp_ptr, shard, shard_stride, to_log2, SHARDS: tl.constexpr):
    """Softmax of one token and model from the statistics of all vocabulary shards; see `statistics.Softmax`.

    Args:
        max_ptr, sum_exp_ptr: the token's maximum and sum of exponentials in shard 0; shards are shard_stride apart.
        shard: the shard whose maximum the softmax is relative to.

    Returns:
        TokenSoftmax of the shard, and the maximum over all shards.
    """
    highest = tl.load(max_ptr)
    for other in range(1, SHARDS):
        highest = tl.maximum(highest, tl.load(max_ptr + other * shard_stride))
    total = 0.0 * highest
    for other in range(SHARDS):
        shift = (tl.load(max_ptr + other * shard_stride) - highest) * to_log2
        total += tl.exp2(shift) * tl.load(sum_exp_ptr + other * shard_stride)
    own = tl.load(max_ptr + shard * shard_stride)
    return TokenSoftmax(own, tl.log2(total) - (own - highest) * to_log2), highest


@triton.jit
def merge_kl(
    max_a_ptr, sum_exp_a_ptr, max_b_ptr, sum_exp_b_ptr, log_ratio_ptr, shard_stride, to_log2, SHARDS: tl.constexpr
):
    """KL(a || b) in nats of one token over all vocabulary shards; see `statistics._kl`.

    Args:
        max_a_ptr, ..., log_ratio_ptr: the token's statistics in shard 0; shards are shard_stride apart.
    """
    a, highest_a = merge_softmax(max_a_ptr, sum_exp_a_ptr, 0, shard_stride, to_log2, SHARDS)
    b, highest_b = merge_softmax(max_b_ptr, sum_exp_b_ptr, 0, shard_stride, to_log2, SHARDS)
    log_a = a.log2_sum_exp + (a.max - highest_a) * to_log2
    log_b = b.log2_sum_exp + (b.max - highest_b) * to_log2
    expected = 0.0 * log_a
    for shard in range(SHARDS):
        offset = shard * shard_stride
        shift_a = (tl.load(max_a_ptr + offset) - highest_a) * to_log2
        shift_b = (tl.load(max_b_ptr + offset) - highest_b) * to_log2
        log_ratio = tl.load(log_ratio_ptr + offset) + tl.load(sum_exp_a_ptr + offset) * (shift_a - shift_b) * LN_2
        expected += weighted(tl.exp2(shift_a), log_ratio)
    return (log_b - log_a) * LN_2 + expected / tl.exp2(log_a)
