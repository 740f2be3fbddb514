"""Cross-entropy and divergence from logits that are cut along the vocabulary over the tensor-parallel group."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mkd.config import LossSpec
from mkd.losses.divergences import (
    RowScalars,
    Targets,
    local_statistics,
    merge_statistics,
    shift_,
    write_gradient_,
)

CHUNK_BYTES = 256 * 2**20
"""Default size of one chunk of one model's logits in the precision of the statistics."""


class LossOutput(NamedTuple):
    """The sum that is minimised, and the terms of each token for reports."""

    loss: Tensor
    """Scalar, fp32 (float64 for float64 inputs), differentiable: sum of ce_weight * ce + kd_weight * kd over rows."""
    ce: Tensor | None
    """[N] detached cross-entropy in nats, unweighted; 0 where its weight is 0; None if there are no CE weights."""
    kd: Tensor | None
    """[N] detached divergence in nats, unweighted, with T^2 if the spec says so; 0 where its weight is 0; None if there
    are no KD weights."""


@dataclass(frozen=True)
class VocabShard:
    """This rank's part of the vocabulary: global ids start .. start + columns; shard r is the r-th of equal parts."""

    group: ProcessGroup | None
    rank: int
    size: int
    start: int
    columns: int
    """Real columns: those below the true vocabulary. They come first; the padding columns of the shard follow."""
    true_vocab: int

    @classmethod
    def of(cls, width: int, true_vocab: int, group: ProcessGroup | None) -> "VocabShard":
        """The shard of a rank whose logits have `width` columns, padding included.

        Raises:
            ValueError: the true vocabulary is empty or larger than all shards together.
        """
        rank, size = (0, 1) if group is None else (group.rank(), group.size())
        if not 1 <= true_vocab <= width * size:
            raise ValueError(f"true_vocab is {true_vocab}; {size} shards of {width} columns hold 1 to {width * size}")
        start = rank * width
        return cls(group, rank, size, start, min(max(true_vocab - start, 0), width), true_vocab)

    def gather(self, stats: dict[str, Tensor]) -> dict[str, Tensor]:
        """Statistics [rows] of this shard -> [tp, rows] of all shards, in one all-gather."""
        packed = torch.stack(list(stats.values()))
        gathered = packed
        if self.size > 1:
            gathered = packed.new_empty((self.size * packed.shape[0], packed.shape[1]))
            torch.distributed.all_gather_into_tensor(gathered, packed, group=self.group)
        by_rank = gathered.view(self.size, *packed.shape)
        return dict(zip(stats, by_rank.unbind(dim=1), strict=True))


def statistics_dtype(inputs: Tensor) -> torch.dtype:
    """fp32, or float64 for float64 inputs."""
    return torch.float64 if inputs.dtype == torch.float64 else torch.float32


def row_chunks(rows: int, columns: int, dtype: torch.dtype, chunk_rows: int | None) -> list[slice]:
    """Cut rows into chunks of `chunk_rows`, by default `CHUNK_BYTES` of logits in `dtype`; no rows are one empty chunk.

    Raises:
        ValueError: chunk_rows below 1.
    """
    if chunk_rows is None:
        chunk_rows = max(1, CHUNK_BYTES // (max(columns, 1) * dtype.itemsize))
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows is {chunk_rows}; it must be at least 1")
    return [slice(first, min(first + chunk_rows, rows)) for first in range(0, max(rows, 1), chunk_rows)]


@dataclass(frozen=True)
class Rows:
    """Labels and weights of some tokens; None for the weights of a term that is not computed."""

    labels: Tensor
    ce_weight: Tensor | None
    kd_weight: Tensor | None

    @classmethod
    def of(
        cls, labels: Tensor, ce_weight: Tensor | None, kd_weight: Tensor | None, count: int, dtype: torch.dtype
    ) -> "Rows":
        """Labels and weights of `count` tokens, the weights in the dtype of the statistics.

        Raises:
            ValueError: no weights at all, or labels or weights that are not [count].
        """
        if ce_weight is None and kd_weight is None:
            raise ValueError("ce_weight and kd_weight are both None: there is nothing to compute")
        for name, tensor in (("labels", labels), ("ce_weight", ce_weight), ("kd_weight", kd_weight)):
            if tensor is not None and tensor.shape != (count,):
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}; the student has {count} rows")
        return cls(labels, *(None if w is None else w.detach().to(dtype) for w in (ce_weight, kd_weight)))

    def __getitem__(self, rows: slice) -> "Rows":
        return Rows(self.labels[rows], *(None if w is None else w[rows] for w in (self.ce_weight, self.kd_weight)))

    def times(self, factor: Tensor) -> "Rows":
        """The same with all weights multiplied by a scalar."""
        return Rows(self.labels, *(None if w is None else w * factor for w in (self.ce_weight, self.kd_weight)))

    def unused_by_student(self) -> Tensor:
        """[rows, 1] bool: all weights are 0. What such a row holds, NaN included, must have no effect."""
        return torch.stack([w == 0 for w in (self.ce_weight, self.kd_weight) if w is not None]).all(dim=0)[:, None]

    def unused_by_teacher(self) -> Tensor:
        """[rows, 1] bool: the KD weight is 0."""
        return (self.kd_weight == 0)[:, None]

    def targets(self, shard: VocabShard) -> Targets | None:
        """Where the labels lie in the shard; None if CE is not computed."""
        if self.ce_weight is None:
            return None
        return Targets.of(self.labels, self.ce_weight, shard.start, shard.columns, shard.true_vocab)

    def terms(self, scalars: RowScalars, spec: LossSpec) -> tuple[Tensor | None, Tensor | None]:
        """(ce, kd) of these rows as `LossOutput` reports them."""
        if self.kd_weight is None:
            return scalars.ce, None
        return scalars.ce, torch.where(self.kd_weight != 0, scalars.divergence * spec.scale, 0)

    def loss(self, ce: Tensor | None, kd: Tensor | None) -> Tensor:
        """Scalar: the weighted sum of the terms of these rows."""
        pairs = ((self.ce_weight, ce), (self.kd_weight, kd))
        return torch.stack([(weight * term).sum() for weight, term in pairs if weight is not None]).sum()


