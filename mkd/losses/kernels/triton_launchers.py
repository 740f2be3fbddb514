"""The passes over a chunk of logits in Triton: the same functions as in `eager`, for GPUs.

Logits are read as they are (bf16, fp16 or fp32) and never copied; all arithmetic is fp32 and in powers of two, results
are bit-equal from run to run, offsets into logits are 64-bit. HBM traffic for 2-byte logits, in bytes a column and row:
4 for each summing pass, 4 read and 2 written for the gradient. Where one rank holds the whole vocabulary one kernel
does it all, and sweeps back over what the caches still hold.
"""

import torch
import triton
from torch import Tensor

from mkd.config.values import LossSpec
from mkd.losses.divergences import DIVERGENCES
from mkd.losses.inputs import KernelContext, LogitMap, TokenWeights
from mkd.losses.kernels.interface import Chunk, TailCoeffs
from mkd.losses.kernels.triton_programs import (
    all_passes_kernel,
    divergence_stats_kernel,
    gradient_kernel,
    softmax_stats_kernel,
)
from mkd.losses.kernels.triton_tail import tail_gradient_kernel
from mkd.losses.statistics import Statistics

SOFTMAX_STATS_BLOCK, SOFTMAX_STATS_WARPS = 4096, 16
DIVERGENCE_STATS_BLOCK, DIVERGENCE_STATS_WARPS = 4096, 16
GRADIENT_BLOCK, GRADIENT_WARPS = 4096, 8
ALL_PASSES_BLOCK, ALL_PASSES_WARPS = 4096, 16

SOFTMAX_STATS = (
    "student_max",
    "student_sum_exp",
    "ce_sum_exp",
    "label_logit",
    "teacher_max",
    "teacher_sum_exp",
    "log_ratio",
)
"""Order of the first round's statistics in the kernels."""


def softmax_stats(chunk: Chunk, context: KernelContext) -> Statistics:
    """See `eager.softmax_stats`."""
    z, u, tokens = chunk
    stats = z.new_empty((len(SOFTMAX_STATS), z.shape[0]), dtype=torch.float32)
    if z.shape[0]:
        softmax_stats_kernel[(z.shape[0],)](
            z,
            z if u is None else u,
            tokens.labels,
            tokens.ce_weight,
            tokens.kd_weight,
            stats,
            z.stride(0),
            0 if u is None else u.stride(0),
            z.shape[0],
            context.shard.start,
            1.0 / context.temperature,
            **_term_constants(chunk, context),
            EXPECTATION_UNDER=_expectation_under(context),
            **_map_constants(context),
            COLUMNS=z.shape[1],
            BLOCK=_block(SOFTMAX_STATS_BLOCK, z.shape[1]),
            num_warps=SOFTMAX_STATS_WARPS,
        )
    return _written(stats, chunk, context)


def divergence_stats(chunk: Chunk, stats: Statistics, context: KernelContext) -> Statistics:
    """See `eager.divergence_stats`."""
    z, u, tokens = chunk
    sums = z.new_empty((2, z.shape[0]), dtype=torch.float32)
    if z.shape[0]:
        divergence_stats_kernel[(z.shape[0],)](
            z,
            u,
            tokens.kd_weight,
            stats["student_max"],
            stats["student_sum_exp"],
            stats["teacher_max"],
            stats["teacher_sum_exp"],
            sums,
            z.stride(0),
            u.stride(0),
            z.shape[0],
            context.shard.rank,
            stats["student_max"].stride(0),
            1.0 / context.spec.temperature,
            _share(context.spec),
            SHARDS=context.shard.size,
            DIVERGENCE=context.spec.divergence,
            **_map_constants(context),
            COLUMNS=z.shape[1],
            BLOCK=_block(DIVERGENCE_STATS_BLOCK, z.shape[1]),
            num_warps=DIVERGENCE_STATS_WARPS,
        )
    return {"pointwise": sums[0], "dlogq": sums[1]}


def write_gradient(
    chunk: Chunk, stats: Statistics, sums: Statistics | None, context: KernelContext, out: Tensor
) -> None:
    """See `eager.write_gradient`."""
    z, u, tokens = chunk
    if out.numel() == 0:
        return
    spec = context.spec
    block = _block(GRADIENT_BLOCK, z.shape[1])
    gradient_kernel[(z.shape[0], triton.cdiv(z.shape[1], block))](
        z,
        z if u is None else u,
        tokens.labels,
        out,
        tokens.ce_weight,
        tokens.kd_weight,
        stats["student_max"],
        stats["student_sum_exp"],
        stats.get("ce_sum_exp", stats["student_sum_exp"]),
        stats.get("teacher_max"),
        stats.get("teacher_sum_exp"),
        stats.get("log_ratio"),
        None if sums is None else sums["dlogq"],
        z.stride(0),
        0 if u is None else u.stride(0),
        out.stride(0),
        z.shape[1],
        context.shard.start,
        context.shard.rank,
        stats["student_max"].stride(0),
        0 if sums is None else sums["dlogq"].stride(0),
        1.0 / context.temperature,
        spec.scale / spec.temperature,
        float(spec.z_loss),
        _share(spec),
        SHARDS=context.shard.size,
        **_term_constants(chunk, context),
        DIVERGENCE=spec.divergence,
        **_map_constants(context),
        BLOCK=block,
        num_warps=GRADIENT_WARPS,
    )


