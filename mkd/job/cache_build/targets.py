"""Computes cached targets of a microbatch from the teacher's hidden states."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from mkd.data.batch import KDBatch
from mkd.distributed.context_parallel import dual_chunk_positions
from mkd.distributed.groups import Groups
from mkd.losses import LinearLogits, VocabLayout, teacher_top_k
from mkd.losses.measure.sampling import label_logits, sample_teacher_tokens
from mkd.teacher.cache.meta import CacheMeta
from mkd.teacher.cache.record_format import TokenTargets
from mkd.teacher.cache.sampling import count_ids, stratified_uniforms
from mkd.teacher.interface import HiddenSignal

ZERO_FREQUENCY = -50.0
"""Stands for the log of a relative frequency of 0."""


@dataclass(frozen=True)
class TargetBuilder:
    """Hidden states -> a table with one fp32 entry list per token (`table`, on the device and across ranks) -> targets
    on the host (`token_targets`, which the writer thread calls)."""

    meta: CacheMeta
    groups: Groups
    sequence_parallel: bool
    """True if hidden states are slices of the sequence."""
    chunk_rows: int | None = None
    """Tokens per loss chunk; None for the default."""

    @property
    def collects(self) -> bool:
        """True if this rank gets the tables."""
        return self.groups.leads_replica

    def table(self, signal: HiddenSignal, whole: KDBatch) -> np.ndarray | None:
        """[b * s, C] fp32, the input of `token_targets` for every token of a microbatch; None unless `collects`.

        Collective over the tensor- and context-parallel ranks of the last stage.

        Args:
            signal: the teacher's signal for this rank's part of the microbatch.
            whole: the microbatch, on the host.
        """
        hidden = signal.hidden
        if self.sequence_parallel and self.groups.tp.size() > 1:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.groups.tp)
        hidden, part = hidden.flatten(0, 1), whole.cp_slice(self.groups.cp.rank(), self.groups.cp.size())
        teacher = LinearLogits(hidden, signal.head, signal.logit_map)
        vocab = VocabLayout(self.meta.true_vocab, self.groups.tp)
        if self.meta.samples:
            columns, lse = self._sampled(teacher, whole, vocab)
        else:
            columns, lse = self._top_k(teacher, vocab)
        labels = part.labels.t().flatten().to(hidden.device)
        label = label_logits(teacher, labels, vocab=vocab) - lse
        columns = torch.cat((columns, torch.where(labels >= 0, label, 0.0)[:, None]), dim=1)
        gathered = self._gather(columns.view(*part.tokens.shape[::-1], -1).transpose(0, 1), whole)
        return None if gathered is None else gathered.flatten(0, 1).cpu().numpy()

    def _top_k(self, teacher: LinearLogits, vocab: VocabLayout) -> tuple[Tensor, Tensor]:
        """[N, 2 K + 2 temperatures] fp32 ids, logits, lse, tail_lse; and [N] lse at temperature 1."""
        how = dict(temperatures=self.meta.temperatures, vocab=vocab, chunk_rows=self.chunk_rows)
        found = teacher_top_k(teacher, self.meta.top_k, **how)
        lse, tail_lse = (torch.stack([getattr(one, name) for one in found], dim=1) for name in ("lse", "tail_lse"))
        return torch.cat((found[0].ids, found[0].logits, lse, tail_lse), dim=1).float(), found[0].lse

    def _sampled(self, teacher: LinearLogits, whole: KDBatch, vocab: VocabLayout) -> tuple[Tensor, Tensor]:
        """[N, samples] ids in fp32, which is exact up to 2^24; and [N] lse at temperature 1."""
        samples, part = self.meta.samples, slice(None)
        numbers = torch.full((*whole.tokens.shape, samples), 0.5, dtype=torch.float64).view(-1, samples)
        for key, positions in whole.segments():
            numbers[positions] = stratified_uniforms(key, positions.stop - positions.start, samples)
        numbers = numbers.view(*whole.tokens.shape, samples)
        if self.groups.cp.size() > 1:
            part = dual_chunk_positions(whole.bounds, self.groups.cp.rank(), self.groups.cp.size())
        numbers = numbers[:, part].transpose(0, 1).flatten(0, 1).to(teacher.hidden.device)
        temperature = self.meta.temperatures[-1]
        how = dict(temperatures=(1.0,), vocab=vocab, chunk_rows=self.chunk_rows)
        found = sample_teacher_tokens(teacher, numbers, temperature, **how)
        return found.ids.float(), found.lse[0]

    def _gather(self, columns: Tensor, whole: KDBatch) -> Tensor | None:
        """[b, s/cp, C] per context-parallel rank -> [b, s, C] in the order of the row if `collects`, else None."""
        cp, tp = self.groups.cp, self.groups.tp
        if tp.rank() != 0:
            return None
        if cp.size() == 1:
            return columns
        parts = [torch.empty_like(columns) for _ in range(cp.size())] if cp.rank() == 0 else None
        dist.gather(columns.contiguous(), parts, group=cp, group_dst=0)
        if parts is None:
            return None
        gathered = columns.new_empty((columns.shape[0], whole.tokens.shape[1], columns.shape[2]))
        for rank, part in enumerate(parts):
            positions = dual_chunk_positions(whole.bounds, rank, cp.size()).to(part.device)
            gathered[:, positions] = part
        return gathered

    def token_targets(self, table: np.ndarray) -> TokenTargets:
        """Targets of n tokens from their entries [n, C] of `table`."""
        k, count, label = self.meta.top_k, len(self.meta.temperatures), np.ascontiguousarray(table[:, -1])
        if not self.meta.samples:
            ids, logits, lse, tail_lse = np.split(table[:, :-1], [k, 2 * k, 2 * k + count], axis=1)
            return TokenTargets(ids.astype(np.int32), logits, lse, label, tail_lse)
        ids, counts = count_ids(table[:, :-1].astype(np.int32), k)
        with np.errstate(divide="ignore"):
            log_frequency = np.maximum(np.log(counts / self.meta.samples), ZERO_FREQUENCY).astype(np.float32)
        no_tail = np.full((len(table), count), -np.inf, dtype=np.float32)
        return TokenTargets(ids, log_frequency, np.zeros((len(table), count), np.float32), label, no_tail)
