"""Experts with biases without Transformer Engine.

Megatron's experts add their bias in place to what the last linear layer gives. On one rank that is a view made by the
autograd function that would add up the ranks' parts, and torch refuses to change such a view.
"""

from megatron.core.tensor_parallel import layers
from torch import Tensor
from torch.distributed import ProcessGroup

_reduce = layers.reduce_from_tensor_model_parallel_region


def reduce_over_ranks(part: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Megatron's sum over tensor-parallel ranks; on one rank the tensor itself."""
    if group is not None and group.size() == 1:
        return part
    return _reduce(part, group=group)


def install() -> None:
    """Have megatron's row-parallel layers use `reduce_over_ranks`."""
    layers.reduce_from_tensor_model_parallel_region = reduce_over_ranks
