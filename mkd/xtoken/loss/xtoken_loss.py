"""Loss of a student from a teacher with another tokenizer, from the hidden states of both."""

from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mkd.config.loss_spec import LossSpec
from mkd.losses.fused_linear import MainGrad, fp16_scale, keep_gradients, kept_gradients
from mkd.losses.inputs import (
    KernelContext,
    LinearLogits,
    LMHead,
    LogitMaps,
    TokenWeights,
    resolve_logits_dtype,
    statistics_dtype,
)
from mkd.losses.kernels import eager
from mkd.losses.kernels.interface import Kernels
from mkd.losses.kernels.select import choose
from mkd.losses.options import LossOptions
from mkd.losses.output import LossOutput
from mkd.losses.vocab_shard import VocabLayout
from mkd.xtoken.loss.chunk_groups import GroupLoss, SeparateCE
from mkd.xtoken.loss.chunks import ChunkPlan, TokenChunks
from mkd.xtoken.loss.gold import gold
from mkd.xtoken.loss.group_pass import GroupPass, LossValues
from mkd.xtoken.loss.group_size import (
    GROUP_TOKENS,
    UNCOMMON_TOP_K,
    GroupColumns,
    fused_group_tokens,
    plain_group_tokens,
)
from mkd.xtoken.loss.p_kl import p_kl
from mkd.xtoken.loss.partition import Partition
from mkd.xtoken.vocabulary.cross_vocabulary import CrossVocabulary


@dataclass(frozen=True)
class _Inputs:
    """Inputs without a gradient."""

    teacher_hidden: Tensor
    teacher_head: LMHead
    ce_weight: Tensor | None
    kd_weight: Tensor
    plan: ChunkPlan
    context: KernelContext
    group_loss: GroupLoss
    logits_dtype: torch.dtype
    main_grad: MainGrad | None
    wants_hidden: bool
    """True if the gradient of the hidden states is computed."""
    wants_weight: bool
    """True if the gradient of the LM head is computed."""


