"""The same loss from hidden states: LM heads and loss together, a chunk of rows at a time, logits never kept."""

from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mkd.config.kd_config import LossSpec
from mkd.losses.chunking import MIN_CHUNK_TOKENS, loss_chunks
from mkd.losses.fused_pass import FusedPass
from mkd.losses.kernels.interface import Kernels, choose
from mkd.losses.lm_head import LMHead, fp16_scale
from mkd.losses.logits import PLAIN_LOGITS, KernelContext, LogitMaps, statistics_dtype
from mkd.losses.main_grad import MainGrad, keep_gradients, kept_gradients
from mkd.losses.reference.linear import dense_divergence, linear_loss
from mkd.losses.rows import TokenWeights
from mkd.losses.sparse.teacher import SparseTarget
from mkd.losses.vocab_parallel import LossOutput
from mkd.losses.vocab_shard import VocabShard


class _FusedLinearLoss(torch.autograd.Function):
    """Loss and, with it, the gradients of hidden states and LM head; backward only applies the upstream scalar."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, teacher_hidden, teacher_head, rows, context, options):
        dtype, columns = statistics_dtype(hidden), context.shard.columns
        wanted, main_grad = options.wanted, options.main_grad
        # What upstream scalar the gradients carry already, and for fp16 the factor that brings them into range.
        ahead = main_grad.upstream if main_grad else None
        scale = fp16_scale(rows, context.spec) if hidden.dtype == torch.float16 and rows.labels.numel() else None
        carried = rows if ahead is None and scale is None else rows.times(scale if ahead is None else ahead)
        kept = hidden.dtype if ahead is not None else dtype
        # Weights of padding columns take part in nothing: they may hold anything, and their gradient is exactly 0.
        d_weight = None
        if wanted.weight:
            d_weight = main_grad.buffer if main_grad else torch.empty(weight.shape, dtype=dtype, device=weight.device)
            if not main_grad:
                d_weight[columns:] = 0
        d_hidden = torch.empty(hidden.shape, dtype=kept, device=hidden.device) if wanted.hidden else None
        d_bias = torch.zeros(weight.shape[0], dtype=dtype, device=weight.device) if wanted.bias else None
        terms = FusedPass(
            hidden=hidden.detach(),
            head=LMHead.of(weight[:columns], None if bias is None else bias[:columns]),
            teacher_hidden=teacher_hidden,
            teacher_head=None if teacher_head is None else teacher_head.of_columns(columns),
            sparse=options.sparse,
            rows=rows,
            context=context,
            kernels=options.kernels,
            chunks=options.chunks,
            logits_dtype=options.logits_dtype,
            gradient_rows=carried if any(wanted) else None,
            d_hidden=d_hidden,
            d_weight=None if d_weight is None else d_weight[:columns],
            d_bias=None if d_bias is None else d_bias[:columns],
            adds_to_d_weight=main_grad is not None,
        ).run()
        gradients = d_hidden, None if main_grad else d_weight, d_bias
        keep_gradients(ctx, gradients, scale, (hidden, weight, bias), main_grad)
        ctx.mark_non_differentiable(*(term for term in (terms.ce, terms.kd) if term is not None))
        return rows.weighted_sum(terms, context.spec), terms.ce, terms.kd

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, *_):
        return *kept_gradients(ctx, upstream), *[None] * 5


@dataclass(frozen=True)
class _Wanted:
    """Which gradients are."""

    hidden: bool
    weight: bool
    bias: bool

    def __iter__(self):
        return iter((self.hidden, self.weight, self.bias))


@dataclass(frozen=True)
class _Options:
    kernels: Kernels
    sparse: SparseTarget | None
    chunks: list[slice]
    logits_dtype: torch.dtype
    wanted: _Wanted
    main_grad: MainGrad | None


def _check_heads(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor | None, teacher_weight: Tensor | None) -> None:
    """Raise ValueError on shapes or dtypes that do not fit."""
    pairs = [("student", hidden, weight)]
    if teacher_hidden is not None or teacher_weight is not None:
        if teacher_hidden is None or teacher_weight is None:
            raise ValueError("teacher_hidden and teacher_weight must be given together")
        pairs.append(("teacher", teacher_hidden, teacher_weight))
        if teacher_hidden.shape[0] != hidden.shape[0]:
            raise ValueError(
                f"teacher has {teacher_hidden.shape[0]} rows, student {hidden.shape[0]}: both must be equal"
            )
    for pair in pairs:
        check_head(*pair)


def check_head(name: str, hidden: Tensor, weight: Tensor) -> None:
    """Raise ValueError unless hidden states and LM head can be multiplied."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or hidden.dtype != weight.dtype:
        raise ValueError(
            f"{name}_hidden is {tuple(hidden.shape)} {hidden.dtype} and {name}_weight {tuple(weight.shape)} "
            f"{weight.dtype}; needed: [N, H] and [V/tp, H] of one dtype"
        )


