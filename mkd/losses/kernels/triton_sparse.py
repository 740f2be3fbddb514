"""The passes over a loss chunk beside a sparse teacher in Triton, where one rank holds the whole vocabulary.

Five kernels instead of a hundred small operations on [tokens, K], whose launches would take longer than the loss: the
top columns are taken out of the products, the tail's statistics and gradient are those of `triton_launchers`, and
between and after them one kernel each computes the coefficients of a token and writes the gradient of its top columns.
Formulas are those of `mkd.losses.sparse.statistics`, in log2 as in `triton_kernels`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mkd.losses.divergences import DIVERGENCES
from mkd.losses.inputs import KernelContext, TokenWeights
from mkd.losses.kernels.interface import Chunk, TailCoeffs
from mkd.losses.kernels.sparse import SparseKernels
from mkd.losses.kernels.triton_launchers import divergence_share, log_ratio_under
from mkd.losses.kernels.triton_math import (
    LEAST,
    LN_2,
    LOG2_E,
    LossConstants,
    compute_logits,
    dlogq_term,
    pointwise_term,
    weighted,
)
from mkd.losses.sparse.teacher import SparseTarget
from mkd.losses.statistics import Statistics

TOP_STATISTICS = (
    "topk_max",
    "topk_sum_exp",
    "topk_ce_sum_exp",
    "label_logit",
    "log_ratio",
    "topk_prob",
    "used",
)
"""Order of the statistics of top columns in the kernels' buffer [statistics, tokens]; "used" is 1 or 0."""
COEFFICIENTS = ("used", "ce", "ce_log_norm", "kd", "kd_log_norm", "label", "ce_sum_exp", "pointwise", "dlogq")
"""Order of the output of `top_gradient_kernel` [coefficients, tokens]: fields of `TailCoeffs`, and statistics."""
TOPK_MAX = tl.constexpr(TOP_STATISTICS.index("topk_max"))
TOPK_SUM_EXP = tl.constexpr(TOP_STATISTICS.index("topk_sum_exp"))
TOPK_CE_SUM_EXP = tl.constexpr(TOP_STATISTICS.index("topk_ce_sum_exp"))
LABEL_LOGIT = tl.constexpr(TOP_STATISTICS.index("label_logit"))
LOG_RATIO = tl.constexpr(TOP_STATISTICS.index("log_ratio"))
TOPK_PROB = tl.constexpr(TOP_STATISTICS.index("topk_prob"))
STAT_USED = tl.constexpr(TOP_STATISTICS.index("used"))
USED = tl.constexpr(COEFFICIENTS.index("used"))
CE = tl.constexpr(COEFFICIENTS.index("ce"))
CE_LOG_NORM = tl.constexpr(COEFFICIENTS.index("ce_log_norm"))
KD = tl.constexpr(COEFFICIENTS.index("kd"))
KD_LOG_NORM = tl.constexpr(COEFFICIENTS.index("kd_log_norm"))
LABEL = tl.constexpr(COEFFICIENTS.index("label"))
CE_SUM_EXP = tl.constexpr(COEFFICIENTS.index("ce_sum_exp"))
POINTWISE = tl.constexpr(COEFFICIENTS.index("pointwise"))
DLOGQ = tl.constexpr(COEFFICIENTS.index("dlogq"))


