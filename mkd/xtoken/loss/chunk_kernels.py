"""Triton kernels of p_kl and gold: means over the tokens of text chunks, the projection, and gradients of tokens.

Logits are read as the LM heads write them (bf16, fp16 or fp32), all arithmetic is fp32, and sums have a fixed order:
results are bit-equal from run to run. Divergences are those of `mkd.losses.kernels`; what they compare, one number per
text chunk and column, is computed here. Programs of the same token or chunk are neighbors, so that
those that run together share its row in the L2 cache.

HBM traffic per token or text chunk and column, with 2-byte logits and 4-byte means:

    kernel                 reads                                              writes
    chunk_means_kernel     2 per token                                        4 per chunk
    project_kernel         4 per chunk and share of the projection (gathers)  4 per chunk
    by_probability_kernel  8 per chunk                                        4 per chunk
    token_sums_kernel      6 per token                                        -
    rest_gradient_kernel   8 per chunk                                        4 per chunk
    token_gradient_kernel  6 per token                                        2 per token
"""

import triton
import triton.language as tl

from mkd.losses.kernels.triton_math import LN_2, LOG2_E, compute_logits

LOG_TINY = tl.constexpr(-87.3365447505531)
"""ln of the smallest normal fp32 number; probabilities below it have this logarithm and no gradient."""