class _VocabParallelLoss(torch.autograd.Function):
    """Forward: statistics. Backward: gradients from the saved logits and row scalars, without a collective."""

    @staticmethod
    def forward(ctx, student_logits, teacher_logits, rows: Rows, spec: LossSpec, shard: VocabShard):
        chunks = row_chunks(student_logits.shape[0], shard.columns, statistics_dtype(student_logits), None)
        parts = []
        for chunk in chunks:
            z, u = _load(student_logits, teacher_logits, rows, chunk, shard)
            parts.append(local_statistics(z, u, rows[chunk].targets(shard), spec))
        local = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        kd = rows.kd_weight is not None
        scalars = merge_statistics(shard.gather(local), shard.rank, kd, rows.targets(shard), spec)
        ce, kd = rows.terms(scalars, spec)
        ctx.save_for_backward(student_logits, teacher_logits)
        ctx.saved = rows, spec, shard, chunks, scalars, local["student_max"], local.get("teacher_max")
        ctx.mark_non_differentiable(*(term for term in (ce, kd) if term is not None))
        return rows.loss(ce, kd), ce, kd

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, *_):
        student_logits, teacher_logits = ctx.saved_tensors
        rows, spec, shard, chunks, scalars, student_max, teacher_max = ctx.saved
        gradient = torch.empty_like(student_logits)
        gradient[:, shard.columns :] = 0
        # The upstream scalar goes into the weights: fp16 gradients are rounded after the loss scale, not before.
        weighted = rows.times(upstream)
        temperature = spec.temperature if rows.kd_weight is not None else 1.0
        for chunk in chunks:
            z, u = _load(student_logits, teacher_logits, rows, chunk, shard)
            shift_(z, student_max[chunk], temperature)
            if u is not None:
                shift_(u, teacher_max[chunk], temperature)
            of_chunk = RowScalars(*(None if x is None else x[chunk] for x in scalars))
            w = weighted[chunk]
            write_gradient_(z, u, of_chunk, rows[chunk].targets(shard), w.ce_weight, w.kd_weight, spec)
            gradient[chunk, : shard.columns] = z
        return gradient, None, None, None, None


def _load(
    student_logits: Tensor, teacher_logits: Tensor | None, rows: Rows, chunk: slice, shard: VocabShard
) -> tuple[Tensor, Tensor | None]:
    """Copies of a chunk's real columns in the precision of the statistics, with unused rows set to 0."""
    dtype, columns = statistics_dtype(student_logits), slice(0, shard.columns)
    z = student_logits[chunk, columns].to(dtype, copy=True)
    z.masked_fill_(rows[chunk].unused_by_student(), 0)
    if rows.kd_weight is None:
        return z, None
    u = teacher_logits[chunk, columns].to(dtype, copy=True)
    return z, u.masked_fill_(rows[chunk].unused_by_teacher(), 0)


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
) -> LossOutput:
    """Sum of ce_weight * CE + kd_weight * divergence over this rank's tokens, from logits.

    CE is at T = 1; `spec.temperature` applies to the divergence alone. Formulas and merging: docs/losses.md.

    Communication: one all-gather over `tp_group` in forward, of 12 bytes a row for CE alone and 20 to 28 with a
    divergence (fp32); none in backward. None at all if `tp_group` is None or has one rank.

    Args:
        student_logits: [N, V/tp] this rank's columns, floating; rank r holds global ids r * V/tp and up.
        teacher_logits: [N, V/tp] same columns, any float dtype, never differentiated; unread if `kd_weight` is None.
        labels: [N] int64 global ids; anything where `ce_weight` is 0.
        ce_weight: [N] fp32, not differentiated; None: CE is not computed.
        kd_weight: [N] fp32, same; None: the divergence is not computed.
        spec: divergence and temperature.
        true_vocab: columns of this global id and above are padding: probability 0, gradient exactly 0.
        tp_group: ranks that hold the other columns of the same rows.

    Returns:
        LossOutput. The gradient of its loss is that of this rank's columns.

    Raises:
        ValueError: shapes that do not fit, or weights that need logits that are not given.
    """
    if kd_weight is not None and (teacher_logits is None or teacher_logits.shape != student_logits.shape):
        seen = None if teacher_logits is None else tuple(teacher_logits.shape)
        raise ValueError(f"teacher_logits has shape {seen}; kd_weight needs {tuple(student_logits.shape)}")
    shard = VocabShard.of(student_logits.shape[1], true_vocab, tp_group)
    rows = Rows.of(labels, ce_weight, kd_weight, student_logits.shape[0], statistics_dtype(student_logits))
    teacher = None if kd_weight is None else teacher_logits.detach()
    return LossOutput(*_VocabParallelLoss.apply(student_logits, teacher, rows, spec, shard))
