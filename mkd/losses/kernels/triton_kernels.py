"""The Triton kernels of the loss: softmax statistics, divergence statistics and gradient of every token.

# Passes

A *pass* reads the logits of a token once, column by column in blocks of BLOCK. With z and u the logits of student and
teacher, q and p their probabilities at temperature T, and q1 the student's at T = 1, a loss has up to three passes:

1. The softmax pass computes each model's maximum and sum of exponentials (the student's also at T = 1 for
   cross-entropy), the label's logit, and for the KLs the sum of the log ratio: `SOFTMAX_STATS`.
2. The divergence pass sums the pointwise terms d(ln q_j, ln p_j) and their derivatives by ln q_j, dlogq_j:
   `DIVERGENCE_STATS`.
3. The gradient pass writes d loss / d z_j, with ln Z = ln sum_k exp(z_k) and c = T^2 or 1:

       ce_weight * ((1 + 2 z_loss ln Z) q1_j - [j is the label]) + kd_weight * c / T * (dlogq_j - q_j sum_k dlogq_k)

JSD, skew KLs and TVD need the divergence pass: their terms are not linear in ln q and ln p (a mixture, an absolute
value), so nothing can be summed before both normalizers are known. KLs are linear. With s = z / T and t = u / T,

    KL(p || q) = E_p[ln p - ln q] = E_p[t - s] - (ln sum_k exp(t_k) - ln sum_k exp(s_k))

The expectation is summed in the softmax pass with weights exp(t_j), which are normalized at the end. The sum of dlogq
follows from the value: it is -1 for the forward KL and the value itself for the reverse KL (see `divergences.py`).

# Kernels

If the vocabulary has several shards, each pass is a kernel, and the ranks exchange statistics between the kernels. If
one rank holds the whole vocabulary, `all_passes_kernel` runs all passes over a token in one program. Each of its passes
goes in the opposite direction of the one before and so begins with the logits that the caches still hold. Without
gradients (evaluation) the first two kernels run alone. `tail_gradient_kernel` is the gradient pass of sparse teachers.

HBM traffic for 2-byte logits, in bytes per token and column. Everything else is a few numbers per token.

    kernel                     cross-entropy alone     with a teacher
    softmax_stats_kernel       2 read                  4 read
    divergence_stats_kernel    -                       4 read
    gradient_kernel            2 read, 2 written       4 read, 2 written
    these kernels together     6                       10 for the KLs, 14 for the others
    all_passes_kernel          4 to 6                  6 to 10 for the KLs, 6 to 14 for the others

`all_passes_kernel` would reach the lower numbers if the caches held all logits of the tokens in flight. They hold a
part: 128k columns of two models are 0.5 MB per token, 132 multiprocessors with two or three tokens each have 130 to
200 MB in flight, and the L2 cache of an H100 or H200 is 50 MB. Logits are never copied or converted in memory, and the
gradient may be written over the student's logits.

A program of a kernel with statistics processes one token, in a loop over its columns: the order of every sum is fixed,
without atomics, and results are bit-equal from run to run. Only gradient kernels have a program per token and block,
because there columns are independent.

# Merging

A sum over some of a token's columns is kept relative to the maximum m_i of those columns: S_i = sum exp((z - m_i) / T).
The sums of several parts of a token are merged by

    m = max_i m_i,    S = sum_i exp((m_i - m) / T) S_i

The log ratio of model a to model b is kept as R_i = sum exp(a) (a - b), with a and b relative to their own maxima in
part i. With x_i and y_i the parts' maxima of a and b minus those of the whole, divided by T,

    R = sum_i exp(x_i) (R_i + S_i (x_i - y_i))

No difference of large numbers is taken, so that large logits cost no precision. The same formulas merge the blocks of a
pass, the lanes of a program (below), and the vocabulary shards of the ranks. Every rank merges the shards in rank order
and inside the kernel that needs them: no small kernel runs between the passes, and all ranks hold the same bits.

# Lanes, blocks and warps

A block is [BLOCK / RUN, RUN] columns. The RUN = 8 columns are what one thread loads at once: 16 bytes of 2-byte logits,
the widest load there is. Each run is a *lane* with a maximum and sums of its own until the end of the pass. The loop
therefore has no reduction across threads and no barrier, and a new maximum costs one power of two per lane.

Kernels with statistics use blocks of 4096 columns and 16 warps: one lane per thread, so that a pass keeps only some
registers of state and two or three programs of 512 threads share a multiprocessor. The gradient kernel keeps no state;
with 8 warps it has 16 columns per thread, two loads per model in flight, and merges the shards' statistics, which every
thread repeats, half as often. Vocabularies below 4096 columns use the next power of two. The numbers are in
`triton_launchers.py`; `benchmarks/bench_loss.py` measures a change of them.

Scalars that start as `0.0 * x` are zeros of the type of x. Literal zeros compile to other register counts: for the JSD
in `all_passes_kernel` 48 instead of 40 per thread, two programs per multiprocessor instead of three. Measure first.

# Numerical traps

- Columns past the end are loaded as -inf and have probability 0, as have columns whose logits are -inf. Their log
  ratios are infinite or NaN, so every product of a probability and a logarithm goes through `weighted`.
- Maxima start at LEAST, which is finite: with -inf the first shift would be -inf - -inf, which is NaN.
- Tokens without weight are not read: whatever they hold, NaN included, has no effect, and their gradient is 0.
- NaN in a token with weight reaches its loss and gradient: `weighted` replaces only products whose weight equals 0.
- Equal logits of both models give a divergence of exactly 0: both models' statistics come from the same operations,
  ratios to a mixture are relative to the larger probability, and `fast_log2(1)` is 0. The gradient is 0 too, for the
  skew KLs up to the rounding of sum_k q_k.
- Cross-entropy is at T = 1. If T is 1 it shares the divergence's sum of exponentials, else it has its own.
- Offsets into logits are 64-bit: a chunk may have more than 2^31 logits.
- The label's logit is loaded before the softmax pass. `all_passes_kernel` overwrites the logits later, and the
  reductions at the end of the pass are the barrier between the two.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from mkd.losses.kernels.triton_math import (
    LEAST,
    LN_2,
    LOG2_E,
    TokenSoftmax,
    compute_logits,
    dlogq_term,
    merge_kl,
    merge_softmax,
    pointwise_term,
    weighted,
)

SOFTMAX_STATS = (
    "student_max",
    "student_sum_exp",
    "ce_sum_exp",
    "label_logit",
    "teacher_max",
    "teacher_sum_exp",
    "log_ratio",
)
"""Order of the softmax statistics in the kernels' buffers [statistics, tokens]."""
DIVERGENCE_STATS = ("pointwise", "dlogq")
"""Order of the divergence statistics, which follow the softmax statistics where one kernel writes both."""
STUDENT_MAX = tl.constexpr(SOFTMAX_STATS.index("student_max"))
STUDENT_SUM_EXP = tl.constexpr(SOFTMAX_STATS.index("student_sum_exp"))
CE_SUM_EXP = tl.constexpr(SOFTMAX_STATS.index("ce_sum_exp"))
LABEL_LOGIT = tl.constexpr(SOFTMAX_STATS.index("label_logit"))
TEACHER_MAX = tl.constexpr(SOFTMAX_STATS.index("teacher_max"))
TEACHER_SUM_EXP = tl.constexpr(SOFTMAX_STATS.index("teacher_sum_exp"))
LOG_RATIO = tl.constexpr(SOFTMAX_STATS.index("log_ratio"))
SOFTMAX_STATS_COUNT = tl.constexpr(len(SOFTMAX_STATS))
POINTWISE = tl.constexpr(DIVERGENCE_STATS.index("pointwise"))
DLOGQ = tl.constexpr(DIVERGENCE_STATS.index("dlogq"))