@dataclass(frozen=True)
class TritonSparseKernels(SparseKernels):
    """`SparseKernels` over Triton's kernels for the tail."""

    def all_passes(
        self, chunk: Chunk, context: KernelContext, weighted: TokenWeights, out: Tensor
    ) -> tuple[Statistics, Statistics | None]:
        """See `eager.all_passes`."""
        products, target, tokens = chunk
        if not products.numel():
            return super().all_passes(chunk, context, weighted, out)
        top = _TopColumns.take_from(products, target, tokens, context)
        used = TokenWeights(tokens.labels, top.stats["used"], None)
        tail = self.base.softmax_stats(Chunk(products, None, used), context)
        coeffs, gradient = _write_coefficients(top, tail, target, weighted, context)
        # The statistic is that of the tail's columns, so its maximum is what they are relative to.
        tail_coeffs = {name: coeffs[name] for name in ("used", "ce", "ce_log_norm", "kd", "kd_log_norm", "label")}
        tail_coeffs |= {"top": tail["student_max"], "label_column": top.label_column}
        self.base.write_tail_gradient(products, TailCoeffs(**tail_coeffs), context, out)
        put_top_columns_kernel[(len(out),)](
            out, gradient, target.ids, out.stride(0), target.ids.shape[1], out.shape[1], **_block(target)
        )
        stats = {name: tail[name] for name in ("student_max", "student_sum_exp")}
        stats |= {name: top.stats[name] for name in ("topk_max", "topk_sum_exp")}
        if tokens.ce_weight is not None:
            stats["label_logit"] = top.stats["label_logit"]
            if context.temperature != 1.0:
                stats["ce_sum_exp"] = coeffs["ce_sum_exp"]
        shortcut = DIVERGENCES[context.spec.divergence].single_pass
        if shortcut is None:
            return stats, {name: coeffs[name] for name in ("pointwise", "dlogq")}
        stats["log_ratio"] = top.stats["log_ratio"]
        if shortcut.under == "teacher":
            stats["topk_prob"] = top.stats["topk_prob"]
        return stats, None


@dataclass(frozen=True)
class _TopColumns:
    """The top columns of a loss chunk, which then hold -inf in the products."""

    logits: Tensor
    """[N, K] fp32, the student's; -inf in an empty slot."""
    stats: Statistics
    """name -> [N] of `TOP_STATISTICS`."""
    label_column: Tensor
    """[N] int64; -1 where the label is a top column or no column."""

    @classmethod
    def take_from(
        cls, products: Tensor, target: SparseTarget, tokens: TokenWeights, context: KernelContext
    ) -> "_TopColumns":
        count, width = target.ids.shape
        logits = products.new_empty((count, width), dtype=torch.float32)
        stats = products.new_empty((len(TOP_STATISTICS), count), dtype=torch.float32)
        label_column = torch.empty_like(tokens.labels)
        take_top_columns_kernel[(count,)](
            products,
            target.ids,
            target.log_p,
            target.log_value,
            tokens.labels,
            tokens.ce_weight,
            tokens.kd_weight,
            logits,
            stats,
            label_column,
            products.stride(0),
            count,
            width,
            products.shape[1],
            1.0 / context.temperature,
            LOSS=_constants(tokens, context),
            **_block(target),
        )
        return cls(logits, dict(zip(TOP_STATISTICS, stats, strict=True)), label_column)


def _write_coefficients(
    top: _TopColumns, tail: Statistics, target: SparseTarget, weights: TokenWeights, context: KernelContext
) -> tuple[Statistics, Tensor]:
    """(name -> [N] of `COEFFICIENTS`, [N, K] gradient by the products of the top columns)"""
    count, width = target.ids.shape
    coeffs = top.logits.new_empty((len(COEFFICIENTS), count))
    spec, gradient = context.spec, torch.empty_like(top.logits)
    top_gradient_kernel[(count,)](
        top.logits,
        target.ids,
        target.log_p,
        target.log_tail,
        weights.labels,
        weights.ce_weight,
        weights.kd_weight,
        tail["student_max"],
        tail["student_sum_exp"],
        tail.get("ce_sum_exp"),
        top.stats["topk_max"],  # the first of the statistics' buffer
        coeffs,
        gradient,
        count,
        width,
        1.0 / context.temperature,
        spec.temperature_factor / spec.temperature,
        float(spec.z_loss),
        divergence_share(spec),
        LOSS=_constants(weights, context),
        **_block(target),
    )
    return dict(zip(COEFFICIENTS, coeffs, strict=True)), gradient


