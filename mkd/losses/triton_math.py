"""What the Triton kernels share: logits, densities and slopes of a block, and the merging of the shards' statistics."""

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
def natural_log(x):
    """To 2^-22 or one in 2^22: triton's own log2 is exact to the last bit, in 20 instructions instead of 1."""
    if INTERPRETED:
        log2 = tl.log2(x)
    else:
        log2 = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return log2 * LN_2


@triton.jit
def density_of(DIVERGENCE: tl.constexpr, log_q, log_p, share):
    """See divergences.py; logarithms are natural, `share` is beta or skew."""
    q = tl.exp2(log_q * LOG2_E)
    p = tl.exp2(log_p * LOG2_E)
    if DIVERGENCE == "jsd":
        log_m = natural_log(share * p + (1.0 - share) * q)
        density = share * weighted(p, log_p - log_m) + (1.0 - share) * weighted(q, log_q - log_m)
    elif DIVERGENCE == "skew_forward_kl":
        density = weighted(p, log_p - natural_log(share * p + (1.0 - share) * q))
    elif DIVERGENCE == "skew_reverse_kl":
        density = weighted(q, log_q - natural_log(share * q + (1.0 - share) * p))
    else:
        tl.static_assert(DIVERGENCE == "tvd", "no density for this divergence")
        density = 0.5 * tl.abs(p - q)
    return density


@triton.jit
def slope_of(DIVERGENCE: tl.constexpr, log_q, log_p, q, p, share):
    """See divergences.py; q and p are e^log_q and e^log_p, rounded alike: where the models agree, tvd's sign is 0."""
    if DIVERGENCE == "forward_kl":
        slope = -p
    elif DIVERGENCE == "reverse_kl":
        slope = weighted(q, log_q - log_p)
    elif DIVERGENCE == "jsd":
        slope = (1.0 - share) * weighted(q, log_q - natural_log(share * p + (1.0 - share) * q))
    elif DIVERGENCE == "skew_forward_kl":
        slope = tl.where(q > 0, (share - 1.0) * q * p / (share * p + (1.0 - share) * q), 0.0)
    elif DIVERGENCE == "skew_reverse_kl":
        m = share * q + (1.0 - share) * p
        slope = weighted(q, log_q - natural_log(m) - share * q / m)
    else:
        tl.static_assert(DIVERGENCE == "tvd", "no slope for this divergence")
        sign = (q > p).to(tl.float32) - (q < p).to(tl.float32)
        slope = 0.5 * q * sign
    return slope


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