RUN = tl.constexpr(8)
"""Neighboring columns of one lane."""


class TokenInputs(NamedTuple):
    """Pointers to the inputs of a token."""

    student: tl.tensor
    """[columns] LM-head products of the student at this token."""
    teacher: tl.tensor
    """[columns] likewise of the teacher; not read without a divergence."""
    labels: tl.tensor
    """[tokens] int64."""
    ce_weight: tl.tensor | None
    """[tokens] fp32; None without cross-entropy."""
    kd_weight: tl.tensor | None
    """[tokens] fp32; None without a divergence."""


class SoftmaxSums(NamedTuple):
    """Softmax statistics of a token over the shard, fp32 scalars; the log ratio is in log2."""

    student_max: tl.tensor
    teacher_max: tl.tensor
    student_sum_exp: tl.tensor
    ce_sum_exp: tl.tensor
    teacher_sum_exp: tl.tensor
    log_ratio: tl.tensor


class TokenSoftmaxes(NamedTuple):
    """The softmaxes of a token."""

    student: TokenSoftmax
    ce: TokenSoftmax
    """The student's at T = 1."""
    teacher: TokenSoftmax


class GradientScalars(NamedTuple):
    """Numbers that the gradients of all tokens share, fp32 scalars."""

    to_log2: tl.tensor
    """log2(e) / T."""
    temperature_scale: tl.tensor
    """T^2 if the divergence is multiplied by it, else 1, over T."""
    z_loss: tl.tensor
    share: tl.tensor
    """beta of the JSD, skew of the skew KLs."""


class TokenCoeffs(NamedTuple):
    """Factors in a token's gradient, fp32 scalars; see `statistics.GradCoeffs`."""

    ce: tl.tensor
    label: tl.tensor
    kd: tl.tensor
    dlogq_sum: tl.tensor


# The kernels.