@triton.jit
def chunk_means_kernel(
    products_ptr,  # [tokens, ...] LM-head products, any float dtype
    out_ptr,  # [chunks, columns] fp32, output
    columns_ptr,  # [columns] int64 columns of the products; None: the first ones, in order
    by_chunk_ptr,  # [tokens] int64 tokens, chunk by chunk
    start_ptr,  # [chunks] int64 index of each chunk's first token in by_chunk
    count_ptr,  # [chunks] fp32 number of tokens
    top_ptr,  # [tokens] fp32; a probability is e^((z - top) / T - log_norm). None: the mean is that of z / T
    log_norm_ptr,  # [tokens] fp32; None as top_ptr
    reached_ptr,  # [columns] bool; where False the output is -inf, else ln of the mean. None: the output is the mean
    products_stride,  # elements between tokens
    out_stride,  # elements between chunks
    columns,
    blocks,  # programs of each chunk
    inverse_temperature,  # 1 / T
    SCALE: tl.constexpr,  # LogitMap.scale
    SOFTCAP: tl.constexpr,  # LogitMap.softcap, 0.0 without one
    BLOCK: tl.constexpr,  # columns per program
):
    """Mean over the tokens of a chunk in one block of columns. Grid: [chunks * blocks]."""
    chunk = (tl.program_id(0) // blocks).to(tl.int64)
    offsets = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    real = offsets < columns
    column = offsets.to(tl.int64) if columns_ptr is None else tl.load(columns_ptr + offsets, real, other=0)
    count = tl.load(count_ptr + chunk)
    index = tl.load(start_ptr + chunk)
    end = index + count.to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    while index < end:
        token = tl.load(by_chunk_ptr + index)
        z = compute_logits(tl.load(products_ptr + token * products_stride + column, real, other=0.0), SCALE, SOFTCAP)
        if top_ptr is None:
            total += z * inverse_temperature
        else:
            relative = (z - tl.load(top_ptr + token)) * inverse_temperature - tl.load(log_norm_ptr + token)
            total += tl.exp2(relative * LOG2_E)
        index += 1
    mean = total / count
    if reached_ptr is not None:
        mean = log_or_least(mean, tl.load(reached_ptr + offsets, real, other=0) != 0)
    tl.store(out_ptr + chunk * out_stride + offsets, mean, real)


@triton.jit
def project_kernel(
    source_ptr,  # [chunks, source columns] fp32
    out_ptr,  # [chunks, rows of the matrix] fp32, output
    rows_ptr,  # [listed rows] int32 rows of the matrix
    starts_ptr,  # [listed rows] int32 index of each row's first entry
    lengths_ptr,  # [listed rows] int32 number of entries
    ids_ptr,  # [entries] int32 columns of the matrix
    shares_ptr,  # [entries] fp32
    divisor_ptr,  # [chunks] fp32 divisor of the output; None for 1
    reached_ptr,  # [rows of the matrix] bool, as in chunk_means_kernel; None: the output is the product
    source_stride,  # elements between chunks
    out_stride,  # elements between chunks
    listed,  # number of listed rows
    blocks,  # programs of each chunk
    ROWS: tl.constexpr,  # rows per program
    WIDTH: tl.constexpr,  # entries of each row that are read at once
):
    """Sparse matrix times the vector of a chunk, in some rows. Grid: [chunks * blocks]."""
    chunk = (tl.program_id(0) // blocks).to(tl.int64)
    index = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    is_listed = index < listed
    row = tl.load(rows_ptr + index, is_listed, other=0)
    start = tl.load(starts_ptr + index, is_listed, other=0)
    length = tl.load(lengths_ptr + index, is_listed, other=0)
    longest = tl.max(length, 0)
    source_ptr += chunk * source_stride
    total = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    first = longest - longest
    while first < longest:
        entry = first + tl.arange(0, WIDTH)
        present = entry[None, :] < length[:, None]
        position = start[:, None] + entry[None, :]
        column = tl.load(ids_ptr + position, present, other=0)
        share = tl.load(shares_ptr + position, present, other=0.0)
        total += share * tl.load(source_ptr + column, present, other=0.0)
        first += WIDTH
    product = tl.sum(total, 1)
    if divisor_ptr is not None:
        product = product / tl.load(divisor_ptr + chunk)
    if reached_ptr is not None:
        product = log_or_least(product, tl.load(reached_ptr + row, is_listed, other=0) != 0)
    tl.store(out_ptr + chunk * out_stride + row, product, is_listed)


@triton.jit
def log_or_least(probability, reached):
    """ln of a probability, at least `LOG_TINY`; -inf where not reached."""
    logarithm = tl.maximum(tl.log2(probability) * LN_2, LOG_TINY)
    # a NaN stays one
    logarithm = tl.where(probability == probability, logarithm, probability)
    return tl.where(reached, logarithm, float("-inf"))


@triton.jit
def by_probability_kernel(
    by_log_ptr,  # [chunks, columns] fp32 gradient by the logarithms; overwritten with that by the probabilities
    log_ptr,  # [chunks, columns] fp32 logarithms of probabilities
    by_log_stride,  # elements between chunks
    log_stride,  # elements between chunks
    columns,
    blocks,  # programs of each chunk
    BLOCK: tl.constexpr,  # columns per program
):
    """Gradient by the probabilities; 0 where they are impossible or too small. Grid: [chunks * blocks]."""
    chunk = (tl.program_id(0) // blocks).to(tl.int64)
    offsets = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    real = offsets < columns
    logarithm = tl.load(log_ptr + chunk * log_stride + offsets, real, other=0.0)
    gradient = tl.load(by_log_ptr + chunk * by_log_stride + offsets, real, other=0.0)
    gradient = tl.where(logarithm > LOG_TINY, gradient * tl.exp2(-logarithm * LOG2_E), 0.0)
    gradient = tl.where(logarithm == logarithm, gradient, logarithm)
    tl.store(by_log_ptr + chunk * by_log_stride + offsets, gradient, real)


@triton.jit
def token_sums_kernel(
    products_ptr,  # [tokens, columns] LM-head products of the student, any float dtype
    by_mean_ptr,  # [chunks, columns] fp32 gradient by each token's probability
    chunks_ptr,  # [tokens] int64 chunk of each token
    top_ptr,  # [tokens] fp32; a probability is e^((z - top) / T - log_norm)
    log_norm_ptr,  # [tokens] fp32
    out_ptr,  # [tokens] fp32, output
    products_stride,  # elements between tokens
    by_mean_stride,  # elements between chunks
    inverse_temperature,  # 1 / T
    SCALE: tl.constexpr,  # LogitMap.scale
    SOFTCAP: tl.constexpr,  # LogitMap.softcap, 0.0 without one
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,  # columns per block
):
    """Sum over the columns of a token's probabilities times their gradients. Grid: [tokens]."""
    token = tl.program_id(0).to(tl.int64)
    products_ptr += token * products_stride
    by_mean_ptr += tl.load(chunks_ptr + token) * by_mean_stride
    top = tl.load(top_ptr + token)
    norm = tl.load(log_norm_ptr + token) * LOG2_E
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, COLUMNS, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        z = tl.load(products_ptr + offsets, offsets < COLUMNS, other=float("-inf"))
        by_mean = tl.load(by_mean_ptr + offsets, offsets < COLUMNS, other=0.0)
        z = compute_logits(z, SCALE, SOFTCAP)
        total += tl.exp2((z - top) * (inverse_temperature * LOG2_E) - norm) * by_mean
    tl.store(out_ptr + token, tl.sum(total, 0))


@triton.jit
def rest_gradient_kernel(
    logits_ptr,  # [chunks, columns] fp32 mean logits / T of the student's uncommon tokens; overwritten
    signs_ptr,  # [chunks, columns] fp32 signs of the sorted distance
    sum_ptr,  # [chunks] fp32 sum of the signs times the probabilities
    log_norm_ptr,  # [chunks] fp32: a probability is e^(logit - log_norm)
    rest_log_norm_ptr,  # [chunks] fp32: the same relative to all uncommon tokens; +inf without that outcome
    by_rest_ptr,  # [chunks] fp32 gradient by the log-mass of all uncommon tokens
    weight_ptr,  # [chunks] fp32 factor
    logits_stride,  # elements between chunks
    signs_stride,  # elements between chunks
    columns,
    blocks,  # programs of each chunk
    BLOCK: tl.constexpr,  # columns per program
):
    """Gradient of gold by the logits of uncommon tokens, written over them. Grid: [chunks * blocks]."""
    chunk = (tl.program_id(0) // blocks).to(tl.int64)
    offsets = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    real = offsets < columns
    z = tl.load(logits_ptr + chunk * logits_stride + offsets, real, other=float("-inf"))
    sign = tl.load(signs_ptr + chunk * signs_stride + offsets, real, other=0.0)
    probability = tl.exp2((z - tl.load(log_norm_ptr + chunk)) * LOG2_E)
    share = tl.exp2((z - tl.load(rest_log_norm_ptr + chunk)) * LOG2_E)
    gradient = tl.load(by_rest_ptr + chunk) * share + (sign - tl.load(sum_ptr + chunk)) * probability
    gradient *= tl.load(weight_ptr + chunk)
    tl.store(logits_ptr + chunk * logits_stride + offsets, gradient, real)


@triton.jit
def token_gradient_kernel(
    products_ptr,  # [tokens, ...] LM-head products of the student, any float dtype
    by_mean_ptr,  # [chunks, columns] fp32 gradient by the mean of a chunk, times the weights
    out_ptr,  # [tokens, ...] any float dtype, output; may be products_ptr
    columns_ptr,  # [columns] int64 columns of the products; None: the first ones, in order
    chunks_ptr,  # [tokens] int64 chunk of each token
    count_ptr,  # [chunks] fp32 divisor of by_mean; None for 1
    sum_ptr,  # [tokens] fp32 of token_sums_kernel: the means are those of probabilities. None: those of z / T
    log_norm_ptr,  # [tokens] fp32, see token_sums_kernel; None as sum_ptr
    top_ptr,  # [tokens] fp32; not read without cross-entropy and sums
    ce_ptr,  # [tokens] fp32: factor of the probability at T = 1. None: no cross-entropy
    ce_log_norm_ptr,  # [tokens] fp32: that probability is e^(z - top - ce_log_norm)
    label_ptr,  # [tokens] fp32: what is subtracted in the label's column; where 0 there is no cross-entropy
    label_column_ptr,  # [tokens] int64
    products_stride,  # elements between tokens
    by_mean_stride,  # elements between chunks
    out_stride,  # elements between tokens
    columns,
    blocks,  # programs of each token
    inverse_temperature,  # 1 / T
    SCALE: tl.constexpr,  # LogitMap.scale
    SOFTCAP: tl.constexpr,  # LogitMap.softcap, 0.0 without one
    BLOCK: tl.constexpr,  # columns per program
):
    """Gradient by the products of a token in one block of columns. Grid: [tokens * blocks]."""
    token = (tl.program_id(0) // blocks).to(tl.int64)
    chunk = tl.load(chunks_ptr + token)
    offsets = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    real = offsets < columns
    column = offsets.to(tl.int64) if columns_ptr is None else tl.load(columns_ptr + offsets, real, other=0)
    z = compute_logits(tl.load(products_ptr + token * products_stride + column, real, other=0.0), SCALE, SOFTCAP)
    gradient = tl.load(by_mean_ptr + chunk * by_mean_stride + offsets, real, other=0.0)
    if count_ptr is not None:
        gradient = gradient / tl.load(count_ptr + chunk)
    if sum_ptr is not None:
        norm = tl.load(log_norm_ptr + token) * LOG2_E
        q = tl.exp2((z - tl.load(top_ptr + token)) * (inverse_temperature * LOG2_E) - norm)
        gradient = q * (gradient - tl.load(sum_ptr + token))
    if ce_ptr is not None:
        label = tl.load(label_ptr + token)
        q = tl.exp2((z - tl.load(top_ptr + token)) * LOG2_E - tl.load(ce_log_norm_ptr + token) * LOG2_E)
        ce = tl.load(ce_ptr + token) * q
        ce -= tl.where(column == tl.load(label_column_ptr + token), label, 0.0)
        gradient += tl.where(label != 0, ce, 0.0)
    if SOFTCAP > 0:
        gradient *= 1.0 - (z / SOFTCAP) * (z / SOFTCAP)
    if SCALE != 1.0:
        gradient *= SCALE
    tl.store(out_ptr + token * out_stride + column, gradient.to(out_ptr.dtype.element_ty), real)
