"""The LM head in a loss: loss chunks, the dtypes of operands and results, and the GEMMs."""

from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from mkd.losses.inputs import LinearLogits, statistics_dtype

CHUNK_BYTES = 192 * 2**20
"""Default size of one model's logits in a loss chunk."""
MIN_CHUNK_TOKENS = 768
"""Default minimum of tokens in a loss chunk on a GPU: with fewer, the GEMMs of the LM heads are bound by reading their
weights."""


def loss_chunks(tokens: int, columns: int, dtype: torch.dtype, chunk_rows: int | None, least: int = 1) -> list[slice]:
    """Cut tokens into loss chunks; zero tokens are one empty chunk.

    Args:
        tokens: their number.
        columns, dtype: of the logits.
        chunk_rows: tokens per chunk; None: as many as `CHUNK_BYTES` of logits hold, but at least `least`, in chunks of
            about equal size and a multiple of 128 tokens if there are that many.
        least: see chunk_rows.

    Raises:
        ValueError: chunk_rows below 1.
    """
    if chunk_rows is None:
        most = max(least, 1, CHUNK_BYTES // (max(columns, 1) * dtype.itemsize))
        if most >= 128:
            most -= most % 128
        parts = -(-max(tokens, 1) // most)
        chunk_rows = -(-max(tokens, 1) // parts)
        if parts > 1 and most >= 128:
            chunk_rows += -chunk_rows % 128
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows is {chunk_rows}; it must be at least 1")
    return [slice(first, min(first + chunk_rows, tokens)) for first in range(0, max(tokens, 1), chunk_rows)]


def interleave(tasks: Iterable[Generator[None, None, None]], at_a_time: int) -> None:
    """Run generators to their ends, at most `at_a_time` of them alive, each advancing one step in turn.

    A task yields where it would wait for other ranks; the next step of another task then fills the time. The order of
    steps depends on nothing but the number of tasks and steps, so it is the same on all ranks.
    """
    waiting = iter(tasks)
    alive: deque[Generator[None, None, None]] = deque()
    while True:
        while len(alive) < at_a_time and (task := next(waiting, None)) is not None:
            alive.append(task)
        if not alive:
            return
        task = alive.popleft()
        try:
            next(task)
        except StopIteration:
            continue
        alive.append(task)


@dataclass(frozen=True)
class LMHead:
    """The real columns of one model's LM head on this rank, as GEMM operands."""

    weight: Tensor
    """[columns, H]"""
    bias: Tensor | None
    """[columns]"""

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> "LMHead":
        """From a parameter of any float dtype."""
        return cls(gemm_operand(weight, statistics_dtype(weight)), None if bias is None else bias.detach())

    @classmethod
    def of_columns(cls, model: LinearLogits, columns: int) -> "LMHead":
        """The first `columns` columns of a model's LM head."""
        return cls.of(model.weight[:columns], None if model.bias is None else model.bias[:columns])

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """hidden [N, H] @ weight^T + bias into `out` [N, columns], which is returned."""
        gemm(gemm_operand(hidden, statistics_dtype(hidden)), self.weight.t(), out)
        return out if self.bias is None else out.add_(self.bias)


def gemm_operand(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor unchanged, or in `dtype` where torch has no GEMM from its dtype to `dtype` (half precision on CPU)."""
    has_mixed_gemm = tensor.device.type != "cpu" and dtype == torch.float32
    return tensor.detach() if has_mixed_gemm else tensor.detach().to(dtype)


def gemm(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """a @ b into `out`, accumulated in fp32 or better and rounded once, to the dtype of `out`."""
    if out.dtype == a.dtype:
        return torch.mm(a, b, out=out)
    if a.device.type == "cpu":
        return out.copy_(a @ b)
    return torch.mm(a, b, out_dtype=out.dtype, out=out)


def add_gemm(total: Tensor, a: Tensor, b: Tensor, fresh: bool) -> None:
    """total += a @ b in the precision of `total`; with `fresh` it is uninitialized and total = a @ b."""
    if fresh:
        gemm(a, b, total)
    elif a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def resolve_logits_dtype(logits_dtype: torch.dtype | None, hidden: Tensor) -> torch.dtype:
    """The dtype of a loss chunk's logits.

    Args:
        logits_dtype: the dtype that is asked for; None selects that of bf16 hidden states on a GPU, else the precision
            of the statistics.
        hidden: the student's hidden states.

    Raises:
        ValueError: a dtype that no GEMM gives from such hidden states.
    """
    precise = statistics_dtype(hidden)
    if logits_dtype is None:
        return hidden.dtype if hidden.dtype == torch.bfloat16 and hidden.is_cuda else precise
    if logits_dtype not in (precise, hidden.dtype) and hidden.is_cuda:
        raise ValueError(
            f"logits_dtype is {logits_dtype}; from {hidden.dtype} hidden states it can be {hidden.dtype} or {precise}"
        )
    return logits_dtype
