"""The Triton kernel of a sparse teacher: the gradient of the columns that it does not name."""

import triton
import triton.language as tl

from mkd.losses.kernels.triton_math import LOG2_E, logits_of


@triton.jit
def tail_gradient_kernel(
    products,
    out,
    used,  # this and the following: [rows], see TailCoeffs
    top,
    ce,
    ce_log_norm,
    kd,
    kd_log_norm,
    label,
    label_column,
    products_stride,
    out_stride,
    columns,
    inverse_temperature,
    TEMPERED: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # Unused rows are not read.
    there = tl.where(tl.load(used + row) != 0, columns, 0)
    z = tl.load(products + row * products_stride + offsets, offsets < there, other=float("-inf"))
    z = logits_of(z, SCALE, SOFTCAP)
    relative = (z - tl.load(top + row)) * LOG2_E
    norm = tl.load(kd_log_norm + row) * LOG2_E
    of_tail = tl.exp2(relative * inverse_temperature - norm) if TEMPERED else tl.exp2(relative - norm)
    gradient = tl.load(ce + row) * tl.exp2(relative - tl.load(ce_log_norm + row) * LOG2_E)
    gradient += tl.load(kd + row) * of_tail
    gradient -= tl.where(offsets == tl.load(label_column + row), tl.load(label + row), 0.0)
    if SOFTCAP > 0:
        gradient *= 1.0 - (z / SOFTCAP) * (z / SOFTCAP)
    if SCALE != 1.0:
        gradient *= SCALE
    # Impossible columns are those that the teacher names; their sums have been NaN, maybe.
    gradient = tl.where(z == float("-inf"), 0.0, gradient)
    tl.store(out + row * out_stride + offsets, gradient.to(out.dtype.element_ty), offsets < columns)
