"""The loss of a student from a teacher with another tokenizer, from hidden states."""

from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mkd.config.kd_config import LossSpec
from mkd.losses.fused_linear import MainGrad, fp16_scale, keep_gradients, kept_gradients
from mkd.losses.inputs import (
    CHUNK_BYTES,
    PLAIN_LOGITS,
    KernelContext,
    LinearLogits,
    LMHead,
    LogitMaps,
    TokenWeights,
    resolve_logits_dtype,
    statistics_dtype,
)
from mkd.losses.kernels.interface import Kernels
from mkd.losses.kernels.select import choose
from mkd.losses.output import LossOutput
from mkd.losses.vocab_shard import VocabLayout
from mkd.xtoken.loss.chunk_groups import Apart, TermsOfGroup
from mkd.xtoken.loss.chunks import ChunkRows, Plan
from mkd.xtoken.loss.gold import gold
from mkd.xtoken.loss.head_pass import HeadPass, Values
from mkd.xtoken.loss.p_kl import p_kl
from mkd.xtoken.loss.partition import Partition
from mkd.xtoken.vocabulary.cross_vocabulary import CrossVocabulary, XTokenLoss

GROUP_ROWS = 3072
"""Least rows of a group of partition_kl on a GPU. A group has 500 small kernels, and the GPU waits for their launches;
measured in docs/benchmarks.md."""
UNCOMMON_TOP_K = 8192
"""Default places of the sorted probabilities that gold compares."""


@dataclass(frozen=True)
class _Job:
    """What does not take part in autograd."""

    teacher_hidden: Tensor
    teacher_head: LMHead
    ce_weight: Tensor | None
    kd_weight: Tensor
    plan: Plan
    setting: KernelContext
    terms_of_group: TermsOfGroup
    logits_dtype: torch.dtype
    main_grad: MainGrad | None
    wanted: tuple[bool, bool]
    """Whether gradients of the hidden states and of the LM head are."""


