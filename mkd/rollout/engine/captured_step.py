"""A forward pass of writing as a CUDA graph: the host launches one graph instead of some hundred kernels."""

from collections.abc import Callable, Sequence

import torch
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from mkd.distributed.groups import Groups


def can_capture(chunks: Sequence[nn.Module], groups: Groups) -> bool:
    """True on a GPU, unless the host takes part in the forward pass: pipeline stages exchange messages by its order,
    it reads the number of tokens of each expert, and FP8 keeps maxima of earlier passes. Overlapped communication keeps
    sequence parallelism, see `TokenLayout`, which reads the state of the random number generator."""
    config = get_model_config(chunks[0])
    return (
        torch.cuda.is_available()
        and next(chunks[0].parameters()).is_cuda
        and groups.pp.size() == 1
        and not config.num_moe_experts
        and not config.fp8
        and not config.fp4
        and not config.tp_comm_overlap
    )


def captured(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A function that computes what `compute` does, from the same tensors, and always returns the same output tensor.

    `compute` has run before, so that kernels are compiled, parameters are gathered and communicators exist. All
    tensor-parallel ranks capture the same pass. The graph holds the addresses of the parameters, and lives for one
    rollout. Calls of other threads do not end the capture: NCCL's watchdog reads events meanwhile.
    """
    graph = torch.cuda.CUDAGraph()
    # Megatron replaces its shared buffers by larger ones when prompts are longer; the graph uses those of now.
    buffers = list(get_global_memory_buffer().buffer.values())
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = compute()

    def replay(held: Sequence[Tensor] = buffers) -> Tensor:
        graph.replay()
        return output

    return replay