class _XTokenLoss(torch.autograd.Function):
    """Loss and, with it, the gradients of hidden states and LM head; backward multiplies by the upstream scalar."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, inputs: _Inputs):
        dtype, columns, main_grad = statistics_dtype(hidden), inputs.context.shard.columns, inputs.main_grad
        ahead = main_grad.upstream if main_grad else None
        scale = _fp16_scale(hidden, inputs)
        factor = ahead if ahead is not None else scale
        d_hidden = d_weight = None
        if inputs.wants_hidden:
            d_hidden = torch.zeros(hidden.shape, dtype=hidden.dtype if main_grad else dtype, device=hidden.device)
        if inputs.wants_weight:
            d_weight = main_grad.buffer if main_grad else torch.zeros(weight.shape, dtype=dtype, device=weight.device)
        values = GroupPass(
            hidden=hidden.detach(),
            head=LMHead.of(weight[:columns], None),
            teacher_hidden=inputs.teacher_hidden,
            teacher_head=inputs.teacher_head,
            ce_weight=inputs.ce_weight,
            kd_weight=inputs.kd_weight,
            factor=1.0 if factor is None else factor,
            group_loss=inputs.group_loss,
            logits_dtype=inputs.logits_dtype,
            d_hidden=d_hidden,
            d_weight=None if d_weight is None else d_weight[:columns],
        ).run(inputs.plan.groups)
        keep_gradients(ctx, (d_hidden, None if main_grad else d_weight), scale, (hidden, weight), main_grad)
        ctx.mark_non_differentiable(*(x for x in (values.ce, values.kd) if x is not None))
        return _weighted_sum(values, inputs), values.ce, values.kd

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, *_):
        return *kept_gradients(ctx, upstream), None


def _weighted_sum(values: LossValues, inputs: _Inputs) -> Tensor:
    """Scalar: the sum that is minimized."""
    loss = (inputs.kd_weight * values.kd).sum()
    if values.ce is None:
        return loss
    terms, z_loss = values.ce, inputs.context.spec.z_loss
    if z_loss:
        terms = terms + z_loss * values.log_sum.square()
    return loss + (inputs.ce_weight * terms).sum()


def _fp16_scale(hidden: Tensor, inputs: _Inputs) -> Tensor | None:
    """See `fp16_scale`; None for other dtypes than fp16."""
    if hidden.dtype != torch.float16 or not hidden.shape[0]:
        return None
    kd_weight = inputs.kd_weight if len(inputs.kd_weight) else inputs.kd_weight.new_zeros(1)
    return fp16_scale(TokenWeights(kd_weight, inputs.ce_weight, kd_weight), inputs.context.spec)


def xtoken_loss(
    student: LinearLogits,
    teacher: LinearLogits,
    tokens: TokenWeights,
    chunks: TokenChunks,
    *,
    vocabulary: CrossVocabulary,
    spec: LossSpec,
    vocab: VocabLayout,
    options: LossOptions = LossOptions(),  # noqa: B008
    uncommon_top_k: int = UNCOMMON_TOP_K,
    upstream: Tensor | float | None = None,
) -> LossOutput:
    """Sum of ce_weight * CE over this rank's tokens and of chunk weight * divergence over its text chunks.

    As in `loss_from_hidden`, the gradient is computed together with the forward pass. The divergences are defined, one
    chunk at a time, in `mkd.xtoken.loss.reference`; formulas: docs/cross_tokenizer.md.

    Communication over the context-parallel group of the chunks, once: an all-gather of chunk numbers and labels, one of
    the teacher's hidden states, and one of the student's hidden states in chunks that lie on several ranks (a
    reduce-scatter in backward). Over the tensor-parallel group, per group of chunks: an all-gather of 12 bytes per
    token for CE, and those of the divergence; for the hidden states as in `loss_from_hidden`. All context-parallel
    ranks must call it for the same microbatch, and all tensor-parallel ranks with the same tokens.

    Args:
        student: N_s tokens; the LM head has rows of global ids rank * V_s/tp and up. Differentiable.
        teacher: N_t tokens; the LM head has the rows of the ids `vocabulary.teacher_columns`, in order. Never
            differentiated.
        tokens: the student's labels and CE weights (None: CE and z-loss are not computed). KD weights are per chunk.
        chunks: tokens that are compared, the teacher's labels, and the weight of each comparison.
        vocabulary: common tokens and projection, of this tensor-parallel rank; its `kind` selects the divergence.
        spec: divergence (also that over common tokens in gold), temperature and z-loss.
        vocab: true vocabulary of the student, tensor-parallel group and sequence parallelism.
        options: memory, precision and implementation. `chunk_rows` is the number of tokens of both models whose logits
            exist at one time, but at least a whole text chunk; None: see `mkd.xtoken.loss.group_size`.
        uncommon_top_k: gold only: number of sorted probabilities of uncommon tokens that are compared.
        upstream: see `loss_from_hidden`.

    Returns:
        LossOutput; `ce` is [N_s], `kd` is [C] and 0 for chunks of other context-parallel ranks: its sum over ranks is
        complete, and so is that of the loss.

    Raises:
        ValueError: shapes, dtypes or chunks that do not fit.
    """
    student.check("student")
    teacher.check("teacher")
    _check_vocabulary(vocabulary, student.weight, teacher.weight, vocab)
    shard, hidden = vocab.shard(student.weight.shape[0]), vocab.gather_trained_hidden(student.hidden)
    teacher_hidden = vocab.gather_hidden(teacher.hidden.detach())
    dtype, labels = statistics_dtype(hidden), tokens.labels
    _check_labels(hidden, labels, teacher_hidden, chunks.teacher_labels)
    logits_dtype = resolve_logits_dtype(options.logits_dtype, hidden)
    context = KernelContext(spec, shard, LogitMaps(student.logit_map, teacher.logit_map))
    kernels = choose(options.impl, hidden.device, hidden.dtype, context.needs_float64)
    plan = ChunkPlan.of(
        chunks,
        labels,
        tokens.ce_weight,
        vocabularies=(vocabulary.student_vocab, vocabulary.teacher_vocab),
        budget=_budget(options.chunk_rows, vocabulary, logits_dtype, hidden, context, kernels),
        device=hidden.device,
    )
    hidden, teacher_hidden = _from_all_ranks(hidden, teacher_hidden, plan, chunks.cp_group)
    ce_weight = tokens.ce_weight
    if ce_weight is not None:
        ce_weight = torch.nn.functional.pad(ce_weight.detach().to(dtype), (0, len(hidden) - len(labels)))
    wants_hidden, wants_weight = (torch.is_grad_enabled() and x.requires_grad for x in (hidden, student.weight))
    inputs = _Inputs(
        teacher_hidden=teacher_hidden,
        teacher_head=LMHead.of(teacher.weight, None),
        ce_weight=ce_weight,
        kd_weight=chunks.weight.to(hidden.device, dtype),
        plan=plan,
        context=context,
        group_loss=_group_loss(vocabulary, context, kernels, uncommon_top_k),
        logits_dtype=logits_dtype,
        main_grad=MainGrad.of(student.weight, upstream) if wants_weight else None,
        wants_hidden=wants_hidden,
        wants_weight=wants_weight,
    )
    loss, ce, kd = _XTokenLoss.apply(hidden, student.weight, inputs)
    return LossOutput(loss, None if ce is None else ce[: len(labels)], kd)


def _group_loss(
    vocabulary: CrossVocabulary, context: KernelContext, kernels: Kernels, uncommon_top_k: int
) -> GroupLoss:
    if vocabulary.kind == "partition_kl":
        return Partition(vocabulary, context, kernels)
    if uncommon_top_k < 1:
        raise ValueError(f"uncommon_top_k is {uncommon_top_k}; it must be at least 1")
    if kernels is not eager:
        from mkd.xtoken.loss.fused_losses import FusedGold, FusedPKL

        if vocabulary.kind == "p_kl":
            return FusedPKL(vocabulary, context, kernels)
        columns = torch.cat([vocabulary.slots, vocabulary.uncommon])
        return FusedGold(vocabulary, context, kernels, uncommon_top_k, columns)
    known = dict(vocabulary=vocabulary, shard=context.shard, spec=context.spec)
    if vocabulary.kind == "p_kl":
        return SeparateCE(partial(p_kl, **known), context, kernels)
    return SeparateCE(partial(gold, uncommon_top_k=uncommon_top_k, **known), context, kernels)


def _check_labels(hidden: Tensor, labels: Tensor, teacher_hidden: Tensor, teacher_labels: Tensor) -> None:
    """Raise ValueError unless there is one label per token."""
    for name, tokens, ids in (("student", hidden, labels), ("teacher", teacher_hidden, teacher_labels)):
        if ids.shape != tokens.shape[:1]:
            raise ValueError(f"the {name} has {len(tokens)} tokens, its labels have shape {tuple(ids.shape)}")


def _budget(
    chunk_rows: int | None,
    vocabulary: CrossVocabulary,
    logits: torch.dtype,
    hidden: Tensor,
    context: KernelContext,
    kernels: Kernels,
) -> int:
    """Tokens of a group. Raises ValueError below 1."""
    if chunk_rows is not None:
        if chunk_rows < 1:
            raise ValueError(f"chunk_rows is {chunk_rows}; it must be at least 1")
        return chunk_rows
    columns = GroupColumns(context.shard.columns, len(vocabulary.teacher_columns), vocabulary.teacher_vocab)
    if vocabulary.kind == "partition_kl":
        # It keeps the dtype of the logits, unless it needs float64.
        keeps = not context.needs_float64
        itemsize = logits.itemsize if keeps else context.statistics_dtype(hidden).itemsize
        return plain_group_tokens(columns, itemsize, GROUP_TOKENS if hidden.is_cuda and keeps else 1)
    if kernels is eager:
        # Copies in the precision of the statistics.
        return plain_group_tokens(columns, context.statistics_dtype(hidden).itemsize)
    return fused_group_tokens(vocabulary.kind, columns, logits, hidden.dtype)


def _check_vocabulary(vocabulary: CrossVocabulary, weight: Tensor, teacher_weight: Tensor, vocab: VocabLayout) -> None:
    """Raise ValueError unless the vocabulary is that of these LM heads on this rank."""
    if vocab.true_vocab != vocabulary.student_vocab:
        raise ValueError(f"true_vocab is {vocab.true_vocab}, the vocabulary has {vocabulary.student_vocab} tokens")
    if (vocabulary.rank, vocabulary.size, vocabulary.student_width) != (vocab.rank, vocab.size, weight.shape[0]):
        raise ValueError(
            f"the vocabulary is of rank {vocabulary.rank} of {vocabulary.size} with {vocabulary.student_width} student "
            f"columns; this is rank {vocab.rank} of {vocab.size} with {weight.shape[0]}"
        )
    if teacher_weight.shape[0] != len(vocabulary.teacher_columns):
        raise ValueError(
            f"teacher_weight has {teacher_weight.shape[0]} rows; teacher_columns are {len(vocabulary.teacher_columns)}"
        )


def _from_all_ranks(
    hidden: Tensor, teacher_hidden: Tensor, plan: ChunkPlan, group: ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """(student tokens of this rank followed by those that all ranks sent, teacher tokens of all ranks)."""
    if group is None or group.size() == 1:
        return hidden, teacher_hidden
    teacher_hidden = gather_from_sequence_parallel_region(teacher_hidden, group=group)
    if not plan.max_sent:
        return hidden, teacher_hidden
    sent = torch.nn.functional.pad(hidden[plan.sent], (0, 0, 0, plan.max_sent - len(plan.sent)))
    # Only the owner of a chunk has a gradient of its tokens, so the sum over ranks is that gradient.
    received = gather_from_sequence_parallel_region(sent, tensor_parallel_output_grad=True, group=group)
    return torch.cat([hidden, received]), teacher_hidden
