"""From a teacher's hidden states to what is stored of each text."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from mkd.cache_build.sampling import counted, uniforms
from mkd.data.batch import KDBatch
from mkd.distributed.context_parallel import dual_chunk_positions
from mkd.distributed.groups import Groups
from mkd.losses.logits import LogitMap
from mkd.losses.measure.sampling import label_logits, teacher_draws
from mkd.losses.measure.topk import teacher_top_k
from mkd.teacher.cache.record_format import TokenRows
from mkd.teacher.cache.store import CacheMeta
from mkd.teacher.interface import HiddenSignal

NOT_DRAWN = -50.0
"""Stands for the ln of a share of 0."""


@dataclass(frozen=True)
class Answers:
    """What a cache of this kind holds of a microbatch."""

    meta: CacheMeta
    groups: Groups
    sequence_parallel: bool
    """Whether hidden states come in slices of the sequence."""
    chunk_rows: int | None = None
    """Tokens whose logits exist at one time; None for the default."""

    @property
    def are_here(self) -> bool:
        """Whether this rank gets them: the first tensor- and context-parallel rank of the last pipeline stage."""
        return self.groups.is_last_stage and self.groups.tp.rank() == 0 and self.groups.cp.rank() == 0

    def of(self, signal: HiddenSignal, whole: KDBatch) -> np.ndarray | None:
        """[b * s, C] fp32, what `token_rows` reads, of every place; None where the answers are not.

        Collective over the tensor- and context-parallel ranks of the last stage.

        Args:
            signal: the teacher's, of this rank's part of the microbatch.
            whole: the microbatch, on the host.
        """
        hidden = signal.hidden
        if self.sequence_parallel and self.groups.tp.size() > 1:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.groups.tp)
        hidden, part = hidden.flatten(0, 1), whole.cp_slice(self.groups.cp.rank(), self.groups.cp.size())
        common = dict(
            true_vocab=self.meta.true_vocab, tp_group=self.groups.tp, logit_map=LogitMap(scale=signal.logit_scale)
        )
        if self.meta.samples:
            columns, lse = self._drawn(hidden, signal.head, whole, common)
        else:
            columns, lse = self._most_probable(hidden, signal.head, common)
        labels = part.labels.t().flatten().to(hidden.device)
        label = label_logits(hidden, signal.head, labels, **common) - lse
        columns = torch.cat((columns, torch.where(labels >= 0, label, 0.0)[:, None]), dim=1)
        everything = self._gather(columns.view(*part.tokens.shape[::-1], -1).transpose(0, 1), whole)
        return None if everything is None else everything.flatten(0, 1).cpu().numpy()

    def _most_probable(self, hidden: Tensor, head: Tensor, common: dict) -> tuple[Tensor, Tensor]:
        """[N, 2 K + 2 temperatures] fp32 ids, logits, lse, tail_lse; and [N] lse at temperature 1."""
        found = teacher_top_k(
            hidden,
            head,
            self.meta.top_k,
            temperatures=self.meta.temperatures,
            chunk_rows=self.chunk_rows,
            **common,
        )
        return torch.cat((found.ids, found.logits, found.lse.t(), found.tail_lse.t()), dim=1).float(), found.lse[0]

    def _drawn(self, hidden: Tensor, head: Tensor, whole: KDBatch, common: dict) -> tuple[Tensor, Tensor]:
        """[N, draws] ids as fp32, which holds all up to 2^24; and [N] lse at temperature 1."""
        draws, part = self.meta.samples, slice(None)
        numbers = torch.full((*whole.tokens.shape, draws), 0.5, dtype=torch.float64).view(-1, draws)
        for key, places in whole.segments():
            numbers[places] = uniforms(key, places.stop - places.start, draws)
        numbers = numbers.view(*whole.tokens.shape, draws)
        if self.groups.cp.size() > 1:
            part = dual_chunk_positions(whole.bounds, self.groups.cp.rank(), self.groups.cp.size())
        numbers = numbers[:, part].transpose(0, 1).flatten(0, 1).to(hidden.device)
        temperature = self.meta.temperatures[-1]
        sums = dict(temperatures=(1.0,), chunk_rows=self.chunk_rows)
        found = teacher_draws(hidden, head, numbers, temperature, **sums, **common)
        return found.ids.float(), found.lse[0]

    def _gather(self, columns: Tensor, whole: KDBatch) -> Tensor | None:
        """[b, s/cp, C] of each context-parallel rank -> [b, s, C] in the order of the row, where answers are wanted."""
        cp, tp = self.groups.cp, self.groups.tp
        if tp.rank() != 0:
            return None
        if cp.size() == 1:
            return columns
        parts = [torch.empty_like(columns) for _ in range(cp.size())] if cp.rank() == 0 else None
        dist.gather(columns.contiguous(), parts, group=cp, group_dst=0)
        if parts is None:
            return None
        everything = columns.new_empty((columns.shape[0], whole.tokens.shape[1], columns.shape[2]))
        for rank, part in enumerate(parts):
            places = dual_chunk_positions(whole.bounds, rank, cp.size()).to(part.device)
            everything[:, places] = part
        return everything

    def token_rows(self, table: np.ndarray) -> TokenRows:
        """Rows of what `of` gives -> what the teacher said of these tokens."""
        k, count, label = self.meta.top_k, len(self.meta.temperatures), np.ascontiguousarray(table[:, -1])
        if not self.meta.samples:
            ids, logits, lse, tail_lse = np.split(table[:, :-1], [k, 2 * k, 2 * k + count], axis=1)
            return TokenRows(ids.astype(np.int32), logits, lse, label, tail_lse)
        ids, counts = counted(table[:, :-1].astype(np.int32), k)
        with np.errstate(divide="ignore"):
            shares = np.maximum(np.log(counts / self.meta.samples), NOT_DRAWN).astype(np.float32)
        nothing = np.full((len(table), count), -np.inf, dtype=np.float32)
        return TokenRows(ids, shares, np.zeros((len(table), count), np.float32), label, nothing)