@triton.jit
def softmax_stats_kernel(
    student_ptr,  # [tokens, columns] LM-head products of the student, any float dtype
    teacher_ptr,  # [tokens, columns] LM-head products of the teacher, any float dtype; not read without a divergence
    labels_ptr,  # [tokens] int64 global ids of the labels; not read without cross-entropy
    ce_weight_ptr,  # [tokens] fp32 weights of cross-entropy; None without it
    kd_weight_ptr,  # [tokens] fp32 weights of the divergence; None without one
    stats_ptr,  # [SOFTMAX_STATS, tokens] fp32, output: statistics of this shard
    student_stride,  # elements between the student's tokens
    teacher_stride,  # elements between the teacher's tokens
    tokens,  # number of tokens
    first_column,  # global id of the shard's first column
    inverse_temperature,  # 1 / T
    LOSS: tl.constexpr,  # LossConstants
    COLUMNS: tl.constexpr,  # real columns of the shard
    BLOCK: tl.constexpr,  # columns per block, a power of two from 2 * RUN up
):
    """Softmax statistics of one token over this shard. Grid: [tokens]."""
    token = tl.program_id(0).to(tl.int64)
    inputs = TokenInputs(
        student_ptr + token * student_stride,
        teacher_ptr + token * teacher_stride,
        labels_ptr,
        ce_weight_ptr,
        kd_weight_ptr,
    )
    to_log2 = inverse_temperature * LOG2_E
    store_softmax_stats(inputs, stats_ptr, token, tokens, first_column, to_log2, LOSS, COLUMNS, BLOCK)


@triton.jit
def divergence_stats_kernel(
    student_ptr,  # [tokens, columns] LM-head products of the student, any float dtype
    teacher_ptr,  # [tokens, columns] LM-head products of the teacher, any float dtype
    kd_weight_ptr,  # [tokens] fp32 weights of the divergence
    student_max_ptr,  # [shards, tokens] fp32 softmax statistics of all shards, as the three that follow
    student_sum_exp_ptr,  # [shards, tokens] fp32
    teacher_max_ptr,  # [shards, tokens] fp32
    teacher_sum_exp_ptr,  # [shards, tokens] fp32
    sums_ptr,  # [DIVERGENCE_STATS, tokens] fp32, output: statistics of this shard
    student_stride,  # elements between the student's tokens
    teacher_stride,  # elements between the teacher's tokens
    tokens,  # number of tokens
    shard,  # index of this rank's shard
    shard_stride,  # elements between the shards of a softmax statistic
    inverse_temperature,  # 1 / T
    share,  # beta of the JSD, skew of the skew KLs
    SHARDS: tl.constexpr,  # number of vocabulary shards
    LOSS: tl.constexpr,  # LossConstants
    COLUMNS: tl.constexpr,  # real columns of the shard
    BLOCK: tl.constexpr,  # columns per block, a power of two from 2 * RUN up
):
    """Divergence statistics of one token over this shard. Grid: [tokens]."""
    token = tl.program_id(0).to(tl.int64)
    to_log2 = inverse_temperature * LOG2_E
    student, _ = merge_softmax(
        student_max_ptr + token, student_sum_exp_ptr + token, shard, shard_stride, to_log2, SHARDS
    )
    teacher, _ = merge_softmax(
        teacher_max_ptr + token, teacher_sum_exp_ptr + token, shard, shard_stride, to_log2, SHARDS
    )
    inputs = TokenInputs(
        student_ptr + token * student_stride,
        teacher_ptr + token * teacher_stride,
        None,
        None,
        kd_weight_ptr,
    )
    store_divergence_stats(
        inputs, sums_ptr, token, tokens, student, teacher, to_log2, share, False, LOSS, COLUMNS, BLOCK
    )


