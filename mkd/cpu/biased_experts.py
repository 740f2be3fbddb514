"""Experts with biases without Transformer Engine.

Megatron's experts add their bias in place to the output of the last linear layer. On one rank that output is a view
from the autograd function of the all-reduce, and torch raises an error on in-place changes of such a view.
"""

from megatron.core.tensor_parallel import layers
from torch import Tensor
from torch.distributed import ProcessGroup

_reduce = layers.reduce_from_tensor_model_parallel_region


def reduce_over_ranks(part: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Megatron's sum over tensor-parallel ranks; on one rank the tensor unchanged."""
    if group is not None and group.size() == 1:
        return part
    return _reduce(part, group=group)


def install() -> None:
    """Use `reduce_over_ranks` in megatron's row-parallel layers."""
    layers.reduce_from_tensor_model_parallel_region = reduce_over_ranks
