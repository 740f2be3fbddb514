"""The work behind `xtoken_loss`: group by group from hidden states to values and gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mkd.config import LossSpec
from mkd.losses.lm_head import LMHead, add_product, factor, product
from mkd.losses.logits import LogitMap, LogitMaps, statistics_dtype
from mkd.losses.vocab_shard import VocabShard
from mkd.xtoken.chunks import Group
from mkd.xtoken.shards import Mass, gather_all, put_columns

KDOfGroup = Callable[..., Tensor]
"""(student logits, teacher logits, group, *, weight, gradient, ...) -> [chunks]; see `partition.partition_kl`."""


class CrossEntropy(NamedTuple):
    """Of this rank's rows."""

    values: Tensor
    """[rows] in nats; 0 where the weight is."""
    weighted_sum: Tensor
    """Scalar, with z-loss."""


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
    shard: VocabShard
    spec: LossSpec
    maps: LogitMaps
    kd_of_group: KDOfGroup
    d_hidden: Tensor | None
    """Zeros, as `hidden`; None: not wanted."""
    d_weight: Tensor | None
    """[columns, H]; the gradient is added."""

    def run(self, groups: list[Group]) -> tuple[CrossEntropy | None, Tensor]:
        """Fill the gradients; return cross-entropy and divergences [chunks]."""
        dtype, device = statistics_dtype(self.hidden), self.hidden.device
        self._dtype = dtype
        kd = torch.zeros_like(self.kd_weight)
        self._ce = self._z_loss = None
        if self.ce_weight is not None:
            self._ce, self._z_loss = torch.zeros(2, len(self.hidden), dtype=dtype, device=device)
        for group in groups:
            self._group(group, kd)
        if self.ce_weight is None:
            return None, kd
        terms = self._ce if not self.spec.z_loss else self._ce + self.spec.z_loss * self._z_loss
        return CrossEntropy(self._ce, (self.ce_weight * terms).sum()), kd

    def _group(self, group: Group, kd: Tensor) -> None:
        rows = group.student.rows
        hidden = self.hidden[rows]
        z = self._logits(self.head, hidden, self.maps.student)
        with_gradient = self.d_hidden is not None or self.d_weight is not None
        gradient = torch.zeros_like(z) if with_gradient else None
        # The divergence overwrites its logits.
        slope = None
        if with_gradient and not self.maps.student.is_identity:
            slope = self.maps.student.derivative(z)
        if self.ce_weight is not None:
            self._cross_entropy(z, group, gradient)
        if len(group.numbers):
            u = self._logits(self.teacher_head, self.teacher_hidden[group.teacher.rows], self.maps.teacher)
            weight = self.kd_weight[group.numbers] * self.factor
            kd[group.numbers] = self.kd_of_group(z, u, group, weight=weight, gradient=gradient)
        if gradient is not None:
            d_logits = (gradient if slope is None else gradient.mul_(slope)).to(self.head.weight.dtype)
            if self.d_hidden is not None:
                self.d_hidden[rows] = product(
                    d_logits, self.head.weight, torch.empty_like(hidden, dtype=self.d_hidden.dtype)
                )
            if self.d_weight is not None:
                add_product(self.d_weight, d_logits.t(), factor(hidden, self.d_weight.dtype), fresh=False)

    def _logits(self, head: LMHead, hidden: Tensor, logit_map: LogitMap) -> Tensor:
        out = hidden.new_empty((len(hidden), len(head.weight)), dtype=self._dtype)
        return logit_map.apply_(head.logits(hidden, out))

    def _cross_entropy(self, z: Tensor, group: Group, gradient: Tensor | None) -> None:
        """Values of the group's rows, and their gradient into `gradient`."""
        rows, labels = group.student.rows, group.student.labels
        weight = self.ce_weight[rows]
        used = weight != 0
        column = labels - self.shard.start
        owned = used & (column >= 0) & (column < self.shard.columns)
        there = torch.zeros_like(weight)
        if z.shape[1]:
            there = torch.where(owned, z.gather(1, torch.where(owned, column, 0)[:, None])[:, 0], 0)
        top, mass, at_label = gather_all(self.shard, *Mass.of(z), there)
        most = top.amax(dim=0)
        log_sum = most + Mass(top, mass).log(most)
        legal = (labels >= 0) & (labels < self.shard.true_vocab)
        ce = Mass(top, mass).log(most) + (most - at_label.sum(dim=0))
        self._ce[rows] = torch.where(used, torch.where(legal, ce, torch.nan), 0)
        self._z_loss[rows] = torch.where(used, log_sum.square(), 0)
        if gradient is not None:
            of_column = weight * (1.0 + 2.0 * self.spec.z_loss * log_sum) * self.factor
            gradient.add_((z - log_sum[:, None]).exp_().mul_(of_column[:, None]))
            put_columns(gradient, column, owned, -weight * self.factor)
