"""Functions shared by the Triton kernels: logits, divergence terms and derivatives, and the merging of shards."""

import os

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""Whether kernels run in Triton's interpreter, which knows no assembly."""
LEAST = tl.constexpr(-1e30)
"""Maximum of a row that has no finite logit: finite itself, so that differences of maxima are."""


@triton.jit
def logits_of(products, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """Products -> logits in fp32; columns that are not there hold -inf and stay so without a cap."""
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
    return tl.where(weight == 0, 0.0, weight * logarithm)


@triton.jit
def fast_log2(x):
    """To 2^-22, and exact at 1: triton's own is exact to the last bit, in 20 instructions instead of 1."""
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
def pointwise_of(DIVERGENCE: tl.constexpr, s, t, q, p, share):
    """See divergences.py; s and t are log2 of q and p, `share` is beta or skew."""
    if DIVERGENCE == "jsd":
        p_to_m, q_to_m = ratios_to_mixture(s, t, share)
        pointwise = (share * weighted(p, p_to_m) + (1.0 - share) * weighted(q, q_to_m)) * LN_2
    elif DIVERGENCE == "skew_forward_kl":
        p_to_m, _ = ratios_to_mixture(s, t, share)
        pointwise = weighted(p, p_to_m) * LN_2
    elif DIVERGENCE == "skew_reverse_kl":
        _, q_to_m = ratios_to_mixture(s, t, 1.0 - share)
        pointwise = weighted(q, q_to_m) * LN_2
    else:
        tl.static_assert(DIVERGENCE == "tvd", "no pointwise for this divergence")
        pointwise = 0.5 * tl.abs(p - q)
    return pointwise


@triton.jit
def dlogq_of(DIVERGENCE: tl.constexpr, s, t, q, p, share):
    """See divergences.py; s and t are log2 of q and p, which are rounded alike: where they agree, tvd's sign is 0."""
    if DIVERGENCE == "forward_kl":
        dlogq = -p
    elif DIVERGENCE == "reverse_kl":
        dlogq = weighted(q, (s - t) * LN_2)
    elif DIVERGENCE == "jsd":
        _, q_to_m = ratios_to_mixture(s, t, share)
        dlogq = (1.0 - share) * weighted(q, q_to_m * LN_2)
    elif DIVERGENCE == "skew_forward_kl":
        p_to_m, _ = ratios_to_mixture(s, t, share)
        dlogq = (share - 1.0) * weighted(q, tl.exp2(p_to_m))
    elif DIVERGENCE == "skew_reverse_kl":
        _, q_to_m = ratios_to_mixture(s, t, 1.0 - share)
        dlogq = weighted(q, q_to_m * LN_2 - share * tl.exp2(q_to_m))
    else:
        tl.static_assert(DIVERGENCE == "tvd", "no dlogq for this divergence")
        sign = (q > p).to(tl.float32) - (q < p).to(tl.float32)
        dlogq = 0.5 * q * sign
    return dlogq


@triton.jit
def merge_softmax(top, mass, rank, rank_stride, to_log2, SHARDS: tl.constexpr):
    """One model's softmax of one row over all shards; see rows.Softmax.

    Returns (this shard's maximum, log2 of what its powers sum to over all shards, the row's maximum).
    """
    highest = tl.load(top)
    for shard in range(1, SHARDS):
        highest = tl.maximum(highest, tl.load(top + shard * rank_stride))
    total = 0.0 * highest
    for shard in range(SHARDS):
        shift = (tl.load(top + shard * rank_stride) - highest) * to_log2
        total += tl.exp2(shift) * tl.load(mass + shard * rank_stride)
    own = tl.load(top + rank * rank_stride)
    return own, tl.log2(total) - (own - highest) * to_log2, highest


@triton.jit
def merge_kl(top_a, mass_a, top_b, mass_b, ratio, rank_stride, to_log2, SHARDS: tl.constexpr):
    """KL(a || b) of one row over all shards; see rows._kl."""
    own_a, log_a, highest_a = merge_softmax(top_a, mass_a, 0, rank_stride, to_log2, SHARDS)
    own_b, log_b, highest_b = merge_softmax(top_b, mass_b, 0, rank_stride, to_log2, SHARDS)
    log_a += (own_a - highest_a) * to_log2
    log_b += (own_b - highest_b) * to_log2
    expected = 0.0 * log_a
    for shard in range(SHARDS):
        at = shard * rank_stride
        shift_a = (tl.load(top_a + at) - highest_a) * to_log2
        shift_b = (tl.load(top_b + at) - highest_b) * to_log2
        of_shard = tl.load(ratio + at) + tl.load(mass_a + at) * (shift_a - shift_b) * LN_2
        expected += weighted(tl.exp2(shift_a), of_shard)
    return (log_b - log_a) * LN_2 + expected / tl.exp2(log_a)