def _constants(tokens: TokenWeights, context: KernelContext) -> LossConstants:
    student = context.maps.student
    return LossConstants(
        has_ce=tokens.ce_weight is not None,
        has_kd=True,
        tempered=context.temperature != 1.0,
        divergence=context.spec.divergence,
        log_ratio_under=log_ratio_under(context),
        student_scale=float(student.scale),
        student_softcap=float(student.softcap or 0.0),
        teacher_scale=1.0,
        teacher_softcap=0.0,
    )


def _block(target: SparseTarget) -> dict[str, int]:
    block = triton.next_power_of_2(max(target.ids.shape[1], 16))
    return {"BLOCK": block, "num_warps": min(max(block // 256, 1), 8)}


class TopAndTail(NamedTuple):
    """The student's softmax of one token over its top columns and over its tail; all fp32."""

    topk_max: tl.tensor
    """Maximum of the logits of the top columns."""
    topk_sum_exp: tl.tensor
    """Sum of their e^((z - topk_max) / T)."""
    tail_max: tl.tensor
    tail_sum_exp: tl.tensor
    highest: tl.tensor
    """The larger maximum."""
    topk_shift: tl.tensor
    """(topk_max - highest) * to_log2: log2 of the factor from `topk_max` to `highest`."""
    tail_shift: tl.tensor
    log2_sum_exp: tl.tensor
    """log2 of the sum of e^((z - highest) / T) over all columns."""


@triton.jit
def take_top_columns_kernel(
    products_ptr,  # [tokens, columns] LM-head products of the student, any float dtype; top columns become -inf
    ids_ptr,  # [tokens, slots] int64 top columns, -1 for none
    log_p_ptr,  # [tokens, slots] fp32; this and the next as in `SparseTarget`
    log_value_ptr,  # [tokens, slots] fp32
    labels_ptr,  # [tokens] int64
    ce_weight_ptr,  # [tokens] fp32; None without cross-entropy
    kd_weight_ptr,  # [tokens] fp32
    logits_ptr,  # [tokens, slots] fp32, output
    stats_ptr,  # [TOP_STATISTICS, tokens] fp32, output
    label_column_ptr,  # [tokens] int64, output
    products_stride,  # elements between tokens
    tokens,
    slots,
    columns,
    inverse_temperature,  # 1 / T
    LOSS: tl.constexpr,  # LossConstants
    BLOCK: tl.constexpr,  # slots, rounded up
):
    """Take the top columns out of the products of one token. Grid: [tokens]."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, BLOCK)
    at = token * slots + slot
    ids = tl.load(ids_ptr + at, slot < slots, other=-1)
    owned = (ids >= 0) & (ids < columns)
    products_ptr += token * products_stride
    z = tl.load(products_ptr + ids, owned, other=float("-inf"))
    z = compute_logits(z, LOSS.student_scale, LOSS.student_softcap)
    used = tl.load(kd_weight_ptr + token) != 0
    label_logit = 0.0 * inverse_temperature
    if LOSS.has_ce:
        label = tl.load(labels_ptr + token)
        supervised = tl.load(ce_weight_ptr + token) != 0
        used = used | supervised
        is_column = supervised & (label >= 0) & (label < columns)
        label_logit = tl.load(products_ptr + label, is_column, other=0.0)
        label_logit = compute_logits(label_logit, LOSS.student_scale, LOSS.student_softcap)
        is_top = tl.max(((ids == label) & owned).to(tl.int32), 0) > 0
        tl.store(label_column_ptr + token, tl.where(is_column & (is_top == 0), label, -1))
        # Other threads read the label's product: it must not be replaced before.
        tl.debug_barrier()
    impossible = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    tl.store(products_ptr + ids, impossible.to(products_ptr.dtype.element_ty), owned)
    top = tl.maximum(tl.max(z, 0), LEAST)
    s = (z - top) * (inverse_temperature * LOG2_E)
    q = tl.exp2(s)
    tl.store(logits_ptr + at, z, slot < slots)
    stats_ptr += token
    tl.store(stats_ptr + TOPK_MAX * tokens, top)
    tl.store(stats_ptr + TOPK_SUM_EXP * tokens, tl.sum(q, 0))
    tl.store(stats_ptr + STAT_USED * tokens, used.to(tl.float32))
    if LOSS.has_ce:
        tl.store(stats_ptr + LABEL_LOGIT * tokens, label_logit)
        if LOSS.tempered:
            tl.store(stats_ptr + TOPK_CE_SUM_EXP * tokens, tl.sum(tl.exp2((z - top) * LOG2_E), 0))
    if LOSS.log_ratio_under == "teacher":
        p = tl.exp2(tl.load(log_p_ptr + at, owned, other=float("-inf")) * LOG2_E)
        log_value = tl.load(log_value_ptr + at, owned, other=float("-inf"))
        tl.store(stats_ptr + LOG_RATIO * tokens, tl.sum(weighted(p, log_value - s * LN_2), 0))
        tl.store(stats_ptr + TOPK_PROB * tokens, tl.sum(p, 0))
    if LOSS.log_ratio_under == "student":
        log_p = tl.load(log_p_ptr + at, owned, other=float("-inf"))
        tl.store(stats_ptr + LOG_RATIO * tokens, tl.sum(weighted(q, s * LN_2 - log_p), 0))


@triton.jit
def top_gradient_kernel(
    logits_ptr,  # [tokens, slots] fp32 of the student, -inf in an empty slot
    ids_ptr,  # [tokens, slots] int64
    log_p_ptr,  # [tokens, slots] fp32
    log_tail_ptr,  # [tokens] fp32; None: the tail is not a category
    labels_ptr,  # [tokens] int64
    ce_gradient_ptr,  # [tokens] fp32 weights of cross-entropy times the upstream gradient; None without it
    kd_gradient_ptr,  # [tokens] fp32 weights of the divergence times the upstream gradient
    tail_max_ptr,  # [tokens] fp32 statistics of the tail, as the two that follow
    tail_sum_exp_ptr,  # [tokens] fp32
    tail_ce_sum_exp_ptr,  # [tokens] fp32 at T = 1; None if T is 1 or without cross-entropy
    stats_ptr,  # [TOP_STATISTICS, tokens] fp32
    coeffs_ptr,  # [COEFFICIENTS, tokens] fp32, output
    out_ptr,  # [tokens, slots] fp32, output: gradient by the products of the top columns
    tokens,
    slots,
    inverse_temperature,  # 1 / T
    temperature_scale,  # T^2 if the divergence is multiplied by it, else 1, over T
    z_loss,  # factor of z-loss
    share,  # beta of the JSD, skew of the skew KLs
    LOSS: tl.constexpr,  # LossConstants
    BLOCK: tl.constexpr,  # slots, rounded up
):
    """Coefficients of one token and the gradient of its top columns. Grid: [tokens]."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, BLOCK)
    at = token * slots + slot
    to_log2 = inverse_temperature * LOG2_E
    stats_ptr += token
    coeffs_ptr += token
    z = tl.load(logits_ptr + at, slot < slots, other=float("-inf"))
    ids = tl.load(ids_ptr + at, slot < slots, other=-1)
    owned = ids >= 0
    sums = merge_top_and_tail(stats_ptr, tail_max_ptr, tail_sum_exp_ptr, token, tokens, to_log2)
    gradient, used, kd = divergence_gradient(
        z,
        sums,
        owned,
        log_p_ptr,
        log_tail_ptr,
        stats_ptr,
        coeffs_ptr,
        kd_gradient_ptr,
        token,
        tokens,
        slot,
        slots,
        to_log2,
        temperature_scale,
        share,
        LOSS,
    )
    ce = 0.0 * kd
    label = ce
    ce_log_norm = ce
    if LOSS.has_ce:
        label = tl.load(ce_gradient_ptr + token)
        used = used | (label != 0)
        log2_sum_exp = sums.log2_sum_exp
        if LOSS.tempered:
            log2_sum_exp = store_ce_sum(sums, stats_ptr, tail_ce_sum_exp_ptr, coeffs_ptr, token, tokens)
        ce = tl.where(label != 0, label * (1.0 + 2.0 * z_loss * (log2_sum_exp * LN_2 + sums.highest)), 0.0)
        ce_log_norm = log2_sum_exp * LN_2 + (sums.highest - sums.tail_max)
        q1 = tl.exp2((z - sums.highest) * LOG2_E - log2_sum_exp)
        is_label = ids == tl.load(labels_ptr + token)
        gradient += tl.where(label != 0, ce * q1 - tl.where(is_label, label, 0.0), 0.0)
    tl.store(coeffs_ptr + USED * tokens, used.to(tl.float32))
    tl.store(coeffs_ptr + CE * tokens, ce)
    tl.store(coeffs_ptr + CE_LOG_NORM * tokens, ce_log_norm)
    tl.store(coeffs_ptr + LABEL * tokens, label)
    if LOSS.student_softcap > 0:
        gradient *= 1.0 - (z / LOSS.student_softcap) * (z / LOSS.student_softcap)
    if LOSS.student_scale != 1.0:
        gradient *= LOSS.student_scale
    tl.store(out_ptr + at, tl.where(owned, gradient, 0.0), slot < slots)


@triton.jit
def merge_top_and_tail(
    stats_ptr,  # [TOP_STATISTICS] at a stride of `tokens`, fp32
    tail_max_ptr,  # [tokens] fp32
    tail_sum_exp_ptr,  # [tokens] fp32
    token,
    tokens,
    to_log2,
):
    """The student's softmax of one token -> TopAndTail."""
    topk_max = tl.load(stats_ptr + TOPK_MAX * tokens)
    topk_sum_exp = tl.load(stats_ptr + TOPK_SUM_EXP * tokens)
    tail_max = tl.load(tail_max_ptr + token)
    tail_sum_exp = tl.load(tail_sum_exp_ptr + token)
    highest = tl.maximum(topk_max, tail_max)
    topk_shift = (topk_max - highest) * to_log2
    tail_shift = (tail_max - highest) * to_log2
    log2_sum_exp = tl.log2(topk_sum_exp * tl.exp2(topk_shift) + tail_sum_exp * tl.exp2(tail_shift))
    return TopAndTail(topk_max, topk_sum_exp, tail_max, tail_sum_exp, highest, topk_shift, tail_shift, log2_sum_exp)


@triton.jit
def divergence_gradient(
    z,  # [slots] logits of the top columns
    sums,  # TopAndTail
    owned,  # [slots]: the slot has a column
    log_p_ptr,  # [tokens, slots] fp32
    log_tail_ptr,  # [tokens] fp32; None: the tail is not a category
    stats_ptr,  # [TOP_STATISTICS] at a stride of `tokens`, fp32
    coeffs_ptr,  # [COEFFICIENTS] at a stride of `tokens`, fp32, output: those of the divergence
    kd_gradient_ptr,  # [tokens] fp32
    token,
    tokens,
    slot,
    slots,
    to_log2,
    temperature_scale,
    share,
    LOSS: tl.constexpr,
):
    """The divergence of one token -> ([slots] gradient by the logits, whether it has a weight, its weight c / T)."""
    # log2 q of a top column is (z - topk_max) * to_log2 - norm.
    norm = tl.log2(sums.topk_sum_exp)
    if log_tail_ptr is not None:
        norm = sums.log2_sum_exp - sums.topk_shift
    s = tl.where(owned, (z - sums.topk_max) * to_log2 - norm, float("-inf"))
    t = tl.load(log_p_ptr + (token * slots + slot), owned & (slot < slots), other=float("-inf")) * LOG2_E
    q = tl.exp2(s)
    p = tl.exp2(t)
    s_tail = tl.zeros([1], dtype=tl.float32) + float("-inf")
    t_tail = s_tail
    if log_tail_ptr is not None:
        s_tail = tl.zeros([1], dtype=tl.float32) + (tl.log2(sums.tail_sum_exp) + sums.tail_shift - sums.log2_sum_exp)
        t_tail = tl.zeros([1], dtype=tl.float32) + tl.load(log_tail_ptr + token) * LOG2_E
    q_tail = tl.exp2(s_tail)
    p_tail = tl.exp2(t_tail)
    dlogq = dlogq_term(s, t, q, p, share, LOSS)
    dlogq_tail = dlogq_term(s_tail, t_tail, q_tail, p_tail, share, LOSS)
    dlogq_sum = 0.0 * to_log2 - 1.0
    if LOSS.log_ratio_under == "none":
        pointwise = tl.sum(pointwise_term(s, t, q, p, share, LOSS), 0)
        of_top = tl.sum(dlogq, 0)
        dlogq_sum = of_top + tl.sum(dlogq_tail, 0)
        tl.store(coeffs_ptr + POINTWISE * tokens, pointwise)
        tl.store(coeffs_ptr + DLOGQ * tokens, of_top)
    if LOSS.log_ratio_under == "student":
        relative = tl.load(stats_ptr + LOG_RATIO * tokens) + weighted(sums.topk_sum_exp, -norm * LN_2)
        # Without a top column the normalizer is infinite.
        value = tl.where(tl.exp2(-norm) > 0, tl.exp2(-norm) * relative, 0.0)
        dlogq_sum = value + tl.sum(weighted(q_tail, (s_tail - t_tail) * LN_2), 0)
    kd_weight = tl.load(kd_gradient_ptr + token)
    kd = kd_weight * temperature_scale
    used = kd_weight != 0
    dlogq_sum = tl.where(used, dlogq_sum, 0.0)
    gradient = kd * (dlogq - q * dlogq_sum)
    tail = tl.sum(tl.where(used, kd * (dlogq_tail - q_tail * dlogq_sum), 0.0), 0)
    if log_tail_ptr is None:
        tail = 0.0 * kd
    tl.store(coeffs_ptr + KD * tokens, tail)
    tl.store(coeffs_ptr + KD_LOG_NORM * tokens, tl.log2(sums.tail_sum_exp) * LN_2)
    return gradient, used, kd


@triton.jit
def store_ce_sum(
    sums,  # TopAndTail
    stats_ptr,  # [TOP_STATISTICS] at a stride of `tokens`, fp32
    tail_ce_sum_exp_ptr,  # [tokens] fp32
    coeffs_ptr,  # [COEFFICIENTS] at a stride of `tokens`, fp32, output: CE_SUM_EXP
    token,
    tokens,
):
    """Store the sum of exponentials of all columns at T = 1, relative to `sums.highest`, and return its log2."""
    of_top = tl.load(stats_ptr + TOPK_CE_SUM_EXP * tokens) * tl.exp2((sums.topk_max - sums.highest) * LOG2_E)
    of_tail = tl.load(tail_ce_sum_exp_ptr + token) * tl.exp2((sums.tail_max - sums.highest) * LOG2_E)
    tl.store(coeffs_ptr + CE_SUM_EXP * tokens, of_top + of_tail)
    return tl.log2(of_top + of_tail)


@triton.jit
def put_top_columns_kernel(
    out_ptr,  # [tokens, columns] any float dtype; the top columns are overwritten
    gradient_ptr,  # [tokens, slots] fp32
    ids_ptr,  # [tokens, slots] int64
    out_stride,  # elements between tokens
    slots,
    columns,
    BLOCK: tl.constexpr,  # slots, rounded up
):
    """Write the gradient of one token's top columns. Grid: [tokens]."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + token * slots + slot, slot < slots, other=-1)
    gradient = tl.load(gradient_ptr + token * slots + slot, slot < slots, other=0.0)
    owned = (ids >= 0) & (ids < columns)
    tl.store(out_ptr + token * out_stride + ids, gradient.to(out_ptr.dtype.element_ty), owned)
