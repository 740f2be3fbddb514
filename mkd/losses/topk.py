"""The losses against a sparse teacher: its most probable columns, or columns that were drawn from it."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mkd.config.kd_config import LossSpec
from mkd.losses.fused_linear import check_bias, check_head, fused_linear_loss, on_all_ranks, run_fused
from mkd.losses.kernels.interface import choose
from mkd.losses.logits import KernelContext, LogitMap, LogitMaps, statistics_dtype
from mkd.losses.reference.linear import linear_loss, sparse_divergence
from mkd.losses.rows import TokenWeights
from mkd.losses.sparse.passes import SparseKernels
from mkd.losses.sparse.teacher import SparseTarget, SparseTeacher, Tail
from mkd.losses.vocab_parallel import LossOutput, loss_of_logits, vocab_parallel_loss
from mkd.losses.vocab_shard import VocabShard


def topk_loss(
    student_logits: Tensor,
    ids: Tensor,
    teacher_logits: Tensor,
    teacher_lse: Tensor | None,
    labels: Tensor,
    ce_weight: Tensor | None,
    kd_weight: Tensor | None,
    *,
    spec: LossSpec,
    tail: Tail = "bucket",
    true_vocab: int,
    tp_group: ProcessGroup | None = None,
    lse_temperature: float = 1.0,
    teacher_tail_lse: Tensor | None = None,
    counts: Tensor | None = None,
    impl: str = "auto",
) -> LossOutput:
    """Sum of ce_weight * CE + kd_weight * divergence over this rank's tokens, from the student's logits.

    The divergence is over the columns that the teacher names and, with the bucket, one category for the others; with
    `counts` it is the estimate of the full forward KL from drawn columns. Definitions: `reference_topk.top_k`,
    `reference_topk.sampled`; formulas: docs/losses.md.

    Communication over `tp_group`, all in forward (fp32): one all-gather of 24 to 32 bytes a row; for jsd, the skewed
    KLs and tvd a second one of 8. No column travels: each rank owns its ids.

    Args:
        student_logits: [N, V/tp] this rank's columns, floating; rank r holds global ids r * V/tp and up.
        ids: [N, K] integer global ids, the same on all ranks; see `SparseTeacher`.
        teacher_logits: [N, K] any float dtype, at no temperature and not normalized.
        teacher_lse: [N] ln sum_j exp(u_j / lse_temperature) over the teacher's whole row; unread to renormalize.
        labels, ce_weight, kd_weight: as in `vocab_parallel_loss`.
        spec: divergence, temperature and z-loss.
        tail: bucket or renormalize; unread with counts.
        true_vocab, tp_group, impl: as in `vocab_parallel_loss`.
        lse_temperature: of the teacher's sums and draws.
        teacher_tail_lse: [N] the same sum over the columns that are not in ids: more exact than 1 - head.
        counts: [N, K] how often each id was drawn.

    Returns:
        LossOutput. An id beyond the true vocabulary makes its row's `kd`, and so the loss, NaN.

    Raises:
        ValueError: shapes that do not fit; sums or draws at another temperature than the spec's; draws with another
            divergence than forward_kl; Triton where it cannot run.
    """
    shard = VocabShard.of(student_logits.shape[1], true_vocab, tp_group)
    if kd_weight is None:
        return vocab_parallel_loss(
            student_logits,
            None,
            labels,
            ce_weight,
            None,
            spec=spec,
            true_vocab=true_vocab,
            tp_group=tp_group,
            impl=impl,
        )
    rows = TokenWeights.of(labels, ce_weight, kd_weight, student_logits.shape[0], statistics_dtype(student_logits))
    teacher = SparseTeacher(ids, teacher_logits, teacher_lse, teacher_tail_lse, lse_temperature, counts)
    target, rows = SparseTarget.of(teacher, rows, tail, spec, true_vocab)
    kernels = SparseKernels(choose(impl, student_logits))
    return loss_of_logits(student_logits, target, rows, KernelContext(spec, shard), kernels)


def fused_linear_topk_loss(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher: SparseTeacher | None,
    labels: Tensor,
    ce_weight: Tensor | None,
    kd_weight: Tensor | None,
    *,
    spec: LossSpec,
    tail: Tail = "bucket",
    true_vocab: int,
    tp_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    chunk_rows: int | None = None,
    student_bias: Tensor | None = None,
    student_map: LogitMap = LogitMap(),  # noqa: B008
    logits_dtype: torch.dtype | None = None,
    impl: str = "auto",
    upstream: Tensor | float | None = None,
) -> LossOutput:
    """The same from the student's final hidden states and LM head; see `fused_linear_loss` for what that means.

    Args:
        student_hidden, student_weight: as in `fused_linear_loss`.
        teacher: of all N rows, also under sequence parallelism; the same on all ranks. None without `kd_weight`.
        labels, ce_weight, kd_weight, spec, true_vocab, tp_group, sequence_parallel, chunk_rows, student_bias,
            logits_dtype, impl, upstream: as in `fused_linear_loss`.
        tail: as in `topk_loss`.
        student_map: scale (> 0) and softcap of the student's logits. The teacher's are logits already.

    Returns:
        LossOutput, as from `fused_linear_loss`.

    Raises:
        ValueError: as `topk_loss` and `fused_linear_loss`, or a scale that is not above 0.
    """
    if student_map.scale <= 0:
        raise ValueError(f"the student's logit scale is {student_map.scale}; a sparse teacher needs it above 0")
    how = {"chunk_rows": chunk_rows, "logits_dtype": logits_dtype, "upstream": upstream}
    maps = LogitMaps(student_map)
    if kd_weight is None:
        return fused_linear_loss(
            student_hidden,
            student_weight,
            None,
            None,
            labels,
            ce_weight,
            None,
            spec=spec,
            true_vocab=true_vocab,
            tp_group=tp_group,
            sequence_parallel=sequence_parallel,
            student_bias=student_bias,
            maps=maps,
            impl=impl,
            **how,
        )
    if teacher is None:
        raise ValueError("kd_weight is given and teacher is None")
    check_head("student", student_hidden, student_weight)
    check_bias("student", student_bias, student_weight)
    shard = VocabShard.of(student_weight.shape[0], true_vocab, tp_group)
    student_hidden, _ = on_all_ranks(student_hidden, None, shard, sequence_parallel)
    rows = TokenWeights.of(labels, ce_weight, kd_weight, student_hidden.shape[0], statistics_dtype(student_hidden))
    context = KernelContext(spec, shard, maps)
    student = (student_hidden, student_weight, student_bias)
    target, counted = SparseTarget.of(teacher, rows, tail, spec, true_vocab)
    if impl == "reference":
        return LossOutput(*linear_loss(student, sparse_divergence(teacher, tail, rows, context), rows, context))
    return run_fused(student, target, counted, context, SparseKernels(choose(impl, student_hidden)), **how)
