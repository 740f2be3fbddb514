"""The work behind `xtoken_loss`: group by group from hidden states to values and gradients."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mkd.losses.inputs import LMHead, add_gemm, gemm, gemm_operand, statistics_dtype
from mkd.xtoken.loss.chunk_groups import GroupWeights, TermsOfGroup
from mkd.xtoken.loss.chunks import Group


class Values(NamedTuple):
    """Of all rows and chunks of this rank."""

    kd: Tensor
    """[chunks], 0 of those that are not in a group."""
    ce: Tensor | None
    """[rows]"""
    log_sum: Tensor | None
    """[rows]"""


@dataclass
class HeadPass:
    """One evaluation of the loss, and with it of the gradients of hidden states and LM head."""

    hidden: Tensor
    head: LMHead
    teacher_hidden: Tensor
    teacher_head: LMHead
    ce_weight: Tensor | None
    """[rows] of `hidden`."""
    kd_weight: Tensor
    """[chunks]"""
    factor: Tensor | float
    """What the gradients are multiplied by."""
    terms_of_group: TermsOfGroup
    logits_dtype: torch.dtype
    d_hidden: Tensor | None
    """Zeros, as `hidden`; None: not wanted."""
    d_weight: Tensor | None
    """[columns, H]; the gradient is added."""

    def run(self, groups: list[Group]) -> Values:
        """Fill the gradients, return the values."""
        rows = torch.zeros(2, len(self.hidden), dtype=self.kd_weight.dtype, device=self.hidden.device)
        values = Values(torch.zeros_like(self.kd_weight), *((None, None) if self.ce_weight is None else rows))
        for group in groups:
            self._group(group, values)
        return values

    def _group(self, group: Group, values: Values) -> None:
        rows, dtype = group.student.rows, self.head.weight.dtype
        hidden = self.hidden[rows]
        products = self._products(self.head, hidden)
        gradient = None
        if self.d_hidden is not None or self.d_weight is not None:
            gradient = products if products.dtype == dtype else torch.empty_like(products, dtype=dtype)
        weights = GroupWeights(
            None if self.ce_weight is None else self.ce_weight[rows], self.kd_weight[group.numbers], self.factor
        )
        teacher = self._products(self.teacher_head, self.teacher_hidden[group.teacher.rows])
        terms = self.terms_of_group(products, teacher, group, weights, gradient)
        values.kd[group.numbers] = terms.kd
        if terms.ce is not None:
            values.ce[rows], values.log_sum[rows] = terms.ce, terms.log_sum
        if self.d_hidden is not None:
            out = hidden.new_empty(hidden.shape, dtype=self.d_hidden.dtype)
            self.d_hidden[rows] = gemm(gradient, self.head.weight, out)
        if self.d_weight is not None:
            add_gemm(self.d_weight, gradient.t(), gemm_operand(hidden, self.d_weight.dtype), fresh=False)

    def _products(self, head: LMHead, hidden: Tensor) -> Tensor:
        # A GEMM rounds its result to the dtype of its factors or not at all.
        rounded = self.logits_dtype == head.weight.dtype or hidden.device.type == "cpu"
        out = hidden.new_empty(
            (len(hidden), len(head.weight)), dtype=self.logits_dtype if rounded else statistics_dtype(hidden)
        )
        return head.logits(hidden, out) if len(hidden) else out
