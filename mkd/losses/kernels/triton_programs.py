"""The Triton kernels themselves: what one program does with one row, or with one block of a row.

A program of a summing kernel walks along one row, so sums have one order and need no atomics.
"""

import triton
import triton.language as tl

from mkd.losses.kernels.triton_math import LN_2, LOG2_E, logits_of, merge_kl, merge_softmax
from mkd.losses.kernels.triton_sweeps import first_of_row, gradient_of, second_of_row, write_gradient_of_row


@triton.jit
def softmax_stats_kernel(
    student,
    teacher,
    labels,
    ce_weight,
    kd_weight,
    stats,
    student_stride,
    teacher_stride,
    rows,
    first_column,
    inverse_temperature,
    HAS_CE: tl.constexpr,
    HAS_KD: tl.constexpr,
    TEMPERED: tl.constexpr,
    EXPECTATION_UNDER: tl.constexpr,
    STUDENT_SCALE: tl.constexpr,
    STUDENT_SOFTCAP: tl.constexpr,
    TEACHER_SCALE: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first_of_row(
        student + row * student_stride,
        teacher + row * teacher_stride,
        labels,
        ce_weight,
        kd_weight,
        stats,
        row,
        rows,
        first_column,
        inverse_temperature * LOG2_E,
        HAS_CE,
        HAS_KD,
        TEMPERED,
        EXPECTATION_UNDER,
        STUDENT_SCALE,
        STUDENT_SOFTCAP,
        TEACHER_SCALE,
        TEACHER_SOFTCAP,
        COLUMNS,
        BLOCK,
    )


@triton.jit
def divergence_stats_kernel(
    student,
    teacher,
    kd_weight,
    student_max,  # this and the like: [shards, rows], rows of rank_stride numbers
    student_sum_exp,
    teacher_max,
    teacher_sum_exp,
    sums,  # [2, rows]: pointwise, dlogq
    student_stride,
    teacher_stride,
    rows,
    rank,
    rank_stride,
    inverse_temperature,
    share,
    SHARDS: tl.constexpr,
    DIVERGENCE: tl.constexpr,
    STUDENT_SCALE: tl.constexpr,
    STUDENT_SOFTCAP: tl.constexpr,
    TEACHER_SCALE: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    to_log2 = inverse_temperature * LOG2_E
    m, log_mass_q, _ = merge_softmax(student_max + row, student_sum_exp + row, rank, rank_stride, to_log2, SHARDS)
    n, log_mass_p, _ = merge_softmax(teacher_max + row, teacher_sum_exp + row, rank, rank_stride, to_log2, SHARDS)
    second_of_row(
        student + row * student_stride,
        teacher + row * teacher_stride,
        kd_weight,
        sums,
        row,
        rows,
        (m, log_mass_q),
        (n, log_mass_p),
        to_log2,
        share,
        False,
        DIVERGENCE,
        STUDENT_SCALE,
        STUDENT_SOFTCAP,
        TEACHER_SCALE,
        TEACHER_SOFTCAP,
        COLUMNS,
        BLOCK,
    )


@triton.jit
def gradient_kernel(
    student,
    teacher,
    labels,
    out,
    ce_weight,
    kd_weight,
    student_max,  # this and the like: [shards, rows], rows of rank_stride numbers
    student_sum_exp,
    ce_sum_exp,
    teacher_max,
    teacher_sum_exp,
    log_ratio,
    dlogq_sum,
    student_stride,
    teacher_stride,
    out_stride,
    columns,
    first_column,
    rank,
    rank_stride,
    sums_stride,
    inverse_temperature,
    kd_scale,
    z_loss,
    share,
    SHARDS: tl.constexpr,
    HAS_CE: tl.constexpr,
    HAS_KD: tl.constexpr,
    TEMPERED: tl.constexpr,
    DIVERGENCE: tl.constexpr,
    STUDENT_SCALE: tl.constexpr,
    STUDENT_SOFTCAP: tl.constexpr,
    TEACHER_SCALE: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    to_log2 = inverse_temperature * LOG2_E
    # Unused rows are not read: 0 is finite, and its gradient is multiplied away.
    used_columns = 0
    at_label = offsets < 0
    m, log_mass_q, _ = merge_softmax(student_max + row, student_sum_exp + row, rank, rank_stride, to_log2, SHARDS)
    of_label = 0.0 * m
    of_kd = of_label
    of_q = of_label
    log_mass_1 = of_label
    n = of_label
    log_mass_p = of_label
    total_dlogq = of_label
    if HAS_CE:
        of_label = tl.load(ce_weight + row)
        used_columns = tl.where(of_label != 0, columns, 0)
        _, log_mass_1, highest = merge_softmax(student_max + row, ce_sum_exp + row, rank, rank_stride, LOG2_E, SHARDS)
        log_sum = (log_mass_1 + (m - highest) * LOG2_E) * LN_2 + highest
        of_q = of_label * (1.0 + 2.0 * z_loss * log_sum)
        at_label = offsets == tl.load(labels + row) - first_column
    u = tl.zeros([BLOCK], dtype=tl.float32)
    if HAS_KD:
        of_kd = tl.load(kd_weight + row) * kd_scale
        teacher_columns = tl.where(of_kd != 0, columns, 0)
        used_columns = tl.maximum(used_columns, teacher_columns)
        u = tl.load(teacher + row * teacher_stride + offsets, offsets < teacher_columns, other=0.0)
        u = logits_of(u, TEACHER_SCALE, TEACHER_SOFTCAP)
        n, log_mass_p, _ = merge_softmax(teacher_max + row, teacher_sum_exp + row, rank, rank_stride, to_log2, SHARDS)
        total_dlogq = of_label - of_label - 1.0
        if DIVERGENCE == "reverse_kl":
            total_dlogq = merge_kl(
                student_max + row,
                student_sum_exp + row,
                teacher_max + row,
                teacher_sum_exp + row,
                log_ratio + row,
                rank_stride,
                to_log2,
                SHARDS,
            )
        elif DIVERGENCE != "forward_kl":
            total_dlogq = 0.0 * n
            for shard in range(SHARDS):
                total_dlogq += tl.load(dlogq_sum + shard * sums_stride + row)
    z = tl.load(student + row * student_stride + offsets, offsets < used_columns, other=0.0)
    gradient = gradient_of(
        logits_of(z, STUDENT_SCALE, STUDENT_SOFTCAP),
        u,
        at_label,
        m,
        log_mass_1,
        log_mass_q,
        n,
        log_mass_p,
        of_label,
        of_q,
        of_kd,
        total_dlogq,
        to_log2,
        share,
        HAS_CE,
        HAS_KD,
        TEMPERED,
        DIVERGENCE,
        STUDENT_SCALE,
        STUDENT_SOFTCAP,
    )
    tl.store(out + row * out_stride + offsets, gradient.to(out.dtype.element_ty), offsets < columns)


@triton.jit
def all_passes_kernel(
    student,
    teacher,
    labels,
    out,
    ce_weight,
    kd_weight,
    ce_gradient,  # the weights times what backward will pass
    kd_gradient,
    stats,  # [9, rows]: the first round's 7, pointwise, dlogq
    student_stride,
    teacher_stride,
    out_stride,
    rows,
    inverse_temperature,
    kd_scale,
    z_loss,
    share,
    HAS_CE: tl.constexpr,
    HAS_KD: tl.constexpr,
    TEMPERED: tl.constexpr,
    EXPECTATION_UNDER: tl.constexpr,
    DIVERGENCE: tl.constexpr,
    STUDENT_SCALE: tl.constexpr,
    STUDENT_SOFTCAP: tl.constexpr,
    TEACHER_SCALE: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    student += row * student_stride
    teacher += row * teacher_stride
    out += row * out_stride
    to_log2 = inverse_temperature * LOG2_E
    softmax_q, softmax_p, log_mass_1, expected = first_of_row(
        student,
        teacher,
        labels,
        ce_weight,
        kd_weight,
        stats,
        row,
        rows,
        0,
        to_log2,
        HAS_CE,
        HAS_KD,
        TEMPERED,
        EXPECTATION_UNDER,
        STUDENT_SCALE,
        STUDENT_SOFTCAP,
        TEACHER_SCALE,
        TEACHER_SOFTCAP,
        COLUMNS,
        BLOCK,
    )
    total_dlogq = 0.0 * to_log2 - 1.0
    if HAS_KD:
        if DIVERGENCE == "reverse_kl":
            total_dlogq = (softmax_p[1] - softmax_q[1]) * LN_2 + expected
        if EXPECTATION_UNDER == "none":
            total_dlogq = second_of_row(
                student,
                teacher,
                kd_weight,
                stats + 7 * rows,
                row,
                rows,
                softmax_q,
                softmax_p,
                to_log2,
                share,
                True,
                DIVERGENCE,
                STUDENT_SCALE,
                STUDENT_SOFTCAP,
                TEACHER_SCALE,
                TEACHER_SOFTCAP,
                COLUMNS,
                BLOCK,
            )
    write_gradient_of_row(
        student,
        teacher,
        out,
        labels,
        ce_gradient,
        kd_gradient,
        row,
        softmax_q,
        softmax_p,
        log_mass_1,
        total_dlogq,
        to_log2,
        kd_scale,
        z_loss,
        share,
        EXPECTATION_UNDER != "none" or not HAS_KD,
        HAS_CE,
        HAS_KD,
        TEMPERED,
        DIVERGENCE,
        STUDENT_SCALE,
        STUDENT_SOFTCAP,
        TEACHER_SCALE,
        TEACHER_SOFTCAP,
        COLUMNS,
        BLOCK,
    )