def check_bias(name: str, bias: Tensor | None, weight: Tensor | None) -> None:
    """Raise ValueError unless there is one bias for each row of the LM head, or none."""
    if bias is not None and weight is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{name}_bias has shape {tuple(bias.shape)} and {name}_weight {tuple(weight.shape)}")


def on_all_ranks(
    student: Tensor, teacher: Tensor | None, shard: VocabShard, sequence_parallel: bool
) -> tuple[Tensor, Tensor | None]:
    """Hidden states of all rows on every rank, so that backward sums the student's gradient over the shards."""
    if shard.size == 1:
        return student, teacher
    if not sequence_parallel:
        return copy_to_tensor_model_parallel_region(student, group=shard.group), teacher
    student = gather_from_sequence_parallel_region(student, tensor_parallel_output_grad=True, group=shard.group)
    if teacher is not None:
        teacher = gather_from_sequence_parallel_region(teacher, group=shard.group)
    return student, teacher


def resolve_logits_dtype(wanted: torch.dtype | None, hidden: Tensor) -> torch.dtype:
    """The dtype in which chunks of logits are kept.

    Args:
        wanted: None: that of bf16 hidden states on a GPU, else the precision of the statistics.
        hidden: the student's hidden states.

    Raises:
        ValueError: a dtype that no GEMM gives from such hidden states.
    """
    precise = statistics_dtype(hidden)
    if wanted is None:
        return hidden.dtype if hidden.dtype == torch.bfloat16 and hidden.is_cuda else precise
    if wanted not in (precise, hidden.dtype) and hidden.is_cuda:
        raise ValueError(
            f"logits_dtype is {wanted}; from {hidden.dtype} hidden states it can be {hidden.dtype} or {precise}"
        )
    return wanted


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
    """Sum of ce_weight * CE + kd_weight * divergence over this rank's tokens, from final hidden states and LM heads.

    The gradient is computed together with the forward pass, a chunk of rows at a time and over the chunk's own logits,
    so that logits of one or two chunks exist at one time. Kept for backward: the gradient of the hidden states, and
    unless `upstream` is given those of weight and bias, in the precision of the statistics (fp32, or float64).

    Communication over `tp_group`: per chunk, in forward, one all-gather of 12 bytes a row for CE alone or 16 to 28 with
    a divergence, and for jsd, the skewed KLs and tvd a second one of 8 (fp32); the products of the next chunk run
    meanwhile. For the hidden states, as any column-parallel layer: nothing in forward and one all-reduce in backward,
    or with `sequence_parallel` one all-gather a model in forward and one reduce-scatter in backward. None at all if
    `tp_group` is None or has one rank.

    Args:
        student_hidden: [N, Hs], the same on all ranks of `tp_group`; with `sequence_parallel` [N/tp, Hs], this rank's
            rows in rank order.
        student_weight: [V/tp, Hs] rows of the LM head of global ids rank * V/tp and up.
        teacher_hidden: [N, Ht] or [N/tp, Ht], as the student's; any float dtype; never differentiated; read only if
            `kd_weight` is given.
        teacher_weight: [V/tp, Ht] in the dtype of `teacher_hidden`; on one rank the number of padding rows may differ.
        labels: [N] int64 global ids; anything where `ce_weight` is 0.
        ce_weight: [N] fp32, not differentiated; None: CE and z-loss are not computed.
        kd_weight: [N] fp32, same; None: the divergence is not computed.
        spec: divergence, temperature and z-loss.
        true_vocab: columns of this global id and above are padding: probability 0, gradient exactly 0.
        tp_group: ranks that hold the other columns.
        sequence_parallel: hidden states are cut along rows over `tp_group`.
        chunk_rows: rows of the teacher whose logits exist at one time; default: 192 MiB of them, or 768 rows on a GPU.
            Of the student it is twice as many.
        student_bias, teacher_bias: [V/tp] of the LM heads.
        maps: scale and softcap of both models' logits.
        logits_dtype: of the logits of a chunk; default: bf16 for bf16 hidden states on a GPU, else fp32. Rounding
            logits to bf16 puts a floor under the gradient's error when student and teacher are close.
        impl: auto (Triton on a GPU, eager elsewhere), eager, triton, or reference (definition and autograd; one rank).
        upstream: scalar, the gradient that backward will pass to the loss, if it is known. Where the weight has an fp32
            `main_grad`, its gradient is then added to that while the loss is computed, with nothing kept. If backward
            passes another value, the gradient of the hidden states is NaN.

    Returns:
        LossOutput. The gradient of `student_hidden` is complete (summed over the vocabulary shards), those of
        `student_weight` and `student_bias` are this shard's.

    Raises:
        ValueError: shapes or dtypes that do not fit, weights that need a teacher that is not given, or Triton where it
            cannot run.
    """
    if kd_weight is None:
        teacher_hidden = teacher_weight = None
    elif teacher_hidden is None:
        raise ValueError("kd_weight is given and teacher_hidden is None")
    _check_heads(student_hidden, student_weight, teacher_hidden, teacher_weight)
    check_bias("student", student_bias, student_weight)
    check_bias("teacher", teacher_bias, teacher_weight)
    shard = VocabShard.of(student_weight.shape[0], true_vocab, tp_group)
    teacher_head = None
    if teacher_hidden is not None:
        shard.check_teacher(student_weight.shape[0], teacher_weight.shape[0])
        teacher_hidden, teacher_head = teacher_hidden.detach(), LMHead.of(teacher_weight, teacher_bias)
    student_hidden, teacher_hidden = on_all_ranks(student_hidden, teacher_hidden, shard, sequence_parallel)
    rows = TokenWeights.of(labels, ce_weight, kd_weight, student_hidden.shape[0], statistics_dtype(student_hidden))
    context = KernelContext(spec, shard, maps, with_kd=kd_weight is not None)
    if impl == "reference":
        teacher = None if kd_weight is None else (teacher_hidden, teacher_weight.detach(), teacher_bias)
        kd_of = None if teacher is None else dense_divergence(teacher, rows, context)
        return LossOutput(*linear_loss((student_hidden, student_weight, student_bias), kd_of, rows, context))
    student = (student_hidden, student_weight, student_bias)
    return run_fused(
        student,
        (teacher_hidden, teacher_head),
        rows,
        context,
        choose(impl, student_hidden),
        chunk_rows,
        logits_dtype,
        upstream,
    )