@triton.jit
def gradient_kernel(
    student_ptr,  # [tokens, columns] LM-head products of the student, any float dtype
    teacher_ptr,  # [tokens, columns] LM-head products of the teacher, any float dtype; not read without a divergence
    labels_ptr,  # [tokens] int64 global ids of the labels; not read without cross-entropy
    out_ptr,  # [tokens, columns] any float dtype, output: d loss / d products of the student; may be student_ptr
    ce_weight_ptr,  # [tokens] fp32 weights of cross-entropy times the upstream gradient; None without it
    kd_weight_ptr,  # [tokens] fp32 weights of the divergence times the upstream gradient; None without one
    student_max_ptr,  # [shards, tokens] fp32 softmax statistics of all shards, as the five that follow
    student_sum_exp_ptr,  # [shards, tokens] fp32
    ce_sum_exp_ptr,  # [shards, tokens] fp32; that of the student at T = 1
    teacher_max_ptr,  # [shards, tokens] fp32; None without a divergence
    teacher_sum_exp_ptr,  # [shards, tokens] fp32; None without a divergence
    log_ratio_ptr,  # [shards, tokens] fp32; None unless the divergence is a KL
    dlogq_ptr,  # [shards, tokens] fp32 divergence statistic of all shards; None without a divergence pass
    student_stride,  # elements between the student's tokens
    teacher_stride,  # elements between the teacher's tokens
    out_stride,  # elements between the gradient's tokens
    columns,  # real columns of the shard
    first_column,  # global id of the shard's first column
    shard,  # index of this rank's shard
    shard_stride,  # elements between the shards of a softmax statistic
    sums_stride,  # elements between the shards of dlogq
    inverse_temperature,  # 1 / T
    temperature_scale,  # T^2 if the divergence is multiplied by it, else 1, over T
    z_loss,  # factor of z-loss
    share,  # beta of the JSD, skew of the skew KLs
    SHARDS: tl.constexpr,  # number of vocabulary shards
    LOSS: tl.constexpr,  # LossConstants
    BLOCK: tl.constexpr,  # columns per program
):
    """Gradient of one token in one block of columns. Grid: [tokens, blocks]."""
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    to_log2 = inverse_temperature * LOG2_E
    # Tokens without weight are not read: 0 is finite, and its gradient is multiplied away.
    student_columns = 0
    at_label = offsets < 0
    student, _ = merge_softmax(
        student_max_ptr + token, student_sum_exp_ptr + token, shard, shard_stride, to_log2, SHARDS
    )
    zero = 0.0 * student.max
    label_coeff = zero
    ce_coeff = zero
    kd_coeff = zero
    dlogq_sum = zero
    ce = TokenSoftmax(student.max, zero)
    teacher = TokenSoftmax(zero, zero)
    if LOSS.has_ce:
        label_coeff = tl.load(ce_weight_ptr + token)
        student_columns = tl.where(label_coeff != 0, columns, 0)
        ce, highest = merge_softmax(
            student_max_ptr + token, ce_sum_exp_ptr + token, shard, shard_stride, LOG2_E, SHARDS
        )
        log_sum = (ce.log2_sum_exp + (student.max - highest) * LOG2_E) * LN_2 + highest
        ce_coeff = label_coeff * (1.0 + 2.0 * z_loss * log_sum)
        at_label = offsets == tl.load(labels_ptr + token) - first_column
    u = tl.zeros([BLOCK], dtype=tl.float32)
    if LOSS.has_kd:
        kd_coeff = tl.load(kd_weight_ptr + token) * temperature_scale
        teacher_columns = tl.where(kd_coeff != 0, columns, 0)
        student_columns = tl.maximum(student_columns, teacher_columns)
        u = tl.load(teacher_ptr + token * teacher_stride + offsets, offsets < teacher_columns, other=0.0)
        u = compute_logits(u, LOSS.teacher_scale, LOSS.teacher_softcap)
        teacher, _ = merge_softmax(
            teacher_max_ptr + token, teacher_sum_exp_ptr + token, shard, shard_stride, to_log2, SHARDS
        )
        dlogq_sum = label_coeff - label_coeff - 1.0  # -1 as a tensor, see the top of this file
        if LOSS.divergence == "reverse_kl":
            dlogq_sum = merge_kl(
                student_max_ptr + token,
                student_sum_exp_ptr + token,
                teacher_max_ptr + token,
                teacher_sum_exp_ptr + token,
                log_ratio_ptr + token,
                shard_stride,
                to_log2,
                SHARDS,
            )
        elif LOSS.divergence != "forward_kl":
            dlogq_sum = 0.0 * teacher.max
            for other in range(SHARDS):
                dlogq_sum += tl.load(dlogq_ptr + other * sums_stride + token)
    z = tl.load(student_ptr + token * student_stride + offsets, offsets < student_columns, other=0.0)
    z = compute_logits(z, LOSS.student_scale, LOSS.student_softcap)
    softmaxes = TokenSoftmaxes(student, ce, teacher)
    coeffs = TokenCoeffs(ce_coeff, label_coeff, kd_coeff, dlogq_sum)
    gradient = compute_gradient(z, u, at_label, softmaxes, coeffs, to_log2, share, LOSS)
    tl.store(out_ptr + token * out_stride + offsets, gradient.to(out_ptr.dtype.element_ty), offsets < columns)


