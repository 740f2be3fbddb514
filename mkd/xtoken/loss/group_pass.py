"""The pass of `xtoken_loss` over all groups of chunks: from hidden states to values and gradients."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mkd.losses.inputs import LMHead, add_gemm, gemm, gemm_operand, statistics_dtype
from mkd.xtoken.loss.chunk_groups import GroupLoss, GroupWeights
from mkd.xtoken.loss.chunks import ChunkGroup


class LossValues(NamedTuple):
    """Values of all tokens and chunks of this rank."""

    kd: Tensor
    """[chunks], 0 for chunks in no group."""
    ce: Tensor | None
    """[N]"""
    log_sum: Tensor | None
    """[N]"""


@dataclass
class GroupPass:
    """One evaluation of the loss and of the gradients of hidden states and LM head."""

    hidden: Tensor
    """[N, Hs] of the student."""
    head: LMHead
    teacher_hidden: Tensor
    """[N_t, Ht]"""
    teacher_head: LMHead
    ce_weight: Tensor | None
    """[N] of `hidden`."""
    kd_weight: Tensor
    """[chunks]"""
    factor: Tensor | float
    """Factor of the gradients."""
    group_loss: GroupLoss
    logits_dtype: torch.dtype
    d_hidden: Tensor | None
    """Zeros, as `hidden`; None: not computed."""
    d_weight: Tensor | None
    """[columns, H]; the gradient is added. None: not computed."""

    def run(self, groups: list[ChunkGroup]) -> LossValues:
        """Fill the gradients, return the values."""
        per_token = torch.zeros(2, len(self.hidden), dtype=self.kd_weight.dtype, device=self.hidden.device)
        values = LossValues(torch.zeros_like(self.kd_weight), *((None, None) if self.ce_weight is None else per_token))
        for group in groups:
            self._run_group(group, values)
        return values

    def _run_group(self, group: ChunkGroup, values: LossValues) -> None:
        index, dtype = group.student.index, self.head.weight.dtype
        hidden = self.hidden[index]
        products = self._products(self.head, hidden)
        gradient = None
        if self.d_hidden is not None or self.d_weight is not None:
            gradient = products if products.dtype == dtype else torch.empty_like(products, dtype=dtype)
        weights = GroupWeights(
            None if self.ce_weight is None else self.ce_weight[index], self.kd_weight[group.numbers], self.factor
        )
        teacher = self._products(self.teacher_head, self.teacher_hidden[group.teacher.index])
        found = self.group_loss(products, teacher, group, weights, gradient)
        dtype = values.kd.dtype
        values.kd[group.numbers] = found.kd.to(dtype)
        if found.ce is not None:
            values.ce[index], values.log_sum[index] = found.ce.to(dtype), found.log_sum.to(dtype)
        if self.d_hidden is not None:
            out = hidden.new_empty(hidden.shape, dtype=self.d_hidden.dtype)
            self.d_hidden[index] = gemm(gradient, self.head.weight, out)
        if self.d_weight is not None:
            add_gemm(self.d_weight, gradient.t(), gemm_operand(hidden, self.d_weight.dtype), fresh=False)

    def _products(self, head: LMHead, hidden: Tensor) -> Tensor:
        # A GEMM rounds its result to the dtype of its operands or not at all.
        rounded = self.logits_dtype == head.weight.dtype or hidden.device.type == "cpu"
        out = hidden.new_empty(
            (len(hidden), len(head.weight)), dtype=self.logits_dtype if rounded else statistics_dtype(hidden)
        )
        return head.logits(hidden, out) if len(hidden) else out
