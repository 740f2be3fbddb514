"""Rows of a training step whose answers the student has just written (--kd-on-policy).

Which rows of a global batch they are, their prompts and their random numbers are functions of seed and iteration, so a
resumed run needs no state, and every layout trains on the same texts.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mkd.data.packing.row_layout import RowLayout
from mkd.data.packing.row_plan import EpochOrder
from mkd.distributed.groups import Groups
from mkd.rollout.interface import Decoding, Engine, Request, WrittenText
from mkd.rollout.write import write_texts


@dataclass(frozen=True)
class RolloutFacts:
    """Measurements of the texts of one step, over all ranks."""

    texts: int
    tokens: int
    cut_off: int
    """Number of texts without an end token."""
    seconds: float

    def metrics(self) -> dict[str, float]:
        """Name -> value, for the metrics of an iteration."""
        return {
            "written_tokens": self.tokens / self.texts,
            "written_cut_off": self.cut_off / self.texts,
            "written_tokens_per_s": self.tokens / self.seconds,
        }


@dataclass(frozen=True)
class WrittenRows:
    """The rows of this rank that take the place of given ones in a step."""

    rows: Mapping[int, tuple[Request, WrittenText]]
    """Number of the row among those of this data-parallel rank in the step -> its text."""
    layout: RowLayout
    facts: RolloutFacts

    def replace_in(self, source: Iterator[Mapping[str, Tensor]]) -> Iterator[Mapping[str, Tensor]]:
        """The collated samples of `source`, with these rows in them."""
        number = 0
        while True:  # Megatron's iterators have no __iter__
            try:
                sample = next(source)
            except StopIteration:
                return
            count = sample["tokens"].shape[0]
            own = {row: self.rows[number + row] for row in range(count) if number + row in self.rows}
            yield self._replaced(sample, own) if own else sample
            number += count

    def _replaced(self, sample: Mapping[str, Any], own: Mapping[int, tuple[Request, WrittenText]]) -> dict[str, Any]:
        sample = dict(sample)
        if "ce_mask" not in sample:  # Megatron's own rows
            mask = sample.pop("loss_mask").float()
            sample |= {"ce_mask": mask, "kd_mask": mask}
        if not self.layout.is_packed and "length" not in sample:
            rows, length = sample["tokens"].shape
            sample["length"] = torch.full((rows,), length)
        for place, (request, text) in own.items():
            for name, value in self._row(request, text).items():
                sample[name] = sample[name].clone()
                sample[name][place] = torch.as_tensor(value)
        return sample

    def _row(self, request: Request, text: WrittenText) -> dict[str, np.ndarray]:
        """Tensors of a row: the divergence counts on the written tokens, cross-entropy on none."""
        ids = np.array([*request.prompt, *text.tokens])
        row = self.layout.row([(ids, np.arange(len(ids)) >= len(request.prompt))])
        return row | {"ce_mask": np.zeros_like(row["ce_mask"])}


@dataclass(frozen=True)
class OnPolicy:
    """Lets the student write the answers of a share of each global batch."""

    share: float
    """L, above 0 and at most 1."""
    prompts: Sequence[tuple[int, ...]]
    layout: RowLayout
    decoding: Decoding
    engine: Engine

    def count(self, rows: int) -> int:
        """Number of written rows among the first `rows` of a global batch."""
        return math.floor(rows * Fraction(repr(self.share)))

    def requests(self, iteration: int, rows: int) -> dict[int, Request]:
        """Row of the global batch -> its prompt; written rows are spread evenly. `iteration` counts from 0."""
        written = [row for row in range(rows) if self.count(row + 1) > self.count(row)]
        order = EpochOrder(len(self.prompts), self.decoding.seed)
        found = {}
        for number, row in enumerate(written, start=iteration * len(written)):
            found[row] = Request(self.prompts[order.row_at(number)], sample=number // len(self.prompts))
        return found

    def write(
        self, chunks: Sequence[nn.Module], groups: Groups, iteration: int, microbatches: int, micro_batch_size: int
    ) -> WrittenRows:
        """Write the answers of one step. Collective over all ranks.

        Args:
            chunks: the student's model chunks on this rank.
            groups: its layout.
            iteration: of the step, counted from 0.
            microbatches: of the step on this rank.
            micro_batch_size: rows of each.
        """
        began = time.monotonic()
        size, rank = groups.dp.size(), groups.dp.rank()
        wanted = self.requests(iteration, microbatches * micro_batch_size * size)
        texts = write_texts(chunks, groups, list(wanted.values()), self.decoding, self.engine)
        rows = {}
        for (row, request), text in zip(wanted.items(), texts, strict=True):
            microbatch, rest = divmod(row, micro_batch_size * size)
            if rest // micro_batch_size == rank:  # as Megatron's sampler deals the rows of a global batch
                rows[microbatch * micro_batch_size + rest % micro_batch_size] = (request, text)
        tokens, cut_off = sum(len(text.tokens) for text in texts), sum(not text.ended for text in texts)
        return WrittenRows(
            rows, self.layout, RolloutFacts(len(texts), tokens, cut_off, max(time.monotonic() - began, 1e-9))
        )