@triton.jit
def all_passes_kernel(
    student_ptr,  # [tokens, columns] LM-head products of the student, any float dtype
    teacher_ptr,  # [tokens, columns] LM-head products of the teacher, any float dtype; not read without a divergence
    labels_ptr,  # [tokens] int64 labels; not read without cross-entropy
    out_ptr,  # [tokens, columns] any float dtype, output: d loss / d products of the student; may be student_ptr
    ce_weight_ptr,  # [tokens] fp32 weights of cross-entropy; None without it
    kd_weight_ptr,  # [tokens] fp32 weights of the divergence; None without one
    ce_gradient_ptr,  # [tokens] fp32 weights of cross-entropy times the upstream gradient; None without it
    kd_gradient_ptr,  # [tokens] fp32 weights of the divergence times the upstream gradient; None without one
    stats_ptr,  # [SOFTMAX_STATS + DIVERGENCE_STATS, tokens] fp32, output
    student_stride,  # elements between the student's tokens
    teacher_stride,  # elements between the teacher's tokens
    out_stride,  # elements between the gradient's tokens
    tokens,  # number of tokens
    inverse_temperature,  # 1 / T
    temperature_scale,  # T^2 if the divergence is multiplied by it, else 1, over T
    z_loss,  # factor of z-loss
    share,  # beta of the JSD, skew of the skew KLs
    LOSS: tl.constexpr,  # LossConstants
    COLUMNS: tl.constexpr,  # real columns of the vocabulary
    BLOCK: tl.constexpr,  # columns per block, a power of two from 2 * RUN up
):
    """Statistics and gradient of one token over the whole vocabulary. Grid: [tokens]."""
    token = tl.program_id(0).to(tl.int64)
    student_ptr += token * student_stride
    teacher_ptr += token * teacher_stride
    out_ptr += token * out_stride
    scalars = GradientScalars(inverse_temperature * LOG2_E, temperature_scale, z_loss, share)
    inputs = TokenInputs(student_ptr, teacher_ptr, labels_ptr, ce_weight_ptr, kd_weight_ptr)
    softmaxes, log_ratio = store_softmax_stats(
        inputs, stats_ptr, token, tokens, 0, scalars.to_log2, LOSS, COLUMNS, BLOCK
    )
    dlogq_sum = 0.0 * scalars.to_log2 - 1.0
    if LOSS.has_kd:
        if LOSS.divergence == "reverse_kl":
            dlogq_sum = (softmaxes.teacher.log2_sum_exp - softmaxes.student.log2_sum_exp) * LN_2 + log_ratio
        if LOSS.log_ratio_under == "none":
            dlogq_sum = store_divergence_stats(
                inputs,
                stats_ptr + SOFTMAX_STATS_COUNT * tokens,
                token,
                tokens,
                softmaxes.student,
                softmaxes.teacher,
                scalars.to_log2,
                share,
                True,
                LOSS,
                COLUMNS,
                BLOCK,
            )
    upstream = TokenInputs(student_ptr, teacher_ptr, labels_ptr, ce_gradient_ptr, kd_gradient_ptr)
    # Every pass runs in the direction opposite to the one before; a divergence pass makes the gradient pass the third.
    gradient_reversed = LOSS.log_ratio_under != "none" or not LOSS.has_kd
    store_gradient(upstream, out_ptr, token, softmaxes, dlogq_sum, scalars, gradient_reversed, LOSS, COLUMNS, BLOCK)


@triton.jit
def tail_gradient_kernel(
    products_ptr,  # [tokens, columns] LM-head products of the student, any float dtype; -inf in the teacher's columns
    out_ptr,  # [tokens, columns] any float dtype, output: gradient by the products, 0 at -inf; may be products_ptr
    used_ptr,  # [tokens] bool; this and the pointers that follow are the fields of TailCoeffs
    top_ptr,  # [tokens] fp32
    ce_ptr,  # [tokens] fp32
    ce_log_norm_ptr,  # [tokens] fp32
    kd_ptr,  # [tokens] fp32
    kd_log_norm_ptr,  # [tokens] fp32
    label_ptr,  # [tokens] fp32
    label_column_ptr,  # [tokens] int64
    products_stride,  # elements between the student's tokens
    out_stride,  # elements between the gradient's tokens
    columns,  # real columns of the shard
    inverse_temperature,  # 1 / T
    TEMPERED: tl.constexpr,  # T is not 1
    SCALE: tl.constexpr,  # LogitMap.scale of the student
    SOFTCAP: tl.constexpr,  # LogitMap.softcap of the student, 0.0 without one
    BLOCK: tl.constexpr,  # columns per program
):
    """Gradient of one token in one block of the columns that a sparse teacher does not list. Grid: [tokens, blocks]."""
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # Tokens without weight are not read.
    used_columns = tl.where(tl.load(used_ptr + token) != 0, columns, 0)
    z = tl.load(products_ptr + token * products_stride + offsets, offsets < used_columns, other=float("-inf"))
    z = compute_logits(z, SCALE, SOFTCAP)
    relative = (z - tl.load(top_ptr + token)) * LOG2_E
    norm = tl.load(kd_log_norm_ptr + token) * LOG2_E
    tail = tl.exp2(relative * inverse_temperature - norm) if TEMPERED else tl.exp2(relative - norm)
    gradient = tl.load(ce_ptr + token) * tl.exp2(relative - tl.load(ce_log_norm_ptr + token) * LOG2_E)
    gradient += tl.load(kd_ptr + token) * tail
    gradient -= tl.where(offsets == tl.load(label_column_ptr + token), tl.load(label_ptr + token), 0.0)
    if SOFTCAP > 0:
        gradient *= 1.0 - (z / SOFTCAP) * (z / SOFTCAP)
    if SCALE != 1.0:
        gradient *= SCALE
    # Columns at -inf are those that the teacher lists; arithmetic with -inf may have made them NaN.
    gradient = tl.where(z == float("-inf"), 0.0, gradient)
    tl.store(out_ptr + token * out_stride + offsets, gradient.to(out_ptr.dtype.element_ty), offsets < columns)


