"""The forward pass of a frozen model as a CUDA graph: the host launches one graph instead of some hundred kernels."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from mkd.compat.random_states import without_dropout_states
from mkd.errors import MkdConfigError

MOST_SHAPES = 4
"""Shapes of which graphs are captured: those of training and of evaluations, and a smaller last pass of each."""


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    tokens: Tensor
    position_ids: Tensor
    hidden: Tensor


class CapturedForward:
    """Forward passes of a frozen model on a GPU, from token ids and positions to hidden states.

    The first pass of a shape runs as always, which compiles kernels and plans matrix products. The second one captures
    a graph, and later ones replay it, with the same kernels in the same order: the same numbers to the last bit.
    A graph holds the addresses of the weights, which must not move. All graphs share one pool of memory, beside that of
    the rest of the job.
    """

    def __init__(self, model: Module, compute: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Nothing is captured yet.

        Args:
            model: the model, in `eval` mode and without dropout.
            compute: its forward pass.
        """
        self._model, self._compute = model, compute
        self._seen: set[tuple[int, ...]] = set()
        self._graphs: dict[tuple[int, ...], _Captured] = {}
        self._pool: object | None = None

    def __call__(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        """The hidden states of a pass, in memory of their own."""
        shape = tuple(tokens.shape)
        if shape not in self._seen:
            self._seen.add(shape)
            return self._compute(tokens, position_ids)
        if shape not in self._graphs:
            if len(self._graphs) == MOST_SHAPES:
                return self._compute(tokens, position_ids)
            self._graphs[shape] = self._capture(tokens, position_ids)
        captured = self._graphs[shape]
        captured.tokens.copy_(tokens)
        captured.position_ids.copy_(position_ids)
        captured.graph.replay()
        return captured.hidden.clone()

    def _capture(self, tokens: Tensor, position_ids: Tensor) -> _Captured:
        inputs, graph = (tokens.clone(), position_ids.clone()), torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # Calls of other threads do not end the capture: NCCL's watchdog reads events meanwhile.
        mode = dict(pool=self._pool, capture_error_mode="thread_local")
        try:
            with without_dropout_states(self._model), torch.cuda.graph(graph, **mode):
                hidden = self._compute(*inputs)
        except RuntimeError as error:
            raise MkdConfigError(
                f"--kd-teacher-cuda-graph: the teacher's forward pass cannot be captured ({_first_line(error)}): leave "
                "it out"
            ) from error
        return _Captured(graph, *inputs, hidden)


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]
