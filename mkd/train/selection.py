"""Which of several teachers teaches each text of a microbatch: the one that predicts it best."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.data.batch import KDBatch
from mkd.data.token_counts import StepTokens
from mkd.distributed.groups import Groups
from mkd.train.evaluation import Mean, sums_of_texts
from mkd.train.objective import TeacherObjective


@dataclass(frozen=True)
class Selection:
    """The same on all tensor- and context-parallel ranks of a microbatch."""

    chosen: Tensor
    """[texts] int64 number of the teacher with the lowest cross-entropy; the first of equal ones."""
    supervised: Tensor
    """[texts] bool: whether the text has a supervised token."""
    teachers: int

    @classmethod
    @torch.no_grad()
    def of(
        cls, terms: Sequence[TeacherObjective], batch: KDBatch, groups: Groups, sequence_parallel: bool
    ) -> "Selection":
        """Ask each teacher for its cross-entropy on the supervised tokens of each text.

        Communication, whatever is chosen: an all-reduce of 8 (2 teachers + 1) bytes a text over the context-parallel
        ranks, and one of 8 bytes a text over the tensor-parallel ones.

        Args:
            terms: of the teachers, in order.
            batch: with the numbers of its texts (`KDBatch.with_texts`).
            groups: of this rank.
            sequence_parallel: whether the teachers' hidden states are cut along rows.
        """
        texts = len(batch.keys)
        sums = torch.cat(
            [
                *(term.sums_of_texts(texts, sequence_parallel) for term in terms),
                sums_of_texts([batch.ce_mask], batch.text, texts),
            ]
        )
        dist.all_reduce(sums, group=groups.cp)
        nats, units = sums[:-1].view(len(terms), 2, texts).unbind(1)
        chosen = torch.where(units > 0, nats / units, torch.inf).argmin(dim=0)
        # Ranks that differ in the last bit of a sum must not differ in what they teach.
        dist.all_reduce(chosen, op=dist.ReduceOp.MAX, group=groups.tp)
        return cls(chosen, sums[-1] > 0, len(terms))

    def taught_by(self, number: int) -> Tensor:
        """[texts] fp32, 1 for the texts of one teacher."""
        return (self.chosen == number).float()

    def shares(self, tokens: StepTokens, groups: Groups) -> dict[str, Mean]:
        """Name -> share of the texts with a supervised token that each teacher was selected for."""
        # Each text counts once, on the first of the context-parallel ranks, which all know it.
        counted = self.supervised.float() * float(groups.cp.rank() == 0)
        return {
            f"selected_{number + 1}": Mean.of(self.taught_by(number), counted, tokens.ce)
            for number in range(self.teachers)
        }