def run_fused(
    student: tuple[Tensor, Tensor, Tensor | None],
    teacher: tuple[Tensor | None, LMHead | None] | SparseTarget,
    rows: TokenWeights,
    context: KernelContext,
    kernels: Kernels,
    chunk_rows: int | None,
    logits_dtype: torch.dtype | None,
    upstream: Tensor | float | None,
) -> LossOutput:
    """The loss of checked inputs.

    Args:
        student: hidden states of all rows, LM head and bias.
        teacher: hidden states of all rows and LM head, both None without a divergence; or what a sparse one says.
        rows, context, kernels: of all rows; the kernels are made for that kind of teacher.
        chunk_rows, logits_dtype, upstream: see `fused_linear_loss`.
    """
    hidden, weight, bias = student
    grad = torch.is_grad_enabled()
    wanted = _Wanted(*(grad and x is not None and x.requires_grad for x in student))
    dtype = resolve_logits_dtype(logits_dtype, hidden)
    least = MIN_CHUNK_TOKENS if hidden.is_cuda else 1
    sparse = teacher if isinstance(teacher, SparseTarget) else None
    options = _Options(
        kernels=kernels,
        sparse=sparse,
        chunks=loss_chunks(hidden.shape[0], context.shard.columns, dtype, chunk_rows, least),
        logits_dtype=dtype,
        wanted=wanted,
        main_grad=MainGrad.of(weight, upstream) if wanted.weight else None,
    )
    dense = (None, None) if sparse is not None else teacher
    return LossOutput(*_FusedLinearLoss.apply(hidden, weight, bias, *dense, rows, context, options))
