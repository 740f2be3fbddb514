"""Faults that distillation on many ranks is known for, each planted by a patch while a case runs in a worker."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mkd.data import supervised
from mkd.data.batch import KDBatch
from mkd.distributed.context_parallel import dual_chunk_positions
from mkd.losses import LossOutput
from mkd.teacher.online import OnlineTeacher
from mkd.teacher.resharded import plan as teacher_layout
from mkd.teacher.resharded.exchange import StepExchange
from mkd.train import cross_tokenizer, objective, schedule, step
from mkd.train.step_tokens import StepTokens


@contextmanager
def _patched(owner: Any, name: str, make: Callable[[Callable], Callable]) -> Iterator[None]:
    right = getattr(owner, name)
    setattr(owner, name, make(right))
    try:
        yield
    finally:
        setattr(owner, name, right)


def _with_loss(change: Callable[[Tensor], Tensor], owner: Any = objective, name: str = "loss_from_hidden") -> Any:
    """Another loss with the reports of the right one."""

    def make(right: Callable) -> Callable:
        def wrong(*args: Any, **options: Any) -> LossOutput:
            # mkd would raise: the upstream gradient is not the announced one
            output = right(*args, **{**options, "upstream": None})
            return LossOutput(change(output.loss), output.ce, output.kd)

        return wrong

    return _patched(owner, name, make)


def _doubled(owner: Any = objective, name: str = "loss_from_hidden") -> Any:
    """The right loss with twice the gradient: what a collective that is differentiated on two ranks gives."""
    return _with_loss(lambda loss: 2.0 * loss - loss.detach(), owner, name)


class _CountedTwice(StepTokens):
    """Every context-parallel rank adds all chunks of its microbatches."""

    @classmethod
    def of(cls, batches: list[KDBatch], group: Any, cp_rank: int) -> StepTokens:
        return StepTokens.of(batches, group, 0)


@contextmanager
def _local_divisor() -> Iterator[None]:
    """Each microbatch's loss is a mean over its own tokens, and the step's a mean of means."""

    def make(right: Callable) -> Callable:
        def wrong(*args: Any) -> tuple:
            loss, count, report = right(*args)
            return loss / count.clamp(min=1), torch.ones_like(count), report

        return wrong

    with _with_loss(lambda loss: loss), _patched(step.MicrobatchLoss, "report", make):
        yield


def _with_batches(change: Callable[[KDBatch], KDBatch]) -> Any:
    def make(right: Callable) -> Callable:
        return lambda *args: [change(batch) for batch in right(*args)]

    return _patched(schedule, "next_microbatches", make)


def _across_segments(batch: KDBatch) -> KDBatch:
    """Labels shifted along the row: the last token of a segment is to predict the first of the next."""
    return replace(batch, labels=batch.tokens.roll(-1, dims=1))


def _chunk_of_the_place(batch: KDBatch) -> KDBatch:
    """Chunks of the tokens that are read and not of those that are predicted."""
    late = [
        replace(
            other, student_chunk=other.student_chunk.roll(1, dims=1), student_first=other.student_first.roll(1, dims=1)
        )
        for other in batch.teacher_views
    ]
    return replace(batch, teacher_views=tuple(late))


def every_token() -> Any:
    """Not a fault: losses over all tokens, whether they have a weight or not."""
    return _patched(supervised, "NEARLY_ALL", lambda _: -1.0)


@contextmanager
def _with_teacher(change: Callable[[OnlineTeacher, Tensor], Tensor]) -> Iterator[None]:
    """Other hidden states [s/cp, b, H] of the teacher, which keeps those of all tokens."""

    def make(right: Callable) -> Callable:
        def wrong(teacher: OnlineTeacher, batches: list[KDBatch]) -> list:
            return [replace(s, hidden=change(teacher, s.hidden)) for s in right(teacher, batches)]

        return wrong

    with every_token(), _patched(OnlineTeacher, "signals", make):
        yield


@contextmanager
def _with_exchange(owner: Any, name: str, make: Callable[[Callable], Callable]) -> Iterator[None]:
    """A fault of the exchange with a teacher in its own layout, which sends hidden states of all tokens."""
    with every_token(), _patched(owner, name, make):
        yield


def _in_reverse_order(right: Callable) -> Callable:
    def wrong(
        step: StepExchange, hidden: Iterator[Tensor], width: int, dtype: torch.dtype, states: dict[int, Tensor]
    ) -> None:
        right(step, hidden, width, dtype, found := {})
        for number in found:
            states[number] = found[len(found) - 1 - number]

    return wrong


def _in_contiguous_order(teacher: OnlineTeacher, hidden: Tensor) -> Tensor:
    """Hidden states of whole rows, from the load-balanced order of context parallelism to that of the text."""
    cp = teacher._groups.cp
    parts = [torch.empty_like(hidden) for _ in range(cp.size())]
    dist.all_gather(parts, hidden.contiguous(), group=cp)
    length = hidden.shape[0] * cp.size()
    places = torch.cat([dual_chunk_positions((0, length), rank, cp.size()) for rank in range(cp.size())])
    row = torch.empty(length, *hidden.shape[1:])
    row[places] = torch.cat(parts)
    return row.chunk(cp.size())[cp.rank()]


def _whole_chunks(bounds: Sequence[int], rank: int, size: int) -> Tensor:
    """As if context parallelism gave each rank one chunk of the row."""
    return torch.arange(bounds[-1]).chunk(size)[rank]


EVERY_TOKEN = "every token in the loss"

FAULTS: dict[str, Callable[[], Any]] = {
    "doubled gradient": _doubled,
    "doubled gradient between tokenizers": lambda: _doubled(cross_tokenizer, "xtoken_loss"),
    "router losses as in Megatron": lambda: _patched(
        schedule, "scale_router_losses", lambda right: lambda *_, **__: None
    ),
    "chunks counted on every rank": lambda: _patched(schedule, "StepTokens", lambda right: _CountedTwice),
    "chunk of the place": lambda: _with_batches(_chunk_of_the_place),
    "local divisor": _local_divisor,
    "label across a segment border": lambda: _with_batches(_across_segments),
    "KD at the next position": lambda: _with_teacher(lambda _, hidden: hidden.roll(1, dims=0)),
    "teacher in another order": lambda: _with_teacher(_in_contiguous_order),
    "hidden states in another order": lambda: _with_exchange(StepExchange, "send_states", _in_reverse_order),
    "hidden states in contiguous order": lambda: _with_exchange(
        teacher_layout, "dual_chunk_positions", lambda right: _whole_chunks
    ),
    EVERY_TOKEN: every_token,
}
"""Name -> context manager."""
