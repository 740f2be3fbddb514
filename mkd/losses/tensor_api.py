"""Entry points of the losses over plain tensors; each calls `loss_from_hidden` or `loss_from_logits`."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mkd.config.loss_spec import LossSpec
from mkd.losses.from_logits import loss_from_logits
from mkd.losses.fused_linear import loss_from_hidden
from mkd.losses.inputs import PLAIN_LOGITS, LinearLogits, LogitMap, LogitMaps, TokenWeights
from mkd.losses.options import LossOptions
from mkd.losses.output import LossOutput
from mkd.losses.sparse.teacher import SparseTeacher, Tail
from mkd.losses.vocab_shard import VocabLayout


def fused_linear_loss(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor | None,
    teacher_weight: Tensor | None,
    labels: Tensor,
    ce_weight: Tensor | None,
    kd_weight: Tensor | None,
    *,
    spec: LossSpec,
    true_vocab: int,
    tp_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    chunk_rows: int | None = None,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    maps: LogitMaps = PLAIN_LOGITS,
    logits_dtype: torch.dtype | None = None,
    impl: str = "auto",
    upstream: Tensor | float | None = None,
) -> LossOutput:
    """`loss_from_hidden` with a dense teacher.

    Args:
        student_hidden: [N, Hs], the same on all ranks of `tp_group`; with `sequence_parallel` [N/tp, Hs], this rank's
            tokens in rank order.
        student_weight: [V/tp, Hs] of the LM head, for the global ids rank * V/tp and up.
        teacher_hidden: [N, Ht] or [N/tp, Ht], like the student's; any float dtype; never differentiated; read only if
            `kd_weight` is given.
        teacher_weight: [V/tp, Ht] in the dtype of `teacher_hidden`; on one rank the padding may differ.
        labels: [N] int64 global ids; anything where `ce_weight` is 0.
        ce_weight: [N] fp32, not differentiated; None: CE and z-loss are not computed.
        kd_weight: [N] fp32, likewise; None: the divergence is not computed.
        spec: divergence, temperature and z-loss.
        true_vocab: columns of this global id and above are padding: probability 0, gradient exactly 0.
        tp_group: ranks that hold the other columns.
        sequence_parallel: hidden states are split over `tp_group`.
        chunk_rows: tokens of the teacher whose logits exist at one time, see `LossOptions`.
        student_bias, teacher_bias: [V/tp] of the LM heads.
        maps: scale and softcap of both models' logits.
        logits_dtype, impl: see `LossOptions`.
        upstream: see `loss_from_hidden`.

    Raises:
        ValueError: as `loss_from_hidden`.
    """
    teacher = None
    if kd_weight is not None:
        if teacher_hidden is None:
            raise ValueError("kd_weight is given and teacher_hidden is None")
        if teacher_weight is None:
            raise ValueError("teacher_hidden and teacher_weight must be given together")
        teacher = LinearLogits(teacher_hidden, teacher_weight, maps.teacher, teacher_bias)
    return loss_from_hidden(
        LinearLogits(student_hidden, student_weight, maps.student, student_bias),
        teacher,
        TokenWeights(labels, ce_weight, kd_weight),
        spec=spec,
        vocab=VocabLayout(true_vocab, tp_group, sequence_parallel),
        options=LossOptions(chunk_rows, logits_dtype, impl),
        upstream=upstream,
    )


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
    """`loss_from_hidden` with a sparse teacher.

    Args:
        teacher: of all N tokens, also under sequence parallelism; the same on all ranks. None without `kd_weight`.
        tail: as in `topk_loss`.
        student_map: scale (> 0) and softcap of the student's logits. The teacher's are mapped already.
        student_hidden, student_weight, labels, ce_weight, kd_weight, spec, true_vocab, tp_group, sequence_parallel,
            chunk_rows, student_bias, logits_dtype, impl, upstream: as in `fused_linear_loss`.

    Raises:
        ValueError: as `loss_from_hidden`, or a scale that is not above 0.
    """
    if student_map.scale <= 0:
        raise ValueError(f"the student's logit scale is {student_map.scale}; a sparse teacher needs it above 0")
    return loss_from_hidden(
        LinearLogits(student_hidden, student_weight, student_map, student_bias),
        teacher,
        TokenWeights(labels, ce_weight, kd_weight),
        spec=spec,
        vocab=VocabLayout(true_vocab, tp_group, sequence_parallel),
        options=LossOptions(chunk_rows, logits_dtype, impl),
        tail=tail,
        upstream=upstream,
    )


def vocab_parallel_loss(
    student_logits: Tensor,
    teacher_logits: Tensor | None,
    labels: Tensor,
    ce_weight: Tensor | None,
    kd_weight: Tensor | None,
    *,
    spec: LossSpec,
    true_vocab: int,
    tp_group: ProcessGroup | None = None,
    impl: str = "auto",
) -> LossOutput:
    """`loss_from_logits` with a dense teacher.

    Args:
        student_logits: [N, V/tp] this rank's columns, floating; rank r holds global ids r * V/tp and up.
        teacher_logits: [N, V/tp] same columns, any float dtype, never differentiated; unread if `kd_weight` is None. On
            one rank its padding may be wider or narrower than the student's.
        labels, ce_weight, kd_weight, spec, true_vocab, tp_group: as in `fused_linear_loss`.
        impl: auto (Triton on a GPU, eager elsewhere), eager or triton.

    Raises:
        ValueError: as `loss_from_logits`.
    """
    tokens, vocab = TokenWeights(labels, ce_weight, kd_weight), VocabLayout(true_vocab, tp_group)
    return loss_from_logits(student_logits, teacher_logits, tokens, spec=spec, vocab=vocab, impl=impl)


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
    """`loss_from_logits` with a sparse teacher.

    The divergence is over the columns that the teacher lists and, with the bucket, one category for the others; with
    `counts` it is the estimate of the full forward KL from sampled columns. Definitions: `reference.topk.top_k`,
    `reference.topk.sampled`; formulas: docs/losses.md.

    Args:
        ids, teacher_logits, teacher_lse, teacher_tail_lse, counts: the fields of `SparseTeacher`.
        lse_temperature: temperature of the teacher's sums and samples.
        tail: bucket or renormalize; unread with counts.
        student_logits, labels, ce_weight, kd_weight, spec, true_vocab, tp_group, impl: as in `vocab_parallel_loss`.

    Raises:
        ValueError: as `loss_from_logits`.
    """
    teacher = SparseTeacher(ids, teacher_logits, teacher_lse, teacher_tail_lse, lse_temperature, counts)
    tokens, vocab = TokenWeights(labels, ce_weight, kd_weight), VocabLayout(true_vocab, tp_group)
    return loss_from_logits(student_logits, teacher, tokens, spec=spec, vocab=vocab, tail=tail, impl=impl)
