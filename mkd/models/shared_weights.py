"""A frozen student's weights that are those of the teacher: one copy in memory for both models."""

from collections.abc import Sequence

import torch
from megatron.core.models.gpt import GPTModel


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
