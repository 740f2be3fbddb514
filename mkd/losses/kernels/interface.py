"""The kernels of a loss: their inputs and the passes that they compute. `select` chooses the implementation."""

from typing import NamedTuple, Protocol

from torch import Tensor

from mkd.losses.inputs import KernelContext, TokenWeights
from mkd.losses.sparse.columns import TopColumns
from mkd.losses.sparse.teacher import SparseTarget
from mkd.losses.statistics import Statistics


class Chunk(NamedTuple):
    """A loss chunk: LM-head products of some tokens over the shard's real columns, before `LogitMap`."""

    student: Tensor
    """[N, columns], any float dtype, columns contiguous."""
    teacher: Tensor | SparseTarget | TopColumns | None
    """[N, columns] likewise; of a sparse teacher the target, or its columns once they are taken out of the products;
    None without a divergence."""
    tokens: TokenWeights


class TailCoeffs(NamedTuple):
    """Coefficients of a shard's gradient in the columns that a sparse teacher does not list; each [N].

    The gradient by a logit z is ce * e^(z - top - ce_log_norm) + kd * e^((z - top) / T - kd_log_norm), minus `label` in
    the label's column.
    """

    used: Tensor
    """bool; where False the gradient is 0, whatever the logits hold."""
    top: Tensor
    """At least the largest logit of the shard that is not -inf."""
    ce: Tensor
    """Coefficient of q at T = 1, whose logarithm is z - top - ce_log_norm."""
    ce_log_norm: Tensor
    kd: Tensor
    """Coefficient of a column's share of the tail, whose logarithm is (z - top) / T - kd_log_norm."""
    kd_log_norm: Tensor
    label: Tensor
    """Subtracted in the label's column."""
    label_column: Tensor
    """int64; -1 where the label is not among these columns."""


class Kernels(Protocol):
    """The passes over a loss chunk; `eager` documents what each returns."""

    def softmax_stats(self, chunk: Chunk, context: KernelContext) -> Statistics: ...

    def divergence_stats(self, chunk: Chunk, stats: Statistics, context: KernelContext) -> Statistics: ...

    def write_gradient(
        self, chunk: Chunk, stats: Statistics, sums: Statistics | None, context: KernelContext, out: Tensor
    ) -> None: ...

    def write_tail_gradient(self, products: Tensor, tail: TailCoeffs, context: KernelContext, out: Tensor) -> None: ...

    def all_passes(
        self, chunk: Chunk, context: KernelContext, weighted: TokenWeights, out: Tensor
    ) -> tuple[Statistics, Statistics | None]: ...