def write_tail_gradient(products: Tensor, tail: TailCoeffs, context: KernelContext, out: Tensor) -> None:
    """See `eager.write_tail_gradient`."""
    if out.numel() == 0:
        return
    columns = products.shape[1]
    block = _block(GRADIENT_BLOCK, columns)
    student_map = context.maps.student
    tail_gradient_kernel[(products.shape[0], triton.cdiv(columns, block))](
        products,
        out,
        *(factor.contiguous() for factor in tail),
        products.stride(0),
        out.stride(0),
        columns,
        1.0 / context.temperature,
        TEMPERED=context.temperature != 1.0,
        SCALE=float(student_map.scale),
        SOFTCAP=float(student_map.softcap or 0.0),
        BLOCK=block,
        num_warps=GRADIENT_WARPS,
    )


def all_passes(
    chunk: Chunk, context: KernelContext, weighted: TokenWeights, out: Tensor
) -> tuple[Statistics, Statistics | None]:
    """See `eager.all_passes`."""
    z, u, tokens = chunk
    spec = context.spec
    stats = z.new_empty((len(SOFTMAX_STATS) + 2, z.shape[0]), dtype=torch.float32)
    if z.shape[0]:
        all_passes_kernel[(z.shape[0],)](
            z,
            z if u is None else u,
            tokens.labels,
            out,
            tokens.ce_weight,
            tokens.kd_weight,
            weighted.ce_weight,
            weighted.kd_weight,
            stats,
            z.stride(0),
            0 if u is None else u.stride(0),
            out.stride(0),
            z.shape[0],
            1.0 / context.temperature,
            spec.scale / spec.temperature,
            float(spec.z_loss),
            _share(spec),
            **_term_constants(chunk, context),
            EXPECTATION_UNDER=_expectation_under(context),
            DIVERGENCE=spec.divergence,
            **_map_constants(context),
            COLUMNS=z.shape[1],
            BLOCK=_block(ALL_PASSES_BLOCK, z.shape[1]),
            num_warps=ALL_PASSES_WARPS,
        )
    sums = (
        {"pointwise": stats[-2], "dlogq": stats[-1]}
        if u is not None and _expectation_under(context) == "none"
        else None
    )
    return _written(stats, chunk, context), sums


def _written(stats: Tensor, chunk: Chunk, context: KernelContext) -> Statistics:
    """Name -> [rows] of the first round's statistics that its kernel has computed."""
    names = {"student_max", "student_sum_exp"}
    if chunk.tokens.ce_weight is not None:
        names |= {"label_logit", "ce_sum_exp"} if context.temperature != 1.0 else {"label_logit"}
    if chunk.teacher is not None:
        names |= (
            {"teacher_max", "teacher_sum_exp"}
            if _expectation_under(context) == "none"
            else {"teacher_max", "teacher_sum_exp", "log_ratio"}
        )
    return {name: values for name, values in zip(SOFTMAX_STATS, stats, strict=False) if name in names}


def _expectation_under(context: KernelContext) -> str:
    """Under whose probabilities the first round takes the log ratio: teacher, student or none."""
    shortcut = DIVERGENCES[context.spec.divergence].single_pass if context.with_kd else None
    return "none" if shortcut is None else shortcut.under


def _term_constants(chunk: Chunk, context: KernelContext) -> dict[str, bool]:
    """Which terms there are, and whether the divergence has a temperature of its own."""
    return {
        "HAS_CE": chunk.tokens.ce_weight is not None,
        "HAS_KD": chunk.teacher is not None,
        "TEMPERED": context.temperature != 1.0,
    }


def _share(spec: LossSpec) -> float:
    return spec.beta if spec.divergence == "jsd" else spec.skew


def _block(most: int, columns: int) -> int:
    return min(most, triton.next_power_of_2(max(columns, 16)))


def _map_constants(context: KernelContext) -> dict[str, float]:
    """Scale and cap as compile-time constants; no cap is 0."""

    def of(name: str, logit_map: LogitMap) -> dict[str, float]:
        return {f"{name}_SCALE": float(logit_map.scale), f"{name}_SOFTCAP": float(logit_map.softcap or 0.0)}

    return of("STUDENT", context.maps.student) | of("TEACHER", context.maps.teacher)
