"""The three passes over a chunk of logits as Triton kernels: the same functions as in `eager`, for GPUs.

Logits are read as they are (bf16, fp16 or fp32) and never copied; all arithmetic is fp32 and in powers of two. A
program of the two summing kernels walks along one row, so sums have one order and need no atomics: results are
bit-equal from run to run. Offsets into logits are 64-bit. HBM traffic for 2-byte logits, in bytes a column and row: 4
for each summing pass, 4 read and 2 written for the gradient.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mkd.config import LossSpec
from mkd.losses.divergences import DIVERGENCES
from mkd.losses.logits import Chunk, LogitMap, Setting
from mkd.losses.rows import Statistics
from mkd.losses.triton_math import (
    LEAST,
    LN_2,
    LOG2_E,
    density_of,
    logits_of,
    merge_kl,
    merge_softmax,
    slope_of,
    weighted,
)

ONE_ROUND_BLOCK, ONE_ROUND_WARPS = 4096, 4
TWO_ROUND_BLOCK, TWO_ROUND_WARPS = 4096, 8
GRADIENT_BLOCK, GRADIENT_WARPS = 4096, 8


@triton.jit
def _first_round_kernel(
    student,
    teacher,
    labels,
    ce_weight,
    kd_weight,
    stats,  # [STATS, rows]: student_max, student_mass, ce_mass, label_logit, teacher_max, teacher_mass, log_ratio
    student_stride,
    teacher_stride,
    rows,
    first_column,
    inverse_temperature,
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
    row = tl.program_id(0).to(tl.int64)
    student += row * student_stride
    teacher += row * teacher_stride
    ce_on = False
    kd_on = False
    if HAS_CE:
        ce_on = tl.load(ce_weight + row) != 0
    if HAS_KD:
        kd_on = tl.load(kd_weight + row) != 0
    to_log2 = inverse_temperature * LOG2_E
    # fp32 scalars that the loop carries
    m = LEAST + 0.0 * inverse_temperature
    n = m
    mass = 0.0 * inverse_temperature
    ce_mass = mass
    teacher_mass = mass
    ratio = mass
    # A row that no term uses is not read, nor is the teacher's if the divergence does not use it.
    teacher_columns = tl.where(kd_on, COLUMNS, 0)
    if ce_on | kd_on:
        for first in range(0, COLUMNS, BLOCK):
            offsets = first + tl.arange(0, BLOCK)
            there = offsets < COLUMNS
            z = logits_of(tl.load(student + offsets, there, other=float("-inf")), STUDENT_SCALE, STUDENT_SOFTCAP)
            new_m = tl.maximum(m, tl.max(z, 0))
            s = (z - new_m) * to_log2
            m_shift = (m - new_m) * to_log2
            q = tl.exp2(s)
            old_mass = mass
            mass = mass * tl.exp2(m_shift) + tl.sum(q, 0)
            if HAS_CE and TEMPERED:
                ce_mass = ce_mass * tl.exp2((m - new_m) * LOG2_E) + tl.sum(tl.exp2((z - new_m) * LOG2_E), 0)
            m = new_m
            if HAS_KD:
                u = tl.load(teacher + offsets, offsets < teacher_columns, other=float("-inf"))
                u = logits_of(u, TEACHER_SCALE, TEACHER_SOFTCAP)
                new_n = tl.maximum(n, tl.max(u, 0))
                t = (u - new_n) * to_log2
                n_shift = (n - new_n) * to_log2
                p = tl.exp2(t)
                if UNDER == "teacher":
                    old = weighted(tl.exp2(n_shift), ratio + teacher_mass * (n_shift - m_shift))
                    ratio = old + tl.sum(weighted(p, t - s), 0)
                if UNDER == "student":
                    old = weighted(tl.exp2(m_shift), ratio + old_mass * (m_shift - n_shift))
                    ratio = old + tl.sum(weighted(q, s - t), 0)
                teacher_mass = teacher_mass * tl.exp2(n_shift) + tl.sum(p, 0)
                n = new_n
    stats += row
    tl.store(stats, m)
    tl.store(stats + rows, mass)
    if HAS_CE:
        column = tl.load(labels + row) - first_column
        owned = ce_on & (column >= 0) & (column < COLUMNS)
        label = tl.load(student + column, owned, other=0.0)
        tl.store(stats + 3 * rows, logits_of(label, STUDENT_SCALE, STUDENT_SOFTCAP))
        if TEMPERED:
            tl.store(stats + 2 * rows, ce_mass)
    if HAS_KD:
        tl.store(stats + 4 * rows, n)
        tl.store(stats + 5 * rows, teacher_mass)
        tl.store(stats + 6 * rows, ratio * LN_2)


@triton.jit
def _second_round_kernel(
    student,
    teacher,
    kd_weight,
    student_max,  # this and the like: [shards, rows], rows of rank_stride numbers
    student_mass,
    teacher_max,
    teacher_mass,
    sums,  # [2, rows]: density, slope
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
    COLUMNS: tl.constexpr,  # Triton's interpreter cannot loop up to a number that is not a constant
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    student += row * student_stride
    teacher += row * teacher_stride
    to_log2 = inverse_temperature * LOG2_E
    m, log_mass_q, _ = merge_softmax(student_max + row, student_mass + row, rank, rank_stride, to_log2, SHARDS)
    n, log_mass_p, _ = merge_softmax(teacher_max + row, teacher_mass + row, rank, rank_stride, to_log2, SHARDS)
    density = 0.0 * m
    slope = 0.0 * m
    if tl.load(kd_weight + row) != 0:
        for first in range(0, COLUMNS, BLOCK):
            offsets = first + tl.arange(0, BLOCK)
            there = offsets < COLUMNS
            z = logits_of(tl.load(student + offsets, there, other=float("-inf")), STUDENT_SCALE, STUDENT_SOFTCAP)
            u = logits_of(tl.load(teacher + offsets, there, other=float("-inf")), TEACHER_SCALE, TEACHER_SOFTCAP)
            log_q = ((z - m) * to_log2 - log_mass_q) * LN_2
            log_p = ((u - n) * to_log2 - log_mass_p) * LN_2
            density += tl.sum(density_of(DIVERGENCE, log_q, log_p, share), 0)
            q, p = tl.exp2(log_q * LOG2_E), tl.exp2(log_p * LOG2_E)
            slope += tl.sum(slope_of(DIVERGENCE, log_q, log_p, q, p, share), 0)
    tl.store(sums + row, density)
    tl.store(sums + rows + row, slope)


@triton.jit
def _gradient_kernel(
    student,
    teacher,
    labels,
    out,
    ce_weight,
    kd_weight,
    student_max,  # this and the like: [shards, rows], rows of rank_stride numbers
    student_mass,
    ce_mass,
    teacher_max,
    teacher_mass,
    log_ratio,
    slope_sum,
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
    DIVERGENCE: tl.constexpr,
    STUDENT_SCALE: tl.constexpr,
    STUDENT_SOFTCAP: tl.constexpr,
    TEACHER_SCALE: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = offsets < columns
    to_log2 = inverse_temperature * LOG2_E
    used_columns = 0
    if HAS_CE:
        of_label = tl.load(ce_weight + row)
        used_columns = tl.where(of_label != 0, columns, 0)
    if HAS_KD:
        of_kd = tl.load(kd_weight + row) * kd_scale
        teacher_columns = tl.where(of_kd != 0, columns, 0)
        used_columns = tl.maximum(used_columns, teacher_columns)
    # Unused rows are not read: 0 is finite, and its gradient is multiplied away below.
    products = tl.load(student + row * student_stride + offsets, offsets < used_columns, other=0.0)
    z = logits_of(products, STUDENT_SCALE, STUDENT_SOFTCAP)
    m, log_mass_q, _ = merge_softmax(student_max + row, student_mass + row, rank, rank_stride, to_log2, SHARDS)
    gradient = tl.zeros_like(z)
    if HAS_CE:
        _, log_mass_1, highest = merge_softmax(student_max + row, ce_mass + row, rank, rank_stride, LOG2_E, SHARDS)
        log_sum = (log_mass_1 + (m - highest) * LOG2_E) * LN_2 + highest
        of_q = of_label * (1.0 + 2.0 * z_loss * log_sum)
        q1 = tl.exp2((z - m) * LOG2_E - log_mass_1)
        at_label = offsets == tl.load(labels + row) - first_column
        gradient = tl.where(of_label != 0, of_q * q1 - tl.where(at_label, of_label, 0.0), 0.0)
    if HAS_KD:
        log_q = ((z - m) * to_log2 - log_mass_q) * LN_2
        q = tl.exp2((z - m) * to_log2 - log_mass_q)
        u = tl.load(teacher + row * teacher_stride + offsets, offsets < teacher_columns, other=0.0)
        u = logits_of(u, TEACHER_SCALE, TEACHER_SOFTCAP)
        n, log_mass_p, _ = merge_softmax(teacher_max + row, teacher_mass + row, rank, rank_stride, to_log2, SHARDS)
        log_p = ((u - n) * to_log2 - log_mass_p) * LN_2
        sum_of_slopes = -1.0
        if DIVERGENCE == "reverse_kl":
            sum_of_slopes = merge_kl(
                student_max + row,
                student_mass + row,
                teacher_max + row,
                teacher_mass + row,
                log_ratio + row,
                rank_stride,
                to_log2,
                SHARDS,
            )
        elif DIVERGENCE != "forward_kl":
            sum_of_slopes = 0.0 * n
            for shard in range(SHARDS):
                sum_of_slopes += tl.load(slope_sum + shard * sums_stride + row)
        p = tl.exp2((u - n) * to_log2 - log_mass_p)
        of_row = slope_of(DIVERGENCE, log_q, log_p, q, p, share) - q * sum_of_slopes
        gradient += tl.where(of_kd != 0, of_kd * of_row, 0.0)
    if STUDENT_SOFTCAP > 0:
        gradient *= 1.0 - (z / STUDENT_SOFTCAP) * (z / STUDENT_SOFTCAP)
    if STUDENT_SCALE != 1.0:
        gradient *= STUDENT_SCALE
    tl.store(out + row * out_stride + offsets, gradient.to(out.dtype.element_ty), there)


def first_round(chunk: Chunk, setting: Setting) -> Statistics:
    """See `eager.first_round`."""
    z, u, rows = chunk
    names = ["student_max", "student_mass", "ce_mass", "label_logit", "teacher_max", "teacher_mass", "log_ratio"]
    stats = z.new_empty((len(names), z.shape[0]), dtype=torch.float32)
    shortcut = DIVERGENCES[setting.spec.divergence].one_round if u is not None else None
    tempered = setting.temperature != 1.0
    if z.shape[0]:
        _first_round_kernel[(z.shape[0],)](
            z,
            z if u is None else u,
            rows.labels,
            rows.ce_weight,
            rows.kd_weight,
            stats,
            z.stride(0),
            0 if u is None else u.stride(0),
            z.shape[0],
            setting.shard.start,
            1.0 / setting.temperature,
            HAS_CE=rows.ce_weight is not None,
            HAS_KD=u is not None,
            TEMPERED=tempered,
            UNDER="none" if shortcut is None else shortcut.under,
            **_map_constants(setting),
            COLUMNS=z.shape[1],
            BLOCK=_block(ONE_ROUND_BLOCK, z.shape[1]),
            num_warps=ONE_ROUND_WARPS,
        )
    written = {"student_max", "student_mass"}
    if rows.ce_weight is not None:
        written |= {"label_logit", "ce_mass"} if tempered else {"label_logit"}
    if u is not None:
        written |= {"teacher_max", "teacher_mass"} if shortcut is None else {"teacher_max", "teacher_mass", "log_ratio"}
    return {name: values for name, values in zip(names, stats, strict=True) if name in written}


def second_round(chunk: Chunk, stats: Statistics, setting: Setting) -> Statistics:
    """See `eager.second_round`."""
    z, u, rows = chunk
    sums = z.new_empty((2, z.shape[0]), dtype=torch.float32)
    if z.shape[0]:
        _second_round_kernel[(z.shape[0],)](
            z,
            u,
            rows.kd_weight,
            stats["student_max"],
            stats["student_mass"],
            stats["teacher_max"],
            stats["teacher_mass"],
            sums,
            z.stride(0),
            u.stride(0),
            z.shape[0],
            setting.shard.rank,
            stats["student_max"].stride(0),
            1.0 / setting.spec.temperature,
            _share(setting.spec),
            SHARDS=setting.shard.size,
            DIVERGENCE=setting.spec.divergence,
            **_map_constants(setting),
            COLUMNS=z.shape[1],
            BLOCK=_block(TWO_ROUND_BLOCK, z.shape[1]),
            num_warps=TWO_ROUND_WARPS,
        )
    return {"density": sums[0], "slope": sums[1]}


def write_gradient(chunk: Chunk, stats: Statistics, sums: Statistics | None, setting: Setting, out: Tensor) -> None:
    """See `eager.write_gradient`."""
    z, u, rows = chunk
    if out.numel() == 0:
        return
    spec = setting.spec
    block = _block(GRADIENT_BLOCK, z.shape[1])
    _gradient_kernel[(z.shape[0], triton.cdiv(z.shape[1], block))](
        z,
        z if u is None else u,
        rows.labels,
        out,
        rows.ce_weight,
        rows.kd_weight,
        stats["student_max"],
        stats["student_mass"],
        stats.get("ce_mass", stats["student_mass"]),
        stats.get("teacher_max"),
        stats.get("teacher_mass"),
        stats.get("log_ratio"),
        None if sums is None else sums["slope"],
        z.stride(0),
        0 if u is None else u.stride(0),
        out.stride(0),
        z.shape[1],
        setting.shard.start,
        setting.shard.rank,
        stats["student_max"].stride(0),
        0 if sums is None else sums["slope"].stride(0),
        1.0 / setting.temperature,
        spec.scale / spec.temperature,
        float(spec.z_loss),
        _share(spec),
        SHARDS=setting.shard.size,
        HAS_CE=rows.ce_weight is not None,
        HAS_KD=u is not None,
        DIVERGENCE=spec.divergence,
        **_map_constants(setting),
        BLOCK=block,
        num_warps=GRADIENT_WARPS,
    )


def _share(spec: LossSpec) -> float:
    return spec.beta if spec.divergence == "jsd" else spec.skew


def _block(most: int, columns: int) -> int:
    return min(most, triton.next_power_of_2(max(columns, 16)))


def _map_constants(setting: Setting) -> dict[str, float]:
    """Scale and cap as compile-time constants; no cap is 0."""

    def of(name: str, logit_map: LogitMap) -> dict[str, float]:
        return {f"{name}_SCALE": float(logit_map.scale), f"{name}_SOFTCAP": float(logit_map.softcap or 0.0)}

    return of("STUDENT", setting.maps.student) | of("TEACHER", setting.maps.teacher)
