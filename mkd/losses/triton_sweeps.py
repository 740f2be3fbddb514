"""What the Triton kernels do with one row of logits: the sums of both rounds, and the gradient of a block of columns.

Pointers are at the row's first column. Sums are kept by lane and added up once at the end, all relative to one maximum
of the row so far: a step of a sweep then needs one reduction over the program a model.
"""

import triton
import triton.language as tl

from mkd.losses.triton_math import LEAST, LN_2, LOG2_E, density_of, logits_of, slope_of, weighted


@triton.jit
def first_sums(
    student,
    teacher,
    teacher_columns,  # COLUMNS, or 0 for a row whose teacher is not to be read
    to_log2,
    HAS_CE: tl.constexpr,
    HAS_KD: tl.constexpr,
    TEMPERED: tl.constexpr,
    UNDER: tl.constexpr,
    STUDENT_SCALE: tl.constexpr,
    STUDENT_SOFTCAP: tl.constexpr,
    TEACHER_SCALE: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    COLUMNS: tl.constexpr,  # Triton's interpreter cannot loop up to a number that is not a constant
    BLOCK: tl.constexpr,
):
    """Maximum and mass of both models, the student's mass at T = 1 and the expected log ratio times a mass, in log2."""
    m = LEAST + 0.0 * to_log2
    n = m
    mass = tl.zeros([BLOCK], dtype=tl.float32)
    ce_mass = mass
    teacher_mass = mass
    ratio = mass
    for first in range(0, COLUMNS, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        z = tl.load(student + offsets, offsets < COLUMNS, other=float("-inf"))
        if HAS_KD:
            u = tl.load(teacher + offsets, offsets < teacher_columns, other=float("-inf"))
        z = logits_of(z, STUDENT_SCALE, STUDENT_SOFTCAP)
        new_m = tl.maximum(m, tl.max(z, 0))
        s = (z - new_m) * to_log2
        m_shift = (m - new_m) * to_log2
        q = tl.exp2(s)
        old_mass = mass
        mass = mass * tl.exp2(m_shift) + q
        if HAS_CE and TEMPERED:
            ce_mass = ce_mass * tl.exp2((m - new_m) * LOG2_E) + tl.exp2((z - new_m) * LOG2_E)
        m = new_m
        if HAS_KD:
            u = logits_of(u, TEACHER_SCALE, TEACHER_SOFTCAP)
            new_n = tl.maximum(n, tl.max(u, 0))
            t = (u - new_n) * to_log2
            n_shift = (n - new_n) * to_log2
            p = tl.exp2(t)
            if UNDER == "teacher":
                ratio = weighted(tl.exp2(n_shift), ratio + teacher_mass * (n_shift - m_shift)) + weighted(p, t - s)
            if UNDER == "student":
                ratio = weighted(tl.exp2(m_shift), ratio + old_mass * (m_shift - n_shift)) + weighted(q, s - t)
            teacher_mass = teacher_mass * tl.exp2(n_shift) + p
            n = new_n
    return m, tl.sum(mass, 0), tl.sum(ce_mass, 0), n, tl.sum(teacher_mass, 0), tl.sum(ratio, 0)


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
    """Sums of density and slope, from each model's maximum and log2 of its mass."""
    density = tl.zeros([BLOCK], dtype=tl.float32)
    slope = density
    for step in range(0, COLUMNS, BLOCK):
        offsets = block_of(step, REVERSED, COLUMNS, BLOCK) + tl.arange(0, BLOCK)
        there = offsets < COLUMNS
        z = logits_of(tl.load(student + offsets, there, other=float("-inf")), STUDENT_SCALE, STUDENT_SOFTCAP)
        u = logits_of(tl.load(teacher + offsets, there, other=float("-inf")), TEACHER_SCALE, TEACHER_SOFTCAP)
        log_q = ((z - m) * to_log2 - log_mass_q) * LN_2
        log_p = ((u - n) * to_log2 - log_mass_p) * LN_2
        density += density_of(DIVERGENCE, log_q, log_p, share)
        q, p = tl.exp2(log_q * LOG2_E), tl.exp2(log_p * LOG2_E)
        slope += slope_of(DIVERGENCE, log_q, log_p, q, p, share)
    return tl.sum(density, 0), tl.sum(slope, 0)


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
    slope_sum,
    to_log2,
    share,
    HAS_CE: tl.constexpr,
    HAS_KD: tl.constexpr,
    TEMPERED: tl.constexpr,
    DIVERGENCE: tl.constexpr,
    STUDENT_SCALE: tl.constexpr,
    STUDENT_SOFTCAP: tl.constexpr,
):
    """d loss / d products of a block, from its logits and the row's scalars; see rows.Factors. Masses are log2."""
    gradient = tl.zeros_like(z)
    s = (z - m) * to_log2 - log_mass_q
    q = tl.exp2(s)
    if HAS_CE:
        q1 = tl.exp2((z - m) * LOG2_E - log_mass_1) if TEMPERED else q
        gradient = tl.where(of_label != 0, of_q * q1 - tl.where(at_label, of_label, 0.0), 0.0)
    if HAS_KD:
        t = (u - n) * to_log2 - log_mass_p
        p = tl.exp2(t)
        of_row = slope_of(DIVERGENCE, s * LN_2, t * LN_2, q, p, share) - q * slope_sum
        gradient += tl.where(of_kd != 0, of_kd * of_row, 0.0)
    if STUDENT_SOFTCAP > 0:
        gradient *= 1.0 - (z / STUDENT_SOFTCAP) * (z / STUDENT_SOFTCAP)
    if STUDENT_SCALE != 1.0:
        gradient *= STUDENT_SCALE
    return gradient
