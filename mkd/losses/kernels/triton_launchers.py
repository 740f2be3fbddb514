"""The passes over a chunk of logits in Triton: the same functions as in `eager`, for GPUs.

`triton_kernels.py` explains the passes and their HBM traffic. Logits are read as they are (bf16, fp16 or fp32); all
arithmetic is fp32 and results are bit-equal from run to run.
"""

import torch
import triton
from torch import Tensor

from mkd.config.loss_spec import LossSpec
from mkd.losses.divergences import DIVERGENCES
from mkd.losses.inputs import KernelContext, TokenWeights
from mkd.losses.kernels.interface import Chunk, TailCoeffs
from mkd.losses.kernels.triton_kernels import (
    DIVERGENCE_STATS,
    SOFTMAX_STATS,
    all_passes_kernel,
    divergence_stats_kernel,
    gradient_kernel,
    softmax_stats_kernel,
    tail_gradient_kernel,
)
from mkd.losses.kernels.triton_math import LossConstants
from mkd.losses.statistics import Statistics

# Columns per block and warps per program; triton_kernels.py has the reasons.
SOFTMAX_STATS_BLOCK, SOFTMAX_STATS_WARPS = 4096, 16
DIVERGENCE_STATS_BLOCK, DIVERGENCE_STATS_WARPS = 4096, 16
GRADIENT_BLOCK, GRADIENT_WARPS = 4096, 8
ALL_PASSES_BLOCK, ALL_PASSES_WARPS = 4096, 16


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
            LOSS=_constants(chunk, context),
            COLUMNS=z.shape[1],
            BLOCK=_block(SOFTMAX_STATS_BLOCK, z.shape[1]),
            num_warps=SOFTMAX_STATS_WARPS,
        )
    return _written(stats, chunk, context)


def divergence_stats(chunk: Chunk, stats: Statistics, context: KernelContext) -> Statistics:
    """See `eager.divergence_stats`."""
    z, u, tokens = chunk
    sums = z.new_empty((len(DIVERGENCE_STATS), z.shape[0]), dtype=torch.float32)
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
            divergence_share(context.spec),
            SHARDS=context.shard.size,
            LOSS=_constants(chunk, context),
            COLUMNS=z.shape[1],
            BLOCK=_block(DIVERGENCE_STATS_BLOCK, z.shape[1]),
            num_warps=DIVERGENCE_STATS_WARPS,
        )
    return dict(zip(DIVERGENCE_STATS, sums, strict=True))


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
        spec.temperature_factor / spec.temperature,
        float(spec.z_loss),
        divergence_share(spec),
        SHARDS=context.shard.size,
        LOSS=_constants(chunk, context),
        BLOCK=block,
        num_warps=GRADIENT_WARPS,
    )


def write_tail_gradient(products: Tensor, tail: TailCoeffs, context: KernelContext, out: Tensor) -> None:
    """See `eager.write_tail_gradient`."""
    if out.numel() == 0:
        return
    columns = products.shape[1]
    block = _block(GRADIENT_BLOCK, columns)
    logit_map = context.maps.student
    tail_gradient_kernel[(products.shape[0], triton.cdiv(columns, block))](
        products,
        out,
        *(factor.contiguous() for factor in tail),
        products.stride(0),
        out.stride(0),
        columns,
        1.0 / context.temperature,
        TEMPERED=context.temperature != 1.0,
        SCALE=float(logit_map.scale),
        SOFTCAP=float(logit_map.softcap or 0.0),
        BLOCK=block,
        num_warps=GRADIENT_WARPS,
    )


def all_passes(
    chunk: Chunk, context: KernelContext, weighted: TokenWeights, out: Tensor
) -> tuple[Statistics, Statistics | None]:
    """See `eager.all_passes`."""
    z, u, tokens = chunk
    spec = context.spec
    stats = z.new_empty((len(SOFTMAX_STATS) + len(DIVERGENCE_STATS), z.shape[0]), dtype=torch.float32)
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
            spec.temperature_factor / spec.temperature,
            float(spec.z_loss),
            divergence_share(spec),
            LOSS=_constants(chunk, context),
            COLUMNS=z.shape[1],
            BLOCK=_block(ALL_PASSES_BLOCK, z.shape[1]),
            num_warps=ALL_PASSES_WARPS,
        )
    sums = None
    if u is not None and log_ratio_under(context) == "none":
        sums = dict(zip(DIVERGENCE_STATS, stats[len(SOFTMAX_STATS) :], strict=True))
    return _written(stats, chunk, context), sums


def _written(stats: Tensor, chunk: Chunk, context: KernelContext) -> Statistics:
    """Name -> [tokens] of the softmax statistics that a kernel has written into the buffer [statistics, tokens]."""
    names = {"student_max", "student_sum_exp"}
    if chunk.tokens.ce_weight is not None:
        names |= {"label_logit"} | ({"ce_sum_exp"} if context.temperature != 1.0 else set())
    if chunk.teacher is not None:
        names |= {"teacher_max", "teacher_sum_exp"} | ({"log_ratio"} if log_ratio_under(context) != "none" else set())
    return {name: values for name, values in zip(SOFTMAX_STATS, stats, strict=False) if name in names}


def _constants(chunk: Chunk, context: KernelContext) -> LossConstants:
    student, teacher = context.maps
    return LossConstants(
        has_ce=chunk.tokens.ce_weight is not None,
        has_kd=chunk.teacher is not None,
        tempered=context.temperature != 1.0,
        divergence=context.spec.divergence,
        log_ratio_under=log_ratio_under(context),
        student_scale=float(student.scale),
        student_softcap=float(student.softcap or 0.0),
        teacher_scale=float(teacher.scale),
        teacher_softcap=float(teacher.softcap or 0.0),
    )


def log_ratio_under(context: KernelContext) -> str:
    """Model whose probabilities weight the log ratio in the softmax pass: teacher, student or none."""
    shortcut = DIVERGENCES[context.spec.divergence].single_pass if context.with_kd else None
    return "none" if shortcut is None else shortcut.under


def divergence_share(spec: LossSpec) -> float:
    """beta of the JSD, skew of the skew KLs."""
    return spec.beta if spec.divergence == "jsd" else spec.skew


def _block(largest: int, columns: int) -> int:
    return min(largest, triton.next_power_of_2(max(columns, 16)))
