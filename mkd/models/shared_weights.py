"""A frozen student's weights that are those of the teacher: one copy in memory for both models."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.training.models import GPTModelBuilder
from torch.overrides import TorchFunctionMode

_LARGE = 2**16
"""Elements from which a parameter is created without memory. Smaller ones, such as norms, may be filled by their
modules."""


class BorrowingBuilder(GPTModelBuilder):
    """Megatron's builder of GPT models, for a model whose parameters are replaced by another one's.

    Its matrices have no memory of their own until then, so that the two models never need it twice.
    """

    PATH = "mkd.models.shared_weights.BorrowingBuilder"
    """For `GPTModelConfig.builder`."""

    def build_model(self, *args: Any, **options: Any) -> GPTModel:
        """See `GPTModelBuilder`."""
        with _WithoutMemory():
            return super().build_model(*args, **options)


class _WithoutMemory(TorchFunctionMode):
    """`torch.empty` of a large shape returns one element that is expanded to the shape."""

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func is torch.empty and "out" not in options:
            shape = options.get("size", args[0] if args and not isinstance(args[0], int) else args)
            if math.prod(shape) >= _LARGE:
                options = {name: value for name, value in options.items() if name != "size"}
                return torch.empty(1, **options).expand(*shape)
        return func(*args, **options)


@torch.no_grad()
def share_weights(chunks: Sequence[GPTModel], other: GPTModel) -> None:
    """Make the parameters of a model views of another one's, and copy its buffers.

    Args:
        chunks: the student's only model chunk, before it is wrapped. None of its parameters may be trained.
        other: the same architecture in the same layout, loaded and wrapped. Parameters that Megatron creates in fp32
            for a model in half precision (routers, norms of local layers) already have the model's dtype there.
    """
    (chunk,) = chunks
    theirs = dict(other.named_parameters())
    own = dict(chunk.named_parameters())
    assert own.keys() == theirs.keys(), sorted(own.keys() ^ theirs.keys())[:3]
    for name, parameter in own.items():
        source = theirs[name]
        assert parameter.shape == source.shape, name
        assert parameter.dtype in (source.dtype, torch.float32), name
        parameter.data = source.data
    buffers = dict(other.named_buffers())
    for name, buffer in chunk.named_buffers():
        buffer.copy_(buffers[name])