class _XTokenLoss(torch.autograd.Function):
    """Loss and, with it, the gradients of hidden states and LM head; backward only applies the upstream scalar."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, job: _Job):
        dtype, columns, main_grad = statistics_dtype(hidden), job.setting.shard.columns, job.main_grad
        ahead = main_grad.upstream if main_grad else None
        scale = _fp16_scale(hidden, job)
        factor = ahead if ahead is not None else scale
        d_hidden = d_weight = None
        if job.wanted[0]:
            d_hidden = torch.zeros(hidden.shape, dtype=hidden.dtype if main_grad else dtype, device=hidden.device)
        if job.wanted[1]:
            d_weight = main_grad.buffer if main_grad else torch.zeros(weight.shape, dtype=dtype, device=weight.device)
        values = HeadPass(
            hidden=hidden.detach(),
            head=LMHead.of(weight[:columns], None),
            teacher_hidden=job.teacher_hidden,
            teacher_head=job.teacher_head,
            ce_weight=job.ce_weight,
            kd_weight=job.kd_weight,
            factor=1.0 if factor is None else factor,
            terms_of_group=job.terms_of_group,
            logits_dtype=job.logits_dtype,
            d_hidden=d_hidden,
            d_weight=None if d_weight is None else d_weight[:columns],
        ).run(job.plan.groups)
        keep_gradients(ctx, (d_hidden, None if main_grad else d_weight), scale, (hidden, weight), main_grad)
        ctx.mark_non_differentiable(*(x for x in (values.ce, values.kd) if x is not None))
        return _weighted_sum(values, job), values.ce, values.kd

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, *_):
        return *kept_gradients(ctx, upstream), None


def _weighted_sum(values: Values, job: _Job) -> Tensor:
    """Scalar: the sum that is minimized."""
    loss = (job.kd_weight * values.kd).sum()
    if values.ce is None:
        return loss
    terms, z_loss = values.ce, job.setting.spec.z_loss
    if z_loss:
        terms = terms + z_loss * values.log_sum.square()
    return loss + (job.ce_weight * terms).sum()


def _fp16_scale(hidden: Tensor, job: _Job) -> Tensor | None:
    """See `fp16_scale`; None where it is not needed."""
    if hidden.dtype != torch.float16 or not hidden.shape[0]:
        return None
    kd_weight = job.kd_weight if len(job.kd_weight) else job.kd_weight.new_zeros(1)
    return fp16_scale(TokenWeights(kd_weight, job.ce_weight, kd_weight), job.setting.spec)


def xtoken_loss(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    labels: Tensor,
    ce_weight: Tensor | None,
    teacher_labels: Tensor,
    chunks: ChunkRows,
    *,
    kind: XTokenLoss,
    vocabulary: CrossVocabulary,
    spec: LossSpec,
    tp_group: ProcessGroup | None = None,
    cp_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    chunk_rows: int | None = None,
    maps: LogitMaps = PLAIN_LOGITS,
    uncommon_top_k: int = UNCOMMON_TOP_K,
    logits_dtype: torch.dtype | None = None,
    impl: str = "auto",
    upstream: Tensor | float | None = None,
) -> LossOutput:
    """Sum of ce_weight * CE over this rank's tokens and of chunk weight * divergence over its chunks.

    As `fused_linear_loss`, the gradient is computed together with the forward pass. Definitions of the divergences, a
    chunk at a time: `mkd.xtoken.loss.reference`. Formulas: docs/cross_tokenizer.md.

    Communication over `cp_group`, once: an all-gather of row numbers, one of the teacher's hidden states, and one of
    the student's hidden states in rows of chunks that lie on several ranks (a reduce-scatter in backward). Over
    `tp_group`, for each group of chunks: an all-gather of 12 bytes a row for CE, and those of the divergence; for the
    hidden states as in `fused_linear_loss`. All ranks of `cp_group` must call it for the same microbatch, and all ranks
    of `tp_group` with the same rows.

    Args:
        student_hidden: [N_s, Hs], the same on all ranks of `tp_group`; with `sequence_parallel` [N_s/tp, Hs].
        student_weight: [V_s/tp, Hs] rows of the LM head of global ids rank * V_s/tp and up.
        teacher_hidden: [N_t, Ht] or [N_t/tp, Ht]; never differentiated.
        teacher_weight: [columns, Ht] rows of the teacher's LM head of the ids `vocabulary.teacher_columns`, in order.
        labels: [N_s] int64; anything in a row without weight and chunk.
        ce_weight: [N_s] fp32; None: CE and z-loss are not computed.
        teacher_labels: [N_t] int64, what the teacher's rows predict; anything in a row without a chunk.
        chunks: which rows are compared, and how much each comparison counts.
        kind: partition_kl, p_kl, gold or gold_relaxed; the vocabulary must be made for it.
        vocabulary: of this rank of `tp_group`.
        spec: divergence (also that over common tokens in gold), temperature and z-loss.
        tp_group: ranks that hold the other columns.
        cp_group: ranks that hold the other rows of the microbatch.
        sequence_parallel: hidden states are cut along rows over `tp_group`.
        chunk_rows: rows of both models whose logits exist at one time, but at least a whole chunk; default: 192 MiB of
            one model's, or 3072 rows of partition_kl on a GPU.
        maps: scale and softcap of both models' logits.
        uncommon_top_k: gold only: places of the sorted probabilities of uncommon tokens that are compared.
        logits_dtype, upstream: see `fused_linear_loss`.
        impl: auto, eager or triton, of what `mkd.losses.kernels` computes.

    Returns:
        LossOutput; `ce` is [N_s], `kd` is [C] and 0 where another rank of `cp_group` has the chunk: its sum over ranks
        is complete. Likewise the loss.

    Raises:
        ValueError: shapes, dtypes or chunks that do not fit.
    """
    LinearLogits(student_hidden, student_weight).check("student")
    LinearLogits(teacher_hidden, teacher_weight).check("teacher")
    _check_vocabulary(vocabulary, student_weight, teacher_weight, tp_group, kind)
    layout = VocabLayout(vocabulary.student_vocab, tp_group, sequence_parallel)
    shard, hidden = layout.shard(student_weight.shape[0]), layout.gather_trained_hidden(student_hidden)
    teacher_hidden = layout.gather_hidden(teacher_hidden.detach())
    dtype = statistics_dtype(hidden)
    _check_rows(hidden, labels, teacher_hidden, teacher_labels)
    products_dtype = resolve_logits_dtype(logits_dtype, hidden)
    plan = Plan.of(
        chunks,
        labels,
        ce_weight,
        teacher_labels,
        vocabularies=(vocabulary.student_vocab, vocabulary.teacher_vocab),
        cp_group=cp_group,
        budget=_budget(chunk_rows, kind, max(shard.columns, len(vocabulary.teacher_columns)), products_dtype, hidden),
        device=hidden.device,
    )
    hidden, teacher_hidden = _from_all_ranks(hidden, teacher_hidden, plan, cp_group)
    if ce_weight is not None:
        ce_weight = torch.nn.functional.pad(ce_weight.detach().to(dtype), (0, len(hidden) - len(labels)))
    wanted = tuple(torch.is_grad_enabled() and x.requires_grad for x in (hidden, student_weight))
    setting = KernelContext(spec, shard, maps)
    job = _Job(
        teacher_hidden=teacher_hidden,
        teacher_head=LMHead.of(teacher_weight, None),
        ce_weight=ce_weight,
        kd_weight=chunks.weight.to(hidden.device, dtype),
        plan=plan,
        setting=setting,
        terms_of_group=_terms_of_group(kind, vocabulary, setting, choose(impl, hidden), uncommon_top_k),
        logits_dtype=products_dtype,
        main_grad=MainGrad.of(student_weight, upstream) if wanted[1] else None,
        wanted=wanted,
    )
    loss, ce, kd = _XTokenLoss.apply(hidden, student_weight, job)
    return LossOutput(loss, None if ce is None else ce[: len(labels)], kd)


def _terms_of_group(
    kind: XTokenLoss, vocabulary: CrossVocabulary, setting: KernelContext, kernels: Kernels, uncommon_top_k: int
) -> TermsOfGroup:
    if kind == "partition_kl":
        return Partition(vocabulary, setting, kernels)
    known = dict(vocabulary=vocabulary, shard=setting.shard, spec=setting.spec)
    if kind == "p_kl":
        return Apart(partial(p_kl, **known), setting, kernels)
    if uncommon_top_k < 1:
        raise ValueError(f"uncommon_top_k is {uncommon_top_k}; it must be at least 1")
    return Apart(partial(gold, uncommon_top_k=uncommon_top_k, **known), setting, kernels)


def _check_rows(hidden: Tensor, labels: Tensor, teacher_hidden: Tensor, teacher_labels: Tensor) -> None:
    """Raise ValueError unless there is one label for each row."""
    for name, rows, ids in (("student", hidden, labels), ("teacher", teacher_hidden, teacher_labels)):
        if ids.shape != rows.shape[:1]:
            raise ValueError(f"the {name} has {len(rows)} rows, its labels have shape {tuple(ids.shape)}")


def _budget(chunk_rows: int | None, kind: XTokenLoss, columns: int, dtype: torch.dtype, hidden: Tensor) -> int:
    """Rows of a group. Raises ValueError below 1."""
    if chunk_rows is None:
        # partition_kl leaves the logits as they are, the others copy them in the precision of the statistics.
        as_they_are = kind == "partition_kl"
        element = dtype.itemsize if as_they_are else statistics_dtype(hidden).itemsize
        least = GROUP_ROWS if hidden.is_cuda and as_they_are else 1
        chunk_rows = max(least, CHUNK_BYTES // (max(columns, 1) * element))
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows is {chunk_rows}; it must be at least 1")
    return chunk_rows


def _check_vocabulary(
    vocabulary: CrossVocabulary, weight: Tensor, teacher_weight: Tensor, group: ProcessGroup | None, kind: XTokenLoss
) -> None:
    """Raise ValueError unless the vocabulary is that of these heads on this rank."""
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    if (vocabulary.rank, vocabulary.size, vocabulary.student_width) != (rank, size, weight.shape[0]):
        raise ValueError(
            f"the vocabulary is of rank {vocabulary.rank} of {vocabulary.size} with {vocabulary.student_width} student "
            f"columns; this is rank {rank} of {size} with {weight.shape[0]}"
        )
    if teacher_weight.shape[0] != len(vocabulary.teacher_columns):
        raise ValueError(
            f"teacher_weight has {teacher_weight.shape[0]} rows; teacher_columns are {len(vocabulary.teacher_columns)}"
        )
    if kind != vocabulary.kind:
        raise ValueError(f"the vocabulary is made for {vocabulary.kind}, the loss is {kind}")


def _from_all_ranks(
    hidden: Tensor, teacher_hidden: Tensor, plan: Plan, group: ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Student rows of this rank and then those that the ranks sent; teacher rows of all ranks."""
    if group is None or group.size() == 1:
        return hidden, teacher_hidden
    teacher_hidden = gather_from_sequence_parallel_region(teacher_hidden, group=group)
    if not plan.most_moved:
        return hidden, teacher_hidden
    sent = torch.nn.functional.pad(hidden[plan.moved], (0, 0, 0, plan.most_moved - len(plan.moved)))
    # The owner of a chunk has the only gradient of its rows, so that the sum over ranks is that one.
    received = gather_from_sequence_parallel_region(sent, tensor_parallel_output_grad=True, group=group)
    return torch.cat([hidden, received]), teacher_hidden
