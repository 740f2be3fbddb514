"""Random states of Megatron and Transformer Engine during the capture of a CUDA graph."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import nn

_ATTENTION = "attention_dropout_ctx"
"""Attribute of Transformer Engine's attention modules: a function that returns the context of their dropout."""


@contextmanager
def without_dropout_states(model: nn.Module) -> Iterator[None]:
    """A model without dropout does not switch random states inside the `with` block.

    Megatron and Transformer Engine switch to a random state of the tensor-parallel rank around every dropout, also
    where its probability is 0, and read the state on the host. CUDA does not allow that while a graph is captured.

    Args:
        model: a frozen model in `eval` mode.
    """
    modules = [module for module in model.modules() if _ATTENTION in vars(module)]
    contexts = [getattr(module, _ATTENTION) for module in modules]
    tracker = get_cuda_rng_tracker()
    tracker.fork = _no_switch
    for module in modules:
        setattr(module, _ATTENTION, nullcontext)
    try:
        yield
    finally:
        del tracker.fork
        for module, context in zip(modules, contexts, strict=True):
            setattr(module, _ATTENTION, context)


def _no_switch(*args: Any, **options: Any) -> Any:
    return nullcontext()
