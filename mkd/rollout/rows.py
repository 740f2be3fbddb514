"""Rows of written texts in the place of given ones."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from mkd.data.batch import TEACHER_VIEWS
from mkd.data.packing.aligned_layout import AlignedRowLayout
from mkd.data.packing.row_layout import RowLayout
from mkd.data.sources.aligned import AlignedSample, TeacherText
from mkd.rollout.facts import RolloutFacts
from mkd.rollout.interface import Request, WrittenText


@dataclass(frozen=True)
class WrittenRowOptions:
    """Weights of written tokens."""

    drops_cut_off: bool = False
    """True to learn nothing from texts that were cut off."""
    half_life: float | None = None
    """Written tokens after which the weight of a token is halved; None: all have the same weight."""
    is_routed: bool = False
    """True if some texts have a teacher of their own (`Request.teacher`)."""

    def weights(self, text: WrittenText) -> np.ndarray:
        """[n] fp32 weight of each written token in the divergence."""
        count = len(text.tokens)
        if self.drops_cut_off and not text.ended:
            return np.zeros(count, dtype=np.float32)
        if self.half_life is None:
            return np.ones(count, dtype=np.float32)
        return np.exp2(-np.arange(count) / self.half_life).astype(np.float32)


class WrittenTextAligner(Protocol):
    """Aligns written texts with the tokens of teachers with other tokenizers."""

    def texts(self, number: int, prompt: Sequence[int], new: Sequence[int]) -> tuple[TeacherText, ...]:
        """A text in the tokens of each teacher: the number of its prompt, the prompt's tokens, and the written ones."""
        ...


@dataclass(frozen=True)
class WrittenViews:
    """The views of written rows in the tokens of teachers with other tokenizers."""

    aligner: WrittenTextAligner
    layout: AlignedRowLayout

    def rows(self, request: Request, text: WrittenText, is_learned: np.ndarray) -> tuple[dict[str, np.ndarray], ...]:
        """The row of each teacher, as `AlignedRowLayout.row` returns it; `is_learned` is [n + m] bool of the prompt's
        and the written tokens."""
        texts = self.aligner.texts(request.number, request.prompt, text.tokens)
        ids = np.array([*request.prompt, *text.tokens])
        return self.layout.row([AlignedSample(ids, is_learned, texts)])[TEACHER_VIEWS]


@dataclass(frozen=True)
class WrittenRows:
    """The rows of this rank that take the place of given ones in a step."""

    rows: Mapping[int, tuple[Request, WrittenText]]
    """Number of the row among those of this data-parallel rank in the step -> its text."""
    layout: RowLayout
    facts: RolloutFacts | None
    """None while other texts of the step are being written."""
    options: WrittenRowOptions = WrittenRowOptions()
    views: WrittenViews | None = None
    """None if all teachers have the student's tokenizer."""

    def replace_in(self, source: Iterator[Mapping[str, Tensor]]) -> Iterator[Mapping[str, Tensor]]:
        """The collated samples of `source`, with these rows in them."""
        number = 0
        while True:  # Megatron's iterators have no __iter__
            try:
                sample = next(source)
            except StopIteration:
                return
            yield self.sample(number, sample)
            number += sample["tokens"].shape[0]

    def sample(self, first: int, sample: Mapping[str, Any]) -> dict[str, Any]:
        """A collated sample whose first row has the number `first`, with these rows in it."""
        rows = range(sample["tokens"].shape[0])
        own = {row: self.rows[first + row] for row in rows if first + row in self.rows}
        return self._replaced(sample, own) if own else self._with_marks(sample)

    def _with_marks(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """The sample with the tensors that only written rows fill in."""
        names = ("written", "teacher") if self.options.is_routed else ("written",)
        return {**sample, **{name: torch.full_like(sample["tokens"], -1) for name in names}}

    def _replaced(self, sample: Mapping[str, Any], own: Mapping[int, tuple[Request, WrittenText]]) -> dict[str, Any]:
        sample = self._with_marks(sample)
        if "ce_mask" not in sample:  # Megatron's own rows
            mask = sample.pop("loss_mask").float()
            sample |= {"ce_mask": mask, "kd_mask": mask}
        if not self.layout.is_packed and "length" not in sample:
            rows, length = sample["tokens"].shape
            sample["length"] = torch.full((rows,), length)
        views = [dict(view) for view in sample.pop(TEACHER_VIEWS, ())]
        for place, (request, text) in own.items():
            _set_row(sample, place, self._row(request, text))
            if self.views is not None:
                is_learned = np.zeros(len(request.prompt) + len(text.tokens), dtype=bool)
                is_learned[len(request.prompt) :] = self.options.weights(text) > 0.0
                for view, other in zip(views, self.views.rows(request, text, is_learned), strict=True):
                    _set_row(view, place, other)
        return {**sample, TEACHER_VIEWS: views} if views else sample

    def _row(self, request: Request, text: WrittenText) -> dict[str, np.ndarray]:
        """Tensors of a row: the divergence counts on the written tokens, cross-entropy on none."""
        first, count = len(request.prompt), len(text.tokens)
        ids, weights = np.array([*request.prompt, *text.tokens]), np.zeros(first + count, dtype=np.float32)
        weights[first:] = self.options.weights(text)
        row = self.layout.row([(ids, weights)])
        row |= {"ce_mask": np.zeros_like(row["ce_mask"]), "written": np.full_like(row["tokens"], -1)}
        row["written"][first - 1 : first + count - 1] = np.where(weights[first:] > 0.0, np.arange(count), -1)
        if self.options.is_routed:
            row["teacher"] = np.full_like(row["tokens"], request.teacher)
        return row


def _set_row(sample: dict[str, Any], place: int, row: Mapping[str, np.ndarray]) -> None:
    """Put a row into copies of the tensors of a collated sample."""
    for name, value in row.items():
        sample[name] = sample[name].clone()
        sample[name][place] = torch.as_tensor(value)