# Softmax pass.


@triton.jit
def store_softmax_stats(
    inputs,  # TokenInputs
    stats_ptr,  # [SOFTMAX_STATS, tokens] fp32, output
    token,
    tokens,
    first_column,
    to_log2,
    LOSS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Softmax statistics of one token over the shard; a token without weight is not read.

    Returns:
        TokenSoftmaxes of the shard, and the mean of the log ratio in nats under `LOSS.log_ratio_under`.
    """
    ce_on = False
    kd_on = False
    if LOSS.has_ce:
        ce_on = tl.load(inputs.ce_weight + token) != 0
    if LOSS.has_kd:
        kd_on = tl.load(inputs.kd_weight + token) != 0
    if LOSS.has_ce:
        # Before the pass, whose reductions are barriers: a gradient may be written over the logits after it.
        column = tl.load(inputs.labels + token) - first_column
        owned = ce_on & (column >= 0) & (column < COLUMNS)
        label = tl.load(inputs.student + column, owned, other=0.0)
        tl.store(
            stats_ptr + LABEL_LOGIT * tokens + token, compute_logits(label, LOSS.student_scale, LOSS.student_softcap)
        )
    zero = 0.0 * to_log2
    sums = SoftmaxSums(LEAST + zero, LEAST + zero, zero, zero, zero, zero)
    if ce_on | kd_on:
        teacher_columns = tl.where(kd_on, COLUMNS, 0)
        sums = sum_softmax_stats(inputs.student, inputs.teacher, teacher_columns, to_log2, LOSS, COLUMNS, BLOCK)
    log_ratio = sums.log_ratio * LN_2
    stats_ptr += token
    tl.store(stats_ptr + STUDENT_MAX * tokens, sums.student_max)
    tl.store(stats_ptr + STUDENT_SUM_EXP * tokens, sums.student_sum_exp)
    if LOSS.has_ce and LOSS.tempered:
        tl.store(stats_ptr + CE_SUM_EXP * tokens, sums.ce_sum_exp)
    if LOSS.has_kd:
        tl.store(stats_ptr + TEACHER_MAX * tokens, sums.teacher_max)
        tl.store(stats_ptr + TEACHER_SUM_EXP * tokens, sums.teacher_sum_exp)
        tl.store(stats_ptr + LOG_RATIO * tokens, log_ratio)
    student_log2 = tl.log2(sums.student_sum_exp)
    ce_log2 = tl.log2(sums.ce_sum_exp) if LOSS.tempered else student_log2
    softmaxes = TokenSoftmaxes(
        TokenSoftmax(sums.student_max, student_log2),
        TokenSoftmax(sums.student_max, ce_log2),
        TokenSoftmax(sums.teacher_max, tl.log2(sums.teacher_sum_exp)),
    )
    return softmaxes, log_ratio / sums.student_sum_exp


@triton.jit
def sum_softmax_stats(
    student_ptr,  # [columns] LM-head products of the student
    teacher_ptr,  # [columns] LM-head products of the teacher
    teacher_columns,  # COLUMNS, or 0 for a token whose KD weight is 0
    to_log2,
    LOSS: tl.constexpr,
    COLUMNS: tl.constexpr,  # Triton's interpreter cannot loop up to a number that is not a constant
    BLOCK: tl.constexpr,
):
    """The softmax pass over one token -> SoftmaxSums."""
    lanes = tl.zeros([BLOCK // RUN], dtype=tl.float32)
    z_max = lanes + LEAST
    u_max = z_max
    student_sum_exp = lanes
    ce_sum_exp = lanes
    teacher_sum_exp = lanes
    log_ratio = lanes
    for first in range(0, COLUMNS, BLOCK):
        offsets = block_columns(first, BLOCK)
        z = tl.load(student_ptr + offsets, offsets < COLUMNS, other=float("-inf"))
        if LOSS.has_kd:
            u = tl.load(teacher_ptr + offsets, offsets < teacher_columns, other=float("-inf"))
        z = compute_logits(z, LOSS.student_scale, LOSS.student_softcap)
        new_z_max = tl.maximum(z_max, tl.max(z, 1))
        s = (z - new_z_max[:, None]) * to_log2
        z_shift = (z_max - new_z_max) * to_log2
        q = tl.exp2(s)
        old_sum_exp = student_sum_exp
        student_sum_exp = student_sum_exp * tl.exp2(z_shift) + tl.sum(q, 1)
        if LOSS.has_ce and LOSS.tempered:
            ce_rescale = tl.exp2((z_max - new_z_max) * LOG2_E)
            ce_sum_exp = ce_sum_exp * ce_rescale + tl.sum(tl.exp2((z - new_z_max[:, None]) * LOG2_E), 1)
        z_max = new_z_max
        if LOSS.has_kd:
            u = compute_logits(u, LOSS.teacher_scale, LOSS.teacher_softcap)
            new_u_max = tl.maximum(u_max, tl.max(u, 1))
            t = (u - new_u_max[:, None]) * to_log2
            u_shift = (u_max - new_u_max) * to_log2
            p = tl.exp2(t)
            if LOSS.log_ratio_under == "teacher":
                old = weighted(tl.exp2(u_shift), log_ratio + teacher_sum_exp * (u_shift - z_shift))
                log_ratio = old + tl.sum(weighted(p, t - s), 1)
            if LOSS.log_ratio_under == "student":
                old = weighted(tl.exp2(z_shift), log_ratio + old_sum_exp * (z_shift - u_shift))
                log_ratio = old + tl.sum(weighted(q, s - t), 1)
            teacher_sum_exp = teacher_sum_exp * tl.exp2(u_shift) + tl.sum(p, 1)
            u_max = new_u_max
    # Merge the lanes.
    student_max = tl.max(z_max, 0)
    z_shift = (z_max - student_max) * to_log2
    teacher_max = tl.max(u_max, 0)
    u_shift = (u_max - teacher_max) * to_log2
    if LOSS.log_ratio_under == "teacher":
        log_ratio = weighted(tl.exp2(u_shift), log_ratio + teacher_sum_exp * (u_shift - z_shift))
    if LOSS.log_ratio_under == "student":
        log_ratio = weighted(tl.exp2(z_shift), log_ratio + student_sum_exp * (z_shift - u_shift))
    student_sum_exp = tl.sum(student_sum_exp * tl.exp2(z_shift), 0)
    if LOSS.has_ce and LOSS.tempered:
        ce_sum_exp *= tl.exp2((z_max - student_max) * LOG2_E)
    teacher_sum_exp = tl.sum(teacher_sum_exp * tl.exp2(u_shift), 0)
    return SoftmaxSums(
        student_max, teacher_max, student_sum_exp, tl.sum(ce_sum_exp, 0), teacher_sum_exp, tl.sum(log_ratio, 0)
    )


# Divergence pass.


@triton.jit
def store_divergence_stats(
    inputs,  # TokenInputs
    sums_ptr,  # [DIVERGENCE_STATS, tokens] fp32, output
    token,
    tokens,
    student,  # TokenSoftmax
    teacher,  # TokenSoftmax
    to_log2,
    share,
    REVERSED: tl.constexpr,
    LOSS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Divergence statistics of one token over the shard; a token without weight is not read. Returns that of dlogq."""
    pointwise = 0.0 * student.max
    dlogq = pointwise
    if tl.load(inputs.kd_weight + token) != 0:
        pointwise, dlogq = sum_divergence_stats(
            inputs.student, inputs.teacher, student, teacher, to_log2, share, REVERSED, LOSS, COLUMNS, BLOCK
        )
    sums_ptr += token
    tl.store(sums_ptr + POINTWISE * tokens, pointwise)
    tl.store(sums_ptr + DLOGQ * tokens, dlogq)
    return dlogq


@triton.jit
def sum_divergence_stats(
    student_ptr,  # [columns] LM-head products of the student
    teacher_ptr,  # [columns] LM-head products of the teacher
    student,  # TokenSoftmax
    teacher,  # TokenSoftmax
    to_log2,
    share,
    REVERSED: tl.constexpr,
    LOSS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The divergence pass over one token -> (sum of the pointwise terms in nats, sum of dlogq)."""
    pointwise = tl.zeros([BLOCK // RUN], dtype=tl.float32)
    dlogq = pointwise
    for step in range(0, COLUMNS, BLOCK):
        offsets = block_columns(block_start(step, REVERSED, COLUMNS, BLOCK), BLOCK)
        real = offsets < COLUMNS
        z = tl.load(student_ptr + offsets, real, other=float("-inf"))
        z = compute_logits(z, LOSS.student_scale, LOSS.student_softcap)
        u = tl.load(teacher_ptr + offsets, real, other=float("-inf"))
        u = compute_logits(u, LOSS.teacher_scale, LOSS.teacher_softcap)
        s = (z - student.max) * to_log2 - student.log2_sum_exp
        t = (u - teacher.max) * to_log2 - teacher.log2_sum_exp
        q, p = tl.exp2(s), tl.exp2(t)
        pointwise += tl.sum(pointwise_term(s, t, q, p, share, LOSS), 1)
        dlogq += tl.sum(dlogq_term(s, t, q, p, share, LOSS), 1)
    return tl.sum(pointwise, 0), tl.sum(dlogq, 0)


# Gradient pass.


@triton.jit
def store_gradient(
    inputs,  # TokenInputs, with weights times the upstream gradient
    out_ptr,  # [columns] any float dtype, output; may be inputs.student
    token,
    softmaxes,  # TokenSoftmaxes
    dlogq_sum,
    scalars,  # GradientScalars
    REVERSED: tl.constexpr,
    LOSS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient pass over one token whose statistics are known and cover the whole vocabulary."""
    label_coeff = 0.0 * softmaxes.student.max
    ce_coeff = label_coeff
    kd_coeff = label_coeff
    student_columns = 0
    teacher_columns = 0
    label = -1
    if LOSS.has_ce:
        label_coeff = tl.load(inputs.ce_weight + token)
        student_columns = tl.where(label_coeff != 0, COLUMNS, 0)
        ce = softmaxes.ce
        ce_coeff = label_coeff * (1.0 + 2.0 * scalars.z_loss * (ce.log2_sum_exp * LN_2 + ce.max))
        label = tl.load(inputs.labels + token)
    if LOSS.has_kd:
        kd_coeff = tl.load(inputs.kd_weight + token) * scalars.temperature_scale
        teacher_columns = tl.where(kd_coeff != 0, COLUMNS, 0)
        student_columns = tl.maximum(student_columns, teacher_columns)
    coeffs = TokenCoeffs(ce_coeff, label_coeff, kd_coeff, dlogq_sum)
    for step in range(0, COLUMNS, BLOCK):
        offsets = block_columns(block_start(step, REVERSED, COLUMNS, BLOCK), BLOCK)
        # Tokens without weight are not read: 0 is finite, and its gradient is multiplied away.
        z = tl.load(inputs.student + offsets, offsets < student_columns, other=0.0)
        u = 0.0 * offsets
        if LOSS.has_kd:
            u = tl.load(inputs.teacher + offsets, offsets < teacher_columns, other=0.0)
            u = compute_logits(u, LOSS.teacher_scale, LOSS.teacher_softcap)
        z = compute_logits(z, LOSS.student_scale, LOSS.student_softcap)
        at_label = offsets == label
        gradient = compute_gradient(z, u, at_label, softmaxes, coeffs, scalars.to_log2, scalars.share, LOSS)
        tl.store(out_ptr + offsets, gradient.to(out_ptr.dtype.element_ty), offsets < COLUMNS)


@triton.jit
def compute_gradient(
    z,  # block of the student's logits, fp32
    u,  # block of the teacher's logits, fp32
    at_label,  # block of bool: the column is the label's
    softmaxes,  # TokenSoftmaxes
    coeffs,  # TokenCoeffs
    to_log2,
    share,
    LOSS: tl.constexpr,
):
    """d loss / d products of a block of one token, fp32."""
    gradient = tl.zeros_like(z)
    student, teacher = softmaxes.student, softmaxes.teacher
    s = (z - student.max) * to_log2 - student.log2_sum_exp
    q = tl.exp2(s)
    if LOSS.has_ce:
        q1 = tl.exp2((z - softmaxes.ce.max) * LOG2_E - softmaxes.ce.log2_sum_exp) if LOSS.tempered else q
        ce_gradient = coeffs.ce * q1 - tl.where(at_label, coeffs.label, 0.0)
        gradient = tl.where(coeffs.label != 0, ce_gradient, 0.0)
    if LOSS.has_kd:
        t = (u - teacher.max) * to_log2 - teacher.log2_sum_exp
        p = tl.exp2(t)
        kd_gradient = dlogq_term(s, t, q, p, share, LOSS) - q * coeffs.dlogq_sum
        gradient += tl.where(coeffs.kd != 0, coeffs.kd * kd_gradient, 0.0)
    if LOSS.student_softcap > 0:
        gradient *= 1.0 - (z / LOSS.student_softcap) * (z / LOSS.student_softcap)
    if LOSS.student_scale != 1.0:
        gradient *= LOSS.student_scale
    return gradient


# Blocks of a pass.


@triton.jit
def block_columns(first, BLOCK: tl.constexpr):
    """[BLOCK / RUN, RUN] indices of the columns of a block: a lane has RUN neighbors."""
    return first + RUN * tl.arange(0, BLOCK // RUN)[:, None] + tl.arange(0, RUN)[None, :]


@triton.jit
def block_start(step, REVERSED: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """First column of the block at this step of a pass; a reversed pass begins with what the caches still hold."""
    first = step
    if REVERSED:
        first = (COLUMNS - 1) // BLOCK * BLOCK - step
    return first
