"""The student's logits in the columns that a sparse teacher lists, on one vocabulary shard."""

from typing import NamedTuple

import torch
from torch import Tensor

from mkd.losses.inputs import KernelContext, TokenWeights
from mkd.losses.sparse.teacher import SparseTarget


class TopColumns(NamedTuple):
    """A sparse teacher's columns of a loss chunk, and what the student's products held there."""

    target: SparseTarget
    columns: Tensor
    """[N, K] int64 columns of this shard; 0 where a slot has none."""
    owned: Tensor
    """[N, K] bool: the slot has a column here."""
    logits: Tensor
    """[N, K] the student's, in the precision of the statistics; -inf where not owned."""
    label_column: Tensor
    """[N] int64; 0 where this shard has no column of the label."""
    label_owned: Tensor
    """[N] bool: this shard has it."""
    label_logit: Tensor
    """[N]; 0 where not owned."""

    @classmethod
    def take_from(
        cls, products: Tensor, target: SparseTarget, tokens: TokenWeights, context: KernelContext
    ) -> "TopColumns":
        """Take the top columns out of `products` [N, columns], which then hold -inf (impossible) there."""
        shard, dtype = context.shard, context.statistics_dtype(products)

        def locate(ids: Tensor, used: Tensor | bool) -> tuple[Tensor, Tensor]:
            owned = (ids >= shard.start) & (ids < shard.start + shard.columns) & used
            return torch.where(owned, ids - shard.start, 0), owned

        def logits(columns: Tensor) -> Tensor:
            if not products.shape[1]:
                return products.new_zeros(columns.shape, dtype=dtype)
            return context.maps.student.apply_(products.gather(1, columns).to(dtype, copy=True))

        columns, owned = locate(target.ids, True)
        label_column, label_owned = locate(tokens.labels, False if tokens.ce_weight is None else tokens.ce_weight != 0)
        label_logit = torch.where(label_owned, logits(label_column[:, None])[:, 0], 0)
        top = logits(columns).masked_fill(~owned, -torch.inf)
        if products.shape[1]:
            # Slots without a column add 0 to column 0, whatever other slots write there.
            products.scatter_add_(1, columns, torch.where(owned, -torch.inf, 0.0).to(products.dtype))
        return cls(target, columns, owned, top, label_column, label_owned, label_logit)

    def log_q(self, top: Tensor, log_norm: Tensor, temperature: float) -> Tensor:
        """[N, K] the student's ln q_k = (z_k - top) / T - log_norm; -inf where not owned."""
        log_q = (self.logits - top[:, None]) / temperature - log_norm[:, None]
        return log_q.masked_fill(~self.owned, -torch.inf)

    def own_log_p(self) -> Tensor:
        """[N, K] the teacher's ln p_k; -inf where not owned."""
        return self.target.log_p.masked_fill(~self.owned, -torch.inf)
