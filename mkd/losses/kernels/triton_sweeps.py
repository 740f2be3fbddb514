"""What the Triton kernels do with one row of logits: the sums of both rounds, and the gradient of a block of columns.

Pointers are at the row's first column. A block is [BLOCK / RUN, RUN] columns, and each of the BLOCK / RUN lanes has a
maximum and sums of its own until the end of a sweep, where they are merged like the shards of a vocabulary. RUN columns
are what one thread loads at once, so that a sweep has no barrier and needs one more power of two a RUN.
"""

import triton
import triton.language as tl

from mkd.losses.kernels.triton_math import LEAST, LN_2, LOG2_E, dlogq_of, logits_of, pointwise_of, weighted

RUN = tl.constexpr(8)


@triton.jit
def first_sums(
    student,
    teacher,
    teacher_columns,  # COLUMNS, or 0 for a row whose teacher is not to be read
    to_log2,
    HAS_CE: tl.constexpr,
    HAS_KD: tl.constexpr,
    TEMPERED: tl.constexpr,
    EXPECTATION_UNDER: tl.constexpr,
    STUDENT_SCALE: tl.constexpr,
    STUDENT_SOFTCAP: tl.constexpr,
    TEACHER_SCALE: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    COLUMNS: tl.constexpr,  # Triton's interpreter cannot loop up to a number that is not a constant
    BLOCK: tl.constexpr,
):
    """Maximum and mass of both models, the student's mass at T = 1 and the expected log ratio times a mass, in log2."""
    lanes = tl.zeros([BLOCK // RUN], dtype=tl.float32)
    m = lanes + LEAST
    n = m
    mass = lanes
    ce_sum_exp = lanes
    teacher_sum_exp = lanes
    ratio = lanes
    for first in range(0, COLUMNS, BLOCK):
        offsets = columns_at(first, BLOCK)
        z = tl.load(student + offsets, offsets < COLUMNS, other=float("-inf"))
        if HAS_KD:
            u = tl.load(teacher + offsets, offsets < teacher_columns, other=float("-inf"))
        z = logits_of(z, STUDENT_SCALE, STUDENT_SOFTCAP)
        new_m = tl.maximum(m, tl.max(z, 1))
        s = (z - new_m[:, None]) * to_log2
        m_shift = (m - new_m) * to_log2
        q = tl.exp2(s)
        old_mass = mass
        mass = mass * tl.exp2(m_shift) + tl.sum(q, 1)
        if HAS_CE and TEMPERED:
            ce_sum_exp = ce_sum_exp * tl.exp2((m - new_m) * LOG2_E) + tl.sum(tl.exp2((z - new_m[:, None]) * LOG2_E), 1)
        m = new_m
        if HAS_KD:
            u = logits_of(u, TEACHER_SCALE, TEACHER_SOFTCAP)
            new_n = tl.maximum(n, tl.max(u, 1))
            t = (u - new_n[:, None]) * to_log2
            n_shift = (n - new_n) * to_log2
            p = tl.exp2(t)
            if EXPECTATION_UNDER == "teacher":
                old = weighted(tl.exp2(n_shift), ratio + teacher_sum_exp * (n_shift - m_shift))
                ratio = old + tl.sum(weighted(p, t - s), 1)
            if EXPECTATION_UNDER == "student":
                old = weighted(tl.exp2(m_shift), ratio + old_mass * (m_shift - n_shift))
                ratio = old + tl.sum(weighted(q, s - t), 1)
            teacher_sum_exp = teacher_sum_exp * tl.exp2(n_shift) + tl.sum(p, 1)
            n = new_n
    highest, m_shift = merge_lanes(m, to_log2)
    teacher_highest, n_shift = merge_lanes(n, to_log2)
    if EXPECTATION_UNDER == "teacher":
        ratio = weighted(tl.exp2(n_shift), ratio + teacher_sum_exp * (n_shift - m_shift))
    if EXPECTATION_UNDER == "student":
        ratio = weighted(tl.exp2(m_shift), ratio + mass * (m_shift - n_shift))
    mass = tl.sum(mass * tl.exp2(m_shift), 0)
    if HAS_CE and TEMPERED:
        ce_sum_exp *= tl.exp2((m - highest) * LOG2_E)
    teacher_sum_exp = tl.sum(teacher_sum_exp * tl.exp2(n_shift), 0)
    return highest, mass, tl.sum(ce_sum_exp, 0), teacher_highest, teacher_sum_exp, tl.sum(ratio, 0)


@triton.jit
def first_of_row(
    student,  # at the row's first column, as the teacher
    teacher,
    labels,
    ce_weight,
    kd_weight,
    stats,  # [7, rows]: student_max, student_sum_exp, ce_sum_exp, label_logit, teacher_max, teacher_sum_exp, log_ratio
    row,
    rows,
    first_column,
    to_log2,
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
    """Store the first round's sums of one row; a row that no term uses is not read.

    Returns (maximum, log2 of the mass) of student and teacher, log2 of the student's mass at T = 1, the expected ratio.
    """
    ce_on = False
    kd_on = False
    if HAS_CE:
        ce_on = tl.load(ce_weight + row) != 0
    if HAS_KD:
        kd_on = tl.load(kd_weight + row) != 0
    if HAS_CE:
        # Before the sweep, whose reductions are barriers: a gradient may be written over the logits after it.
        column = tl.load(labels + row) - first_column
        owned = ce_on & (column >= 0) & (column < COLUMNS)
        label = tl.load(student + column, owned, other=0.0)
        tl.store(stats + 3 * rows + row, logits_of(label, STUDENT_SCALE, STUDENT_SOFTCAP))
    m = LEAST + 0.0 * to_log2
    n = m
    mass = 0.0 * to_log2
    ce_sum_exp = mass
    teacher_sum_exp = mass
    ratio = mass
    if ce_on | kd_on:
        m, mass, ce_sum_exp, n, teacher_sum_exp, ratio = first_sums(
            student,
            teacher,
            tl.where(kd_on, COLUMNS, 0),
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
    ratio = ratio * LN_2
    stats += row
    tl.store(stats, m)
    tl.store(stats + rows, mass)
    if HAS_CE and TEMPERED:
        tl.store(stats + 2 * rows, ce_sum_exp)
    if HAS_KD:
        tl.store(stats + 4 * rows, n)
        tl.store(stats + 5 * rows, teacher_sum_exp)
        tl.store(stats + 6 * rows, ratio)
    log_mass_q = tl.log2(mass)
    log_mass_1 = tl.log2(ce_sum_exp) if TEMPERED else log_mass_q
    return (m, log_mass_q), (n, tl.log2(teacher_sum_exp)), log_mass_1, ratio / mass


@triton.jit
def columns_at(first, BLOCK: tl.constexpr):
    """[BLOCK / RUN, RUN] numbers of the columns of a block."""
    return first + RUN * tl.arange(0, BLOCK // RUN)[:, None] + tl.arange(0, RUN)[None, :]


@triton.jit
def merge_lanes(top, to_log2):
    """(the row's maximum, [lanes] log2 of what relates a lane's powers to it)."""
    highest = tl.max(top, 0)
    return highest, (top - highest) * to_log2


@triton.jit
def second_sums(
    student,
    teacher,
    m,
    log_mass_q,
    n,
    log_mass_p,
    to_log2,
    share,
    REVERSED: tl.constexpr,
    DIVERGENCE: tl.constexpr,
    STUDENT_SCALE: tl.constexpr,
    STUDENT_SOFTCAP: tl.constexpr,
    TEACHER_SCALE: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums of pointwise and dlogq, from each model's maximum and log2 of its mass."""
    pointwise = tl.zeros([BLOCK // RUN], dtype=tl.float32)
    dlogq = pointwise
    for step in range(0, COLUMNS, BLOCK):
        offsets = columns_at(block_of(step, REVERSED, COLUMNS, BLOCK), BLOCK)
        there = offsets < COLUMNS
        z = logits_of(tl.load(student + offsets, there, other=float("-inf")), STUDENT_SCALE, STUDENT_SOFTCAP)
        u = logits_of(tl.load(teacher + offsets, there, other=float("-inf")), TEACHER_SCALE, TEACHER_SOFTCAP)
        s = (z - m) * to_log2 - log_mass_q
        t = (u - n) * to_log2 - log_mass_p
        q, p = tl.exp2(s), tl.exp2(t)
        pointwise += tl.sum(pointwise_of(DIVERGENCE, s, t, q, p, share), 1)
        dlogq += tl.sum(dlogq_of(DIVERGENCE, s, t, q, p, share), 1)
    return tl.sum(pointwise, 0), tl.sum(dlogq, 0)


@triton.jit
def second_of_row(
    student,  # at the row's first column, as the teacher
    teacher,
    kd_weight,
    sums,  # [2, rows]: pointwise, dlogq
    row,
    rows,
    softmax_q,  # (maximum, log2 of the mass)
    softmax_p,
    to_log2,
    share,
    REVERSED: tl.constexpr,
    DIVERGENCE: tl.constexpr,
    STUDENT_SCALE: tl.constexpr,
    STUDENT_SOFTCAP: tl.constexpr,
    TEACHER_SCALE: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the second round's sums of one row and return that of the dlogq terms; a row without weight is not read."""
    m, log_mass_q = softmax_q
    n, log_mass_p = softmax_p
    pointwise = 0.0 * m
    dlogq = pointwise
    if tl.load(kd_weight + row) != 0:
        pointwise, dlogq = second_sums(
            student,
            teacher,
            m,
            log_mass_q,
            n,
            log_mass_p,
            to_log2,
            share,
            REVERSED,
            DIVERGENCE,
            STUDENT_SCALE,
            STUDENT_SOFTCAP,
            TEACHER_SCALE,
            TEACHER_SOFTCAP,
            COLUMNS,
            BLOCK,
        )
    tl.store(sums + row, pointwise)
    tl.store(sums + rows + row, dlogq)
    return dlogq


@triton.jit
def block_of(step, REVERSED: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """First column of the block at this step of a sweep; a sweep back begins with what the caches still hold."""
    first = step
    if REVERSED:
        first = (COLUMNS - 1) // BLOCK * BLOCK - step
    return first


@triton.jit
def gradient_of(
    z,
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
    dlogq_sum,
    to_log2,
    share,
    HAS_CE: tl.constexpr,
    HAS_KD: tl.constexpr,
    TEMPERED: tl.constexpr,
    DIVERGENCE: tl.constexpr,
    STUDENT_SCALE: tl.constexpr,
    STUDENT_SOFTCAP: tl.constexpr,
):
    """d loss / d products of a block, from its logits and the row's scalars; see rows.GradCoeffs. Masses are log2."""
    gradient = tl.zeros_like(z)
    s = (z - m) * to_log2 - log_mass_q
    q = tl.exp2(s)
    if HAS_CE:
        q1 = tl.exp2((z - m) * LOG2_E - log_mass_1) if TEMPERED else q
        gradient = tl.where(of_label != 0, of_q * q1 - tl.where(at_label, of_label, 0.0), 0.0)
    if HAS_KD:
        t = (u - n) * to_log2 - log_mass_p
        p = tl.exp2(t)
        of_row = dlogq_of(DIVERGENCE, s, t, q, p, share) - q * dlogq_sum
        gradient += tl.where(of_kd != 0, of_kd * of_row, 0.0)
    if STUDENT_SOFTCAP > 0:
        gradient *= 1.0 - (z / STUDENT_SOFTCAP) * (z / STUDENT_SOFTCAP)
    if STUDENT_SCALE != 1.0:
        gradient *= STUDENT_SCALE
    return gradient


@triton.jit
def write_gradient_of_row(
    student,  # at the row's first column, as the teacher and out
    teacher,
    out,
    labels,
    ce_gradient,
    kd_gradient,
    row,
    softmax_q,  # (maximum, log2 of the mass)
    softmax_p,
    log_mass_1,
    total_dlogq,
    to_log2,
    kd_scale,
    z_loss,
    share,
    REVERSED: tl.constexpr,
    HAS_CE: tl.constexpr,
    HAS_KD: tl.constexpr,
    TEMPERED: tl.constexpr,
    DIVERGENCE: tl.constexpr,
    STUDENT_SCALE: tl.constexpr,
    STUDENT_SOFTCAP: tl.constexpr,
    TEACHER_SCALE: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient of a row whose sums are known, over all columns; `out` may be the student's logits themselves."""
    m, log_mass_q = softmax_q
    n, log_mass_p = softmax_p
    of_label = 0.0 * m
    of_q = of_label
    of_kd = of_label
    used_columns = 0
    teacher_columns = 0
    label = -1
    if HAS_CE:
        of_label = tl.load(ce_gradient + row)
        used_columns = tl.where(of_label != 0, COLUMNS, 0)
        of_q = of_label * (1.0 + 2.0 * z_loss * (log_mass_1 * LN_2 + m))
        label = tl.load(labels + row)
    if HAS_KD:
        of_kd = tl.load(kd_gradient + row) * kd_scale
        teacher_columns = tl.where(of_kd != 0, COLUMNS, 0)
        used_columns = tl.maximum(used_columns, teacher_columns)
    for step in range(0, COLUMNS, BLOCK):
        offsets = columns_at(block_of(step, REVERSED, COLUMNS, BLOCK), BLOCK)
        # Unused rows are not read: 0 is finite, and its gradient is multiplied away.
        z = tl.load(student + offsets, offsets < used_columns, other=0.0)
        u = 0.0 * offsets
        if HAS_KD:
            u = logits_of(
                tl.load(teacher + offsets, offsets < teacher_columns, other=0.0), TEACHER_SCALE, TEACHER_SOFTCAP
            )
        gradient = gradient_of(
            logits_of(z, STUDENT_SCALE, STUDENT_SOFTCAP),
            u,
            offsets == label,
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
        tl.store(out + offsets, gradient.to(out.dtype.element_ty), offsets < COLUMNS)
