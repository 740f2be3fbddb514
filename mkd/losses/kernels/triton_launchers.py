"""The passes over a chunk of logits in Triton: the same functions as in `eager`, for GPUs.

Logits are read as they are (bf16, fp16 or fp32) and never copied; all arithmetic is fp32 and in powers of two, results
are bit-equal from run to run, offsets into logits are 64-bit. HBM traffic for 2-byte logits, in bytes a column and row:
4 for each summing pass, 4 read and 2 written for the gradient. Where one rank holds the whole vocabulary one kernel
does it all, and sweeps back over what the caches still hold.
"""

import torch
import triton
from torch import Tensor

from mkd.config.kd_config import LossSpec
from mkd.losses.divergences import DIVERGENCES
from mkd.losses.kernels.triton_programs import (
    all_rounds_kernel,
    first_round_kernel,
    gradient_kernel,
    second_round_kernel,
)
from mkd.losses.kernels.triton_tail import tail_gradient_kernel
from mkd.losses.logits import Chunk, LogitMap, Setting, TailFactors
from mkd.losses.rows import Rows, Statistics

ONE_ROUND_BLOCK, ONE_ROUND_WARPS = 4096, 16
TWO_ROUND_BLOCK, TWO_ROUND_WARPS = 4096, 16
GRADIENT_BLOCK, GRADIENT_WARPS = 4096, 8
ALL_ROUNDS_BLOCK, ALL_ROUNDS_WARPS = 4096, 16

FIRST_ROUND = ("student_max", "student_mass", "ce_mass", "label_logit", "teacher_max", "teacher_mass", "log_ratio")
"""Order of the first round's statistics in the kernels."""


def first_round(chunk: Chunk, setting: Setting) -> Statistics:
    """See `eager.first_round`."""
    z, u, rows = chunk
    stats = z.new_empty((len(FIRST_ROUND), z.shape[0]), dtype=torch.float32)
    if z.shape[0]:
        first_round_kernel[(z.shape[0],)](
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
            **_term_constants(chunk, setting),
            UNDER=_under(setting),
            **_map_constants(setting),
            COLUMNS=z.shape[1],
            BLOCK=_block(ONE_ROUND_BLOCK, z.shape[1]),
            num_warps=ONE_ROUND_WARPS,
        )
    return _written(stats, chunk, setting)


def second_round(chunk: Chunk, stats: Statistics, setting: Setting) -> Statistics:
    """See `eager.second_round`."""
    z, u, rows = chunk
    sums = z.new_empty((2, z.shape[0]), dtype=torch.float32)
    if z.shape[0]:
        second_round_kernel[(z.shape[0],)](
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
    gradient_kernel[(z.shape[0], triton.cdiv(z.shape[1], block))](
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
        **_term_constants(chunk, setting),
        DIVERGENCE=spec.divergence,
        **_map_constants(setting),
        BLOCK=block,
        num_warps=GRADIENT_WARPS,
    )


def write_tail_gradient(products: Tensor, tail: TailFactors, setting: Setting, out: Tensor) -> None:
    """See `eager.write_tail_gradient`."""
    if out.numel() == 0:
        return
    columns = products.shape[1]
    block = _block(GRADIENT_BLOCK, columns)
    student_map = setting.maps.student
    tail_gradient_kernel[(products.shape[0], triton.cdiv(columns, block))](
        products,
        out,
        *(factor.contiguous() for factor in tail),
        products.stride(0),
        out.stride(0),
        columns,
        1.0 / setting.temperature,
        TEMPERED=setting.temperature != 1.0,
        SCALE=float(student_map.scale),
        SOFTCAP=float(student_map.softcap or 0.0),
        BLOCK=block,
        num_warps=GRADIENT_WARPS,
    )


def all_rounds(chunk: Chunk, setting: Setting, weighted: Rows, out: Tensor) -> tuple[Statistics, Statistics | None]:
    """See `eager.all_rounds`."""
    z, u, rows = chunk
    spec = setting.spec
    stats = z.new_empty((len(FIRST_ROUND) + 2, z.shape[0]), dtype=torch.float32)
    if z.shape[0]:
        all_rounds_kernel[(z.shape[0],)](
            z,
            z if u is None else u,
            rows.labels,
            out,
            rows.ce_weight,
            rows.kd_weight,
            weighted.ce_weight,
            weighted.kd_weight,
            stats,
            z.stride(0),
            0 if u is None else u.stride(0),
            out.stride(0),
            z.shape[0],
            1.0 / setting.temperature,
            spec.scale / spec.temperature,
            float(spec.z_loss),
            _share(spec),
            **_term_constants(chunk, setting),
            UNDER=_under(setting),
            DIVERGENCE=spec.divergence,
            **_map_constants(setting),
            COLUMNS=z.shape[1],
            BLOCK=_block(ALL_ROUNDS_BLOCK, z.shape[1]),
            num_warps=ALL_ROUNDS_WARPS,
        )
    sums = {"density": stats[-2], "slope": stats[-1]} if u is not None and _under(setting) == "none" else None
    return _written(stats, chunk, setting), sums


def _written(stats: Tensor, chunk: Chunk, setting: Setting) -> Statistics:
    """Name -> [rows] of the first round's statistics that its kernel has computed."""
    names = {"student_max", "student_mass"}
    if chunk.rows.ce_weight is not None:
        names |= {"label_logit", "ce_mass"} if setting.temperature != 1.0 else {"label_logit"}
    if chunk.teacher is not None:
        names |= (
            {"teacher_max", "teacher_mass"}
            if _under(setting) == "none"
            else {"teacher_max", "teacher_mass", "log_ratio"}
        )
    return {name: values for name, values in zip(FIRST_ROUND, stats, strict=False) if name in names}


def _under(setting: Setting) -> str:
    """Under whose probabilities the first round takes the log ratio: teacher, student or none."""
    shortcut = DIVERGENCES[setting.spec.divergence].one_round if setting.with_kd else None
    return "none" if shortcut is None else shortcut.under


def _term_constants(chunk: Chunk, setting: Setting) -> dict[str, bool]:
    """Which terms there are, and whether the divergence has a temperature of its own."""
    return {
        "HAS_CE": chunk.rows.ce_weight is not None,
        "HAS_KD": chunk.teacher is not None,
        "TEMPERED": setting.temperature != 1.0,
    }


def _share(spec: LossSpec) -> float:
    return spec.beta if spec.divergence == "jsd" else spec.skew


def _block(most: int, columns: int) -> int:
    return min(most, triton.next_power_of_2(max(columns, 16)))


def _map_constants(setting: Setting) -> dict[str, float]:
    """Scale and cap as compile-time constants; no cap is 0."""

    def of(name: str, logit_map: LogitMap) -> dict[str, float]:
        return {f"{name}_SCALE": float(logit_map.scale), f"{name}_SOFTCAP": float(logit_map.softcap or 0.0)}

    return of("STUDENT", setting.maps.student) | of("TEACHER", setting.maps.teacher)
